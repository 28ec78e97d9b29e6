"""GPTQ files, the writer: which weights they support, and what is stored. See gptq.py for the format."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.formats import Format, get_format
from ...core.numerics import Parts, unpermute_last_axis
from ...core.spec import QuantSpec
from ..manifest import Meta, Stored
from . import int32_pack
from .base import Writing

BITS = (2, 3, 4, 8)
SCALES = (torch.float16, torch.bfloat16)
V1, V2 = "gptq", "gptq_v2"
WORD = 32
# GPTQModel's kernels support these, and sizes that are whole words and groups; other programs support fewer.
GROUPS = (16, 32, 64, 128, 256, 512, 1024)


def unsigned(bits: int) -> Format:
    """The format of the codes."""
    return get_format(f"uint{bits}")


def _constant_zero(spec: QuantSpec) -> int:
    """The unsigned constant zero point of codes without a stored one."""
    return spec.mid - int(spec.format.lo)


def symmetric(spec: QuantSpec) -> bool:
    """Whether every zero point is the middle code."""
    return not spec.zero_point and _constant_zero(spec) == 1 << (spec.format.bits - 1)


def refuses(name: str, meta: Meta, first: bool) -> str | None:
    """Why a tensor cannot be stored exactly; ``first``: in version 1."""
    spec, f = meta.spec, meta.spec.format
    sizes = _sizes(name, meta)
    if sizes is not None:
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
    asymmetric = not first and (spec.zero_point or spec.offset is not None)
    codes = unsigned(bits)
    if asymmetric:
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
        f"{layer}.qweight": int32_pack.pack(codes, f.bits).t().contiguous(),
        f"{layer}.qzeros": int32_pack.pack(zero.t() - (1 if first else 0), f.bits),
        f"{layer}.scales": parts.scale.t().contiguous(),
        f"{layer}.g_idx": g_idx if parts.perm is None else unpermute_last_axis(g_idx, parts.perm),
    }


def method(metas: Mapping[str, Meta], plain: tuple[str, ...], first: bool) -> dict[str, Any]:
    """``quantization_config``: the most common bits and group size, and layers that differ or stay float, by name."""
    kinds = {name: (m.spec.format.bits, _size(m.spec)) for name, m in metas.items()}
    (bits, group), _ = Counter(kinds.values()).most_common(1)[0] if kinds else ((4, 128), 0)
    reordered = any(m.perm for m in metas.values())
    head = any(_module(name).rpartition(".")[2] == "lm_head" for name in metas)
    dynamic: dict[str, Any] = {f"-:^{re.escape(_module(n))}$": {} for n in plain if head or _module(n) != "lm_head"}
    for name, (b, g) in kinds.items():
        if (b, g) != (bits, group):
            dynamic[f"+:^{re.escape(_module(name))}$"] = {"bits": b, "group_size": g}
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
