"""AutoAWQ's "gemm" files: 4 bits, a zero point and a float16 scale per group of inputs.

    value[o, i] = (q[i, o] - z[g, o]) * s[g, o], g = i // group_size

``qweight`` int32 [in, out / 8] and ``qzeros`` int32 [in / group, out / 8] hold eight numbers per word: nibble i of word
w, from the low end, is output 8 w + [0, 2, 4, 6, 1, 3, 5, 7][i]. ``scales`` [in / group, out]. A weight has the dtype
of its scales, since the format stores none. Files whose zero points are all 8 (``zero_point`` false) are also read.

GPTQ uses the same tensor names, so a checkpoint is read as AWQ only if its config says awq. Other versions (gemv,
gemv_fast, marlin, exllama) use other packing orders and are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.formats import INT4, UINT4
from ...core.numerics import Parts
from ...core.spec import QuantSpec
from ..file import KeyedError
from ..manifest import Meta, Stored
from .base import FLOATS, Codec, Config, Entries, Found, Get, Writing, need, no_left_overs, setting

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_PARTS = (".qweight", ".qzeros", ".scales")
_GROUP = 128


def _claims(config: Config, entries: Entries) -> bool:
    return config.get("quant_method") == "awq"


def _find(entries: Entries, config: Config, get: Get) -> dict[str, Found]:
    version = setting(config, "version", str, setting(config, "format", str, "gemm"))
    if version.lower() != "gemm" or config.get("backend") == "llm-awq":
        raise ValueError(f"AWQ version {version[:40]!r} uses another packing order; only gemm is supported")
    bits = setting(config, "bits", int, setting(config, "w_bit", int, 4))
    if bits != 4:
        raise ValueError(f"AWQ of {bits} bits; the gemm version supports only 4")
    group = setting(config, "group_size", int, setting(config, "q_group_size", int, _GROUP))
    found = {}
    for name in entries:
        if name.endswith(".qweight"):
            prefix = name.removesuffix(".qweight")
            found[f"{prefix}.weight"] = _find_layer(prefix, group, entries)
    no_left_overs(entries, {part for f in found.values() for part in f.stored}, _PARTS, "quantized weight")
    return found


def _find_layer(prefix: str, group: int, entries: Entries) -> Found:
    owner = f"{prefix}.weight"
    words = need(f"{prefix}.qweight", entries, (torch.int32,), owner=owner)
    if len(words.shape) != 2 or not all(words.shape):
        raise KeyedError(owner, f"{prefix}.qweight is {list(words.shape)[:8]}, expected int32 [in, out / 8]")
    inputs, outputs = words.shape[0], words.shape[1] * 8
    size = inputs if group == -1 else group
    if size < 1 or inputs % size:
        raise KeyedError(
            owner, f"{prefix}.qweight has {inputs} inputs, which quantization_config.group_size {group} does not divide"
        )  # fmt: skip
    need(f"{prefix}.qzeros", entries, (torch.int32,), (inputs // size, words.shape[1]), owner=owner)
    scales = need(f"{prefix}.scales", entries, FLOATS, (inputs // size, outputs), owner=owner)
    spec = QuantSpec(UINT4, (group,), scale=scales.dtype, zero_point=UINT4)
    meta = Meta(spec, (outputs, inputs), scales.dtype)
    return Found(meta, tuple(prefix + part for part in _PARTS), partial(_parts, prefix))


def _parts(prefix: str, get: Get) -> Parts:
    qweight, qzeros, scales = (get(prefix + part) for part in _PARTS)
    return Parts(_unpack(qweight).T.contiguous(), scales.T.contiguous(), _unpack(qzeros).T.contiguous())


def _unpack(words: Tensor) -> Tensor:
    """int32 [n, out / 8] -> uint8 [n, out]."""
    stream = words.contiguous().view(torch.uint8)  # files are little-endian, and so are all supported machines
    nibbles = torch.stack([stream & 15, stream >> 4], -1).reshape(*words.shape, 8)
    place = torch.tensor(_ORDER, device="cpu").argsort()
    return nibbles[..., place].flatten(1)


def _pack_words(codes: Tensor) -> Tensor:
    """Inverse of :func:`_unpack`."""
    nibbles = codes.reshape(codes.shape[0], -1, 8)[..., list(_ORDER)]
    return (nibbles[..., 0::2] | nibbles[..., 1::2] << 4).contiguous().view(torch.int32).squeeze(-1)


def _group_of(meta: Meta) -> int:
    return blocks.resolve(meta.spec.block, meta.shape)[-1]


def _refuses(name: str, meta: Meta) -> str | None:
    spec, shape = meta.spec, meta.shape
    if meta.act is not None:
        return "its activation is quantized, which AWQ does not store"
    if len(shape) != 2 or meta.axes is not None or not all(shape) or not name.endswith(".weight"):
        return "AWQ supports only weights of linear layers, stored as [out, in]"
    if shape[0] % 8:
        return f"AWQ packs eight outputs per word, and {shape[0]} outputs is not a multiple of 8"
    if spec.format not in (UINT4, INT4) or spec.offset is not None:
        return f"AWQ supports only 4-bit integers with zero points, not {spec}"
    if spec.zero_point and spec.zero_point_format.bits > 4:
        return f"AWQ supports only 4-bit zero points, not {spec.zero_point}"
    if spec.scale is not torch.float16:
        return "AWQ supports only float16 scales"
    if blocks.resolve(spec.block, shape)[0] != 1 or shape[1] % _group_of(meta):
        return f"AWQ needs whole groups of inputs per output, not blocks {spec.block} of {list(shape)}"
    return None


def _nearest(name: str, meta: Meta) -> QuantSpec | None:
    block = meta.spec.block  # common group sizes are kept: a model has one group size
    size = block[0] if block is not None and len(block) == 1 and block[0] in (32, 64, 128) else _GROUP
    nearest = QuantSpec(UINT4, (size,), scale=torch.float16, zero_point=UINT4)
    refused = (meta.shape and meta.shape[-1] % size) or _refuses(name, replace(meta, spec=nearest, act=None))
    return None if refused else nearest


def _stored(name: str, meta: Meta) -> Stored:
    prefix, (outputs, inputs) = name.removesuffix(".weight"), meta.shape
    groups = inputs // _group_of(meta)
    return {
        f"{prefix}.qweight": (torch.int32, (inputs, outputs // 8)),
        f"{prefix}.qzeros": (torch.int32, (groups, outputs // 8)),
        f"{prefix}.scales": (torch.float16, (groups, outputs)),
    }


def _pack(name: str, parts: Parts, meta: Meta) -> dict[str, Tensor]:
    prefix, fmt = name.removesuffix(".weight"), meta.spec.format
    if parts.zero_point is not None:
        zeros = fmt.to_unsigned(parts.zero_point)
    else:
        zeros = torch.full_like(parts.scale, meta.spec.mid - int(fmt.lo), dtype=torch.uint8)
    return {
        f"{prefix}.qweight": _pack_words(fmt.to_unsigned(parts.codes).T),
        f"{prefix}.qzeros": _pack_words(zeros.T),
        f"{prefix}.scales": parts.scale.T.contiguous(),
    }


def _method(metas: Mapping[str, Meta], plain: tuple[str, ...]) -> dict[str, Any]:
    groups = {_group_of(meta): name for name, meta in metas.items()}
    whole = all(_group_of(meta) == meta.shape[1] for meta in metas.values())
    if len(groups) > 1 and not whole:
        raise ValueError(f"an AWQ model must have one group size, got several: {groups}")
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": -1 if whole else next(iter(groups)),
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": [name.removesuffix(".weight") for name in plain],
    }


AWQ = Codec(
    "awq",
    _claims,
    _find,
    "auto-round 0.16 (by hand), the formula",
    Writing(_refuses, _nearest, _stored, _pack, _method),
)
