"""Strict JSON parser for untrusted files: size and depth are bounded before parsing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

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
