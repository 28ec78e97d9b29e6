"""Accessors for GGUF metadata that validate each value."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any

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
