"""Small untrusted files: links that stay in their folder, bounded reads, and JSON whose size and depth are bounded
before parsing."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable
from typing import Any

from .file import CheckpointError, checkpoint_errors

MAX_INT_DIGITS = 20  # 2**63 has 19
_NOT_BRACKETS = bytes(c for c in range(256) if c not in b"[]{}")
_CHUNK = 1 << 20


def parse(
    data: bytes, *, max_bytes: int, max_depth: int, floats: bool = False, max_digits: int = MAX_INT_DIGITS
) -> Any:
    """The value of a JSON text. Raises ValueError with the reason.

    Rejects: more than max_bytes, nesting deeper than about max_depth, not UTF-8, a duplicate key in one object, NaN and
    infinities, integers of more than ``max_digits`` (20) digits, and fractions unless ``floats``.
    """
    if len(data) > max_bytes:
        raise ValueError(f"JSON of {len(data)} bytes; the maximum is {max_bytes}")
    if not balanced(data, max_depth):
        raise ValueError(f"JSON nested deeper than {max_depth}, or its brackets do not match")
    try:
        text = data.decode("utf-8")
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_int(max_digits),
            parse_float=_float if floats else _refuse("expected an integer, got a fraction:"),
            parse_constant=_refuse("not a JSON number:"),
        )
    except UnicodeDecodeError as e:
        raise ValueError(f"JSON is not UTF-8 (byte {e.start})") from e
    except json.JSONDecodeError as e:
        raise ValueError(f"not JSON: {e.msg} at character {e.pos}") from e


def balanced(data: bytes, max_depth: int) -> bool:
    """Whether brackets outside strings match and nest at most max_depth deep; linear time, no recursion.

    Up to twice max_depth may pass where [] and {} alternate; the bound only needs to be far below the parser's stack.
    """
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"")  # now every quote opens or closes a string
    brackets, inside = bytearray(), False
    for start in range(0, len(data), _CHUNK):
        pieces = data[start : start + _CHUNK].split(b'"')
        for piece in pieces[int(inside) :: 2]:
            brackets += piece.translate(None, _NOT_BRACKETS)
        inside ^= len(pieces) % 2 == 0
    left = bytes(brackets)
    for _ in range(max_depth):
        if not left:
            break
        left = left.replace(b"[]", b"").replace(b"{}", b"")
    return not left


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"key {twice[:100]!r} appears twice in one JSON object")
    return out


def _int(max_digits: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        if len(text) > max_digits:
            raise ValueError(f"number of {len(text)} digits")
        return int(text)

    return convert


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {text[:30]} is out of range")
    return value


def _refuse(why: str) -> Callable[[str], Any]:
    def refuse(text: str) -> Any:
        raise ValueError(f"{why} {text[:30]}")

    return refuse


def resolve_inside(folder: str, name: str) -> str:
    """Real path of a file in ``folder`` (a real path). Raises CheckpointError for a link that points outside of it.

    Exception: the Hub's cache, where snapshots/<revision>/ contains links into blobs/ beside snapshots/.
    """
    path = os.path.join(folder, name)
    try:
        real = os.path.realpath(path, strict=True)
    except (OSError, ValueError) as e:
        raise CheckpointError(path, None, f"cannot be opened: {getattr(e, 'strerror', None) or e}") from e
    roots = [folder]
    if os.path.basename(os.path.dirname(folder)) == "snapshots":
        roots.append(os.path.join(os.path.dirname(os.path.dirname(folder)), "blobs"))
    if not any(real.startswith(os.path.join(root, "")) for root in roots):
        raise CheckpointError(path, None, "is a link that points outside the folder")
    return real


def read_bytes(path: str, max_bytes: int) -> bytes:
    """A whole file. Raises CheckpointError if it is not a regular one of at most ``max_bytes``, or cannot be read."""
    try:
        # a pipe must not block the open
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
        with os.fdopen(os.open(path, flags), "rb") as f:
            regular = stat.S_ISREG(os.fstat(f.fileno()).st_mode)
            data = f.read(max_bytes + 1) if regular else b""
    except OSError as e:
        raise CheckpointError(path, None, f"cannot be read: {e.strerror}") from e
    if not regular or len(data) > max_bytes:
        raise CheckpointError(path, None, f"is larger than {max_bytes} bytes" if regular else "is not a regular file")
    return data


def read_json(path: str, *, max_bytes: int, max_depth: int = 32, max_digits: int = MAX_INT_DIGITS) -> Any:
    """The value in a JSON file, fractions allowed. Raises CheckpointError, see :func:`read_bytes` and :func:`parse`."""
    data = read_bytes(path, max_bytes)
    with checkpoint_errors(path):
        return parse(data, max_bytes=max_bytes, max_depth=max_depth, floats=True, max_digits=max_digits)


def read_object(folder: str, name: str, max_bytes: int, max_digits: int = MAX_INT_DIGITS) -> dict[str, Any] | None:
    """The JSON object in a file of a folder (a real path); None if there is no such file. Raises CheckpointError."""
    if not os.path.lexists(os.path.join(folder, name)):
        return None
    path = resolve_inside(folder, name)
    data = read_json(path, max_bytes=max_bytes, max_digits=max_digits)
    if not isinstance(data, dict):
        raise CheckpointError(path, None, "must hold an object")
    return data
