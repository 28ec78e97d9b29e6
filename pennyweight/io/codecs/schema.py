"""Helpers for codecs: checks of names, dtypes, shapes and config before any data is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..manifest import KeyedError
from ..safetensors_file import Entry

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def need(
    name: str, entries: Mapping[str, Entry], dtypes: Collection[torch.dtype], *shapes: tuple[int, ...],
    owner: str | None = None,
) -> Entry:  # fmt: skip
    """The entry of a stored tensor. Raises KeyedError unless its dtype and shape are among those given, if any.

    owner: the quantized tensor to report in the error, if it is not ``name`` itself.
    """
    entry = entries.get(name)
    if entry is None:
        reason = "is missing"
    elif entry.dtype not in dtypes or (shapes and entry.shape not in shapes):
        kinds = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        sizes = " or ".join(str(list(s)) for s in shapes)
        got = f"{str(entry.dtype).removeprefix('torch.')} {list(entry.shape)[:8]}"
        reason = f"is {got}, expected {kinds} {sizes}".rstrip()
    else:
        return entry
    if owner is None:
        raise KeyedError(name, reason)
    raise KeyedError(owner, f"{name} {reason}")


def no_left_overs(entries: Mapping[str, Entry], owned: Collection[str], ends: tuple[str, ...], what: str) -> None:
    """Raise KeyedError for a tensor whose name has the suffix of a quantized tensor's part, but that no tensor uses."""
    for name in sorted(entries):
        if name.endswith(ends) and name not in owned:
            raise KeyedError(name, f"is unexpected: no {what} uses it")


def setting(
    config: Mapping[str, Any], key: str, kinds: type | tuple[type, ...], default: Any = None,
    what: str = "quantization_config",
) -> Any:  # fmt: skip
    """``config[key]``, or the default if missing or null. Raises ValueError for another type."""
    value, kinds = config.get(key), kinds if isinstance(kinds, tuple) else (kinds,)
    if value is None:
        return default
    if type(value) not in kinds:  # not isinstance: True is also an int
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"{what}: {key} must be {names}, got {str(value)[:60]!r}")
    return value


def model_dtype(entries: Mapping[str, Entry], quantized: Collection[str]) -> torch.dtype | None:
    """The dtype of most unquantized elements, which is the model's compute dtype. None if there are none."""
    counts = dict.fromkeys(FLOATS, 0)
    for name, entry in entries.items():
        if entry.dtype in counts and name not in quantized:
            counts[entry.dtype] += entry.numel
    best = max(counts, key=lambda dtype: counts[dtype])
    return best if counts[best] else None


def join(layer: str, ending: str) -> str:
    """The stored name of a layer's tensor; the layer name is empty if the model is itself a layer."""
    return f"{layer}.{ending}" if layer else ending


def by_layer(entries: Mapping[str, Entry], endings: Collection[str]) -> dict[str, dict[str, str]]:
    """{layer: {ending: stored name}} of the stored tensors whose last name part is one of ``endings``."""
    out: dict[str, dict[str, str]] = {}
    for name in entries:
        layer, _, ending = name.rpartition(".")
        if ending in endings:
            out.setdefault(layer, {})[ending] = name
    return out
