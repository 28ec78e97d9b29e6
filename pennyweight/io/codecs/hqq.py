"""HQQ layers in safetensors, as saved by hqq 0.2 and transformers (read only).

    value = (q - zero) * scale = q * scale + offset, offset = -(zero * scale) in float32

The weight [out, in] is reshaped to groups, [-1, group_size] for axis 1 and [group_size, -1] for axis 0, with a scale
and a zero, both of ``compute_dtype``, for each row or column. Codes are in ``W_q``, packed along its first axis: the
first half of the rows in the high nibbles, and so on; 3-bit codes are packed ten per int32. ``view_as_float`` stores
its bytes as a float dtype. Every other setting is a separate number or text: ``shape``, ``axis``, ``nbits``,
``packing``.

A group of axis 1 is a run of elements (see run_block in base.py). One of axis 0 is every (out / group_size)-th row of a
column, which is not a block: each element gets its own scale and offset, unless a group is the whole column. The
values are the same, but take more memory than float32: requantize them.

hqq computes in ``compute_dtype``, rounding every step; this package computes in float32, where products of float16 or
bfloat16 are exact. 1.58 bits are packed as 2, and 5 and 6 bits as 8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core import blocks
from ...core.formats import UINT1, UINT2, UINT3, UINT4, UINT5, UINT6, UINT8, Format
from ...core.numerics import Parts
from ...core.spec import DTYPES, QuantSpec
from ..file import KeyedError
from ..manifest import Meta
from ..safetensors_file import size_of
from . import base
from .base import FLOATS, Codec, Config, Entries, Found, Get


class _Packing(NamedTuple):
    bits: int
    each: int  # codes per word
    word: torch.dtype
    formats: dict[int, Format]  # by nbits


_PACKING = {
    "8bit_u8": _Packing(8, 1, torch.uint8, {8: UINT8, 6: UINT6, 5: UINT5}),
    "4bit_u8": _Packing(4, 2, torch.uint8, {4: UINT4}),
    "3bit_32": _Packing(3, 10, torch.int32, {3: UINT3}),
    "2bit_u8": _Packing(2, 4, torch.uint8, {2: UINT2, 1: UINT2}),  # nbits 1.58 is rounded down to an integer
    "1bit_u8": _Packing(1, 8, torch.uint8, {1: UINT1}),
}
_NUMBERS = ("nbits", "group_size", "axis")
_FLAGS = ("view_as_float", "quant_scale", "quant_zero", "offload_meta", "encoded_state_dict", "stores_quant_config",
          "channel_wise", "optimize", "round_zero")  # fmt: skip
_TEXTS = ("packing", "unpack_view_dtype", "compute_dtype")
# Names that no other module uses: without codes they are unexpected.
_ENDS = tuple(f".{key}" for key in ("W_q", "zero_scale", "nbits", "group_size", *_FLAGS[:-2], "round_zero", *_TEXTS))
_MAX_TEXT = 64


def _claims(config: Config, entries: Entries) -> bool:
    method = config.get("quant_method")
    return bool(method == "hqq") or (method is None and any(name.endswith(".W_q") for name in entries))


def _find(entries: Entries, config: Config, get: Get) -> dict[str, Found]:
    settings = base.setting(config, "quant_config", dict, {})
    found = {}
    for name in entries:
        if name.endswith(".W_q"):
            prefix = name.removesuffix(".W_q")
            found[f"{prefix}.weight"] = _find_layer(prefix, settings, entries, get)
    base.no_left_overs(entries, {part for f in found.values() for part in f.stored}, _ENDS, "codes W_q")
    return found


def _find_layer(prefix: str, settings: Mapping[str, Any], entries: Entries, get: Get) -> Found:
    owner = f"{prefix}.weight"
    read = partial(_read, owner, prefix, entries, get)
    numbers = {key: read(key) for key in _NUMBERS}
    flags = {key: bool(read(key)) for key in _FLAGS if f"{prefix}.{key}" in entries}
    texts = {
        key: base.stored_text(f"{prefix}.{key}", entries, get, _MAX_TEXT, owner).decode("latin-1")
        for key in _TEXTS
        if f"{prefix}.{key}" in entries
    }
    for flag, want in (("quant_scale", False), ("quant_zero", False), ("channel_wise", True)):
        if flags.get(flag, want) is not want:
            raise KeyedError(
                owner, f"{prefix}.{flag} is {flags[flag]}: only float scales and zeros, one per group, are supported"
            )
    shape = _shape(owner, prefix, entries, get)
    nbits, size, axis = (numbers[key] for key in _NUMBERS)
    packing = _PACKING.get(texts.get("packing", ""))
    if packing is None or nbits not in packing.formats:
        raise KeyedError(
            owner, f"{prefix}.packing is {texts.get('packing')!r} for {nbits} bits; known: {', '.join(_PACKING)}"
        )
    count = math.prod(shape)
    if axis not in (0, 1) or size < 1 or count % size:
        raise KeyedError(owner, f"groups of {size} along axis {axis} do not divide {list(shape)}")
    _agrees(owner, prefix, settings, numbers)
    grouped = (count // size, size) if axis else (size, count // size)
    _check_codes(owner, f"{prefix}.W_q", packing, grouped, entries, flags.get("view_as_float", False))
    per_group = (grouped[0], 1) if axis else (1, grouped[1])
    scale = base.need(f"{prefix}.scale", entries, FLOATS, per_group, owner=owner)
    base.need(f"{prefix}.zero", entries, FLOATS, per_group, owner=owner)
    dtype = DTYPES.get(texts["compute_dtype"].removeprefix("torch.")) if "compute_dtype" in texts else scale.dtype
    if dtype not in FLOATS:
        raise KeyedError(
            owner, f"{prefix}.compute_dtype is {texts['compute_dtype']!r}, expected float32, float16 or bfloat16"
        )  # fmt: skip
    block: blocks.Block = (-1, 1) if size == shape[0] else (1,)
    if axis:
        block, _ = base.run_block(shape, size)
    spec = QuantSpec(packing.formats[nbits], block, scale=scale.dtype, offset=torch.float32)
    names = ["W_q", "scale", "zero", "shape", *_NUMBERS, *flags, *texts]
    parts = partial(_parts, prefix, spec, shape, grouped, axis, packing)
    return Found(Meta(spec, shape, dtype), tuple(f"{prefix}.{key}" for key in names), parts)


def _read(owner: str, prefix: str, entries: Entries, get: Get, key: str) -> int:
    """A scalar tensor, rounded down: nbits may be 1.58."""
    name = f"{prefix}.{key}"
    kinds = (torch.uint8,) if key in _FLAGS else (torch.int32, torch.int64)
    base.need(name, entries, (*kinds, torch.float32) if key == "nbits" else kinds, (), owner=owner)
    value = float(get(name))
    if not math.isfinite(value):
        raise KeyedError(owner, f"{name} is {value}")
    return int(value)


def _shape(owner: str, prefix: str, entries: Entries, get: Get) -> tuple[int, int]:
    name = f"{prefix}.shape"
    base.need(name, entries, (torch.int64,), (2,), owner=owner)
    outputs, inputs = get(name).tolist()
    if outputs < 1 or inputs < 1:
        raise KeyedError(owner, f"{name} is [{outputs}, {inputs}], expected two positive sizes")
    try:
        size_of(torch.float32, (outputs, inputs))
    except ValueError as e:
        raise KeyedError(owner, f"{name}: {e}") from e
    return outputs, inputs


def _check_codes(
    owner: str, name: str, packing: _Packing, grouped: tuple[int, int], entries: Entries, as_float: bool
) -> None:
    rows = -(-grouped[0] // packing.each)
    if packing.word is torch.uint8 and grouped[0] % packing.each:
        raise KeyedError(owner, f"{grouped[0]} rows of groups is not a multiple of the {packing.each} codes per word")
    dtypes = FLOATS if as_float else (packing.word,)
    entry = base.need(name, entries, dtypes, owner=owner)
    ratio = entry.dtype.itemsize, packing.word.itemsize
    if len(entry.shape) != 2 or entry.shape[0] != rows or entry.shape[1] * ratio[0] != grouped[1] * ratio[1]:
        raise KeyedError(
            owner,
            f"{name} is {entry.dtype} {list(entry.shape)[:8]}, but groups {list(grouped)} of {packing.bits} bits "
            f"need {packing.word} {[rows, grouped[1]]}",
        )


def _agrees(owner: str, prefix: str, settings: Mapping[str, Any], numbers: Mapping[str, int]) -> None:
    """Check the config: one for all layers, or one per "tag": the name without "model", "layers" and numbers."""
    tag = ".".join(part for part in prefix.split(".") if part not in ("model", "layers") and not part.isnumeric())
    layer = settings if "weight_quant_params" in settings else base.setting(settings, tag, dict, {})
    params = base.setting(layer, "weight_quant_params", dict, {})
    for key in _NUMBERS:
        stated = params.get(key)
        if isinstance(stated, int) and stated != numbers[key]:
            raise KeyedError(owner, f"{prefix}.{key} is {numbers[key]}, but quantization_config says {stated}")


def _parts(
    prefix: str,
    spec: QuantSpec,
    shape: tuple[int, int],
    grouped: tuple[int, int],
    axis: int,
    packing: _Packing,
    get: Get,
) -> Parts:
    words = get(f"{prefix}.W_q").contiguous().view(packing.word)
    mask = (1 << packing.bits) - 1
    high = packing.bits * (packing.each - 1)
    slices = [((words >> shift) & mask).to(torch.uint8) for shift in range(high, -1, -packing.bits)]
    codes = torch.cat(slices)[: grouped[0]].reshape(shape)
    scale, zero = get(f"{prefix}.scale"), get(f"{prefix}.zero")
    offset = -(zero.float() * scale.float())
    if axis:
        size = grouped[1]
        fill = partial(base.spread_runs, size=size, block=spec.block, shape=shape)
        return Parts(blocks.pad(codes, spec.block), fill(scale.flatten()), None, fill(offset.flatten()))
    part_shape = blocks.counts(spec.block, shape)
    each = math.prod(part_shape) // grouped[1]  # repeats of a row of groups: group_size, or 1
    return Parts(codes, _repeat(scale, each, part_shape), None, _repeat(offset, each, part_shape))


def _repeat(part: Tensor, each: int, shape: tuple[int, ...]) -> Tensor:
    return part.expand(each, -1).reshape(shape).contiguous()


HQQ = Codec("hqq", _claims, _find, "hqq 0.2.8 (by hand), the formula")
