"""compressed-tensors, the format of llm-compressor and vLLM: writer, the inverse of compressed_tensors.py.

Integer formats are converted to signed ones of the same width: q = u - 2**(b-1), also for zero points; a ``mid`` at
the middle becomes a symmetric scheme, any other ``mid`` a constant zero point. All conversions are exact with one
exception: NVFP4 files divide scales by a float32 number while ours are multiplied by one, so the stored global scale is
the reciprocal of ours, rounded. A tensor read from such a file is written back bit for bit; for one quantized here,
group scales may differ in the last bit of a float32.

The rule and eps of an activation are not stored: the runtime uses its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.formats import E2M1, E4M3, E8M0, get_format
from ...core.numerics import Parts
from ...core.packing import pack_bits
from ...core.spec import MXFP4, ActivationSpec, QuantSpec
from ..manifest import Meta, Stored
from .base import FLOATS, Writing, dense_words, pack_words
from .compressed_tensors_config import E8M0_SCALE, FLOAT_OF_BITS, KINDS, MX


@dataclass(frozen=True)
class _How:
    """How a tensor is written. zero: None, "parts", or the constant zero point (signed)."""

    kind: str
    form: str
    bits: int
    strategy: str
    size: Any  # group_size, or block_structure
    act: tuple[tuple[str, Any], ...] | None
    zero: int | str | None = None

    def weights(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "num_bits": self.bits, "type": "int" if self.kind in ("packed", "int") else "float",
            "symmetric": self.zero is None, "strategy": self.strategy, "dynamic": False,
            "group_size": self.size if self.strategy in ("group", "tensor_group") else None,
        }  # fmt: skip
        if self.strategy == "block":
            out["block_structure"] = list(self.size)
        if self.kind.startswith("mx"):
            out["scale_dtype"] = "torch.uint8"
        if self.kind == "nvfp4":
            out["scale_dtype"] = "torch.float8_e4m3fn"
        return out


def _how(name: str, meta: Meta) -> _How | str:
    """How a tensor is written, or why it cannot be."""
    spec, shape = meta.spec, meta.stored_shape
    if name.rpartition(".")[2] != "weight":
        return "compressed-tensors supports only layer parameters named weight"
    if len(shape) != 2 or 0 in shape or meta.axes is not None:
        return "compressed-tensors supports only non-empty matrices [out, in] that are not transposed"
    act = None if meta.act is None else _act_args(meta.act)
    if isinstance(act, str):
        return act
    strategy, size = _strategy(spec, shape)
    if strategy == "group" and shape[1] % size:
        return f"groups of {size} do not divide {shape[1]} columns"
    inputs = {} if act is None else dict(act)
    group = inputs["group_size"] if inputs.get("type") == "int" else None  # files of float8 blocks may have a short one
    if group is not None and group < shape[1] and shape[1] % group:
        return f"groups of {group} input columns do not divide {shape[1]} columns"
    f = spec.format
    if spec.offset is not None:
        return "compressed-tensors does not support offsets in value units"
    if f.kind == "int":
        return _how_int(spec, strategy, size, act)
    if isinstance(spec.scale, QuantSpec):
        return _how_nested(spec, strategy, size, act)
    if f is not E4M3:
        return f"compressed-tensors does not support {f} with plain scales"
    if spec.scale not in FLOATS:
        return f"compressed-tensors needs scales in float32, bfloat16 or float16, not {spec.scale}"
    return _How("float", "naive-quantized" if act is None else "float-quantized", 8, strategy, size, act)


def _strategy(spec: QuantSpec, shape: tuple[int, ...]) -> tuple[str, Any]:
    if spec.block is None:
        return "tensor", None
    rows, columns = blocks.resolve(spec.block, shape)
    if len(spec.block) == 2:
        return "block", tuple(b if b > 0 else n for b, n in zip(spec.block, (rows, columns), strict=True))
    return ("channel", None) if columns == shape[1] and spec.block == (-1,) else ("group", columns)


def _how_int(spec: QuantSpec, strategy: str, size: Any, act: Any) -> _How | str:
    f, bits = spec.format, spec.format.bits
    if bits == 1:
        return "compressed-tensors supports only integers of 2 to 8 bits"
    if spec.scale not in FLOATS:
        return "compressed-tensors needs integers with plain scales in float32, bfloat16 or float16"
    # int8 bytes if inputs are integers too; otherwise runtimes expect packed weights
    kind = "int" if act is not None and dict(act)["type"] == "int" else "packed"
    if strategy == "block":
        return "compressed-tensors supports blocks of several rows only for e4m3"
    if spec.zero_point and spec.zero_point_format.bits > bits:
        return "compressed-tensors needs zero points within the range of the codes"
    middle = 0 if f.signed else 1 << (bits - 1)
    zero: int | str | None = "parts" if spec.zero_point else spec.mid - middle or None
    return _How(kind, KINDS[kind].forms[0], bits, strategy, size, act, zero)


def _how_nested(spec: QuantSpec, strategy: str, size: Any, act: Any) -> _How | str:
    scale = spec.scale
    assert isinstance(scale, QuantSpec)
    if scale.format is E8M0 and scale.scale is None and spec.format in MX:
        kind, group = MX[spec.format], 32
        if (strategy, size) != ("group", group):
            return f"compressed-tensors supports {spec.format} with e8m0 scales only in groups of {group}"
        return _How(kind, KINDS[kind].forms[0], spec.format.bits, "group", group, act)
    above = scale.block is None and scale.offset is None and scale.scale in (torch.float32, torch.float64)
    if spec.format is E2M1 and scale.format is E4M3 and above:
        if (strategy, size) != ("group", 16):
            return "compressed-tensors supports NVFP4 only in groups of 16"
        if act is not None and dict(act)["strategy"] == "tensor_group":
            return "compressed-tensors needs a calibrated input_global_scale for NVFP4 inputs"
        return _How("nvfp4", KINDS["nvfp4"].forms[0], 4, "tensor_group", 16, act)
    return f"compressed-tensors does not support {spec.format} with quantized scales ({scale})"


def _act_args(act: ActivationSpec) -> tuple[tuple[str, Any], ...] | str:
    """Fields of input_activations, or why they cannot be written."""
    spec, f = act.spec, act.spec.format
    middle = 0 if f.signed else 1 << (f.bits - 1)
    integer = f.kind == "int" and f.bits > 1
    dynamic, group = act.mode == "dynamic", None
    scale_dtype = None
    refused = f"compressed-tensors does not support activations {act}"
    if spec.offset is not None or not (integer or f in FLOAT_OF_BITS.values()):
        return refused
    if integer and not spec.zero_point and spec.mid != middle:
        return refused
    if spec.block is None:
        strategy = "tensor"
    elif len(spec.block) == 1 and dynamic:
        strategy, group = ("token", None) if spec.block == (-1,) else ("group", spec.block[0])
    else:
        return refused
    if spec.scale == E8M0_SCALE and f in MX and group == 32:
        scale_dtype = "torch.uint8"
    elif isinstance(spec.scale, QuantSpec) and (f, group, spec.scale.format) == (E2M1, 16, E4M3):
        strategy = "tensor_group"
    elif spec.scale not in FLOATS or (f.kind == "float" and f is not E4M3):
        return refused
    args = {
        "num_bits": f.bits, "type": "int" if integer else "float", "symmetric": not spec.zero_point,
        "strategy": strategy, "dynamic": dynamic, "group_size": group, "scale_dtype": scale_dtype,
    }  # fmt: skip
    return tuple(args.items())


def refuses(name: str, meta: Meta) -> str | None:
    how = _how(name, meta)
    return how if isinstance(how, str) else None


def nearest(name: str, meta: Meta) -> QuantSpec | None:
    """The spec itself if only its activation is rejected. Integers keep their width, with a zero point in place of an
    offset; 8-bit floats become e4m3 per row, e2m1 becomes MXFP4. Table formats become float."""
    spec, shape = meta.spec, meta.stored_shape
    weightless = Meta(spec, meta.shape, meta.dtype, None, meta.axes)
    if refuses(name, weightless) is None:
        return spec
    scale = spec.scale if spec.scale in FLOATS else meta.dtype if meta.dtype in FLOATS else torch.float32
    new: QuantSpec | None = None
    if len(shape) == 2 and spec.format.kind == "int":
        signed = get_format(f"int{max(2, spec.format.bits)}")
        strategy, size = _strategy(spec, shape)
        if strategy == "block" or (strategy == "group" and shape[1] % size):
            size = next((g for g in (128, 64, 32) if g <= shape[1] and shape[1] % g == 0), -1)
        block = None if strategy == "tensor" else (-1,) if strategy == "channel" else (size,)
        moved = bool(spec.zero_point) or spec.offset is not None or spec.mid != 0
        new = QuantSpec(signed, block, scale, zero_point=signed if moved else False)
    elif len(shape) == 2 and spec.format is E2M1 and shape[1] % 32 == 0:
        new = MXFP4
    elif len(shape) == 2 and spec.format.kind == "float" and spec.format.bits == 8:
        new = QuantSpec(E4M3, (-1,), scale)
    fits = new is not None and refuses(name, Meta(new, meta.shape, meta.dtype, None, meta.axes)) is None
    return new if fits else None


def stored(name: str, meta: Meta) -> Stored:
    how, layer = _written(name, meta), name.removesuffix("weight")
    rows, columns = meta.shape
    part_shape = blocks.counts(meta.spec.block, meta.shape)
    scale: Any = meta.spec.scale
    scale_shape = (1,) if how.strategy == "tensor" else part_shape
    out: Stored = {}
    if how.kind == "packed":
        out[f"{layer}weight_packed"] = torch.int32, (rows, dense_words(columns, how.bits))
        out[f"{layer}weight_shape"] = torch.int64, (2,)
    elif how.kind in ("nvfp4", "mxfp4", "mxfp6"):
        out[f"{layer}weight_packed"] = torch.uint8, (rows, columns * how.bits // 8)
    else:
        out[f"{layer}weight"] = torch.int8 if how.kind == "int" else torch.float8_e4m3fn, (rows, columns)
    if isinstance(scale, QuantSpec):
        scale = scale.format.code_dtype
    out[f"{layer}weight_scale"] = scale, scale_shape
    if how.kind == "nvfp4":
        out[f"{layer}weight_global_scale"] = torch.float32, (1,)
    if how.zero is not None:
        packed = how.kind == "packed" and how.strategy != "tensor"
        zero = (torch.int32, (dense_words(rows, how.bits), part_shape[1])) if packed else (torch.int8, scale_shape)
        out[f"{layer}weight_zero_point"] = zero
    if meta.act is not None and meta.act.mode == "static":
        out[f"{layer}input_scale"] = torch.float32, (1,)
        if meta.act.spec.zero_point:
            out[f"{layer}input_zero_point"] = torch.int8, (1,)
    return out


def _written(name: str, meta: Meta) -> _How:
    how = _how(name, meta)
    if isinstance(how, str):
        raise ValueError(f"{name}: {how}")
    return how


def pack(name: str, parts: Parts, meta: Meta) -> dict[str, Tensor]:
    how, layer, spec, shape = _written(name, meta), name.removesuffix("weight"), meta.spec, meta.shape
    codes = parts.codes[: shape[0], : shape[1]]  # e4m3 codes may be padded to whole blocks
    out: dict[str, Tensor] = {}
    if how.kind == "packed":
        out[f"{layer}weight_packed"] = pack_words(_unsigned(_signed(codes, spec), how.bits), how.bits)
        out[f"{layer}weight_shape"] = torch.tensor(shape, dtype=torch.int64, device="cpu")
    elif codes.dtype is torch.uint8 and how.bits < 8:
        out[f"{layer}weight_packed"] = pack_bits(codes, how.bits)
    else:
        out[f"{layer}weight"] = _signed(codes, spec) if how.kind == "int" else codes.contiguous()
    out[f"{layer}weight_scale"] = parts.scale.codes if isinstance(parts.scale, Parts) else _flat(how, parts.scale)
    if how.kind == "nvfp4":
        out[f"{layer}weight_global_scale"] = _global_scale(name, parts.scale.scale)
    if how.zero is not None:
        zero = parts.zero_point
        if zero is None:
            assert isinstance(how.zero, int)
            zero = torch.full(blocks.counts(spec.block, shape), how.zero, dtype=torch.int8, device="cpu")
        else:
            zero = _signed(zero, spec)
        if how.kind == "packed" and how.strategy != "tensor":
            zero = pack_words(_unsigned(zero.t(), how.bits), how.bits).t().clone(memory_format=torch.contiguous_format)
        out[f"{layer}weight_zero_point"] = _flat(how, zero)
    if meta.act is not None and meta.act.mode == "static":
        assert parts.act_scale is not None
        out[f"{layer}input_scale"] = parts.act_scale.float().reshape(1)
        if parts.act_zero_point is not None:
            out[f"{layer}input_zero_point"] = _signed(parts.act_zero_point, meta.act.spec).reshape(1)
    return out


def _flat(how: _How, part: Tensor) -> Tensor:
    return part.reshape(1) if how.strategy == "tensor" else part


def _signed(numbers: Tensor, spec: QuantSpec) -> Tensor:
    """Codes or zero points of an integer format, converted to the signed format of the same width."""
    f = spec.format
    return numbers.contiguous() if f.signed else (numbers.to(torch.int16) - (1 << (f.bits - 1))).to(torch.int8)


def _unsigned(signed: Tensor, bits: int) -> Tensor:
    return get_format(f"int{bits}").to_unsigned(signed.contiguous())


def _global_scale(name: str, scale: Tensor) -> Tensor:
    """The divisor of the group scales: the reciprocal of our global scale."""
    above = (1.0 / scale.double()).float().reshape(1)
    if not 0 < float(above) < float("inf"):
        raise ValueError(f"{name}: its global scale is {float(scale)}; its reciprocal is not a finite float32 number")
    return above


def method(tensors: Mapping[str, Meta], plain: tuple[str, ...]) -> dict[str, Any]:
    """The config. Layers of a group are named by patterns in which numbers are wildcards; if a pattern would match a
    layer of another group, by their names."""
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, meta in tensors.items():
        how = _written(name, meta)
        act = None if how.act is None else {k: v for k, v in how.act if k != "scale_dtype" or v is not None}
        scheme = {"weights": how.weights(), "input_activations": act, "output_activations": None, "format": how.form}
        groups.setdefault(repr(scheme), (scheme, []))[1].append(name.rpartition(".")[0])
    owners: dict[str, set[int]] = {}
    for i, (_, layers) in enumerate(groups.values()):
        for layer in layers:
            owners.setdefault(_template(layer), set()).add(i)
    config_groups = {}
    for i, (scheme, layers) in enumerate(groups.values()):
        targets = ["Linear"] if len(groups) == 1 else []
        for layer in layers:
            template = _template(layer)
            target = layer if len(owners[template]) > 1 else template
            if target not in targets:
                targets.append(target)
        config_groups[f"group_{i}"] = {"targets": targets, **scheme}
    forms = {scheme["format"] for scheme, _ in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": next(iter(forms)) if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": config_groups,
        "ignore": [name.removesuffix(".weight") for name in plain],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _template(layer: str) -> str:
    """A pattern for a layer and similar layers; the layer's own name if it has no number."""
    if not any(part.isdecimal() for part in layer.split(".")):
        return layer
    return "re:^" + r"\.".join(r"\d+" if p.isdecimal() else re.escape(p) for p in layer.split(".")) + "$"


WRITING = Writing(refuses, nearest, stored, pack, method)
