"""JSON from files nobody vouches for: bounded in size and depth before it is parsed, strict in what it accepts."""

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

    Refused: more than max_bytes, nested deeper than about max_depth, not UTF-8, a key twice in one object, NaN and
    infinities, whole numbers of more than ``max_digits`` (20), and fractions unless ``floats``.
    """
    if len(data) > max_bytes:
        raise ValueError(f"JSON of {len(data)} bytes; at most {max_bytes} are read")
    if not balanced(data, max_depth):
        raise ValueError(f"JSON nested deeper than {max_depth}, or its brackets do not match")
    try:
        text = data.decode("utf-8")
        return json.loads(
            text,
            object_pairs_hook=_unique,
            parse_int=_int(max_digits),
            parse_float=_float if floats else _refuse("fraction where a whole number is due:"),
            parse_constant=_refuse("not a JSON number:"),
        )
    except UnicodeDecodeError as e:
        raise ValueError(f"JSON is not UTF-8 (byte {e.start})") from e
    except json.JSONDecodeError as e:
        raise ValueError(f"not JSON: {e.msg} at character {e.pos}") from e


def balanced(data: bytes, max_depth: int) -> bool:
    """Whether brackets outside strings close within max_depth, found in linear time and without recursion.

    Up to twice max_depth may pass, where [] and {} alternate; what matters is a bound far below the parser's stack.
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
