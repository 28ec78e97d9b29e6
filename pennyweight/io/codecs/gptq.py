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

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.formats import get_format
from ...core.numerics import Parts, unpermute_last_axis
from ...core.spec import QuantSpec
from ...planning.engines import fused_groups
from ..file import KeyedError
from ..manifest import Meta, Stored
from .base import Codec, Config, Entries, Found, Get, Writing, pack_words, setting, unpack_words

BITS = (2, 3, 4, 8)
SCALES = (torch.float16, torch.bfloat16)
V1, V2 = "gptq", "gptq_v2"
WORD = 32
# GPTQModel's kernels support these, and sizes that are whole words and groups; other programs support fewer.
GROUPS = (16, 32, 64, 128, 256, 512, 1024)
PARTS = ("qweight", "qzeros", "scales", "g_idx")


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


def _claims(method: Config, entries: Entries, version: str) -> bool:
    """By quant_method in config.json; without one, by three tensors whose sizes fit no other format."""
    if (V2 in (method.get("checkpoint_format"), method.get("format"))) != (version == V2):
        return False
    if method.get("quant_method") is not None:
        return bool(method["quant_method"] == "gptq")
    for name, e in entries.items():
        layer, _, part = name.rpartition(".")
        scales = entries.get(f"{layer}.scales")
        if part == "qweight" and scales is not None and f"{layer}.qzeros" in entries:
            return len(e.shape) == 2 and e.shape[1:] == scales.shape[1:]  # AWQ packs eight outputs per word there
    return False


def _version(method: Config) -> str:
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


def _overrides(method: Config) -> list[Any]:
    """Per-layer settings. Their name patterns, untrusted input, are not matched: tensor sizes determine the
    settings."""
    dynamic = setting(method, "dynamic", dict, {})
    found = list(dynamic.values())
    if not all(isinstance(v, dict) for v in found):
        raise ValueError("quantization_config: dynamic must map patterns to objects")
    return found


def find(entries: Entries, method: Config, get: Get) -> dict[str, Found]:
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


def _found(name: str, entries: Entries, method: Config, version: str, get: Get) -> Found:
    try:
        layer, dtype = _layer(name, entries, method, version)
        # g_idx is small, and shows whether channels are permuted
        reordered = layer.ordered and layer.groups > 1 and _order(layer, get(f"{layer.name}.g_idx")) is not None
    except ValueError as e:
        raise KeyedError(f"{name}.weight", str(e)) from e
    codes = get_format(f"uint{layer.bits}")
    spec = QuantSpec(codes, (layer.size,), dtype, zero_point=False if layer.symmetric else codes,
                     mid=1 << (layer.bits - 1) if layer.symmetric else 0)  # fmt: skip
    meta = Meta(spec, (layer.outputs, layer.inputs), dtype, perm=reordered)
    return Found(meta, layer.stored, partial(read_parts, layer))


def _layer(name: str, entries: Entries, method: Config, version: str) -> tuple[Layer, torch.dtype]:
    """Raises ValueError if names, dtypes, shapes and config are inconsistent."""
    found = {part: entries[f"{name}.{part}"] for part in PARTS if f"{name}.{part}" in entries}
    for part in PARTS[:3]:
        if part not in found:
            raise ValueError(f"{name}.{part} is missing")
    kinds = {"scales": (*SCALES, torch.float32), "g_idx": (torch.int32, torch.int64)}
    for part, e in found.items():
        rank, dtypes = 1 if part == "g_idx" else 2, kinds.get(part, (torch.int32,))
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
    overrides = _overrides(method)
    symmetric = setting(method, "sym", bool) is True and not any("sym" in o for o in overrides)
    layer = Layer(name, bits, inputs, outputs, size, symmetric, version == V1, "g_idx" in found)
    reordered = setting(method, "desc_act", bool) is True and not any("desc_act" in o for o in overrides)
    if reordered and layer.groups > 1 and not layer.ordered:
        raise ValueError(f"{name}.g_idx (the channel order) is missing, but the config says desc_act true")
    return layer, found["scales"].dtype


def _bits(found: Entries, inputs: int | None, method: Config) -> int:
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


