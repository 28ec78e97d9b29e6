"""GPTQ files (AutoGPTQ, GPTQModel, vLLM, transformers): integer codes in groups of channels, with zero points.

A layer of O outputs and I inputs in groups of G, b bits (2, 3, 4 or 8), is stored as

    <layer>.qweight  int32 [ceil(I*b/32), O]   codes, channel i of a column at bits [i*b, (i+1)*b) of its words
    <layer>.qzeros   int32 [I/G, ceil(O*b/32)] zero points, output o of a row at bits [o*b, (o+1)*b)
    <layer>.scales   [I/G, O]                  float16, bfloat16 or float32
    <layer>.g_idx    int32 [I]                 the group of each channel; if missing: i / G

    weight[o, i] = (code[i, o] - zero[g, o]) * scale[g, o],  g = g_idx[i]

Version 1 of the format (``checkpoint_format: gptq``, or none) stores zero - 1. A zero of 0 wraps around, and programs
read it back either as 0 or as 2**b, so such files are rejected. ``gptq_v2`` stores the zero itself. ``desc_act`` files
have channels in any order (``g_idx``): sorted by group they are a normal per-group weight, whose ``perm`` is the
channel order.

Source: GPTQModel 7.7 (utils/model.py, nn_modules/qlinear), checked against auto-round 0.16's decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.numerics import Parts
from ...core.spec import QuantSpec
from ..manifest import KeyedError, Meta
from ..safetensors_file import Entry
from . import int32_pack
from .base import Codec, Found, Get
from .gptq_write import BITS, SCALES, V1, V2, WORD, unsigned, writing
from .schema import setting

PARTS = ("qweight", "qzeros", "scales", "g_idx")

Method = Mapping[str, Any]
Entries = Mapping[str, Entry]


@dataclass(frozen=True)
class Layer:
    """One layer as described by the file's header and config: name, sizes, and the encoding of zero points."""

    name: str
    bits: int
    inputs: int
    outputs: int
    size: int  # group size, as in the config; -1: all channels
    symmetric: bool  # config.json says that all zero points are 2**(bits - 1)
    first: bool  # version 1: zero points are stored minus one
    ordered: bool  # there is a g_idx

    @property
    def group(self) -> int:
        return self.inputs if self.size == -1 else min(self.size, self.inputs)

    @property
    def groups(self) -> int:
        return -(-self.inputs // self.group)

    @property
    def stored(self) -> tuple[str, ...]:
        return tuple(f"{self.name}.{part}" for part in (PARTS if self.ordered else PARTS[:3]))


# -- detection --------------------------------------------------------------------------------------------------


def _claims(method: Method, entries: Entries) -> bool:
    """By quant_method in config.json; without one, by three tensors whose sizes fit no other format."""
    if method.get("quant_method") is not None:
        return bool(method["quant_method"] == "gptq")
    for name, e in entries.items():
        layer, _, part = name.rpartition(".")
        scales = entries.get(f"{layer}.scales")
        if part == "qweight" and scales is not None and f"{layer}.qzeros" in entries:
            return len(e.shape) == 2 and e.shape[1:] == scales.shape[1:]  # AWQ packs eight outputs per word there
    return False


def _version(method: Method) -> str:
    """checkpoint_format; "gptq" if none is given. Raises ValueError for an unsupported one."""
    said = {str(method[key]).lower() for key in ("checkpoint_format", "format") if method.get(key) is not None}
    if method.get("is_marlin_format"):
        said.add("marlin")
    if len(said) > 1:
        raise ValueError(f"quantization_config names several formats: {', '.join(sorted(said))[:80]}")
    version = next(iter(said), V1)
    if version not in (V1, V2):
        raise ValueError(f"checkpoint_format {version[:40]!r} is packed for one kernel; supported: gptq and gptq_v2")
    return version


def _overrides(method: Method) -> list[Any]:
    """Per-layer settings. Their name patterns, untrusted input, are not matched: tensor sizes determine the
    settings."""
    dynamic = setting(method, "dynamic", dict, {})
    found = list(dynamic.values())
    if not all(isinstance(v, dict) for v in found):
        raise ValueError("quantization_config: dynamic must map patterns to objects")
    return found


def find(entries: Entries, method: Method, get: Get) -> dict[str, Found]:
    """Quantized tensors by parameter name; see :class:`pennyweight.io.codecs.base.Codec`."""
    version = _version(method)
    if setting(method, "pack_dtype", str, "int32") != "int32":
        raise ValueError(f"quantization_config: pack_dtype {method['pack_dtype'][:40]!r}; only int32 is supported")
    out: dict[str, Found] = {}
    for stored in entries:
        name, _, part = stored.rpartition(".")
        if part in PARTS and f"{name}.weight" not in out:
            out[f"{name}.weight"] = _found(name, entries, method, version, get)
    return out


def _found(name: str, entries: Entries, method: Method, version: str, get: Get) -> Found:
    try:
        layer, dtype = _layer(name, entries, method, version)
        # g_idx is small, and shows whether channels are permuted
        reordered = layer.ordered and layer.groups > 1 and _order(layer, get(f"{layer.name}.g_idx")) is not None
    except ValueError as e:
        raise KeyedError(f"{name}.weight", str(e)) from e
    codes = unsigned(layer.bits)
    spec = QuantSpec(codes, (layer.size,), dtype, zero_point=False if layer.symmetric else codes,
                     mid=1 << (layer.bits - 1) if layer.symmetric else 0)  # fmt: skip
    meta = Meta(spec, (layer.outputs, layer.inputs), dtype, perm=reordered)
    return Found(meta, layer.stored, partial(read_parts, layer))


def _layer(name: str, entries: Entries, method: Method, version: str) -> tuple[Layer, torch.dtype]:
    """Raises ValueError if names, dtypes, shapes and config are inconsistent."""
    found = {part: entries[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in entries}
    for part in PARTS[:3]:
        if part not in found:
            raise ValueError(f"{name}.{part} is missing")
    for part, e in found.items():
        rank, dtypes = 1 if part == "g_idx" else 2, (*SCALES, torch.float32) if part == "scales" else (torch.int32,)
        if part == "g_idx":
            dtypes = (torch.int32, torch.int64)
        if len(e.shape) != rank or e.dtype not in dtypes or 0 in e.shape:
            raise ValueError(f"{name}.{part} is {e.dtype} {list(e.shape)[:8]}; expected {rank} axes of {dtypes[0]}")
    (rows, outputs), groups = found["qweight"].shape, found["scales"].shape[0]
    inputs = found["g_idx"].shape[0] if "g_idx" in found else None
    bits = _bits(found, inputs, method)
    if inputs is None:
        inputs = rows * WORD // bits
        if inputs * bits != rows * WORD:
            raise ValueError(f"{name}.qweight has {rows} rows, not a whole number of {bits}-bit channels")
    if found["scales"].shape[1] != outputs or found["qzeros"].shape[0] != groups:
        raise ValueError(
            f"qweight is {list(found['qweight'].shape)}, qzeros {list(found['qzeros'].shape)} and scales "
            f"{list(found['scales'].shape)}: they do not belong to one layer"
        )
    size = _group_size(inputs, groups, method)
    alone = any("sym" in override for override in _overrides(method))
    symmetric = setting(method, "sym", bool) is True and not alone
    layer = Layer(name, bits, inputs, outputs, size, symmetric, version == V1, "g_idx" in found)
    reordered = setting(method, "desc_act", bool) is True and not any("desc_act" in o for o in _overrides(method))
    if reordered and layer.groups > 1 and not layer.ordered:
        raise ValueError(f"{name}.g_idx (the channel order) is missing, but the config says desc_act true")
    return layer, found["scales"].dtype


def _bits(found: Entries, inputs: int | None, method: Method) -> int:
    """The bit width that all sizes agree with; the config's if several fit."""
    (rows, outputs), width = found["qweight"].shape, found["qzeros"].shape[1]
    able = [b for b in BITS if width == -(-outputs * b // WORD) and (inputs is None or rows == -(-inputs * b // WORD))]
    said = setting(method, "bits", int)
    if said in able and (len(able) == 1 or not _overrides(method)):
        return int(said)
    if len(able) == 1 and (said is None or _overrides(method)):
        return able[0]
    raise ValueError(
        f"qweight {list(found['qweight'].shape)} and qzeros {list(found['qzeros'].shape)} fit "
        f"{' and '.join(map(str, able)) or 'none of 2, 3, 4 and 8'} bits"
        f"{'' if inputs is None else f' of {inputs} channels'}, but the config says {said}"
    )


def _group_size(inputs: int, groups: int, method: Method) -> int:
    """Channels per group: the config's if it matches the number of groups, else, for a layer override, an even
    split."""
    said = setting(method, "group_size", int)
    if said is not None and said != -1 and said < 1:
        raise ValueError(f"quantization_config: group_size must be positive or -1, got {said}")
    if said is not None and groups == (1 if said == -1 else -(-inputs // said)):
        return int(said)
    if (said is None or _overrides(method)) and inputs % groups == 0:
        return inputs // groups if groups > 1 else -1
    raise ValueError(f"scales have {groups} groups for {inputs} channels, but the config says group_size {said}")


# -- reading ---------------------------------------------------------------------------------------------------------


def read_parts(layer: Layer, get: Get) -> Parts:
    """Plain parts of a layer, its channels sorted by group. Raises ValueError for invalid stored data."""
    codes = int32_pack.unpack(get(f"{layer.name}.qweight").t(), layer.bits, layer.inputs, dense=True)
    scale = get(f"{layer.name}.scales").t().contiguous()
    zero = int32_pack.unpack(get(f"{layer.name}.qzeros"), layer.bits, layer.outputs, dense=True)
    zero = _zeros(layer, zero.t().contiguous(), scale)
    perm = _order(layer, get(f"{layer.name}.g_idx")) if layer.ordered else None
    if perm is not None:
        codes = codes[:, perm]
    padding = layer.groups * layer.group - layer.inputs
    if padding:
        codes = torch.nn.functional.pad(codes, (0, padding))
    return Parts(codes, scale, zero, perm=None if perm is None else perm.to(torch.int32))


def _zeros(layer: Layer, zero: Tensor, scale: Tensor) -> Tensor | None:
    """Decoded zero points [O, groups]; None if the spec has a constant one."""
    top = (1 << layer.bits) - 1
    if layer.first:
        # A group with scale 0 is 0 for any zero point.
        lost = (zero == top) & (scale != 0)
        if bool(lost.any()):
            raise ValueError(
                f"{int(lost.sum())} of {lost.numel()} zero points are stored as {top}: version 1 of the format stores "
                f"zero - 1, and programs read this as 0 or as {top + 1}; save the model again as checkpoint_format "
                "gptq_v2, with the program that quantized it"
            )
        zero = torch.where(zero == top, 0, zero + 1)
    if not layer.symmetric:
        return zero
    other = (zero != 1 << (layer.bits - 1)) & (scale != 0)
    if bool(other.any()):
        raise ValueError(
            f"{int(other.sum())} of {other.numel()} zero points are not {1 << (layer.bits - 1)}, but config.json says "
            "sym: true; if the zero points are right, set sym to false in config.json"
        )
    return None


def _order(layer: Layer, g_idx: Tensor) -> Tensor | None:
    """Channels sorted by group; None if already sorted. Raises ValueError unless each group has its number of
    channels."""
    g_idx = g_idx.long()
    least, most = int(g_idx.min()), int(g_idx.max())
    if least < 0 or most >= layer.groups:
        raise ValueError(f"g_idx ranges from {least} to {most}, but there are {layer.groups} groups")
    sizes = torch.bincount(g_idx, minlength=layer.groups)
    due = torch.full_like(sizes, layer.group)
    due[-1] = layer.inputs - layer.group * (layer.groups - 1)
    if not torch.equal(sizes, due):
        bad = int((sizes != due).nonzero()[0])
        raise ValueError(
            f"g_idx puts {int(sizes[bad])} channels into group {bad}, expected {int(due[bad])}: groups of unequal "
            "size are not supported; dequantize it with the program that wrote it"
        )
    perm = g_idx.argsort(stable=True)
    return None if torch.equal(perm, torch.arange(layer.inputs, dtype=torch.int64, device="cpu")) else perm


ORACLE = "auto-round 0.16.1 (auto_round_extension.torch), by hand; an independent formula in the tests"
# Two formats, because the version is chosen before all tensors are known. Version 1 supports symmetric weights, and all
# programs read it; version 2 supports every zero point.
GPTQ = Codec(V1, lambda m, entries: _claims(m, entries) and not _is_second(m), find, ORACLE, writing(True))
GPTQ_V2 = Codec(V2, lambda m, entries: _claims(m, entries) and _is_second(m), find, ORACLE, writing(False))


def _is_second(method: Method) -> bool:
    return V2 in (method.get("checkpoint_format"), method.get("format"))
