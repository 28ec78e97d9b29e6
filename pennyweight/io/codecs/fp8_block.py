"""FP8 with a scale per block of 128 x 128 weights, as in DeepSeek-V3 and Qwen3 (``quant_method`` "fp8").

    weight            f8e4m3 [.., O, I]
    weight_scale_inv  f32 [.., ceil(O/128), ceil(I/128)], a multiplier despite its name; or ``scale``, or
                      ``qscale_weight``. Powers of two as f8e8m0, or their bytes u8, if ``scale_fmt`` is "ue8m0"
    activation_scale  f32, a scalar, if ``activation_scheme`` is "static"

Without ``weight_block_size`` there is one scale per tensor. Fused experts are ``<name>`` and ``<name>_scale_inv``.
"dynamic" inputs are quantized per token in groups as wide as a block, absmax / 448, as in the ActivationSpec. Without
blocks a token is one group. Source: transformers 5.23, integrations/finegrained_fp8.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.formats import E4M3
from ...core.numerics import Parts
from ...core.spec import FP8_BLOCK, MXFP8, ActivationSpec, QuantSpec
from ..file import KeyedError
from ..manifest import Meta, Stored
from .base import FLOATS, Codec, Config, Entries, Found, Get, Writing, model_dtype, need, setting

_F8 = torch.float8_e4m3fn
_SCALES = ("weight_scale_inv", "scale", "qscale_weight")  # of a layer's ``weight``
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8)
_BLOCK = (128, 128)
_MAX_BLOCK = 1 << 20
_ACT = ActivationSpec(QuantSpec(E4M3, (_BLOCK[1],)))


def claims(config: Config, entries: Entries) -> bool:
    return config.get("quant_method") == "fp8"


def find(entries: Entries, config: Config, get: Get) -> dict[str, Found]:
    block, scheme = _config(config)
    pairs, used = _pairs(entries)
    statics: dict[str, str] = {}
    for name in entries:
        layer, _, ending = name.rpartition(".")
        if ending == "activation_scale":
            weight = f"{layer}.weight" if layer else "weight"
            if weight not in pairs or scheme != "static":
                raise KeyedError(name, f"is unexpected: no FP8 weight beside it, or activation_scheme {scheme!r}")
            need(name, entries, FLOATS, (), (1,))
            statics[weight] = name
    dtype = model_dtype(entries, used | set(statics.values())) or torch.bfloat16
    return {
        name: _found(name, scale, entries, block, scheme, statics.get(name), dtype) for name, scale in pairs.items()
    }


def _config(config: Config) -> tuple[tuple[int, int] | None, str]:
    what = "quantization_config"
    scheme = setting(config, "activation_scheme", str, "dynamic", what=what).lower()
    if scheme not in ("dynamic", "static"):
        raise ValueError(f"{what}: activation_scheme {scheme[:40]!r} is not supported")
    form = setting(config, "fmt", str, "e4m3", what=what)
    if form not in ("e4m3", "float8_e4m3fn"):
        raise ValueError(f"{what}: fmt {form[:40]!r} is not supported, only e4m3")
    experts = setting(config, "expert_dtype", str, "fp8", what=what)
    if experts != "fp8":
        raise ValueError(f"{what}: expert_dtype {experts[:40]!r} is not supported")
    # missing means 128 x 128, null a per-tensor scale
    size = setting(config, "weight_block_size", list, what=what) if "weight_block_size" in config else list(_BLOCK)
    if size is None:
        return None, scheme
    if len(size) != 2 or not all(type(n) is int and 0 < n <= _MAX_BLOCK for n in size):
        raise ValueError(f"{what}: weight_block_size must be two positive sizes or null, got {str(size)[:60]}")
    return (size[0], size[1]), scheme


def _pairs(entries: Entries) -> tuple[dict[str, str], set[str]]:
    """{FP8 parameter: its scale}, and all their names. Raises KeyedError if one is missing."""
    pairs: dict[str, str] = {}
    for name, entry in entries.items():
        layer, _, ending = name.rpartition(".")
        if ending in _SCALES:
            weight = f"{layer}.weight" if layer else "weight"
            if ending == "scale" and (weight not in entries or entries[weight].dtype is not _F8):
                continue  # a parameter of another layer
        elif ending.endswith("_scale_inv"):
            weight = name.removesuffix("_scale_inv")
        elif entry.dtype is _F8:
            pairs.setdefault(name, "")
            continue
        else:
            continue
        if weight not in entries:
            raise KeyedError(name, f"is unexpected: {weight} is not stored")
        if pairs.get(weight):
            raise KeyedError(weight, f"has two scales, {pairs[weight]} and {name}")
        pairs[weight] = name
    for weight, scale in pairs.items():
        if not scale:
            raise KeyedError(weight, f"is FP8, but no scale ({', '.join(_SCALES)}) is stored beside it")
    return pairs, {*pairs, *pairs.values()}


def _found(
    name: str, scale_name: str, entries: Entries, block: tuple[int, int] | None, scheme: str,
    static: str | None, dtype: torch.dtype,
) -> Found:  # fmt: skip
    shape = need(name, entries, (_F8,)).shape
    scale = need(scale_name, entries, _SCALE_DTYPES)
    if len(shape) < 2 or 0 in shape:
        raise KeyedError(name, f"has shape {list(shape)}, expected at least [rows, columns], not empty")
    if scheme == "static" and static is None:
        raise KeyedError(name, "activation_scale is missing, which activation_scheme 'static' requires")
    if block is None:
        per = (-1, -1)  # of the last two axes: one per expert
        allowed = {(*shape[:-2], 1, 1), shape[:-2], (*shape[:-2], 1)}
        what = "weight_block_size null: one scale for each matrix"
    else:
        per, what = block, f"weight_block_size {list(block)}"
        allowed = {blocks.counts(per, shape)}
    if scale.shape not in allowed:
        raise KeyedError(
            scale_name, f"has shape {list(scale.shape)}, but {name} is {list(shape)} and {what}: expected "
            + " or ".join(str(list(s)) for s in sorted(allowed))
        )  # fmt: skip
    if len(shape) == 2 and block is None:
        spec_block: tuple[int, ...] | None = None
    else:
        spec_block = per
    inner: Any = MXFP8.scale if scale.dtype in (torch.uint8, torch.float8_e8m0fnu) else scale.dtype
    spec = QuantSpec(E4M3, spec_block, inner)
    act_block = None if static else (-1,) if block is None else (block[1],)
    act = ActivationSpec(QuantSpec(E4M3, act_block), "static" if static else "dynamic")
    meta = Meta(spec, shape, dtype, act)

    def parts(get: Get) -> Parts:
        numbers = get(scale_name).reshape(blocks.counts(spec.block, shape))
        codes = get(name)
        if blocks.padded(spec.block, shape) != shape:
            codes = blocks.pad(codes.view(torch.uint8), spec.block).view(_F8)
        return Parts(
            codes,
            Parts(numbers.contiguous().view(torch.uint8)) if isinstance(spec.scale, QuantSpec) else numbers,
            act_scale=get(static).float().reshape(1) if static else None,
        )

    return Found(meta, (name, scale_name, *((static,) if static else ())), parts)


# -- writing ---------------------------------------------------------------------------------------------------------


def refuses(name: str, meta: Meta) -> str | None:
    spec, shape = meta.spec, meta.stored_shape
    if len(shape) not in (2, 3) or 0 in shape or meta.axes is not None:
        return "fp8 supports only non-empty matrices [.., out, in] that are not transposed"
    if len(shape) == 2 and name.rpartition(".")[2] != "weight":
        return "fp8 supports only layer parameters named weight, and fused experts"
    if spec != FP8_BLOCK:
        return f"fp8 supports only e4m3 in blocks of 128 x 128 with float32 scales, not {spec}"
    if meta.act is not None and (meta.act.spec, meta.act.mode) != (_ACT.spec, _ACT.mode):
        return f"fp8 supports only dynamic e4m3 inputs in groups of {_BLOCK[1]}, not {meta.act}"
    return None


def nearest(name: str, meta: Meta) -> QuantSpec | None:
    """FP8 blocks for any 8-bit float, or if only the activation is rejected. Other formats become float."""
    if not (meta.spec.format.kind == "float" and meta.spec.format.bits == 8):
        return None
    return FP8_BLOCK if refuses(name, Meta(FP8_BLOCK, meta.shape, meta.dtype, None, meta.axes)) is None else None


def _scale_name(name: str) -> str:
    return f"{name}_scale_inv"


def stored(name: str, meta: Meta) -> Stored:
    return {name: (_F8, meta.shape), _scale_name(name): (torch.float32, blocks.counts(_BLOCK, meta.shape))}


def pack(name: str, parts: Parts, meta: Meta) -> dict[str, Tensor]:
    codes = parts.codes[..., : meta.shape[-2], : meta.shape[-1]].contiguous()
    return {name: codes, _scale_name(name): parts.scale}


def method(tensors: Mapping[str, Meta], plain: tuple[str, ...]) -> dict[str, Any]:
    """The config. The format implies quantized inputs: runtimes that support them will quantize them."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(_BLOCK),
        "modules_to_not_convert": [name.removesuffix(".weight") for name in plain],
    }


FP8 = Codec("fp8", claims, find, "transformers 5.23, Fp8Dequantize", Writing(refuses, nearest, stored, pack, method))