def _group_size(inputs: int, groups: int, method: Config) -> int:
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
    codes = unpack_words(get(f"{layer.name}.qweight").t(), layer.bits, layer.inputs, dense=True)
    scale = get(f"{layer.name}.scales").t().contiguous()
    zero = unpack_words(get(f"{layer.name}.qzeros"), layer.bits, layer.outputs, dense=True)
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
    expected = torch.full_like(sizes, layer.group)
    expected[-1] = layer.inputs - layer.group * (layer.groups - 1)
    if not torch.equal(sizes, expected):
        bad = int((sizes != expected).nonzero()[0])
        raise ValueError(
            f"g_idx puts {int(sizes[bad])} channels into group {bad}, expected {int(expected[bad])}: groups of unequal "
            "size are not supported; dequantize it with the program that wrote it"
        )
    perm = g_idx.argsort(stable=True)
    return None if torch.equal(perm, torch.arange(layer.inputs, dtype=torch.int64, device="cpu")) else perm


# -- writing -----------------------------------------------------------------------------------------------------------


def _constant_zero(spec: QuantSpec) -> int:
    """The unsigned constant zero point of codes without a stored one."""
    return spec.mid - int(spec.format.lo)


def symmetric(spec: QuantSpec) -> bool:
    """Whether every zero point is the middle code."""
    return not spec.zero_point and _constant_zero(spec) == 1 << (spec.format.bits - 1)


def refuses(name: str, meta: Meta, first: bool) -> str | None:
    """Why a tensor cannot be stored exactly; ``first``: in version 1."""
    spec, f = meta.spec, meta.spec.format
    if (sizes := _sizes(name, meta)) is not None:
        return sizes
    if meta.act is not None:
        return "its activation is quantized, which GPTQ does not store"
    if f.kind != "int" or f.bits not in BITS or spec.offset is not None:
        return f"GPTQ supports only integers of 2, 3, 4 or 8 bits with integer zero points, not {spec}"
    if spec.zero_point and spec.zero_point_format.bits > f.bits:
        return f"GPTQ needs zero points within the range of the codes, not {spec.zero_point}"
    if spec.scale not in SCALES:
        return f"GPTQ scales must be float16 or bfloat16, not {spec.scale}"
    if first and not symmetric(spec):
        return "version 1 of the format does not support all zero points; use gptq_v2"
    block, size = spec.block or (), _size(spec)
    if not (len(block) == 1 and (size == -1 or size in GROUPS)) or meta.shape[1] % min(max(size, 1), meta.shape[1]):
        return f"GPTQ groups must be {', '.join(map(str, GROUPS))} or all channels of one output, not {list(block)}"
    return None


def _sizes(name: str, meta: Meta) -> str | None:
    if not name.endswith(".weight") or len(meta.shape) != 2 or meta.axes is not None:
        return "GPTQ supports only weights [out, in] of linear layers, named <layer>.weight"
    if 0 in meta.shape or meta.shape[0] % WORD or meta.shape[1] % WORD:
        return f"GPTQ layers need multiples of {WORD} inputs and outputs, not {list(meta.shape)}"
    return None


def _size(spec: QuantSpec) -> int:
    return spec.block[-1] if spec.block else 0


def nearest(name: str, meta: Meta, first: bool) -> QuantSpec | None:
    """The spec used for a rejected tensor: the same or the next bit width, in groups that fit."""
    if _sizes(name, meta) is not None:
        return None
    spec, inputs = meta.spec, meta.shape[1]
    bits = next(b for b in BITS if b >= spec.format.bits)
    wanted = blocks.resolve(spec.block, meta.stored_shape)[-1]
    group = next((g for g in (wanted, 128, 64) if g in GROUPS and inputs % g == 0), 32)
    if spec.block is not None and spec.block[-1] == -1:
        group = -1
    scale = meta.dtype if meta.dtype in SCALES else torch.float16
    codes = get_format(f"uint{bits}")
    if not first and (spec.zero_point or spec.offset is not None):
        return QuantSpec(codes, (group,), scale, zero_point=codes)
    return QuantSpec(codes, (group,), scale, mid=1 << (bits - 1))


