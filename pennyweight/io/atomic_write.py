"""Atomic writes: a safetensors file written piece by piece, and files that appear complete or not at all."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointError
from .locks import open_folder, same_inode, try_lock, unlock
from .safetensors_file import Entry, header_bytes

_STAGING = re.compile(r"\.(.+)\.[0-9a-f]{16}\.partial")
_MAX_NAME = 200  # bytes; a file name has 255 at most


class Writer:
    """Writes one safetensors file with known entries: header first, then the tensors in any order, each at its offset.

    Raises CheckpointError if a tensor does not match the header, and OSError if a write fails.
    """

    def __init__(self, path: str, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> None:
        if sys.byteorder != "little":
            raise CheckpointError(path, None, "safetensors files are little-endian, but this machine is big-endian")
        self.path, self.entries = path, entries
        self._left = {name: e.numel for name, e in entries.items()}
        try:
            header = header_bytes(entries, metadata)
        except ValueError as e:
            raise CheckpointError(path, None, str(e)) from e
        self._start = len(header)
        self._file = open_new(path)
        try:
            self._write(memoryview(header))
        except BaseException:
            self._file.close()
            raise

    def put(self, name: str, tensor: Tensor, start: int = 0) -> None:
        """Write a tensor, or consecutive elements of it, starting at element ``start``."""
        e = self.entries[name]
        whole = start == 0 and tensor.numel() == e.numel
        fits = start + tensor.numel() <= e.numel and (not whole or tuple(tensor.shape) == e.shape)
        if tensor.dtype != e.dtype or not fits:
            raise CheckpointError(
                self.path, name, f"is {tensor.dtype} {list(tensor.shape)}, the header has {e.dtype} {list(e.shape)}"
            )
        self._left[name] -= tensor.numel()
        if tensor.numel() == 0:
            return
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._file.seek(self._start + e.begin + start * e.dtype.itemsize)
        self._write(memoryview(raw.numpy()))  # type: ignore[arg-type]

    def _write(self, view: memoryview) -> None:
        while view:  # on a nearly full disk a write may be short; the next write then raises the error
            view = view[self._file.write(view) :]

    def finish(self) -> None:
        """Flush to disk and close. Raises CheckpointError if a tensor was not written, or only in part."""
        left = [name for name, count in self._left.items() if count]
        if left:
            raise CheckpointError(self.path, left[0], f"was not written completely, nor were {len(left) - 1} others")
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Close without marking the file as complete."""
        self._file.close()


def open_new(path: str) -> Any:
    """Open a new unbuffered file. Fails if the path exists, even as a link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o666), "r+b", buffering=0)


@contextmanager
def partial_path(folder: str, name: str) -> Iterator[str]:
    """A new folder inside ``folder`` for unfinished files; its remaining contents are removed on exit.

    First removes staging folders of the same name that dead writers left behind. A live writer holds the lock of its
    staging folder, so its files stay.
    """
    name = os.fsdecode(os.fsencode(name)[:_MAX_NAME])
    remove_left_over(folder, name)
    while True:
        path = os.path.join(folder, f".{name}.{secrets.token_hex(8)}.partial")
        os.mkdir(path)
        try:
            fd = open_folder(path)
        except FileNotFoundError:  # another writer removed it as a leftover before it was locked
            continue
        if fd is None or (try_lock(fd) is not False and same_inode(fd, path)):
            break
        os.close(fd)
    try:
        yield path
    finally:
        try:
            shutil.rmtree(path)
        finally:
            if fd is not None:
                unlock(fd)
                os.close(fd)


def remove_left_over(folder: str, name: str | None = None) -> None:
    """Remove staging folders of dead writers: those for ``name``, or all. Without file locks, dead and live writers
    cannot be distinguished, and all staging folders stay."""
    for found in os.listdir(folder):
        match = _STAGING.fullmatch(found)
        if match is None or name not in (None, match[1]):
            continue
        path = os.path.join(folder, found)
        try:
            fd = None if os.path.islink(path) else open_folder(path)
        except (FileNotFoundError, NotADirectoryError):
            continue
        if fd is None:
            continue
        try:
            if try_lock(fd) and same_inode(fd, path):
                shutil.rmtree(path)
        finally:
            unlock(fd)
            os.close(fd)


def is_staging(name: str) -> bool:
    """Whether a folder name is one that :func:`partial_path` generates."""
    return _STAGING.fullmatch(name) is not None


def rename_into_place(temp: str, final: str) -> None:
    """Move a finished file to its final path atomically. An existing file or link there is replaced, not followed."""
    os.replace(temp, final)
    sync_folder(os.path.dirname(final))


def sync_folder(folder: str) -> None:
    """Flush renames in a folder to disk. Windows has no such call."""
    if os.name == "posix":
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@contextmanager
def make_folders(folder: str) -> Iterator[None]:
    """Make sure the folder exists inside the context. On an error, folders created here are removed if still empty."""
    new = []
    at = folder
    while not os.path.isdir(at):
        new.append(at)
        at = os.path.dirname(at)
    if new:
        os.makedirs(folder, exist_ok=True)
    for path in new:
        sync_folder(os.path.dirname(path))
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for path in new:
                os.rmdir(path)
        raise


def write_file(path: str, data: bytes) -> None:
    """Write a new file; it is on disk on return."""
    with open_new(path) as f:
        view = memoryview(data)
        while view:
            view = view[f.write(view) :]
        os.fsync(f.fileno())


def write_bytes(path: str, data: bytes) -> None:
    """Write a small file atomically."""
    folder, name = os.path.split(os.path.abspath(path))
    with partial_path(folder, name) as stage:
        temp = os.path.join(stage, name)
        write_file(temp, data)
        rename_into_place(temp, os.path.join(folder, name))


def index_bytes(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The index of a sharded checkpoint, in the Hugging Face format."""
    data = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
