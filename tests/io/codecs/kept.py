"""Stored tensors through a codec and back, as a reader and a writer of files use it; every answer is looked at."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pennyweight.core import blocks
from pennyweight.core.numerics import Parts
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs import CODECS, Codec, Found, Writing
from pennyweight.io.manifest import Meta
from pennyweight.io.safetensors_file import Entry, place

Tensors = dict[str, Tensor]


def entries_of(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """The header of a file of these tensors."""
    return place({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})


def find(codec: Codec, tensors: Tensors, config: Mapping[str, Any]) -> dict[str, Found]:
    """What the codec finds; it is the one that claims these tensors."""
    entries = entries_of(tensors)
    assert next(c for c in CODECS if c.claims(config, entries)) is codec
    return codec.find(entries, config, tensors.__getitem__)


def read(codec: Codec, tensors: Tensors, config: Mapping[str, Any]) -> dict[str, QT]:
    """The quantized tensors."""
    out = {}
    for name, found in find(codec, tensors, config).items():
        assert found.stored
        assert set(found.stored) <= tensors.keys()
        out[name] = tensor_of(found, tensors)
    return out


def tensor_of(found: Found, tensors: Mapping[str, Tensor]) -> QT:
    """The quantized tensor. Its parts are those that the spec asks for."""
    parts, meta = found.parts(tensors.__getitem__), found.meta
    check_parts(parts, meta)
    return QT(parts, meta.spec, meta.shape, meta.dtype, meta.act, meta.axes)


def check_parts(parts: Parts, meta: Meta) -> None:
    """Assert that parts are there, of the dtypes and shapes that ``meta`` asks for, and mean something."""
    fits(parts, meta.spec, meta.stored_shape)
    static = meta.act is not None and meta.act.mode == "static"
    assert (parts.act_scale is not None) == static
    assert (parts.act_zero_point is not None) == bool(static and meta.act and meta.act.spec.zero_point)


def fits(parts: Parts, spec: QuantSpec, shape: tuple[int, ...]) -> None:
    """Assert dtypes and shapes of plain parts, and that codes mean something."""
    assert parts.codes.dtype == spec.format.code_dtype
    assert parts.codes.shape == blocks.padded(spec.block, shape)
    if spec.format.kind in ("int", "table") and parts.codes.numel():
        least, most = (
            (spec.format.lo, spec.format.hi) if spec.format.kind == "int" else (0, len(spec.format.values) - 1)
        )
        assert least <= int(parts.codes.min())
        assert int(parts.codes.max()) <= most
    assert {s for s in ("scale", "zero_point", "offset") if getattr(parts, s) is not None} == spec.part_specs().keys()
    part_shape = blocks.counts(spec.block, shape)
    for slot, kind in spec.part_specs().items():
        part = getattr(parts, slot)
        if isinstance(kind, QuantSpec):
            fits(part, kind, part_shape)
        else:
            assert (part.dtype, part.shape) == (kind, part_shape)
            assert part.is_contiguous()


def write(codec: Codec, tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """The stored tensors of what was read, each packed from its parts, each as the codec said that it would be."""
    assert codec.writing is not None
    out: Tensors = {}
    for name, found in find(codec, tensors, config).items():
        out |= packed(codec.writing, name, found.parts(tensors.__getitem__), found.meta)
    return out


def written(codec: Codec, weights: Mapping[str, QT]) -> tuple[Tensors, dict[str, Any]]:
    """(stored tensors, quantization_config) of our tensors."""
    assert codec.writing is not None
    out: Tensors = {}
    metas = {}
    for name, w in weights.items():
        metas[name] = Meta(w.spec.with_(layout="plain"), tuple(w.shape), w.dtype, w.act, w.axes)
        out |= packed(codec.writing, name, w.plain_parts(), metas[name])
    return out, codec.writing.method(metas, ())


def packed(writing: Writing, name: str, parts: Parts, meta: Meta) -> Tensors:
    """The stored tensors of parts, each as the codec said that it would be."""
    assert writing.refuses(name, meta) is None
    out = writing.pack(name, parts, meta)
    assert {n: (t.dtype, tuple(t.shape)) for n, t in out.items()} == writing.stored(name, meta)
    assert all(t.is_contiguous() for t in out.values())
    return out


def changed(tensors: Tensors, name: str, change: Callable[[Tensor], Tensor] | None) -> Tensors:
    """The tensors with one of them changed, or taken out."""
    out = dict(tensors)
    if change is None:
        del out[name]
    else:
        out[name] = change(out[name])
    return out


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether dtype, shape and every byte agree."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return torch.equal(*(t.contiguous().flatten().view(torch.uint8) for t in (a, b)))
