"""Native embedding lookup: reads and dequantizes only the requested rows.

One kernel for tables with contiguous rows, which planning prefers, and one for each packed layout of ``linear``, for
tables that are also the weight of a linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.layouts import READABLE
from ...core.numerics import Parts, dequantize, scale_value
from ...core.spec import QuantSpec
from ...core.tensor import AffineQuantizedTensor
from ...core.tracing import in_memory
from ...support.errors import ArgumentError
from .. import embedding
from ..graph_weight import LIBRARY, flatten, key_of, nest, parse_key
from ..table import Case, Kernel, register_kernel
from . import float_linear, int_linear
from .abi import E8M0
from .convert import floats_of
from .library import usable
from .matrix_view import affine, part_kind
from .pack_ops import TILE


def _nested(kind: Any) -> bool:
    """Whether a scale or offset is quantized in a way that the native lookup does not support."""
    return isinstance(kind, QuantSpec) and part_kind(kind) != E8M0


def _native_spec(spec: QuantSpec) -> QuantSpec:
    """The spec that native code gets: nested scales and offsets as float32."""
    nested = {name: torch.float32 for name in ("scale", "offset") if _nested(getattr(spec, name))}
    return spec.with_(**nested) if nested else spec


def _unshared(kind: QuantSpec, spec: QuantSpec, shape: tuple[int, ...]) -> bool:
    """Whether nested scales are not shared between rows of a table."""
    if spec.block is None or blocks.resolve(spec.block, shape)[0] != 1 or kind.layout != "plain":
        return False
    return kind.block is None or blocks.resolve(kind.block, blocks.counts(spec.block, shape))[0] == 1


def _accepts(case: Case) -> bool | str:
    verdict = usable()
    if verdict is not True:
        return verdict
    if len(case.shape) != 2 or affine(_native_spec(case.spec), case.shape, case.dtype, by_row=True) is None:
        return f"supports 2-d tables of float32, bfloat16 or float16, not {list(case.shape)} {case.dtype}"
    if _native_spec(case.spec) is not case.spec:
        kinds = [k for k in (case.spec.scale, case.spec.offset) if isinstance(k, QuantSpec)]
        if not all(_nested(k) and _unshared(k, case.spec, case.shape) for k in kinds):
            return "its scale is itself quantized, in blocks shared by rows"
    return True


def _accepts_rows(case: Case) -> bool | str:
    return _accepts(case) if case.spec.layout in READABLE else 'reads layouts "plain" and "bits"'


def _accepts_packed(layout: Any) -> Callable[[Case], bool | str]:
    def accepts(case: Case) -> bool | str:
        verdict = layout.fits(case.spec, case.shape)
        return _accepts(case) if verdict is True else verdict

    return accepts


def rows(index: Tensor, w: Any, spec: QuantSpec, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """w[index] as floats. index: int32 or int64, any shape; w: any object with the parts of a table as attributes."""
    if index.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"embedding: indices must be int32 or int64, got {index.dtype}")
    out = torch.empty((*index.shape, shape[1]), dtype=dtype, device="cpu")
    if not out.numel():
        return out
    index = index.long().contiguous()
    if _native_spec(spec) is not spec:
        w, index, shape = _gathered(w, index.reshape(-1), spec, shape)
    a = affine(_native_spec(spec), shape, dtype, by_row=True)
    assert a is not None
    return floats_of(w, _native_spec(spec), a, index, out)


def _gathered(w: Any, index: Tensor, spec: QuantSpec, shape: tuple[int, ...]) -> tuple[Parts, Tensor, tuple[int, ...]]:
    """A table of the requested rows (packed: of the tiles that contain them) with nested scales as float32, the indices
    of the rows in it, and its shape. Raises IndexError if out of range."""
    if index.amin() < 0 or index.amax() >= shape[0]:
        raise IndexError(f"index out of range: a quantized table has rows 0 to {shape[0] - 1}")
    count, height = index.numel(), 1 if spec.layout in READABLE else TILE
    unit, row = index // height, index % height
    groups = blocks.counts(spec.block, shape)[-1]

    def gathered(part: Any, kind: Any) -> Any:
        if not _nested(kind):
            return None if part is None else part[unit]
        own = (lambda t: t[unit]) if height == 1 else (lambda t: t[unit, :, row])
        above: list[Any] = [part.scale, part.zero_point, part.offset]
        if kind.block is not None:
            above = [None if p is None else own(p) for p in above]
        picked, size = Parts(own(part.codes), *above), (count, groups)
        x = scale_value(picked, spec, size, torch.float32) if part is w.scale else dequantize(picked, kind, size)
        return x if height == 1 else x.unsqueeze(-1).expand(-1, -1, TILE).contiguous()  # every row of a tile

    parts = Parts(
        w.codes[unit], gathered(w.scale, spec.scale), gathered(w.zero_point, None), gathered(w.offset, spec.offset)
    )  # fmt: skip
    return parts, torch.arange(count, dtype=torch.int64, device="cpu") * height + row, (count * height, *shape[1:])


def lookup(index: Tensor, w: AffineQuantizedTensor, bias: None = None) -> Tensor:
    """w[index] as floats of w's dtype. Raises IndexError if out of range, as torch does."""
    if not torch.compiler.is_compiling():
        if in_memory(w._codes) and in_memory(index):
            return rows(index, w.parts, w.spec, tuple(w.shape), w.dtype)
        if type(w._codes) is Tensor and w.spec.layout in READABLE:
            return (embedding.gather if _native_spec(w.spec) is w.spec else embedding.lookup)(index, w)
    return torch.ops.pennyweight.embedding.default(index, flatten(w)[0], key_of(w))


# -- the op used in graphs -------------------------------------------------------------------------------------------


def _op(index: Tensor, parts: list[Tensor], key: str) -> Tensor:
    static = parse_key(key)
    return rows(index, nest(static.tree, list(parts)), static.spec, static.shape, static.dtype)


def _fake(index: Tensor, parts: list[Tensor], key: str) -> Tensor:
    static = parse_key(key)
    return parts[0].new_empty((*index.shape, static.shape[1]), dtype=static.dtype)


LIBRARY.define("embedding(Tensor index, Tensor[] parts, str key) -> Tensor")
LIBRARY.impl("embedding", _op, "CompositeExplicitAutograd")
torch.library.register_fake("pennyweight::embedding", _fake, lib=LIBRARY)

register_kernel(Kernel("embedding", "cpu_rows", lookup, _accepts_rows, ("cpu",), None, rank=30, tolerance="exact"))
for _name, _of in (("cpu_tiles", int_linear), ("cpu_float_tiles", float_linear)):
    register_kernel(
        Kernel("embedding", _name, lookup, _accepts_packed(_of), ("cpu",), _of.LAYOUT.name, rank=20, tolerance="exact")
    )
