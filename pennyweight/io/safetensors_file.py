"""The safetensors container: a strict header reader for untrusted files, and the header writer.

    8 bytes      n, little-endian
    n bytes      JSON {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end]}}
    the rest     tensor bytes, little-endian; the offsets cover them exactly

https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .atomic_write import check_complete, open_new, write_all
from .file import CheckpointError, RawFile, checkpoint_errors
from .strict_json import parse

MAX_HEADER_BYTES = 32 << 20  # the limit of safetensors itself is 100 MB; 60 000 quantized tensors need about 27
MAX_TENSORS = 1 << 17
MAX_DEPTH = 8
MAX_AXES = 64
MAX_NAME_BYTES = 1024
MAX_NAME_PARTS = 64
_MAX_BYTES = (1 << 63) - 1
ALIGNMENT = 64  # bytes of a cache line, and of the widest vector register

# Fixed table: the only lookup for dtype names from files. Sub-byte dtypes are not supported.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
DTYPE_NAMES = {v: k for k, v in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One stored tensor: dtype, shape, and its bytes [begin, end) after the header."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int = 0
    end: int = 0

    @property
    def numel(self) -> int:
        return (self.end - self.begin) // self.dtype.itemsize


def size_of(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Raises ValueError if the sizes, zeros counted as ones, exceed 63 bits."""
    bound, exact = dtype.itemsize, dtype.itemsize
    for n in shape:
        bound *= max(n, 1)
        exact *= n
        if bound > _MAX_BYTES:
            raise ValueError(f"shape {list(shape)[:8]} of {DTYPE_NAMES[dtype]} is too large")
    return exact


def check_name(name: str) -> None:
    """Raise ValueError for a name that no parameter can have: empty parts, control characters, too long."""
    try:
        size = len(name.encode("utf-8"))
    except UnicodeEncodeError:
        raise ValueError("name is not valid Unicode") from None
    if not 0 < size <= MAX_NAME_BYTES:
        raise ValueError(f"name of {size} bytes; 1 to {MAX_NAME_BYTES} are allowed")
    if not name.isprintable():
        raise ValueError("name holds control characters")
    parts = name.split(".")
    if len(parts) > MAX_NAME_PARTS:
        raise ValueError(f"name of {len(parts)} parts; at most {MAX_NAME_PARTS} are allowed")
    for part in parts:
        if not part:
            raise ValueError("name has an empty part between dots")
        if len(part) > 4 and part.startswith("__") and part.endswith("__"):
            raise ValueError(f"name part {part!r} is reserved")


_READ = "; pass a .safetensors or .gguf file, or the folder of a model"


class File(RawFile):
    """An open safetensors file with a validated header. Raises only CheckpointError on an invalid one.

    ``tensor`` memory-maps (no copy) unless the file was opened with mmap=False; ``read`` copies with plain reads and
    keeps nothing of the file in this process.
    """

    entries: dict[str, Entry]
    metadata: dict[str, str]

    def _read_header(self) -> None:
        if self.size < 8:
            raise CheckpointError(self.path, None, f"{self.size} bytes; a safetensors file has at least 8{_READ}")
        length = int.from_bytes(self._read_at(0, 8), "little")
        if not 2 <= length <= self.size - 8:
            start = self._read_at(0, 8)
            begin = (
                f"it begins with {start!r}"
                if all(32 <= c < 127 or c in b"\t\r\n" for c in start)
                else f"header of {length} bytes"
            )
            raise CheckpointError(
                self.path, None, f"{begin} in a file of {self.size} bytes: not a safetensors file{_READ}"
            )
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(self.path, None, f"header of {length} bytes; the maximum is {MAX_HEADER_BYTES}")
        data = self._read_at(8, length)
        if data[:1] != b"{":
            raise CheckpointError(self.path, None, 'header does not start with "{"')
        if data.count(b'"data_offsets"') > MAX_TENSORS:
            raise CheckpointError(self.path, None, f"more than {MAX_TENSORS} tensors in one file")
        with checkpoint_errors(self.path, prefix="header: "):
            header = parse(data, max_bytes=MAX_HEADER_BYTES, max_depth=MAX_DEPTH)
        self.entries, self.metadata = check_header(header, self.size - 8 - length, self.path)
        self._start = 8 + length

    def tensor(self, name: str) -> Tensor:
        """The stored tensor over the mapped file, copy-on-write: modifying it does not modify the file."""
        e = self.entries[name]
        if e.begin == e.end:
            return torch.zeros(e.shape, dtype=e.dtype, device="cpu")
        flat = self._mapped(self._start + e.begin, self._start + e.end)
        if (self._start + e.begin) % e.dtype.itemsize:
            flat = flat.clone()  # the format does not guarantee alignment
        return flat.view(e.dtype).reshape(e.shape)

    def read(self, name: str, start: int, stop: int) -> Tensor:
        """A copy of elements [start, stop) of the stored tensor, flat, in its own memory."""
        e = self.entries[name]
        out = torch.empty((stop - start) * e.dtype.itemsize, dtype=torch.uint8, device="cpu")  # filled, or an error
        if stop > start:
            self._fill(self._start + e.begin + start * e.dtype.itemsize, memoryview(out.numpy()))
        return out.view(e.dtype)


