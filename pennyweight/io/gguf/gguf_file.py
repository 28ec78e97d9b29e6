"""The GGUF container: a strict reader for untrusted files.

    "GGUF"      uint32 version, uint64 tensors, uint64 entries of metadata, all little-endian
    metadata    see metadata.py
    tensors     name, uint32 axes, uint64 size of each axis (the contiguous one first), uint32 type, uint64 offset
    the rest    tensor data from the next multiple of ``general.alignment`` (32); each tensor is aligned to it

https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..file import RawFile
from ..safetensors_file import check_name
from .blocks import BY_ID, REMOVED, BlockType
from .metadata import MAX_KEYS, Cursor, Value

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
        count = 1
        for n in self.shape[:-1]:
            count *= n
        return count


def size_of(kind: BlockType, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Raises ValueError if a row is not a whole number of blocks, or if the sizes, zeros counted as
    ones, exceed 63 bits."""
    if len(shape) > MAX_AXES:
        raise ValueError(f"{len(shape)} axes; the maximum is {MAX_AXES}")
    bound, exact = kind.nbytes, kind.row_bytes(shape)
    for n in shape:
        bound *= max(n, 1)
        if bound > _MAX_BYTES:
            raise ValueError(f"shape {[*shape]} of {kind.name} is too large")
    for n in shape[:-1]:
        exact *= n
    return exact


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
        try:
            tensors, keys = self._counts(cursor)
            self.metadata = cursor.metadata(keys)
            self.alignment = alignment_of(self.metadata)
        except CheckpointError:
            raise
        except ValueError as e:
            raise CheckpointError(self.path, None, str(e)) from e
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
            try:
                size = size_of(kind, shape)
            except ValueError as e:
                raise CheckpointError(self.path, name, str(e)) from e
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
        out = torch.zeros((stop - start, e.row_bytes), dtype=torch.uint8, device="cpu")
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
