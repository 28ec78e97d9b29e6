"""Stored tensors by layer, as other libraries name them: ``<layer>.<ending>``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..container import Entry
from ..manifest import KeyedError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def by_layer(entries: Mapping[str, Entry], endings: Collection[str]) -> dict[str, dict[str, str]]:
    """{layer: {ending: stored name}} of the stored tensors whose last part is one of ``endings``."""
    out: dict[str, dict[str, str]] = {}
    for name in entries:
        layer, _, ending = name.rpartition(".")
        if ending in endings:
            out.setdefault(layer, {})[ending] = name
    return out


def join(layer: str, ending: str) -> str:
    """The stored name of a layer's tensor; a model that is itself a layer has the empty name."""
    return f"{layer}.{ending}" if layer else ending


def model_dtype(entries: Mapping[str, Entry], quantized: Collection[str]) -> torch.dtype | None:
    """The dtype of most numbers that are not quantized: what such a model computes in. None where there are none."""
    counts = dict.fromkeys(FLOATS, 0)
    for name, entry in entries.items():
        if entry.dtype in counts and name not in quantized:
            counts[entry.dtype] += count(entry.shape)
    best = max(counts, key=lambda dtype: counts[dtype])
    return best if counts[best] else None


def count(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total


def need(name: str, entries: Mapping[str, Entry], dtypes: Collection[torch.dtype], *shapes: tuple[int, ...]) -> Entry:
    """The entry of a stored tensor. Raises KeyedError unless its dtype, and its shape where any is given, is listed."""
    entry = entries[name]
    if entry.dtype not in dtypes:
        raise KeyedError(name, f"is {short(entry.dtype)}, expected {' or '.join(short(d) for d in dtypes)}")
    if shapes and entry.shape not in shapes:
        expected = " or ".join(str(list(s)) for s in shapes)
        raise KeyedError(name, f"has shape {list(entry.shape)}, expected {expected}")
    return entry


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def option(what: str, config: Mapping[str, Any], key: str, kinds: tuple[type, ...], default: Any = None) -> Any:
    """``config[key]``; the default where it is null or absent. Raises ValueError where it is of another type."""
    value = config.get(key)
    if value is None:
        return default
    if type(value) not in kinds:  # not isinstance: True is an int too
        names = " or ".join(k.__name__ for k in kinds)
        raise ValueError(f"{what}: {key} must be {names}, got {str(value)[:60]!r}")
    return value
