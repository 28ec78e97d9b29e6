"""bitsandbytes in safetensors: NF4 and FP4, with plain or nested (double-quantized) absmax, and LLM.int8.

4 bits     value = table[code] * absmax[flat index // blocksize]. Codes are in flat row-major order,
           two to a byte, the first in the high nibble. ``W.quant_state.bitsandbytes__nf4`` is a JSON text in bytes:
           dtype, shape, blocksize.
nested     absmax = map[a] * nested_absmax[index // 256] + nested_offset, in float32, ``a`` of 8 bits
LLM.int8   value = CB * SCB / 127, ``SCB`` a row's largest magnitude

Blocks of 64 map to our blocks if 64 divides the rows, or rows divide 64. Otherwise our blocks are the gcd of the two,
and a scale is repeated over the blocks that make up one of theirs: the values are the same, and writing merges them.
A nested absmax stays nested if its blocks match the blocks of the scale and its map is one of our tables; otherwise
it is read as the float32 values it represents. torch.linspace computes that map; its last bits vary between CPUs.

bitsandbytes computes int8 values as (CB * SCB) * (1 / 127), this package as CB * (SCB / 127): in float32 up to two
units in the last place apart. ``SCB`` is recovered exactly from the scale if it was float16 or bfloat16; about one
float32 in 180 comes back one unit off, with the same scale (see ``_row_maximum``). The outlier decomposition of
LLM.int8 is part of its matmul, not of the file: weights read from it are weight-only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from ...core import blocks
from ...core.formats import Format
from ...core.numerics import Parts
from ...core.spec import DTYPES, INT8_ROW, QuantSpec, check_keys
from ..manifest import KeyedError, Meta
from ..safetensors_file import MAX_AXES, Entry, size_of
from ..strict_json import parse
from .base import Codec, Found, Get
from .bitsandbytes_write import BLOCKSIZES, CODES, MAPS, MARK, NESTED, WRITING
from .flat_blocks import run_block, spread_runs
from .schema import FLOATS, model_dtype, need, no_left_overs, setting

_MAX_STATE = 4096  # bytes of the JSON text; a real one has about 170
_ENDS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".SCB", ".weight_format")
# dtypes that FSDP stores the bytes as
_STORAGE = (torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64)


class _State(NamedTuple):
    """quant_state, and the format of the nested map: None if there is none, or if it is not one of ours."""

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    blocksize: int
    offset: float | None
    nested_blocksize: int = NESTED
    map: Format | None = None


def _claims(config: Mapping[str, Any], entries: Mapping[str, Entry]) -> bool:
    method = config.get("quant_method")
    if method is None:
        return any(MARK in name for name in entries) or any(name.endswith(".SCB") for name in entries)
    return bool(method == "bitsandbytes")


def _find(entries: Mapping[str, Entry], config: Mapping[str, Any], get: Get) -> dict[str, Found]:
    found: dict[str, Found] = {}
    marks = [name.split(MARK, 1) for name in entries if MARK in name]
    kinds = dict(marks)
    if len(kinds) != len(marks):
        twice = next(owner for owner, kind in marks if kinds[owner] != kind)
        raise KeyedError(twice, "has two quant_states")
    for owner, kind in kinds.items():
        found[owner] = _find_4bit(owner, kind, entries, get)
        _agrees(config, owner, "load_in_4bit", True, "4-bit")
        _agrees(config, owner, "load_in_8bit", False, "4-bit")
        _agrees(config, owner, "bnb_4bit_quant_type", kind, kind)
    rows = [name.removesuffix("SCB") + "weight" for name in entries if name.endswith(".SCB")]
    sides = [weight.removesuffix("weight") + "SCB" for weight in rows]
    dtype = model_dtype(entries, sides) or torch.float16
    for name in rows:
        found[name] = _find_8bit(name, dtype, entries, get)
        _agrees(config, name, "load_in_8bit", True, "8-bit")
        _agrees(config, name, "load_in_4bit", False, "8-bit")
    owned = {part for f in found.values() for part in f.stored}
    no_left_overs(entries, owned, _ENDS, "quantized weight")
    for name, entry in entries.items():
        if name.endswith(".weight") and entry.dtype in (torch.uint8, torch.int8) and name not in owned:
            raise KeyedError(name, f"is {str(entry.dtype).removeprefix('torch.')} with neither quant_state nor SCB")
    return found


def _agrees(config: Mapping[str, Any], name: str, key: str, want: Any, stored_as: str) -> None:
    if setting(config, key, type(want), want) != want:
        raise KeyedError(name, f"is stored as {stored_as}, but quantization_config.{key} is {config[key]!r}")


def _find_4bit(owner: str, kind: str, entries: Mapping[str, Entry], get: Get) -> Found:
    nested = f"{owner}.nested_absmax" in entries or f"{owner}.nested_quant_map" in entries
    state = _read_state(owner, kind, nested, entries, get)
    shape, count = state.shape, math.prod(state.shape)
    codes = need(owner, entries, _STORAGE, owner=owner)
    wide = codes.dtype.itemsize
    if codes.shape != (-(-count // 2) // wide, 1) or -(-count // 2) % wide:
        raise KeyedError(
            owner, f"{list(codes.shape)[:8]} of {wide} bytes do not match the {-(-count // 2)} bytes in rows of "
            f"one that {list(shape)} takes at 4 bits"
        )  # fmt: skip
    n_blocks = -(-count // state.blocksize)
    sides = [f"{owner}{MARK}{kind}", f"{owner}.quant_map", f"{owner}.absmax"]
    fmt, order = CODES[kind]
    _read_map(owner, "quant_map", 16, entries, get, {fmt: order})
    need(sides[2], entries, (torch.uint8 if nested else torch.float32,), (n_blocks,), owner=owner)
    if nested:
        sides += [f"{owner}.nested_absmax", f"{owner}.nested_quant_map"]
        need(sides[3], entries, (torch.float32,), (-(-n_blocks // state.nested_blocksize),), owner=owner)
        table = _read_map(owner, "nested_quant_map", 256, entries, get, dict.fromkeys(MAPS, range(256)))
        state = state._replace(map=table)
    block, on_grid = run_block(shape, state.blocksize)
    scale: QuantSpec | torch.dtype = torch.float32
    if state.map is not None and on_grid:
        inner, fits = run_block(blocks.counts(block, shape), state.nested_blocksize)
        scale = QuantSpec(state.map, inner, offset=torch.float32) if fits else scale
    meta = Meta(QuantSpec(fmt, block, scale), shape, state.dtype)
    return Found(meta, (owner, *sides), partial(_parts_4bit, owner, meta, state))


def _read_state(owner: str, kind: str, nested: bool, entries: Mapping[str, Entry], get: Get) -> _State:
    """The JSON text beside the codes, with every field checked."""
    if kind not in CODES:
        raise KeyedError(owner, f"quant_type {kind[:40]!r}; known: {', '.join(CODES)}")
    name = f"{owner}{MARK}{kind}"
    if len(need(name, entries, (torch.uint8,), owner=owner).shape) != 1 or entries[name].numel > _MAX_STATE:
        raise KeyedError(
            owner, f"{name} is {list(entries[name].shape)[:8]}, expected at most {_MAX_STATE} bytes of JSON"
        )
    try:
        raw = parse(bytes(get(name).tolist()), max_bytes=_MAX_STATE, max_depth=2, floats=True)
        fields = {"quant_type", "blocksize", "dtype", "shape"}
        fields |= {"nested_blocksize", "nested_dtype", "nested_offset"} if nested else set()
        check_keys("quant_state", raw, fields, set())
        shape, dtype, size = raw["shape"], raw["dtype"], raw["blocksize"]
        if raw["quant_type"] != kind:
            raise ValueError(f"quant_type {str(raw['quant_type'])[:40]!r} does not match {kind} in its name")
        if not isinstance(dtype, str) or DTYPES.get(dtype) not in FLOATS:
            raise ValueError(f"dtype {str(dtype)[:40]!r}; known: float32, float16, bfloat16")
        if not isinstance(shape, list) or not 1 <= len(shape) <= MAX_AXES:
            raise ValueError(f"shape must be a list of 1 to {MAX_AXES} sizes")
        if not all(type(n) is int and n > 0 for n in shape):
            raise ValueError(f"shape must contain positive integers, got {str(shape)[:80]}")
        size_of(torch.float32, tuple(shape))
        _check_blocksize("blocksize", size)
        if not nested:
            return _State(kind, tuple(shape), DTYPES[dtype], size, None)
        _check_blocksize("nested_blocksize", raw["nested_blocksize"])
        if raw["nested_dtype"] != "float32":
            raise ValueError(f"nested_dtype {str(raw['nested_dtype'])[:40]!r}; only float32 is supported")
        offset = raw["nested_offset"]
        if type(offset) not in (int, float) or abs(offset) > torch.finfo(torch.float32).max:
            raise ValueError(f"nested_offset must be a number in the range of float32, got {str(offset)[:40]!r}")
        return _State(kind, tuple(shape), DTYPES[dtype], size, float(offset), raw["nested_blocksize"])
    except ValueError as e:
        raise KeyedError(owner, f"{name}: {e}") from e


def _check_blocksize(key: str, size: Any) -> None:
    if type(size) is not int or size not in BLOCKSIZES:
        raise ValueError(f"{key} {repr(size)[:40]}; known: {', '.join(map(str, BLOCKSIZES))}")


def _read_map(
    owner: str, part: str, count: int, entries: Mapping[str, Entry], get: Get, known: Mapping[Format, Any]
) -> Format | None:
    """The format whose values a stored table contains, in the order of the given codes.

    None for a table that differs by a few units in the last place. Raises KeyedError for any other.
    """
    need(f"{owner}.{part}", entries, (torch.float32,), (count,), owner=owner)
    table = get(f"{owner}.{part}")
    ours = {fmt: torch.tensor(fmt.values, dtype=torch.float32, device="cpu") for fmt in known}
    for fmt, order in known.items():
        if torch.equal(table[torch.tensor(order, device="cpu")], ours[fmt]):
            return fmt
    if count == 256 and any(torch.allclose(table, numbers, rtol=2.0**-21, atol=0.0) for numbers in ours.values()):
        return None
    names = " or ".join(fmt.name for fmt in known)
    raise KeyedError(owner, f"{owner}.{part} does not contain the values of {names}; other tables are not supported")


def _parts_4bit(owner: str, meta: Meta, state: _State, get: Get) -> Parts:
    shape, spec, count = meta.shape, meta.spec, math.prod(meta.shape)
    packed = get(owner).contiguous().view(torch.uint8).flatten()
    order = CODES[state.kind][1]
    ours = torch.tensor([order.index(code) for code in range(16)], dtype=torch.uint8, device="cpu")
    # per byte: one lookup for both codes
    pairs = torch.stack([ours.repeat_interleave(16), ours.repeat(16)], -1)
    codes = pairs[packed.to(torch.int32)].flatten()[:count].reshape(shape)
    absmax = get(f"{owner}.absmax")
    part_shape = blocks.counts(spec.block, shape)
    scale: Any = absmax
    if isinstance(spec.scale, QuantSpec):
        nested = get(f"{owner}.nested_absmax").reshape(blocks.counts(spec.scale.block, part_shape))
        offset = torch.full_like(nested, state.offset or 0.0)
        return Parts(
            blocks.pad(codes, spec.block),
            Parts(blocks.pad(absmax.reshape(part_shape), spec.scale.block), nested, None, offset),
        )
    if state.offset is not None:
        nested = get(f"{owner}.nested_absmax").repeat_interleave(state.nested_blocksize)[: len(absmax)]
        scale = get(f"{owner}.nested_quant_map")[absmax.to(torch.int32)] * nested + state.offset
    return Parts(blocks.pad(codes, spec.block), spread_runs(scale, state.blocksize, spec.block, shape))


def _find_8bit(name: str, dtype: torch.dtype, entries: Mapping[str, Entry], get: Get) -> Found:
    prefix = name.removesuffix("weight")
    codes = need(name, entries, (torch.int8,), owner=name)
    if len(codes.shape) != 2 or not all(codes.shape):
        raise KeyedError(name, f"is {list(codes.shape)[:8]}, expected int8 [out, in]")
    need(f"{prefix}SCB", entries, (torch.float32,), codes.shape[:1], owner=name)
    parts = [name, f"{prefix}SCB"]
    if f"{prefix}weight_format" in entries:
        need(f"{prefix}weight_format", entries, (torch.uint8,), (), owner=name)
        if int(get(f"{prefix}weight_format")):
            raise KeyedError(name, "weight_format is not 0: it is tiled for a GPU; only row-major order is supported")
        parts.append(f"{prefix}weight_format")
    meta = Meta(INT8_ROW, codes.shape, dtype)
    return Found(meta, tuple(parts), lambda get: Parts(get(name), (get(f"{prefix}SCB") / 127).unsqueeze(1)))


BITSANDBYTES = Codec("bitsandbytes", _claims, _find, "bitsandbytes 0.50", WRITING)
