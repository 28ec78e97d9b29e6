"""Stored tensors through a codec and back, as a reader and a writer of files use it; every answer is looked at."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from pennyweight.core import blocks
from pennyweight.core.numerics import Parts
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs import CODECS, Codec
from pennyweight.io.codecs.base import Found
from pennyweight.io.container import Entry, place

Tensors = dict[str, Tensor]


def entries_of(tensors: Tensors) -> dict[str, Entry]:
    """The header of a file of these tensors."""
    return place({name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()})


def find(codec: Codec, tensors: Tensors, config: Mapping[str, Any]) -> dict[str, Found]:
    """What the codec finds; it is the one that claims these tensors."""
    entries = entries_of(tensors)
    assert next(c for c in CODECS if c.claims(config, entries)) is codec
    return codec.find(entries, config, tensors.__getitem__)


def read(codec: Codec, tensors: Tensors, config: Mapping[str, Any]) -> dict[str, QT]:
    """The quantized tensors. Their parts are of the dtypes and shapes that the spec asks for."""
    out = {}
    for name, found in find(codec, tensors, config).items():
        assert found.stored
        assert set(found.stored) <= tensors.keys()
        parts, meta = found.parts(tensors.__getitem__), found.meta
        fits(parts, meta.spec, meta.stored_shape)
        out[name] = QT(parts, meta.spec, meta.shape, meta.dtype, meta.act, meta.axes)
    return out


def fits(parts: Parts, spec: QuantSpec, shape: tuple[int, ...]) -> None:
    """Assert dtypes and shapes of plain parts, and that codes and scales mean something."""
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
        assert codec.writing.refuses(name, found.meta) is None
        packed = codec.writing.pack(name, found.parts(tensors.__getitem__), found.meta)
        said = codec.writing.stored(name, found.meta)
        assert {n: (t.dtype, tuple(t.shape)) for n, t in packed.items()} == said
        assert all(t.is_contiguous() for t in packed.values())
        out |= packed
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
    return a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