def check_header(header: Any, data_bytes: int, path: str) -> tuple[dict[str, Entry], dict[str, str]]:
    """Entries and metadata of a parsed header, for ``data_bytes`` of tensor data. Raises CheckpointError."""
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(path, None, "__metadata__ must map strings to strings")
    entries: dict[str, Entry] = {}
    for name, raw in header.items():
        try:
            check_name(name)
            entries[name] = _entry(raw)
        except ValueError as e:
            raise CheckpointError(path, name, str(e)) from e
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            raise CheckpointError(path, name, f"data begins at {entry.begin}, expected {at}: a hole or an overlap")
        at = entry.end
    if at != data_bytes:
        raise CheckpointError(path, None, f"tensors take {at} bytes but the file has {data_bytes}: truncated or padded")
    return entries, metadata


def _entry(raw: Any) -> Entry:
    if not isinstance(raw, dict) or raw.keys() != {"dtype", "shape", "data_offsets"}:
        raise ValueError("entry must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"unknown dtype {str(dtype)[:40]!r}; known: {', '.join(DTYPES)}")
    # `type(..) is int`, because True is also an int
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError("shape must be a list of non-negative integers")
    if len(shape) > MAX_AXES:
        raise ValueError(f"{len(shape)} axes; the maximum is {MAX_AXES}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise ValueError("data_offsets must be two non-negative integers")
    begin, end = offsets
    size = size_of(DTYPES[dtype], tuple(shape))
    if end - begin != size:
        raise ValueError(f"{dtype} of shape {shape[:8]} takes {size} bytes, data_offsets give {end - begin}")
    return Entry(DTYPES[dtype], tuple(shape), begin, end)


def place(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> dict[str, Entry]:
    """Entries with offsets. Tensors of whole cache lines come first, so that each is aligned and kernels can read it
    from the mapped file; then the others, widest dtype first. Otherwise by name: deterministic."""

    def order(item: tuple[str, tuple[torch.dtype, tuple[int, ...]]]) -> tuple[bool, int, str]:
        name, (dtype, shape) = item
        return size_of(dtype, shape) % ALIGNMENT != 0, -dtype.itemsize, name

    entries, at = {}, 0
    for name, (dtype, shape) in sorted(tensors.items(), key=order):
        size = size_of(dtype, shape)
        entries[name] = Entry(dtype, shape, at, at + size)
        at += size
    return entries


def header_bytes(entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """Length and JSON header, padded with spaces to a multiple of the cache line."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    for name, e in entries.items():
        offsets = [e.begin, e.end]
        header[name] = {"dtype": DTYPE_NAMES[e.dtype], "shape": list(e.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES or len(entries) > MAX_TENSORS:
        raise ValueError(f"{len(entries)} tensors need a header of {len(text)} bytes; use more, smaller shards")
    return len(text).to_bytes(8, "little") + text


class Writer:
    """Writes one safetensors file with known entries: header first, then the tensors in any order, each at its offset.

    Raises CheckpointError if a tensor does not match the header, and OSError if a write fails.
    """

    def __init__(self, path: str, entries: Mapping[str, Entry], metadata: Mapping[str, str]) -> None:
        if sys.byteorder != "little":
            raise CheckpointError(path, None, "safetensors files are little-endian, but this machine is big-endian")
        self.path, self.entries = path, entries
        self._left = {name: e.numel for name, e in entries.items()}
        with checkpoint_errors(path):
            header = header_bytes(entries, metadata)
        self._start = len(header)
        self._file = open_new(path)
        try:
            write_all(self._file, header)
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
        write_all(self._file, memoryview(raw.numpy()), self._start + e.begin + start * e.dtype.itemsize)  # type: ignore[arg-type]

    def finish(self) -> None:
        """Flush to disk and close. Raises CheckpointError if a tensor was not written, or only in part."""
        check_complete(self.path, self._left)
        os.fsync(self._file.fileno())
        self._file.close()

    def close(self) -> None:
        """Close without marking the file as complete."""
        self._file.close()
