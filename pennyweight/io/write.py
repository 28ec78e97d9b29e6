"""Writing: a safetensors file piece by piece, and files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from .container import Entry, header_bytes
from .errors import CheckpointError


class Writer:
    """One safetensors file of known entries: header first, then each tensor in any order, at its place.

    Raises CheckpointError where a tensor is not what the header says, and OSError where the disk refuses.
    """

    def __init__(self, path: str, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> None:
        if sys.byteorder != "little":
            raise CheckpointError(path, None, "safetensors is little-endian; this machine is not")
        self.path, self.entries = path, entries
        self._left = {name: e.numel for name, e in entries.items()}
        try:
            header = header_bytes(entries, metadata)
        except ValueError as e:
            raise CheckpointError(path, None, str(e)) from e
        self._start = len(header)
        self._file = open_new(path)
        self._file.write(header)

    def put(self, name: str, tensor: Tensor, start: int = 0) -> None:
        """Write a tensor, or some of its elements, in order, from element ``start`` on."""
        e = self.entries[name]
        whole = start == 0 and tensor.numel() == e.numel
        fits = start + tensor.numel() <= e.numel and (not whole or tuple(tensor.shape) == e.shape)
        if tensor.dtype != e.dtype or not fits:
            raise CheckpointError(
                self.path, name, f"is {tensor.dtype} {list(tensor.shape)}, was announced as {e.dtype} {list(e.shape)}"
            )
        self._left[name] -= tensor.numel()
        if tensor.numel() == 0:
            return
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._file.seek(self._start + e.begin + start * e.dtype.itemsize)
        view = memoryview(raw.numpy())  # type: ignore[arg-type]
        while view:
            view = view[self._file.write(view) :]

    def finish(self) -> None:
        """Flush to disk and close. Raises CheckpointError where a tensor was not put, or not all of it."""
        left = [name for name, count in self._left.items() if count]
        if left:
            raise CheckpointError(self.path, left[0], f"was not written as announced, nor {len(left) - 1} others")
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Close without claiming to be complete."""
        self._file.close()


def open_new(path: str) -> Any:
    """A file that must not exist yet, unbuffered; a link in its place is refused."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    return os.fdopen(os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o666), "r+b", buffering=0)


@contextmanager
def temporary(folder: str, name: str) -> Iterator[str]:
    """A path for a new file beside its final place; whatever is there at the end is removed."""
    path = os.path.join(folder, f".{name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        yield path
    finally:
        with suppress(FileNotFoundError):
            os.unlink(path)


def publish(temp: str, final: str) -> None:
    """Put a finished file in its place in one step; what was there, were it a link, is replaced, not followed."""
    os.replace(temp, final)
    sync_folder(os.path.dirname(final))


def sync_folder(folder: str) -> None:
    """Make renames in a folder last. Windows has no such call."""
    if os.name == "posix":
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_bytes(path: str, data: bytes) -> None:
    """A small file, whole or not at all."""
    folder, name = os.path.split(os.path.abspath(path))
    with temporary(folder, name) as temp:
        with open_new(temp) as f:
            view = memoryview(data)
            while view:
                view = view[f.write(view) :]
            os.fsync(f.fileno())
        publish(temp, os.path.join(folder, name))


def index_bytes(weight_map: Mapping[str, str], total_size: int) -> bytes:
    """The index of a sharded checkpoint, as the Hub's readers know it."""
    data = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()
