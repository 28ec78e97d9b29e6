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
from ..safetensors_file import MAX_AXES, Entry, size_of
from ..strict_json import parse
from ..validate import nested_value
from .base import FLOATS, Codec, Found, Get, Writing, model_dtype, need, no_left_overs, run_block, setting, spread_runs

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


# -- writing -----------------------------------------------------------------------------------------------------------


def _flat(meta: Meta) -> int | None:
    """Elements per bitsandbytes block for one of our tensors, None if no blocksize fits."""
    shape, ours = meta.shape, blocks.resolve(meta.spec.block, meta.shape)
    for on_grid, sizes in ((True, (64, *BLOCKSIZES)), (False, (64,))):
        for size in sizes:
            grid, fits = run_block(shape, size)
            if fits is on_grid and blocks.resolve(grid, shape) == ours:
                return size
    return None


def _is_8bit(meta: Meta) -> bool:
    return meta.spec.format is INT8


def _keeps_nested(meta: Meta, size: int) -> bool:
    """Whether the scale is nested as in bitsandbytes; other nested scales are written as float32."""
    kind = meta.spec.scale
    shape = blocks.counts(meta.spec.block, meta.shape)
    if not isinstance(kind, QuantSpec) or kind.format not in MAPS or math.prod(shape) != _n_blocks(meta, size):
        return False
    inner, fits = run_block(shape, NESTED)
    return fits and kind == QuantSpec(kind.format, kind.block, offset=torch.float32) and (
        blocks.resolve(kind.block, shape) == blocks.resolve(inner, shape)
    )  # fmt: skip


def _n_blocks(meta: Meta, size: int) -> int:
    return -(-math.prod(meta.shape) // size)


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
    if _is_8bit(meta):
        if blocks.resolve(spec.block, meta.shape) != (1, meta.shape[1]):
            return "bitsandbytes int8 needs one scale per row"
        return None if name.endswith(".weight") else 'bitsandbytes supports int8 only under names that end in ".weight"'
    if spec.format not in _KINDS:
        return f"{spec.format} is not supported by bitsandbytes; supported: {', '.join(f.name for f in _KINDS)}, int8"
    if _flat(meta) is None:
        return f"blocks {spec.block} of {list(meta.shape)} are not runs of a supported power of two of elements"
    return None


def _nearest(name: str, meta: Meta) -> QuantSpec | None:
    if len(meta.shape) != 2 or meta.axes is not None or not all(meta.shape) or meta.dtype not in FLOATS:
        return None
    if meta.spec.format.bits > 4 and name.endswith(".weight"):
        return INT8_ROW
    return QuantSpec(NF4, run_block(meta.shape, 64)[0]) if run_block(meta.shape, 64)[1] else None


def _stored(name: str, meta: Meta) -> Stored:
    if _is_8bit(meta):
        prefix = name.removesuffix("weight")
        return {
            name: (torch.int8, meta.shape),
            f"{prefix}SCB": (torch.float32, meta.shape[:1]),
            f"{prefix}weight_format": (torch.uint8, ()),
        }
    size = _blocksize(meta)
    n_blocks = _n_blocks(meta, size)
    nested = _keeps_nested(meta, size)
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


def _blocksize(meta: Meta) -> int:
    size = _flat(meta)
    if size is None:
        raise ValueError(f"blocks {meta.spec.block} of {list(meta.shape)} are not supported by bitsandbytes")
    return size


def _state_text(meta: Meta, offset: float | None) -> bytes:
    """The JSON text, formatted as in bitsandbytes. With an offset it is padded with spaces to a fixed length."""
    data: dict[str, Any] = {
        "quant_type": _KINDS[meta.spec.format], "blocksize": _blocksize(meta), "dtype": dtype_name(meta.dtype),
        "shape": list(meta.shape),
    }  # fmt: skip
    if offset is None:
        return json.dumps(data).encode()
    data |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": offset}
    return (json.dumps(data) + " " * (_MAX_OFFSET - len(json.dumps(offset)))).encode()


def _pack(name: str, parts: Parts, meta: Meta) -> dict[str, Tensor]:
    shape, spec = meta.shape, meta.spec
    part_shape = blocks.counts(spec.block, shape)
    if _is_8bit(meta):
        prefix = name.removesuffix("weight")
        scale = nested_value(parts.scale, spec.scale, part_shape)
        zero = torch.zeros((), dtype=torch.uint8, device="cpu")
        tensors = {name: parts.codes.contiguous(), f"{prefix}SCB": _row_maximum(scale.float().flatten())}
        return tensors | {f"{prefix}weight_format": zero}
    size = _blocksize(meta)
    kind = _KINDS[spec.format]
    theirs = torch.tensor(CODES[kind][1], dtype=torch.uint8, device="cpu")
    codes = theirs[parts.codes[: shape[0], : shape[1]].to(torch.int32)].flatten()
    if len(codes) % 2:  # the last byte is padded with the code of zero
        codes = torch.cat([codes, codes.new_tensor([7 if kind == "nf4" else 0])])
    out = {
        name: (codes[0::2] << 4 | codes[1::2]).unsqueeze(1),
        f"{name}.quant_map": torch.tensor(spec.format.values, dtype=torch.float32, device="cpu")[theirs.argsort()],
    }
    offset = None
    if isinstance(spec.scale, QuantSpec) and _keeps_nested(meta, size):
        inner = parts.scale
        offset = float(inner.offset.flatten()[0])
        if bool((inner.offset != offset).any()):
            raise ValueError(f"{name}: its nested blocks have separate offsets, bitsandbytes has only one: requantize")
        padded = inner.codes
        for axis, n in enumerate(part_shape):
            padded = padded.narrow(axis, 0, n)
        out |= {
            f"{name}.absmax": padded.flatten().contiguous(),
            f"{name}.nested_absmax": inner.scale.flatten().contiguous(),
            f"{name}.nested_quant_map": torch.tensor(spec.scale.format.values, dtype=torch.float32, device="cpu"),
        }
    else:
        scale = nested_value(parts.scale, spec.scale, part_shape).float().flatten()
        out[f"{name}.absmax"] = _merged(name, scale, _n_blocks(meta, size), size, blocks.resolve(spec.block, shape)[-1])
    out[f"{name}{MARK}{kind}"] = torch.tensor(list(_state_text(meta, offset)), dtype=torch.uint8, device="cpu")
    return out


def _merged(name: str, scale: Tensor, n_blocks: int, size: int, ours: int) -> Tensor:
    """One scale for each run of ``size`` elements, from blocks of ``ours`` that contain copies of it."""
    if len(scale) == n_blocks:
        return scale.contiguous()
    each = size // ours
    first = scale[::each].contiguous()
    if not torch.equal(first.repeat_interleave(each)[: len(scale)], scale):
        raise ValueError(f"{name}: scales differ within a bitsandbytes block of {size} elements: requantize")
    return first


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
    kinds = {"int8" if _is_8bit(m) else _KINDS[m.spec.format]: name for name, m in metas.items()}
    if len(kinds) > 1:
        raise ValueError(f"a bitsandbytes model must have one kind of quantized weights, got several: {kinds}")
    dtypes = {meta.dtype for meta in metas.values()}
    nested = any(not _is_8bit(m) and _keeps_nested(m, _blocksize(m)) for m in metas.values())
    eight = "int8" in kinds
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
