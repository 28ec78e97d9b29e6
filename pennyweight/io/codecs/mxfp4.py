"""MXFP4 experts as in gpt-oss (``quant_method`` "mxfp4").

    <name>_blocks  u8 [E, O, I/32, 16]: e2m1 in blocks of 32, the even one in the low nibble
    <name>_scales  u8 [E, O, I/32]: 2**(s - 127)

The parameter ``<name>`` is [E, I, O]: kept in file order here, with ``axes``. Source: transformers 5.23,
integrations/mxfp4.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ...core.numerics import Parts
from ...core.packing import pack_bits, unpack_bits
from ...core.spec import MXFP4, QuantSpec
from ..file import KeyedError
from ..manifest import Meta, Stored
from .base import Codec, Config, Entries, Found, Get, Writing, model_dtype, need

_AXES = (0, 2, 1)
_GROUP = 32
_WRITTEN = ("gate_up_proj", "down_proj")  # the parameters that transformers reads
_U8 = (torch.uint8,)


def claims(config: Config, entries: Entries) -> bool:
    return config.get("quant_method") == "mxfp4"


def find(entries: Entries, config: Config, get: Get) -> dict[str, Found]:
    names = {n.removesuffix("_blocks"): None for n in entries if n.endswith("_blocks")}  # in file order
    scales = {n.removesuffix("_scales") for n in entries if n.endswith("_scales") and entries[n].dtype is torch.uint8}
    for name in sorted(names.keys() ^ scales):
        there, missing = ("_blocks", "_scales") if name in names else ("_scales", "_blocks")
        raise KeyedError(name, f"{name}{there} is stored, but {name}{missing} is missing")
    used = {n + ending for n in names for ending in ("_blocks", "_scales")}
    dtype = model_dtype(entries, used) or torch.bfloat16
    return {name: _found(name, entries, dtype) for name in names}


def _found(name: str, entries: Entries, dtype: torch.dtype) -> Found:
    blocks_name, scales_name = f"{name}_blocks", f"{name}_scales"
    shape = need(blocks_name, entries, _U8).shape
    if len(shape) != 4 or shape[3] != _GROUP // 2 or 0 in shape:
        raise KeyedError(blocks_name, f"has shape {list(shape)}, expected [experts, rows, groups, {_GROUP // 2}]")
    need(scales_name, entries, _U8, shape[:3])
    experts, rows, groups, _ = shape
    columns = groups * _GROUP
    meta = Meta(MXFP4, (experts, columns, rows), dtype, None, _AXES)

    def parts(get: Get) -> Parts:
        return Parts(unpack_bits(get(blocks_name).flatten(-2), 4, columns), Parts(get(scales_name)))

    return Found(meta, (blocks_name, scales_name), parts)


# -- writing ---------------------------------------------------------------------------------------------------------


def refuses(name: str, meta: Meta) -> str | None:
    if not name.endswith(_WRITTEN):
        return f"mxfp4 supports only {' and '.join(_WRITTEN)} of experts"
    if len(meta.shape) != 3 or 0 in meta.shape or meta.axes != _AXES:
        return "mxfp4 supports only non-empty experts [experts, in, out], with the input axis contracted"
    if meta.spec != MXFP4:
        return f"mxfp4 supports only e2m1 in blocks of {_GROUP} with e8m0 scales, not {meta.spec}"
    if meta.stored_shape[-1] % _GROUP:
        return f"blocks of {_GROUP} do not divide {meta.stored_shape[-1]} columns"
    return None if meta.act is None else f"mxfp4 does not support quantized activations, this has {meta.act}"


def nearest(name: str, meta: Meta) -> QuantSpec | None:
    """MXFP4 for formats of 4 bits or fewer, or if only the activation is rejected. Others become float."""
    if meta.spec.format.bits > 4:
        return None
    return MXFP4 if refuses(name, Meta(MXFP4, meta.shape, meta.dtype, None, meta.axes)) is None else None


def stored(name: str, meta: Meta) -> Stored:
    experts, rows, columns = meta.stored_shape
    sizes = (experts, rows, columns // _GROUP)
    return {f"{name}_blocks": (torch.uint8, (*sizes, _GROUP // 2)), f"{name}_scales": (torch.uint8, sizes)}


def pack(name: str, parts: Parts, meta: Meta) -> dict[str, Tensor]:
    packed = pack_bits(parts.codes, 4).unflatten(-1, (-1, _GROUP // 2))
    return {f"{name}_blocks": packed, f"{name}_scales": parts.scale.codes}


def method(tensors: Mapping[str, Meta], plain: tuple[str, ...]) -> dict[str, Any]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": [name.removesuffix(".weight") for name in plain]}


EXPERTS_MXFP4 = Codec(
    "mxfp4", claims, find, "transformers 5.23, convert_moe_packed_tensors",
    Writing(refuses, nearest, stored, pack, method),
)  # fmt: skip
