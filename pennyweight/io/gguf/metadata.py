"""Metadata of a GGUF file: typed values and keys, parsed from untrusted bytes and written back to identical bytes; and
accessors of plain values that check them.

    entry    key as a string, uint32 kind, value
    value    of a string: uint64 length, UTF-8; of an array: uint32 kind, uint64 count, elements; else the number

Little-endian. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

MAX_HEADER_BYTES = 1 << 25  # 260 000 tokens with scores and kinds, and 510 000 merges, take 17 MB
MAX_KEYS = 1 << 13
MAX_KEY_BYTES = (1 << 16) - 1  # the format's own limit
MAX_STRINGS = 1 << 20  # in all arrays together; the largest current vocabularies have 780 000 tokens and merges

# The number of each kind in files is its index here. Numeric kinds map to a dtype.
_NUMBERS = {
    "uint8": 0, "int8": 1, "uint16": 2, "int16": 3, "uint32": 4, "int32": 5, "float32": 6,
    "uint64": 10, "int64": 11, "float64": 12,
}  # fmt: skip
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = _NUMBERS | {"bool": _BOOL, "string": _STRING}
_NAMES = {number: name for name, number in _SCALARS.items()}
_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in _NUMBERS} | {"bool": np.dtype(np.uint8)}
_U64 = struct.Struct("<Q")


class Value:
    """A typed value. kind: "uint32", "string", .. or, for arrays, "[uint32]", "[string]", ..

    ``data`` is an int, float, bool or str; for numeric arrays a numpy array (of bool for "[bool]"), for string arrays a
    list. Strings are not interpreted: a chat template is just text. They are decoded on access.
    """

    __slots__ = ("_data", "_stored", "kind")

    def __init__(self, kind: str, data: Any) -> None:
        base = kind.removeprefix("[").removesuffix("]")
        if base not in _SCALARS or kind not in (base, f"[{base}]"):
            raise ValueError(f"unknown kind {kind!r} of a GGUF value; known: {', '.join(_SCALARS)}, and each in [ ]")
        self.kind = kind
        self._stored: tuple[bytes, int] | None = None
        self._data = _checked(kind, base, data)

    @classmethod
    def _of_strings(cls, stored: bytes, count: int) -> Value:
        """An array of strings in its file encoding; lengths and UTF-8 are already checked."""
        value = cls("[string]", [])
        value._data, value._stored = None, (stored, count)
        return value

    @property
    def data(self) -> Any:
        if self._data is None:
            assert self._stored is not None
            raw, at, out = self._stored[0], 0, []
            for _ in range(self._stored[1]):
                end = at + 8 + _U64.unpack_from(raw, at)[0]
                out.append(raw[at + 8 : end].decode())
                at = end
            self._data, self._stored = out, None
        return self._data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Value) and self.kind == other.kind and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        return hash((self.kind, self.to_bytes()))

    def __repr__(self) -> str:
        if self._stored is not None:
            return f"Value({self.kind!r}, <{self._stored[1]} strings>)"
        return f"Value({self.kind!r}, {self._data!r})"

    def to_bytes(self) -> bytes:
        """The value as stored in a file, without its kind."""
        base = self.kind.strip("[]")
        if base == self.kind:
            if base == "string":
                return _string_bytes(self._data)
            return np.array(self._data, _DTYPES[base]).tobytes()
        if self._stored is not None:
            body, count = self._stored
        elif base == "string":
            body, count = b"".join(map(_string_bytes, self._data)), len(self._data)
        else:
            body, count = self._data.astype(_DTYPES[base]).tobytes(), len(self._data)
        return struct.pack("<IQ", _SCALARS[base], count) + body


def _checked(kind: str, base: str, data: Any) -> Any:
    """Convert data to a value of that kind. Raises ValueError if it does not fit."""
    if kind == "[string]":
        fits = isinstance(data, list) and all(isinstance(s, str) for s in data)
    elif kind != base:
        return _checked_array(kind, base, data)
    elif base == "string":
        fits = isinstance(data, str)
    elif base == "bool":
        fits = isinstance(data, bool)
    else:
        number = (int, float, np.number) if base.startswith("float") else (int, np.integer)
        fits = isinstance(data, number) and not isinstance(data, bool)
        if fits:
            return _checked_array(kind, base, [data])[0].item()
    if not fits:
        raise ValueError(f"{str(data)[:80]!r} is not a GGUF value of kind {kind}")
    return data


def _checked_array(kind: str, base: str, data: Any) -> np.ndarray:
    array = np.asarray(data)
    wanted = np.dtype(base)
    if array.size == 0 and array.ndim == 1:
        return array.astype(wanted, copy=False)
    allowed = {"b": "b", "f": "fiu", "i": "iu", "u": "iu"}[wanted.kind]
    fits = array.ndim == 1 and array.dtype.kind in allowed
    if fits and wanted.kind in "iu":
        info = np.iinfo(wanted)
        fits = info.min <= int(array.min()) and int(array.max()) <= info.max
    elif fits and wanted.kind == "f":
        fits = not (np.abs(array[np.isfinite(array)]) > np.finfo(wanted).max).any()
    if not fits:
        raise ValueError(f"{str(data)[:80]!r} is not a GGUF value of kind {kind}")
    return array.astype(wanted, copy=False)


def _string_bytes(text: str) -> bytes:
    raw = text.encode()
    return _U64.pack(len(raw)) + raw


def metadata_bytes(metadata: Mapping[str, Value]) -> bytes:
    """All entries, in order. Raises ValueError for an invalid key."""
    out = []
    for key, value in metadata.items():
        check_key(key)
        number = _ARRAY if value.kind[0] == "[" else _SCALARS[value.kind]
        out += [_string_bytes(key), struct.pack("<I", number), value.to_bytes()]
    return b"".join(out)


def check_key(key: str) -> None:
    """Raise ValueError for a key that is empty, too long or contains control characters."""
    if not 0 < len(key.encode()) <= MAX_KEY_BYTES:
        raise ValueError(f"metadata key of {len(key.encode())} bytes; 1 to {MAX_KEY_BYTES} are allowed")
    if not key.isprintable():
        raise ValueError(f"metadata key {ascii(key)[:80]} contains control characters")


class Cursor:
    """Reads the header of a file sequentially. Every length is compared with the remaining bytes before it is used.

    fill: reads bytes [offset, offset + count) of the file; size: file size in bytes. Raises ValueError.
    """

    PIECE = 1 << 20

    def __init__(self, fill: Callable[[int, int], bytes], size: int) -> None:
        self._fill, self._size = fill, size
        self._buffer, self._start, self._at = b"", 0, 0
        self._strings = 0

    @property
    def offset(self) -> int:
        """File offset of the next byte."""
        return self._start + self._at

    @property
    def left(self) -> int:
        return self._size - self.offset

    def _need(self, count: int) -> None:
        """Make sure that many bytes are in the buffer."""
        if len(self._buffer) - self._at >= count:
            return
        if count > self.left:
            raise ValueError(f"ends early: {count} bytes are needed at {self.offset}, but {self.left} are left")
        if self.offset + count > MAX_HEADER_BYTES:
            raise ValueError(f"header of more than {MAX_HEADER_BYTES} bytes")
        self._start, rest = self.offset, self._buffer[self._at :]
        more = min(max(self.PIECE, count), self._size - self._start) - len(rest)
        self._buffer, self._at = rest + self._fill(self._start + len(rest), more), 0

    def take(self, count: int) -> bytes:
        self._need(count)
        self._at += count
        return self._buffer[self._at - count : self._at]

    def number(self, kind: str) -> int:
        """An unsigned integer: uint32 or uint64."""
        return int.from_bytes(self.take(4 if kind == "uint32" else 8), "little")

    def string(self, most: int = MAX_HEADER_BYTES) -> str:
        length = self.number("uint64")
        if length > most:
            raise ValueError(f"string of {length} bytes at {self.offset}; the maximum is {most}")
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise ValueError(f"string at {self.offset - length} is not UTF-8") from None

    def metadata(self, count: int) -> dict[str, Value]:
        """That many entries. Raises ValueError, naming the key."""
        out: dict[str, Value] = {}
        for _ in range(count):
            key = self.string(MAX_KEY_BYTES)
            check_key(key)
            if key in out:
                raise ValueError(f"metadata key {key[:80]!r} appears twice")
            try:
                out[key] = self.value()
            except ValueError as e:
                raise ValueError(f"metadata {key[:80]!r}: {e}") from e
        return out

    def value(self) -> Value:
        kind_number = self.number("uint32")
        if kind_number == _ARRAY:
            return self._array()
        kind = _name(kind_number)
        if kind == "string":
            return Value(kind, self.string())
        number = np.frombuffer(self.take(_DTYPES[kind].itemsize), _DTYPES[kind])
        return Value(kind, _bools(number)[0] if kind == "bool" else number[0].item())

    def _array(self) -> Value:
        number, count = self.number("uint32"), self.number("uint64")
        if number == _ARRAY:
            raise ValueError("array of arrays; only arrays of numbers, bools and strings are supported")
        kind = _name(number)
        if kind == "string":
            return self._string_array(count)
        raw = np.frombuffer(self.take(count * _DTYPES[kind].itemsize), _DTYPES[kind])
        return Value(f"[{kind}]", np.array(_bools(raw), bool) if kind == "bool" else raw.astype(kind, copy=False))

    def _string_array(self, count: int) -> Value:
        if count * 8 > self.left:
            raise ValueError(f"array of {count} strings, but {self.left} bytes are left")
        self._strings += count
        if self._strings > MAX_STRINGS:
            raise ValueError(f"more than {MAX_STRINGS} strings in arrays")
        pieces = []
        long = []  # where strings of 128 bytes and more begin, in the file
        offset = self.offset
        unpack, buffer, at, first = _U64.unpack_from, self._buffer, self._at, self._at
        size = len(buffer) - 8
        for _ in range(count):  # may run a million times: calls only buffer functions
            end = at + 8 + unpack(buffer, at)[0] if at <= size else 0
            if not at < end <= size + 8:
                pieces.append(buffer[first:at])
                self._at = at
                self._need(8)
                self._need(8 + unpack(self._buffer, self._at)[0])
                buffer, at, first = self._buffer, self._at, self._at
                size = len(buffer) - 8
                end = at + 8 + unpack(buffer, at)[0]
            if end - at >= 8 + 128:
                long.append((self._start + at - offset, self._start + end - offset))
            at = end
        pieces.append(buffer[first:at])
        self._at = at
        stored = b"".join(pieces)
        _check_utf8(stored, long, offset)
        return Value._of_strings(stored, count)


def _check_utf8(stored: bytes, long: Sequence[tuple[int, int]], offset: int) -> None:
    """Raise ValueError if a string is not UTF-8. long: begin and end of the strings of 128 bytes and more.

    Lengths below 128 are ASCII bytes, which end no character of more bytes and begin none. So strings with such lengths
    are UTF-8 if and only if the bytes of all together are, which one call finds out.
    """
    at = 0
    try:
        for begin, end in (*long, (len(stored), len(stored))):
            stored[at:begin].decode()
            at = begin + 8
            stored[at:end].decode()
            at = end
    except UnicodeDecodeError as e:
        raise ValueError(f"string at {offset + at + e.start} is not UTF-8") from None


def _name(number: int) -> str:
    if number not in _NAMES:
        raise ValueError(f"value of unknown kind {number}; known: 0 to 12")
    return _NAMES[number]


def _bools(raw: np.ndarray) -> list[bool]:
    if raw.size and raw.max() > 1:
        raise ValueError("a bool that is neither 0 nor 1")
    return raw.astype(bool).tolist()


KV = dict[str, tuple[str, Any]]  # key -> (GGUF value type, value); array types are e.g. "ARRAY[STRING]"
_NEEDED: Any = object()


def integer(kv: Mapping[str, Any], key: str, default: Any = _NEEDED) -> int:
    """A positive integer. A per-layer list of identical numbers counts as that number."""
    value = _get(kv, key, default)
    if isinstance(value, list) and value and all(v == value[0] for v in value):
        value = value[0]
    if isinstance(value, list):
        raise ValueError(f"{key} differs between layers, which the config of this architecture does not support")
    if type(value) is not int or not 0 < value < 1 << 31:
        raise ValueError(f"{key} must be a positive integer, got {str(value)[:50]!r}")
    return value


def real(kv: Mapping[str, Any], key: str, default: Any = _NEEDED) -> float:
    """A finite float, as the shortest decimal with the same float32 value."""
    value = _get(kv, key, default)
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{key} must be a finite number, got {str(value)[:50]!r}")
    return short(value)


def text(kv: Mapping[str, Any], key: str, default: Any = _NEEDED) -> str:
    value = _get(kv, key, default)
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a string, got {str(value)[:50]!r}")
    return value


def short(x: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-06 for 9.999999974752427e-07."""
    try:
        want = struct.pack("<f", x)
        return next(y for p in range(1, 18) if struct.pack("<f", y := float(f"{x:.{p}g}")) == want)
    except OverflowError:  # outside the range of float32
        return float(x)


def _get(kv: Mapping[str, Any], key: str, default: Any) -> Any:
    value = kv.get(key)
    if value is None:
        if default is _NEEDED:
            raise ValueError(f"{key} is missing")
        return default
    return value
