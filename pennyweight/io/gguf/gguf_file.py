"""The GGUF container: a strict reader for untrusted files, and a writer of rows in any order.

    "GGUF"      uint32 version, uint64 tensors, uint64 entries of metadata, all little-endian
    metadata    see metadata.py
    tensors     name, uint32 axes, uint64 size of each axis (the contiguous one first), uint32 type, uint64 offset
    the rest    tensor data from the next multiple of ``general.alignment`` (32); each tensor is aligned to it

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

from __future__ import annotations

import math
import os
import stat
import struct
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..atomic_write import check_complete, open_new, rename_into_place, same_inode, try_lock, unlock, write_all
from ..file import CheckpointError, RawFile, checkpoint_errors
from ..safetensors_file import check_name
from .blocks import BY_ID, REMOVED, BlockType
from .metadata import MAX_HEADER_BYTES, MAX_KEYS, Cursor, Value, metadata_bytes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_TENSORS = 1 << 15
MAX_AXES = 4  # GGML_MAX_DIMS
MAX_NAME_BYTES = 63  # GGML_MAX_NAME without the trailing zero
MAX_ALIGNMENT = 1 << 20
DEFAULT_ALIGNMENT = 32
_MAX_BYTES = (1 << 63) - 1


@dataclass(frozen=True)
class Entry:
    """One stored tensor. shape: as in torch, the contiguous axis last; begin, end: its bytes, from the file's start."""

    type: BlockType
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0

    @property
    def row_bytes(self) -> int:
        return self.type.row_bytes(self.shape)

    @property
    def rows(self) -> int:
        return math.prod(self.shape[:-1])