def stored(name: str, meta: Meta) -> Stored:
    """Names, dtypes and shapes that a tensor stores."""
    layer, (outputs, inputs), bits = name.removesuffix(".weight"), meta.shape, meta.spec.format.bits
    groups = blocks.counts(meta.spec.block, meta.shape)[1]
    assert isinstance(meta.spec.scale, torch.dtype)
    return {
        f"{layer}.qweight": (torch.int32, (inputs * bits // WORD, outputs)),
        f"{layer}.qzeros": (torch.int32, (groups, outputs * bits // WORD)),
        f"{layer}.scales": (meta.spec.scale, (groups, outputs)),
        f"{layer}.g_idx": (torch.int32, (inputs,)),
    }


def pack(name: str, parts: Parts, meta: Meta, first: bool) -> dict[str, Tensor]:
    """Stored tensors from plain parts; ``first``: in version 1."""
    spec, layer, inputs = meta.spec, name.removesuffix(".weight"), meta.shape[1]
    f = spec.format
    groups = parts.scale.shape[1]
    g_idx = torch.arange(inputs, dtype=torch.int32, device="cpu") // (inputs // groups)
    codes = unpermute_last_axis(f.to_unsigned(parts.codes), parts.perm)
    if parts.zero_point is None:
        zero = torch.full(parts.scale.shape, _constant_zero(spec), dtype=torch.uint8, device="cpu")
    else:
        zero = f.to_unsigned(parts.zero_point)
    return {
        f"{layer}.qweight": pack_words(codes, f.bits).t().contiguous(),
        f"{layer}.qzeros": pack_words(zero.t() - (1 if first else 0), f.bits),
        f"{layer}.scales": parts.scale.t().contiguous(),
        f"{layer}.g_idx": g_idx if parts.perm is None else unpermute_last_axis(g_idx, parts.perm),
    }


def method(metas: Mapping[str, Meta], plain: tuple[str, ...], first: bool) -> dict[str, Any]:
    """``quantization_config``: the most common bits and group size, and layers that differ or stay float, by name and
    by the names of the fused layers of vLLM that they form."""
    kinds = {name: (m.spec.format.bits, _size(m.spec)) for name, m in metas.items()}
    (bits, group), _ = Counter(kinds.values()).most_common(1)[0] if kinds else ((4, 128), 0)
    reordered = any(m.perm for m in metas.values())
    head = any(_module(name).rpartition(".")[2] == "lm_head" for name in metas)
    floats = [_module(n) for n in plain if head or _module(n) != "lm_head"]
    layers: dict[str, tuple[int, int] | None] = {**dict.fromkeys(floats), **{_module(n): k for n, k in kinds.items()}}
    for fused, parts in fused_groups(layers).items():  # vLLM looks up the name of its fused layer
        same = {layers[part] for part in parts}
        if len(same) == 1:
            layers[fused] = same.pop()
    dynamic: dict[str, Any] = {f"-:^{re.escape(layer)}$": {} for layer, kind in layers.items() if kind is None}
    for layer, kind in layers.items():
        if kind is not None and kind != (bits, group):
            dynamic[f"+:^{re.escape(layer)}$"] = {"bits": kind[0], "group_size": kind[1]}
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": reordered,
        "act_group_aware": False,
        "sym": all(symmetric(m.spec) for m in metas.values()),
        "lm_head": head,
        "checkpoint_format": V1 if first else V2,  # the older key, and GPTQModel's current one
        "format": V1 if first else V2,
        "pack_dtype": "int32",
        "meta": {"quantizer": ["pennyweight"]},
        **({"dynamic": dynamic} if dynamic else {}),
    }


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def writing(first: bool) -> Writing:
    """The writer of version 1 (``first``) or 2."""
    return Writing(
        partial(refuses, first=first), partial(nearest, first=first), stored, partial(pack, first=first),
        partial(method, first=first), perm=True,
    )  # fmt: skip


ORACLE = "auto-round 0.16.1 (auto_round_extension.torch), by hand; an independent formula in the tests"
# Two formats, because the version is chosen before all tensors are known. Version 1 supports symmetric weights, and all
# programs read it; version 2 supports every zero point.
GPTQ = Codec(V1, partial(_claims, version=V1), find, ORACLE, writing(True))
GPTQ_V2 = Codec(V2, partial(_claims, version=V2), find, ORACLE, writing(False))
