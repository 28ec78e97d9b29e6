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

import json
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core import blocks
from ...core.formats import DYNAMIC8, DYNAMIC8_FLOAT32, FP4_TWELFTHS, INT8, NF4, Format
from ...core.numerics import Parts
from ...core.spec import DTYPES, INT8_ROW, QuantSpec, check_keys, dtype_name
from ..file import KeyedError
from ..manifest import Meta, Stored
from ..safetensors_file import MAX_AXES, size_of
from ..strict_json import parse
from ..validate import nested_value
from . import base
from .base import FLOATS, Codec, Config, Entries, Found, Get, Writing

MARK = ".quant_state.bitsandbytes__"
# Our format and bitsandbytes' code for each of our codes, by name.
CODES = {"nf4": (NF4, tuple(range(16))), "fp4": (FP4_TWELFTHS, (11, 10, 13, 12, 15, 14, 9, 8, 0, 1, 6, 7, 4, 5, 2, 3))}
MAPS = (DYNAMIC8_FLOAT32, DYNAMIC8)
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED = 256
_KINDS = {fmt: kind for kind, (fmt, _) in CODES.items()}
_MAX_OFFSET = 24  # characters of a float32 written as a double
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


def _claims(config: Config, entries: Entries) -> bool:
    method = config.get("quant_method")
    if method is None:
        return any(MARK in name for name in entries) or any(name.endswith(".SCB") for name in entries)
    return bool(method == "bitsandbytes")


def _find(entries: Entries, config: Config, get: Get) -> dict[str, Found]:
    found: dict[str, Found] = {}
    marks = [name.split(MARK, 1) for name in entries if MARK in name]
    kinds = dict(marks)
    if len(kinds) != len(marks):
        twice = next(owner for owner, kind in marks if kinds[owner] != kind)
        raise KeyedError(twice, "has two quant_states")
    for owner, kind in kinds.items():
        found[owner] = _find_4bit(owner, kind, entries, get)
        _agrees(config, owner, "4-bit", load_in_4bit=True, load_in_8bit=False)
        _agrees(config, owner, kind, bnb_4bit_quant_type=kind)
    rows = [name.removesuffix("SCB") + "weight" for name in entries if name.endswith(".SCB")]
    sides = [weight.removesuffix("weight") + "SCB" for weight in rows]
    dtype = base.model_dtype(entries, sides) or torch.float16
    for name in rows:
        found[name] = _find_8bit(name, dtype, entries, get)
        _agrees(config, name, "8-bit", load_in_8bit=True, load_in_4bit=False)
    owned = {part for f in found.values() for part in f.stored}
    base.no_left_overs(entries, owned, _ENDS, "quantized weight")
    for name, entry in entries.items():
        if name.endswith(".weight") and entry.dtype in (torch.uint8, torch.int8) and name not in owned:
            raise KeyedError(name, f"is {str(entry.dtype).removeprefix('torch.')} with neither quant_state nor SCB")
    return found


def _agrees(config: Config, name: str, stored_as: str, **wanted: Any) -> None:
    for key, want in wanted.items():
        if base.setting(config, key, type(want), want) != want:
            raise KeyedError(name, f"is stored as {stored_as}, but quantization_config.{key} is {config[key]!r}")