def size_of(kind: BlockType, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Raises ValueError if a row is not a whole number of blocks, or if the sizes, zeros counted as
    ones, exceed 63 bits."""
    if len(shape) > MAX_AXES:
        raise ValueError(f"{len(shape)} axes; the maximum is {MAX_AXES}")
    row = kind.row_bytes(shape)
    if kind.nbytes * math.prod(max(n, 1) for n in shape) > _MAX_BYTES:
        raise ValueError(f"shape {[*shape]} of {kind.name} is too large")
    return row * math.prod(shape[:-1])


def check_tensor_name(name: str) -> None:
    """Raise ValueError for a name that is too long for ggml, or that no parameter can have."""
    check_name(name)
    if len(name.encode()) > MAX_NAME_BYTES:
        raise ValueError(f"name of {len(name.encode())} bytes; at most {MAX_NAME_BYTES} are allowed")


def alignment_of(metadata: dict[str, Value]) -> int:
    """``general.alignment``. Raises ValueError unless it is a uint32 power of two."""
    value = metadata.get("general.alignment")
    if value is None:
        return DEFAULT_ALIGNMENT
    n = value.data
    if value.kind != "uint32" or n & (n - 1) or not 1 <= n <= MAX_ALIGNMENT:
        shown = str(n)[:40]
        raise ValueError(
            f"general.alignment is {value.kind} {shown}; expected a uint32 power of two up to {MAX_ALIGNMENT}"
        )
    return n


class File(RawFile):
    """An open GGUF file with a validated header. Raises only CheckpointError on an invalid one.

    The header is in ``version``, ``alignment``, ``metadata``, ``entries``. ``mapped`` memory-maps (no copy), ``rows``
    copies with plain reads and keeps nothing of the file in this process.
    """

    version: int
    alignment: int
    metadata: dict[str, Value]
    entries: dict[str, Entry]

    def _read_header(self) -> None:
        cursor = Cursor(self._read_at, self.size)
        with checkpoint_errors(self.path):
            tensors, keys = self._counts(cursor)
            self.metadata = cursor.metadata(keys)
            self.alignment = alignment_of(self.metadata)
        found = self._infos(cursor, tensors)
        start = padded(cursor.offset, self.alignment)
        self.entries = self._placed(found, start)

    def _counts(self, cursor: Cursor) -> tuple[int, int]:
        if cursor.left < 24:
            raise ValueError(f"{self.size} bytes; a GGUF file has at least 24")
        magic, version = cursor.take(4), cursor.number("uint32")
        if magic != MAGIC:
            raise ValueError(f"begins with {magic!r}, not {MAGIC!r}: this is not a GGUF file")
        self.version = version
        if version not in VERSIONS:
            if version and version & 0xFFFF == 0:
                raise ValueError("is big-endian; only little-endian files are supported")
            raise ValueError(f"GGUF version {version}; supported: 2 and 3")
        tensors, keys = cursor.number("uint64"), cursor.number("uint64")
        # the minimum size of an entry: a name of 1 byte, and a tensor's fields or a value of 1 byte
        for what, count, least, most in (("tensors", tensors, 33, MAX_TENSORS), ("keys", keys, 14, MAX_KEYS)):
            if count * least > self.size:
                raise ValueError(f"the header declares {count} {what} in a file of {self.size} bytes")
            if count > most:
                raise ValueError(f"{count} {what}; the maximum is {most}")
        return tensors, keys

    def _infos(self, cursor: Cursor, count: int) -> dict[str, tuple[BlockType, tuple[int, ...], int]]:
        found: dict[str, tuple[BlockType, tuple[int, ...], int]] = {}
        for i in range(count):
            name = None
            try:
                name = cursor.string(MAX_NAME_BYTES)
                check_tensor_name(name)
                if name in found:
                    raise ValueError("appears twice")
                axes = cursor.number("uint32")
                if axes > MAX_AXES:
                    raise ValueError(f"{axes} axes; the maximum is {MAX_AXES}")
                shape = tuple(cursor.number("uint64") for _ in range(axes))[::-1]
                kind = _type(cursor.number("uint32"))
                found[name] = kind, shape, cursor.number("uint64")
            except CheckpointError:
                raise
            except ValueError as e:
                raise CheckpointError(self.path, name, str(e) if name is not None else f"tensor {i}: {e}") from e
        return found

    def _placed(self, found: dict[str, tuple[BlockType, tuple[int, ...], int]], start: int) -> dict[str, Entry]:
        """Entries whose bytes are contiguous in the file, with only alignment padding between them."""
        entries: dict[str, Entry] = {}
        for name, (kind, shape, offset) in found.items():
            with checkpoint_errors(self.path, name):
                size = size_of(kind, shape)
            begin, end = start + offset, start + offset + size
            if offset % self.alignment:
                raise CheckpointError(self.path, name, f"offset {offset} is not a multiple of {self.alignment}")
            if end > self.size:
                reason = f"{kind.name} of shape {[*shape]} ends at {end}, but the file at {self.size}: truncated"
                raise CheckpointError(self.path, name, reason)
            entries[name] = Entry(kind, shape, begin, end)
        at = start
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != at:
                reason = f"data begins at {entry.begin}, expected {at}: a hole or an overlap"
                raise CheckpointError(self.path, name, reason)
            at = padded(entry.end, self.alignment)
        if self.size > at:
            raise CheckpointError(self.path, None, f"{self.size - at} bytes after the last tensor belong to no tensor")
        return entries

    def mapped(self, name: str) -> Tensor:
        """uint8 [rows, row bytes] over the mapped file, copy-on-write: modifying it does not modify the file."""
        e = self.entries[name]
        if e.begin == e.end:
            return torch.zeros((e.rows, e.row_bytes), dtype=torch.uint8, device="cpu")
        return self._mapped(e.begin, e.end).reshape(e.rows, e.row_bytes)

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of rows [start, stop), uint8 [stop - start, row bytes], in its own memory."""
        e = self.entries[name]
        if not 0 <= start <= stop <= e.rows:
            raise ValueError(f"{name}: rows {start} to {stop} of {e.rows}")
        out = torch.empty((stop - start, e.row_bytes), dtype=torch.uint8, device="cpu")  # filled, or an error
        if out.numel():
            self._fill(e.begin + start * e.row_bytes, memoryview(out.view(-1).numpy()))  # type: ignore[arg-type]
        return out


def _type(number: int) -> BlockType:
    if number in BY_ID:
        return BY_ID[number]
    if number in REMOVED:
        raise ValueError(f"type {number} ({REMOVED[number]}) is not valid in files")
    raise ValueError(f"unknown type {number}; known: {', '.join(t.name for t in BY_ID.values())}")


def padded(offset: int, alignment: int) -> int:
    """The next multiple of the alignment."""
    return -(-offset // alignment) * alignment


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
        with checkpoint_errors(path):
            header, self.entries, size = lay_out(metadata, infos)
        self._left = {name: e.rows * (e.end > e.begin) for name, e in self.entries.items()}
        if resume:
            self._reopen(header, size)
        else:
            self._file = open_new(path)
            try:
                self._claim()
                write_all(self._file, header)
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
            write_all(self._file, memoryview(flat.numpy()), e.begin + first_row * e.row_bytes)  # type: ignore[arg-type]

    def sync(self) -> None:
        """Flush written data to disk."""
        os.fsync(self._file.fileno())

    def finish(self, final: str | None = None) -> None:
        """Flush to disk, rename the file to ``final`` if given, and close.

        Raises CheckpointError if a tensor was not written, or only in part.
        """
        check_complete(self.path, self._left)
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
