"""What codecs ask of names, dtypes, shapes and config before anything is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..container import Entry
from ..manifest import KeyedError

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def stored(
    entries: Mapping[str, Entry], name: str, owner: str, dtypes: Collection[torch.dtype], shape: tuple[int, ...] | None
) -> Entry:
    """The entry of that name. Raises KeyedError for ``owner`` unless it has one of the dtypes and the shape."""
    entry = entries.get(name)
    if entry is None:
        raise KeyedError(owner, f"{name} is missing")
    if entry.dtype not in dtypes or (shape is not None and entry.shape != shape):
        kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        size = "" if shape is None else f" {list(shape)}"
        got = f"{str(entry.dtype).removeprefix('torch.')} {list(entry.shape)[:8]}"
        raise KeyedError(owner, f"{name} is {got}, expected {kinds}{size}")
    return entry


def no_left_overs(entries: Mapping[str, Entry], owned: Collection[str], ends: tuple[str, ...], what: str) -> None:
    """Raise KeyedError for a tensor whose name ends as only parts of a quantized tensor do, but that none claims."""
    for name in sorted(entries):
        if name.endswith(ends) and name not in owned:
            raise KeyedError(name, f"left over: no {what} goes with it")


def setting(config: Mapping[str, Any], key: str, kind: type, default: Any = None) -> Any:
    """``config[key]``, or the default where it is missing or null. Raises ValueError unless it is of that type."""
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not kind:
        raise ValueError(f"quantization_config.{key} must be {kind.__name__}, got {str(value)[:60]!r}")
    return value


def main_float(entries: Mapping[str, Entry], apart_from: Collection[str]) -> torch.dtype:
    """The float dtype of most stored elements, float16 where there are none: the model's, where a format names none."""
    count = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), 0)
    for name, entry in entries.items():
        if entry.dtype in count and name not in apart_from:
            count[entry.dtype] += entry.numel
    return max(count, key=lambda d: count[d])
