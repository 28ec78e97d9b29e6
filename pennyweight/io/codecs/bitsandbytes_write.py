"""bitsandbytes: the writer, and tables shared with the reader bitsandbytes.py."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.formats import DYNAMIC8, DYNAMIC8_FLOAT32, FP4_TWELFTHS, INT8, NF4
from ...core.numerics import Parts
from ...core.spec import INT8_ROW, QuantSpec, dtype_name
from ..manifest import Meta, Stored
from ..validate import nested_value
from .base import Writing
from .flat_blocks import run_block
from .schema import FLOATS

MARK = ".quant_state.bitsandbytes__"
# Our format and bitsandbytes' code for each of our codes, by name.
CODES = {"nf4": (NF4, tuple(range(16))), "fp4": (FP4_TWELFTHS, (11, 10, 13, 12, 15, 14, 9, 8, 0, 1, 6, 7, 4, 5, 2, 3))}
MAPS = (DYNAMIC8_FLOAT32, DYNAMIC8)
BLOCKSIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED = 256
_KINDS = {fmt: kind for kind, (fmt, _) in CODES.items()}
_MAX_OFFSET = 24  # characters of a float32 written as a double


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


WRITING = Writing(_refuses, _nearest, _stored, _pack, _method)
