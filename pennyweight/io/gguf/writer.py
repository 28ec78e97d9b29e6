"""Writes GGUF version 3 files: the header first, then rows of tensors in any order, each at its offset."""

from __future__ import annotations

import os
import stat
import struct
import sys
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ..atomic_write import open_new, rename_into_place
from ..errors import CheckpointError
from ..locks import same_inode, try_lock, unlock
from .blocks import BlockType
from .gguf_file import MAGIC, MAX_TENSORS, Entry, alignment_of, check_tensor_name, padded, size_of
from .metadata import MAX_HEADER_BYTES, MAX_KEYS, Value, metadata_bytes

_VERSION = 3
IN_USE = "another process is writing it; wait until it is done, or choose another file"
Infos = Mapping[str, tuple[BlockType, tuple[int, ...]]]


def lay_out(metadata: Mapping[str, Value], infos: Infos) -> tuple[bytes, dict[str, Entry], int]:
    """The header with its padding, the entries, and the total file size. Raises ValueError for an invalid name, shape
    or key."""
    alignment = alignment_of(dict(metadata))
    if len(infos) > MAX_TENSORS or len(metadata) > MAX_KEYS:
        raise ValueError(f"{len(infos)} tensors and {len(metadata)} keys; the maximum is {MAX_TENSORS} and {MAX_KEYS}")
    out = [MAGIC, struct.pack("<IQQ", _VERSION, len(infos), len(metadata)), metadata_bytes(metadata)]
    sizes, at = {}, 0
    for name, (kind, shape) in infos.items():
        try:
            check_tensor_name(name)
            sizes[name] = size_of(kind, shape)
        except ValueError as e:
            raise ValueError(f"{name}: {e}") from e
        raw = name.encode()
        out += [struct.pack("<Q", len(raw)), raw, struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))]
        out.append(struct.pack("<IQ", kind.id, at))
        at = padded(at + sizes[name], alignment)
    header = b"".join(out)
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"header of {len(header)} bytes; the maximum is {MAX_HEADER_BYTES}")
    header += bytes(padded(len(header), alignment) - len(header))
    entries, begin = {}, len(header)
    for name, (kind, shape) in infos.items():
        entries[name] = Entry(kind, tuple(shape), begin, begin + sizes[name])
        begin = padded(begin + sizes[name], alignment)
    return header, entries, begin


def remove_partial(path: str) -> None:
    """Remove the leftover file of a dead writer. Raises CheckpointError if a live writer uses it."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return
    except OSError:  # a link, which no writer locks
        os.unlink(path)
        return
    try:
        if try_lock(fd) is False:
            raise CheckpointError(path, None, IN_USE)
        os.unlink(path)
    finally:
        unlock(fd)
        os.close(fd)


class Writer:
    """One GGUF file with known metadata and tensors. The caller passes a temporary path and renames it at the end.

    ``resume``: the file was left by an earlier writer with the same header; rows it wrote are declared with
    :meth:`had`. Raises CheckpointError if another process is writing the file, or if the header on disk or the written
    data differs, and OSError if a write fails.
    """

    def __init__(self, path: str, metadata: Mapping[str, Value], infos: Infos, resume: bool = False) -> None:
        if sys.byteorder != "little":
            raise CheckpointError(path, None, "GGUF files are little-endian, but this machine is big-endian")
        self.path = path
        try:
            header, self.entries, size = lay_out(metadata, infos)
        except ValueError as e:
            raise CheckpointError(path, None, str(e)) from e
        self._left = {name: e.rows * (e.end > e.begin) for name, e in self.entries.items()}
        if resume:
            self._reopen(header, size)
        else:
            self._file = open_new(path)
            try:
                self._claim()
                self._write(0, memoryview(header))
                self._file.truncate(size)
            except BaseException:
                self._file.close()
                raise

    def _reopen(self, header: bytes, size: int) -> None:
        flags = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        self._file = os.fdopen(os.open(self.path, flags), "r+b", buffering=0)
        try:
            self._claim()
            info = os.fstat(self._file.fileno())
            if not stat.S_ISREG(info.st_mode) or info.st_size != size:
                raise CheckpointError(self.path, None, f"cannot be resumed: {info.st_size} bytes, expected {size}")
            found = b""
            while len(found) < len(header) and (piece := self._file.read(len(header) - len(found))):
                found += piece
            if found != header:
                raise CheckpointError(self.path, None, "cannot be resumed: its header differs")
        except BaseException:
            self._file.close()
            raise

    def _claim(self) -> None:
        """Lock the file until it is closed."""
        fd = self._file.fileno()
        if try_lock(fd) is False or not same_inode(fd, self.path):
            raise CheckpointError(self.path, None, IN_USE)

    def had(self, name: str, rows: Iterable[int] | int) -> None:
        """Mark rows as written: all below a number, or those listed."""
        self._left[name] -= rows if isinstance(rows, int) else len(set(rows))

    def put(self, name: str, raw: Tensor, first_row: int = 0) -> None:
        """Write rows starting at ``first_row``. raw: uint8 [rows, row bytes]."""
        e = self.entries[name]
        fits = raw.ndim == 2 and raw.shape[1] == e.row_bytes and 0 <= first_row <= e.rows - raw.shape[0]
        if raw.dtype is not torch.uint8 or not fits:
            raise CheckpointError(
                self.path, name,
                f"rows from {first_row} are {raw.dtype} {[*raw.shape]}, expected uint8 [{e.rows}, {e.row_bytes}]",
            )  # fmt: skip
        if raw.numel():
            self._left[name] -= raw.shape[0]
            flat = raw.detach().cpu().contiguous().reshape(-1)
            self._write(e.begin + first_row * e.row_bytes, memoryview(flat.numpy()))  # type: ignore[arg-type]

    def _write(self, offset: int, view: memoryview) -> None:
        self._file.seek(offset)
        while view:
            view = view[self._file.write(view) :]

    def sync(self) -> None:
        """Flush written data to disk."""
        os.fsync(self._file.fileno())

    def finish(self, final: str | None = None) -> None:
        """Flush to disk, rename the file to ``final`` if given, and close.

        Raises CheckpointError if a tensor was not written, or only in part.
        """
        left = [name for name, count in self._left.items() if count]
        if left:
            raise CheckpointError(self.path, left[0], f"was not written completely, nor were {len(left) - 1} others")
        os.fsync(self._file.fileno())
        if os.name != "posix":  # Windows cannot rename an open file
            self.close()
        if final is not None:
            rename_into_place(self.path, final)
        self.close()

    def close(self) -> None:
        """Close, which releases the lock. Without :meth:`finish` the file may be incomplete."""
        if not self._file.closed:
            unlock(self._file.fileno())
            self._file.close()