def _find_4bit(owner: str, kind: str, entries: Entries, get: Get) -> Found:
    nested = f"{owner}.nested_absmax" in entries or f"{owner}.nested_quant_map" in entries
    state = _read_state(owner, kind, nested, entries, get)
    shape, count = state.shape, math.prod(state.shape)
    codes = base.need(owner, entries, _STORAGE, owner=owner)
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
    base.need(sides[2], entries, (torch.uint8 if nested else torch.float32,), (n_blocks,), owner=owner)
    if nested:
        sides += [f"{owner}.nested_absmax", f"{owner}.nested_quant_map"]
        base.need(sides[3], entries, (torch.float32,), (-(-n_blocks // state.nested_blocksize),), owner=owner)
        table = _read_map(owner, "nested_quant_map", 256, entries, get, dict.fromkeys(MAPS, range(256)))
        state = state._replace(map=table)
    block, on_grid = base.run_block(shape, state.blocksize)
    scale: QuantSpec | torch.dtype = torch.float32
    if state.map is not None and on_grid:
        inner, fits = base.run_block(blocks.counts(block, shape), state.nested_blocksize)
        scale = QuantSpec(state.map, inner, offset=torch.float32) if fits else scale
    meta = Meta(QuantSpec(fmt, block, scale), shape, state.dtype)
    return Found(meta, (owner, *sides), partial(_parts_4bit, owner, meta, state))


def _read_state(owner: str, kind: str, nested: bool, entries: Entries, get: Get) -> _State:
    """The JSON text beside the codes, with every field checked."""
    if kind not in CODES:
        raise KeyedError(owner, f"quant_type {kind[:40]!r}; known: {', '.join(CODES)}")
    name = f"{owner}{MARK}{kind}"
    text = base.stored_text(name, entries, get, _MAX_STATE, owner)
    try:
        raw = parse(text, max_bytes=_MAX_STATE, max_depth=2, floats=True)
        fields = {"quant_type", "blocksize", "dtype", "shape"}
        fields |= {"nested_blocksize", "nested_dtype", "nested_offset"} if nested else set()
        check_keys("quant_state", raw, fields, set())
        shape, dtype = raw["shape"], raw["dtype"]
        if raw["quant_type"] != kind:
            raise ValueError(f"quant_type {str(raw['quant_type'])[:40]!r} does not match {kind} in its name")
        if not isinstance(dtype, str) or DTYPES.get(dtype) not in FLOATS:
            raise ValueError(f"dtype {str(dtype)[:40]!r}; known: float32, float16, bfloat16")
        if not isinstance(shape, list) or not 1 <= len(shape) <= MAX_AXES:
            raise ValueError(f"shape must be a list of 1 to {MAX_AXES} sizes")
        if not all(type(n) is int and n > 0 for n in shape):
            raise ValueError(f"shape must contain positive integers, got {str(shape)[:80]}")
        size_of(torch.float32, tuple(shape))
        for key in ("blocksize", "nested_blocksize")[: 1 + nested]:
            if type(raw[key]) is not int or raw[key] not in BLOCKSIZES:
                raise ValueError(f"{key} {repr(raw[key])[:40]}; known: {', '.join(map(str, BLOCKSIZES))}")
        if not nested:
            return _State(kind, tuple(shape), DTYPES[dtype], raw["blocksize"], None)
        if raw["nested_dtype"] != "float32":
            raise ValueError(f"nested_dtype {str(raw['nested_dtype'])[:40]!r}; only float32 is supported")
        offset = raw["nested_offset"]
        if type(offset) not in (int, float) or abs(offset) > torch.finfo(torch.float32).max:
            raise ValueError(f"nested_offset must be a number in the range of float32, got {str(offset)[:40]!r}")
        return _State(kind, tuple(shape), DTYPES[dtype], raw["blocksize"], float(offset), raw["nested_blocksize"])
    except ValueError as e:
        raise KeyedError(owner, f"{name}: {e}") from e


def _read_map(
    owner: str, part: str, count: int, entries: Entries, get: Get, known: Mapping[Format, Any]
) -> Format | None:
    """The format whose values a stored table contains, in the order of the given codes.

    None for a table that differs by a few units in the last place. Raises KeyedError for any other.
    """
    base.need(f"{owner}.{part}", entries, (torch.float32,), (count,), owner=owner)
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
    absmax, part_shape = get(f"{owner}.absmax"), blocks.counts(spec.block, shape)
    if isinstance(spec.scale, QuantSpec):
        nested = get(f"{owner}.nested_absmax").reshape(blocks.counts(spec.scale.block, part_shape))
        offset = torch.full_like(nested, state.offset or 0.0)
        inner = Parts(blocks.pad(absmax.reshape(part_shape), spec.scale.block), nested, None, offset)
        return Parts(blocks.pad(codes, spec.block), inner)
    scale = absmax
    if state.offset is not None:
        nested = get(f"{owner}.nested_absmax").repeat_interleave(state.nested_blocksize)[: len(absmax)]
        scale = get(f"{owner}.nested_quant_map")[absmax.to(torch.int32)] * nested + state.offset
    return Parts(blocks.pad(codes, spec.block), base.spread_runs(scale, state.blocksize, spec.block, shape))


def _find_8bit(name: str, dtype: torch.dtype, entries: Entries, get: Get) -> Found:
    prefix = name.removesuffix("weight")
    codes = base.need(name, entries, (torch.int8,), owner=name)
    if len(codes.shape) != 2 or not all(codes.shape):
        raise KeyedError(name, f"is {list(codes.shape)[:8]}, expected int8 [out, in]")
    base.need(f"{prefix}SCB", entries, (torch.float32,), codes.shape[:1], owner=name)
    parts = [name, f"{prefix}SCB"]
    if f"{prefix}weight_format" in entries:
        base.need(f"{prefix}weight_format", entries, (torch.uint8,), (), owner=name)
        if int(get(f"{prefix}weight_format")):
            raise KeyedError(name, "weight_format is not 0: it is tiled for a GPU; only row-major order is supported")
        parts.append(f"{prefix}weight_format")
    meta = Meta(INT8_ROW, codes.shape, dtype)
    return Found(meta, tuple(parts), lambda get: Parts(get(name), (get(f"{prefix}SCB") / 127).unsqueeze(1)))


# -- writing -----------------------------------------------------------------------------------------------------------


def _blocksize(meta: Meta) -> int:
    """Elements per bitsandbytes block for one of our tensors. Raises ValueError if no blocksize fits."""
    shape, ours = meta.shape, blocks.resolve(meta.spec.block, meta.shape)
    for on_grid, sizes in ((True, (64, *BLOCKSIZES)), (False, (64,))):
        for size in sizes:
            grid, fits = base.run_block(shape, size)
            if fits is on_grid and blocks.resolve(grid, shape) == ours:
                return size
    raise ValueError(f"blocks {meta.spec.block} of {list(shape)} are not runs of a supported power of two of elements")


def _n_blocks(meta: Meta) -> int:
    return -(-math.prod(meta.shape) // _blocksize(meta))


def _keeps_nested(meta: Meta) -> bool:
    """Whether the scale is nested as in bitsandbytes; other nested scales are written as float32."""
    kind, shape = meta.spec.scale, blocks.counts(meta.spec.block, meta.shape)
    if not isinstance(kind, QuantSpec) or kind.format not in MAPS or math.prod(shape) != _n_blocks(meta):
        return False
    inner, fits = base.run_block(shape, NESTED)
    same_block = blocks.resolve(kind.block, shape) == blocks.resolve(inner, shape)
    return fits and same_block and kind == QuantSpec(kind.format, kind.block, offset=torch.float32)


def _refuses(name: str, meta: Meta) -> str | None:
    spec = meta.spec
    if meta.act is not None:
        return "its activation is quantized, which bitsandbytes does not store"
    if len(meta.shape) != 2 or meta.axes is not None or not all(meta.shape):
        return "bitsandbytes supports only weights of linear layers, stored as [out, in]"
    if meta.dtype not in FLOATS or spec.scale in (None, torch.float64):
        return "bitsandbytes supports only float32, float16 and bfloat16 tensors with float32 scales"
    if spec.zero_point or spec.offset is not None or spec.mid:
        return "bitsandbytes does not support zero points or offsets"
    if meta.spec.format is INT8:
        if blocks.resolve(spec.block, meta.shape) != (1, meta.shape[1]):
            return "bitsandbytes int8 needs one scale per row"
        return None if name.endswith(".weight") else 'bitsandbytes supports int8 only under names that end in ".weight"'
    if spec.format not in _KINDS:
        return f"{spec.format} is not supported by bitsandbytes; supported: {', '.join(f.name for f in _KINDS)}, int8"
    try:
        _blocksize(meta)
    except ValueError as e:
        return str(e)
    return None


def _nearest(name: str, meta: Meta) -> QuantSpec | None:
    if len(meta.shape) != 2 or meta.axes is not None or not all(meta.shape) or meta.dtype not in FLOATS:
        return None
    if meta.spec.format.bits > 4 and name.endswith(".weight"):
        return INT8_ROW
    block, fits = base.run_block(meta.shape, 64)
    return QuantSpec(NF4, block) if fits else None


def _stored(name: str, meta: Meta) -> Stored:
    if meta.spec.format is INT8:
        prefix = name.removesuffix("weight")
        return {
            name: (torch.int8, meta.shape),
            f"{prefix}SCB": (torch.float32, meta.shape[:1]),
            f"{prefix}weight_format": (torch.uint8, ()),
        }
    n_blocks, nested = _n_blocks(meta), _keeps_nested(meta)
    out: Stored = {
        name: (torch.uint8, (-(-math.prod(meta.shape) // 2), 1)),
        f"{name}.absmax": (torch.uint8 if nested else torch.float32, (n_blocks,)),
        f"{name}.quant_map": (torch.float32, (16,)),
        f"{name}{MARK}{_KINDS[meta.spec.format]}": (torch.uint8, (len(_state_text(meta, 0.0 if nested else None)),)),
    }
    if nested:
        out[f"{name}.nested_absmax"] = (torch.float32, (-(-n_blocks // NESTED),))
        out[f"{name}.nested_quant_map"] = (torch.float32, (256,))
    return out


def _state_text(meta: Meta, offset: float | None) -> bytes:
    """The JSON text, formatted as in bitsandbytes. With an offset it is padded with spaces to a fixed length."""
    data: dict[str, Any] = {"quant_type": _KINDS[meta.spec.format], "blocksize": _blocksize(meta)}
    data |= {"dtype": dtype_name(meta.dtype), "shape": list(meta.shape)}
    if offset is None:
        return json.dumps(data).encode()
    data |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": offset}
    return (json.dumps(data) + " " * (_MAX_OFFSET - len(json.dumps(offset)))).encode()


def _pack(name: str, parts: Parts, meta: Meta) -> dict[str, Tensor]:
    shape, spec = meta.shape, meta.spec
    part_shape = blocks.counts(spec.block, shape)
    if meta.spec.format is INT8:
        prefix = name.removesuffix("weight")
        scale = nested_value(parts.scale, spec.scale, part_shape)
        return {
            name: parts.codes.contiguous(),
            f"{prefix}SCB": _row_maximum(scale.float().flatten()),
            f"{prefix}weight_format": torch.zeros((), dtype=torch.uint8, device="cpu"),
        }
    size, kind = _blocksize(meta), _KINDS[spec.format]
    order = torch.tensor(CODES[kind][1], dtype=torch.uint8, device="cpu")
    codes = order[parts.codes[: shape[0], : shape[1]].to(torch.int32)].flatten()
    if len(codes) % 2:  # the last byte is padded with the code of zero
        codes = torch.cat([codes, codes.new_tensor([7 if kind == "nf4" else 0])])
    out = {
        name: (codes[0::2] << 4 | codes[1::2]).unsqueeze(1),
        f"{name}.quant_map": torch.tensor(spec.format.values, dtype=torch.float32, device="cpu")[order.argsort()],
    }
    offset = None
    if isinstance(spec.scale, QuantSpec) and _keeps_nested(meta):
        inner = parts.scale
        offset = float(inner.offset.flatten()[0])
        if bool((inner.offset != offset).any()):
            raise ValueError(f"{name}: its nested blocks have separate offsets, bitsandbytes has only one: requantize")
        out |= {
            f"{name}.absmax": inner.codes[: part_shape[0], : part_shape[1]].flatten().contiguous(),
            f"{name}.nested_absmax": inner.scale.flatten().contiguous(),
            f"{name}.nested_quant_map": torch.tensor(spec.scale.format.values, dtype=torch.float32, device="cpu"),
        }
    else:
        scale = nested_value(parts.scale, spec.scale, part_shape).float().flatten()
        # one scale for each run of ``size`` elements, from blocks that contain copies of it
        each = 1 if len(scale) == _n_blocks(meta) else size // blocks.resolve(spec.block, shape)[-1]
        first = out[f"{name}.absmax"] = scale[::each].contiguous()
        if not torch.equal(first.repeat_interleave(each)[: len(scale)], scale):
            raise ValueError(f"{name}: scales differ within a bitsandbytes block of {size} elements: requantize")
    out[f"{name}{MARK}{kind}"] = torch.tensor(list(_state_text(meta, offset)), dtype=torch.uint8, device="cpu")
    return out


def _row_maximum(scale: Tensor) -> Tensor:
    """A float32 SCB with SCB / 127 == scale, the even one if there are two; the nearest if there is none.

    scale: float32 [out]. Where the quotient's binade has half as many numbers as SCB's (mantissas from 127 / 64), two
    SCB values give the same scale. A maximum that was float16 or bfloat16 is even and is recovered.
    """
    guess = scale * 127
    if not bool(guess.isfinite().all()):
        raise ValueError(f"a scale of {float(scale.abs().amax()):g} is beyond bitsandbytes' int8 limit, float32 / 127")
    near = guess.view(torch.int32).unsqueeze(1) + torch.tensor([0, -1, 1], dtype=torch.int32, device="cpu")
    right = near.view(torch.float32) / 127 == scale.unsqueeze(1)
    score = right * (4 + 2 * (near % 2 == 0)) * 2 + torch.tensor([1, 0, 0], device="cpu")
    return near.gather(1, score.argmax(1, keepdim=True)).view(torch.float32).squeeze(1).contiguous()


def _method(metas: Mapping[str, Meta], plain: tuple[str, ...]) -> dict[str, Any]:
    kinds = {"int8" if m.spec.format is INT8 else _KINDS[m.spec.format]: name for name, m in metas.items()}
    if len(kinds) > 1:
        raise ValueError(f"a bitsandbytes model must have one kind of quantized weights, got several: {kinds}")
    dtypes, eight = {meta.dtype for meta in metas.values()}, "int8" in kinds
    nested = any(m.spec.format is not INT8 and _keeps_nested(m) for m in metas.values())
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": not eight,
        "load_in_8bit": eight,
        "bnb_4bit_quant_type": "fp4" if eight else next(iter(kinds), "fp4"),
        "bnb_4bit_use_double_quant": nested,
        "bnb_4bit_compute_dtype": dtype_name(next(iter(dtypes))) if len(dtypes) == 1 else "float32",
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": [name.removesuffix(".weight") for name in plain],
        "llm_int8_threshold": 6.0,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_enable_fp32_cpu_offload": False,
    }


BITSANDBYTES = Codec(
    "bitsandbytes", _claims, _find, "bitsandbytes 0.50", Writing(_refuses, _nearest, _stored, _pack, _method)
)
