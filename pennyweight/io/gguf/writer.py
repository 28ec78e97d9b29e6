"""Writing a GGUF file, version 3: the header first, then rows of tensors in any order, each at its place."""

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
    """The header with its padding, the entries, and the size of the whole file. Raises ValueError where a name, a shape
    or a key is none that a file may have."""
    alignment = alignment_of(dict(metadata))
    if len(infos) > MAX_TENSORS or len(metadata) > MAX_KEYS:
        raise ValueError(
            f"{len(infos)} tensors and {len(metadata)} keys; at most {MAX_TENSORS} and {MAX_KEYS} are read"
        )
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
        raise ValueError(f"header of {len(header)} bytes; at most {MAX_HEADER_BYTES} are read")
    header += bytes(padded(len(header), alignment) - len(header))
    entries, begin = {}, len(header)
    for name, (kind, shape) in infos.items():
        entries[name] = Entry(kind, tuple(shape), begin, begin + sizes[name])
        begin = padded(begin + sizes[name], alignment)
    return header, entries, begin


def remove_partial(path: str) -> None:
    """Remove what a writer that is no more has left. Raises CheckpointError where one is at work on it."""
    try:
        fd = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return
    except OSError:  # a link: nothing that a writer would lock
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
    """One GGUF file of known metadata and tensors. Whoever calls gives a temporary path and renames it at the end.

    ``resume``: the file is there, left by an earlier writer of the same header; rows that it put are announced with
    :meth:`had`. Raises CheckpointError where another process is writing the file, or the header on disk, or what is
    put, is another, OSError where the disk refuses.
    """

    def __init__(self, path: str, metadata: Mapping[str, Value], infos: Infos, resume: bool = False) -> None:
        if sys.byteorder != "little":
            raise CheckpointError(path, None, "GGUF is written little-endian; this machine is not")
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
                raise CheckpointError(self.path, None, f"cannot be gone on with: {info.st_size} bytes, expected {size}")
            found = b""
            while len(found) < len(header) and (piece := self._file.read(len(header) - len(found))):
                found += piece
            if found != header:
                raise CheckpointError(self.path, None, "cannot be gone on with: its header is another")
        except BaseException:
            self._file.close()
            raise

    def _claim(self) -> None:
        """Lock the file until it is closed."""
        fd = self._file.fileno()
        if try_lock(fd) is False or not same_inode(fd, self.path):
            raise CheckpointError(self.path, None, IN_USE)

    def had(self, name: str, rows: Iterable[int] | int) -> None:
        """Count rows as written: all below a number, or those named."""
        self._left[name] -= rows if isinstance(rows, int) else len(set(rows))

    def put(self, name: str, raw: Tensor, first_row: int = 0) -> None:
        """Write rows from ``first_row`` on. raw: uint8 [rows, row bytes]."""
        e = self.entries[name]
        fits = raw.ndim == 2 and raw.shape[1] == e.row_bytes and 0 <= first_row <= e.rows - raw.shape[0]
        if raw.dtype is not torch.uint8 or not fits:
            raise CheckpointError(
                self.path, name,
                f"rows from {first_row} are {raw.dtype} {[*raw.shape]}, announced was uint8 [{e.rows}, {e.row_bytes}]",
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
        """Flush what was put to disk."""
        os.fsync(self._file.fileno())

    def finish(self, final: str | None = None) -> None:
        """Flush to disk, put the file in its place where that is given, and close.

        Raises CheckpointError where a tensor was not put, or not all of it.
        """
        left = [name for name, count in self._left.items() if count]
        if left:
            raise CheckpointError(self.path, left[0], f"was not written as announced, nor {len(left) - 1} others")
        os.fsync(self._file.fileno())
        if os.name != "posix":  # an open file cannot be renamed there
            self.close()
        if final is not None:
            rename_into_place(self.path, final)
        self.close()

    def close(self) -> None:
        """Close, which lets other writers have the file. Without :meth:`finish` it may not be complete."""
        if not self._file.closed:
            unlock(self._file.fileno())
            self._file.close()
