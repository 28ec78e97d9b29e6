"""Batched and grouped products with the weights of many experts [E, N, K], and the layout "cpu_experts".

Each expert is packed separately, in the layout of its kernel: "cpu" for integer codes, "cpu_float" for the others.
Experts without rows cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.layouts import Layout, register_layout, require_fit
from ...core.numerics import Parts
from ...core.spec import SPECS, QuantSpec
from ...core.tensor import ATEN, SLOTS, AffineQuantizedTensor, implements
from ...support.errors import ArgumentError
from ..table import Case, Kernel, case_of, register_kernel
from . import float_linear, int_linear


def _family(spec: QuantSpec) -> ModuleType:
    """The module with the layout and kernel of one expert."""
    return int_linear if spec.format.kind == "int" else float_linear


def fits(spec: QuantSpec, shape: Sequence[int]) -> bool | str:
    """True, or the reason why the layout does not support this."""
    if len(shape) != 3 or 0 in shape:
        return "needs a non-empty 3-d weight"
    if spec.block is not None:
        parts = blocks.counts(spec.block, shape)
        inner = [(kind, parts) for kind in (spec.scale, spec.offset) if isinstance(kind, QuantSpec)]
        for kind, size in ((spec, tuple(shape)), *inner):
            if kind.block is not None and blocks.counts(kind.block, size)[0] != shape[0]:
                return "needs blocks that do not span experts"
    return _family(spec).fits(spec, tuple(shape[1:]))


def _plain(part: Any) -> Any:
    return part.parts if isinstance(part, AffineQuantizedTensor) else part


def _view(part: Any, e: int) -> Any:
    part = _plain(part)
    if isinstance(part, Parts):
        return part.map(lambda t: t[min(e, len(t) - 1)])
    return None if part is None else part[min(e, len(part) - 1)]


def expert(w: Any, e: int) -> Parts:
    """Parts of one expert, as views; parts with a single entry are used for every expert. w: a weight, or its parts."""
    w = _plain(w)
    own = (_view(w.codes, e), _view(w.scale, e), _view(w.zero_point, e), _view(w.offset, e))
    return Parts(*own, *w[4:])


def _join(whole: Any, each: list[Any]) -> Any:
    """Stack the parts of experts; parts with a single entry in ``whole`` keep a single entry."""
    whole = _plain(whole)
    if whole is None:
        return None
    if isinstance(whole, Parts):
        return Parts(*(_join(p, [q[i] for q in each]) for i, p in enumerate(whole)))
    return each[0].unsqueeze(0) if len(whole) == 1 else torch.stack(each)


def _each(parts: Parts, n: int, fn: Callable[[Parts], Parts]) -> Parts:
    done = [fn(expert(parts, e)) for e in range(n)]
    changed = {name: _join(getattr(parts, name), [getattr(d, name) for d in done]) for name in SLOTS[:4]}
    return parts._replace(**changed)


def pack(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """The layout of one expert, with a leading axis for experts."""
    require_fit("cpu_experts", fits(spec, shape), spec, shape)
    inner = _family(spec).LAYOUT
    return _each(parts, shape[0], lambda p: inner.pack(p, spec, shape[1:]))


def from_bits(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """As :func:`pack`, from parts in layout "bits"."""
    require_fit("cpu_experts", fits(spec, shape), spec, shape)
    inner = _family(spec)
    return _each(parts, shape[0], lambda p: inner.from_bits(p, spec, shape[1:]))


def unpack(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """Inverse of :func:`pack`, bit for bit."""
    inner = _family(spec).LAYOUT
    return _each(parts, shape[0], lambda p: inner.unpack(p, spec, shape[1:]))


def _padding(spec: QuantSpec, shape: Sequence[int]) -> int:
    return int(shape[0] * _family(spec).LAYOUT.extra(spec, shape[1:]))


_EXAMPLES = tuple(
    (spec, shape) for spec in SPECS.values() for shape in ((3, 16, 256), (1, 33, 100)) if fits(spec, shape) is True
)
LAYOUT = register_layout(Layout("cpu_experts", pack, unpack, ("cpu",), _EXAMPLES, _padding, from_bits))


def _accepts(case: Case) -> bool | str:
    verdict = fits(case.spec, case.shape)
    if verdict is not True:
        return verdict
    return _family(case.spec)._accepts(replace(case, shape=case.shape[1:]))


def _products(x: Tensor, w: AffineQuantizedTensor) -> Callable[[Tensor, int], Tensor]:
    """(rows, e) -> rows @ w[e].T, with the kernel of one expert."""
    family = _family(w.spec)
    case = replace(case_of(w, x.dtype), perm=False)
    bound = family.bind(replace(case, shape=case.shape[1:], spec=w.spec.with_(layout=family.LAYOUT.name)))
    operands: dict[int, Any] = w._bound.setdefault(("bmm", x.dtype), {})  # checked once per expert

    def product(rows: Tensor, e: int) -> Tensor:
        operand = operands.get(e)
        if operand is None:
            operand = operands[e] = bound.operand(expert(w, e))
        y = bound.run(rows, operand, None)
        if y is None:
            raise ArgumentError(
                f"bmm: rows {list(rows.shape)} {rows.dtype} do not fit experts {list(w.shape)} ({w.spec})"
            )
        return y

    return product


def bmm(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None = None) -> Tensor:
    """y[e] = x[e] @ w[e].T. x: [E, M, K], w: [E, N, K]."""
    product, y = _products(x, w), x.new_empty((*x.shape[:2], w.shape[1]))
    if x.shape[1]:
        for e in range(x.shape[0]):
            y[e] = product(x[e], e)
    return y


def grouped_mm(x: Tensor, w: AffineQuantizedTensor, ends: Tensor) -> Tensor:
    """y[ends[e-1]:ends[e]] = x[ends[e-1]:ends[e]] @ w[e].T. x: [T, K], w: [E, N, K]; rows after the last end are 0."""
    product, y, start = _products(x, w), x.new_empty((x.shape[0], w.shape[1])), 0
    for e, end in enumerate(ends.tolist()):
        if end > start:
            y[start:end] = product(x[start:end], e)
            start = end
    y[start:] = 0
    return y


# Tolerance as for the kernel of one expert: see int_linear.py and float_linear.py.
register_kernel(
    Kernel("bmm", "cpu_experts", bmm, _accepts, ("cpu",), LAYOUT.name, rank=30, tolerance="fixed22",
           row_independent=True, grouped=grouped_mm)
)  # fmt: skip

_select = ATEN[torch.ops.aten.select.int]


@implements(torch.ops.aten.select.int)
def _one_expert(func: Any, args: Any, kwargs: Any) -> Any:
    """w[e] without unpacking, for models that loop over experts."""
    w, dim, e = args
    axes = tuple(range(w.ndim)) if w.axes is None else w.axes
    if w.spec.layout != LAYOUT.name or axes[dim] != 0 or not -w.shape[dim] <= e < w.shape[dim]:
        return _select(func, args, kwargs)
    spec = w.spec.with_(layout=_family(w.spec).LAYOUT.name)
    rest = tuple(a - 1 for a in axes if a)
    shape = [n for i, n in enumerate(w.shape) if i != dim % w.ndim]
    return AffineQuantizedTensor(expert(w, e % w.shape[dim]), spec, shape, w.dtype, w.act, rest, readonly=True)
