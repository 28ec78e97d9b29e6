"""Stored tensors through a codec and back, as the loader and the writer use it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pennyweight.core import blocks
from pennyweight.core.numerics import Parts
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.io.codecs.base import Codec, Found
from pennyweight.io.container import Entry, place
from pennyweight.io.manifest import Meta


def entries_of(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    return place({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})


def tensor_of(found: Found, tensors: Mapping[str, Tensor]) -> AffineQuantizedTensor:
    """What a loader makes of it; parts must be those that the spec calls for."""
    parts, meta = found.parts(tensors.__getitem__), found.meta
    check_parts(parts, meta)
    return AffineQuantizedTensor(parts, meta.spec, meta.shape, meta.dtype, meta.act, meta.axes)


def check_parts(parts: Parts, meta: Meta) -> None:
    def check(parts: Parts, spec: Any, shape: tuple[int, ...]) -> None:
        assert parts.codes.shape == blocks.padded(spec.block, shape)
        assert parts.codes.dtype == spec.format.code_dtype
        assert parts.codes.is_contiguous()
        counts = blocks.counts(spec.block, shape)
        for slot in ("scale", "zero_point", "offset"):
            part, kind = getattr(parts, slot), spec.part_specs().get(slot)
            assert (part is None) == (kind is None), slot
            if isinstance(part, Parts):
                check(part, kind, counts)
            elif part is not None:
                assert (part.dtype, tuple(part.shape)) == (kind, counts), slot

    check(parts, meta.spec, meta.stored_shape)
    static = meta.act is not None and meta.act.mode == "static"
    assert (parts.act_scale is not None) == static
    assert (parts.act_zero_point is not None) == bool(static and meta.act and meta.act.spec.zero_point)


def write(codec: Codec, weights: Mapping[str, AffineQuantizedTensor]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(stored tensors, quantization_config); dtypes and shapes must be those announced."""
    assert codec.writing is not None
    out: dict[str, Tensor] = {}
    metas = {}
    for name, w in weights.items():
        meta = metas[name] = Meta(w.spec.with_(layout="plain"), tuple(w.shape), w.dtype, w.act, w.axes)
        assert codec.writing.refuses(name, meta) is None
        packed = codec.writing.pack(name, w.plain_parts(), meta)
        announced = codec.writing.stored(name, meta)
        assert {k: (t.dtype, tuple(t.shape)) for k, t in packed.items()} == announced
        assert all(t.is_contiguous() for t in packed.values())
        out |= packed
    return out, codec.writing.method(metas, ())


def same(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits."""
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8))
    )
