"""Slice, select, split, cat, stack and index of quantized tensors, along whole blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing as _view

from ...support.errors import ArgumentError
from .. import blocks
from ..layouts import portable_layout
from ..tensor import AffineQuantizedTensor, implements, stored_shape
from .parts import (
    if_consistent,
    map_value,
    shares_codes,
    stored_axis,
    to_sliceable,
    to_unpacked,
    with_alias,
    with_shape,
)
from .view import drop_axis, insert_axis, reshape_leading_axes

aten = torch.ops.aten
QT = AffineQuantizedTensor


def slice_axis(w: QT, dim: int, start: int, stop: int, step: int = 1) -> Any:
    """w[.., start:stop:step, ..] along logical ``dim``, quantized; NotImplemented if that cuts through blocks or along
    an axis reordered by ``perm``.

    The result is read-only if it shares a scale with elements outside it, a ``perm`` or a ``pre_scale``.
    """
    axis, n = stored_axis(w, dim), w.shape[dim]
    start, stop = (max(0, i + n) if i < 0 else min(i, n) for i in (start, stop))
    stop = max(start, stop)
    if (start, stop, step) == (0, n, 1):
        return with_alias(w)
    return _cut(w, axis, start, stop, step, with_shape(w.shape, dim % w.ndim, -(-(stop - start) // step)))


def _cut(w: QT, axis: int, start: int, stop: int, step: int, shape: tuple[int, ...]) -> Any:
    if w._pre_scale is not None:
        pre = w._pre_scale if axis != w.ndim - 1 else aten.slice(w._pre_scale, 0, start, stop, step)
        out = _cut(w.with_(pre_scale=None, readonly=True), axis, start, stop, step, shape)
        return out if out is NotImplemented else out.with_(pre_scale=pre)
    if w._perm is not None:
        if axis == w.ndim - 1:
            return NotImplemented
        w = w.with_(readonly=True)
    if w._table is not None:  # shared with elements outside
        w = w.with_(readonly=True)
    w = to_sliceable(w)
    size = blocks.resolve(w.spec.block, w.stored_shape)[axis]
    n = w.stored_shape[axis]
    last = -(-stop // size)
    whole = step == 1 and start % size == 0 and (stop % size == 0 or stop == n)
    if size == 1:  # every part has an entry per element
        first, last, readonly = start, stop, w.readonly
    elif stop > start and (whole or last - start // size == 1):
        first, readonly = start // size, w.readonly or not whole
    elif stop == start:
        first, last, readonly = 0, 0, True
    else:
        return NotImplemented
    end = last * size if last - first > 1 else stop  # padding stays with the block it completes
    if shares_codes(w, axis):
        dim = w.spec.format.dim
        if step != 1 or start % dim or (end % dim and stop != n):
            return NotImplemented
        start, end = start // dim, -(-end // dim)
    bits = w.spec.format.bits if w.spec.layout == "bits" and axis == w.ndim - 1 else 8
    if bits < 8 and (step != 1 or start * bits % 8 or end * bits % 8):  # not on byte boundaries of the stream
        w, bits = to_unpacked(w), 8
        readonly = True
    zeros = w.spec.zero_point_bits if bits < 8 else 8
    if zeros < 8 and (first * zeros % 8 or (last * zeros % 8 and stop != n)):
        w, bits, zeros, readonly = to_unpacked(w), 8, 8, True

    def part(p: Any, slot: str) -> Any:
        if slot == "codes":
            return aten.slice(p, axis, start * bits // 8, -(-end * bits // 8), step)
        if slot == "zero_point" and zeros < 8:
            return aten.slice(p, axis, first * zeros // 8, -(-last * zeros // 8))
        if size == 1:
            return _slice_part(p, axis, start, stop, step)
        return _slice_part(p, axis, first, last, 1)

    return if_consistent(map_value(w, part, shape=shape, readonly=readonly))


def _slice_part(p: Any, axis: int, start: int, stop: int, step: int) -> Any:
    return slice_axis(p, axis, start, stop, step) if isinstance(p, QT) else aten.slice(p, axis, start, stop, step)


@implements(aten.slice.Tensor)
def _slice(func: Any, args: Any, kwargs: Any) -> Any:
    filled = (*args, *(0, None, None, 1)[len(args) - 1 :])
    w, dim, start, stop, step = filled
    out = slice_axis(w, dim, 0 if start is None else start, w.shape[dim] if stop is None else stop, step)
    return out if out is NotImplemented else _view(func, args, kwargs, out)


@implements(aten.select.int)
def _select(func: Any, args: Any, kwargs: Any) -> Any:
    w, dim, index = args
    axis, n = stored_axis(w, dim), w.shape[dim]
    if not -n <= index < n:
        raise IndexError(f"index {index} is out of range for axis {dim} of a quantized tensor {tuple(w.shape)}")
    if w.ndim == 1:
        return NotImplemented  # a single number: no benefit in keeping it quantized
    one = slice_axis(w, dim, index % n, index % n + 1)
    out = one if one is NotImplemented else drop_axis(one, axis)
    return out if out is NotImplemented else _view(func, args, kwargs, out)


@implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, args: Any, kwargs: Any) -> Any:
    w, size = args[:2]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    stored_axis(w, dim)
    n = w.shape[dim]
    sizes = [min(size, n - i) for i in range(0, max(n, 1), max(size, 1))] if isinstance(size, int) else size
    if sum(sizes) != n:
        raise ArgumentError(f"split into {sizes} along axis {dim} of a quantized tensor {tuple(w.shape)}: sizes differ")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    outs = [slice_axis(w, dim, start, start + length) for start, length in zip(starts, sizes, strict=True)]
    return NotImplemented if any(o is NotImplemented for o in outs) else _view(func, args, kwargs, outs)


@implements(aten.unbind.int)
def _unbind(func: Any, args: Any, kwargs: Any) -> Any:
    w = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if w.ndim == 1:
        return NotImplemented
    ones = [slice_axis(w, dim, i, i + 1) for i in range(w.shape[dim])]
    outs = [o if o is NotImplemented else drop_axis(o, stored_axis(w, dim)) for o in ones]
    return NotImplemented if any(o is NotImplemented for o in outs) else _view(func, args, kwargs, outs)


@implements(aten.cat.default)
def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    return concatenate(args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0))


def concatenate(tensors: Sequence[Any], dim: int) -> Any:
    """Tensors joined along logical ``dim``, quantized; NotImplemented if they are not stored alike: other specs, scales
    shared by more than one of them, or a float tensor among them. At least one is quantized."""
    first = next(t for t in tensors if isinstance(t, QT))
    axis, d = stored_axis(first, dim), dim % first.ndim
    if axis == first.ndim - 1 and all(isinstance(t, QT) and t._pre_scale is not None for t in tensors):
        out = concatenate([t.with_(pre_scale=None) for t in tensors], dim)
        return out if out is NotImplemented else out.with_(pre_scale=torch.cat([t._pre_scale for t in tensors]))
    if not all(
        isinstance(t, QT)
        and (t.act, t.axes, t.dtype, t.ndim) == (first.act, first.axes, first.dtype, first.ndim)
        and with_shape(t.shape, d, 0) == with_shape(first.shape, d, 0)
        and all(map(_same, t.parts[4:], first.parts[4:]))
        for t in tensors
    ) or (axis == first.ndim - 1 and (first._perm is not None or first._pre_scale is not None)):  # fmt: skip
        return NotImplemented
    out = _join(tensors, axis, with_shape(first.shape, d, sum(t.shape[d] for t in tensors)))
    if out is NotImplemented:
        return out
    out = _with_own(out)
    if first.spec.layout == "plain":
        return out
    return out.to_layout(portable_layout(out.spec))


def _with_own(w: QT) -> QT:
    """w with copies of the parts that belong to the whole tensor."""
    whole = {slot: p.clone() for slot in ("perm", "table", "pre_scale") if (p := getattr(w, f"_{slot}")) is not None}
    return w.with_(**whole) if whole else w


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two per-tensor parts are equal; False if their values cannot be read."""
    if a is b or a is None or b is None:
        return a is b
    traced = (torch._subclasses.FakeTensor, torch._subclasses.functional_tensor.FunctionalTensor)
    if isinstance(a, traced) or isinstance(b, traced) or a.is_meta or b.is_meta:
        return False
    return a.shape == b.shape and torch.equal(a, b.to(a.dtype))


def _join(tensors: Sequence[QT], axis: int, shape: tuple[int, ...]) -> Any:
    whole = [to_unpacked(t) for t in tensors]
    first = whole[0]
    one = _one_block(whole, axis, shape)
    dim = first.spec.format.dim if shares_codes(first, axis) else 1
    inner = [t._codes.shape[axis] * dim != t.stored_shape[axis] for t in whole[:-1]]
    if any(inner) or any(t.spec != first.spec for t in whole):  # padding would end up in the middle
        return NotImplemented

    def part(p: Any, slot: str) -> Any:
        pieces = [getattr(t, f"_{slot}") for t in whole]
        if one and slot != "codes":
            return p.clone()
        if isinstance(p, QT):
            return _join(pieces, axis, with_shape(p.shape, axis, sum(q.shape[axis] for q in pieces)))
        return torch.cat(pieces, axis)

    out = map_value(first, part, shape=shape, readonly=False)
    if out is NotImplemented:
        return out
    sizes = {blocks.resolve(t.spec.block, t.stored_shape)[axis] for t in (*whole[:-1], out)}
    return if_consistent(out) if one or len(sizes) == 1 else NotImplemented


def _one_block(tensors: Sequence[QT], axis: int, shape: tuple[int, ...]) -> bool:
    """Whether tensors are pieces of one block of an axis and share its scale, such as two halves of a row."""
    first = tensors[0]
    if blocks.resolve(first.spec.block, stored_shape(shape, first.axes))[axis] == 1:
        return False
    if blocks.counts(first.spec.block, stored_shape(shape, first.axes))[axis] != 1:
        return False
    return all(_equal(t, first) for t in tensors[1:])


def _equal(a: QT, b: QT) -> bool:
    """Whether all parts except the codes are equal, including the codes of nested parts."""
    for slot in ("scale", "zero_point", "offset"):
        p, q = getattr(a, f"_{slot}"), getattr(b, f"_{slot}")
        if isinstance(p, QT):
            if not (_same(p._codes, q._codes) and _equal(p, q)):
                return False
        elif not _same(p, q):
            return False
    return True


@implements(aten.stack.default)
def _stack(func: Any, args: Any, kwargs: Any) -> Any:
    return stack(args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0))


def stack(tensors: Sequence[Any], dim: int) -> Any:
    """Tensors stacked along a new logical axis ``dim``, quantized; NotImplemented as for :func:`concatenate`."""
    if not all(isinstance(t, QT) for t in tensors):
        return NotImplemented
    dim %= tensors[0].ndim + 1
    grown = [insert_axis(t, dim) for t in tensors]
    return NotImplemented if any(t is NotImplemented for t in grown) else concatenate(grown, dim)


@implements(aten.index.Tensor, aten.index_select.default)
def _index(func: Any, args: Any, kwargs: Any) -> Any:
    """Index one axis with a tensor of indices or a mask: an axis of block size 1, or one covered by a single block."""
    w = args[0]
    index = list(args[1]) if func is aten.index.Tensor else [None] * (args[1] % w.ndim) + [args[2]]
    used = [i for i, ix in enumerate(index) if ix is not None]
    if len(used) != 1 or w.axes is not None:
        return NotImplemented
    axis, picks = used[0], index[used[0]]
    if picks.dtype in (torch.bool, torch.uint8):
        if picks.ndim != 1 or isinstance(picks, torch._subclasses.FakeTensor):
            return NotImplemented
        picks = picks.nonzero().squeeze(1)
    elif func is aten.index_select.default:
        picks = picks.reshape(-1)
    if picks.ndim != 1:
        if axis or picks.ndim == 0:
            return NotImplemented
        rows = _pick(w, 0, picks.reshape(-1))
        return rows if rows is NotImplemented else reshape_leading_axes(rows, (*picks.shape, *w.shape[1:]))
    return _pick(w, axis, picks)


def _pick(w: QT, axis: int, picks: Tensor) -> Any:
    if w._pre_scale is not None and axis == w.ndim - 1:
        out = _pick(w.with_(pre_scale=None), axis, picks)
        return out if out is NotImplemented else out.with_(pre_scale=w._pre_scale[picks])
    if w._perm is not None and axis == w.ndim - 1:
        return NotImplemented
    w = to_sliceable(_with_own(w))
    if shares_codes(w, axis):
        return NotImplemented
    if axis == w.ndim - 1:
        w = to_unpacked(w)
    size = blocks.resolve(w.spec.block, w.stored_shape)[axis]
    one = size > 1 and blocks.counts(w.spec.block, w.stored_shape)[axis] == 1
    if not one and size != 1:
        return NotImplemented
    where = [None] * axis + [picks]

    def part(p: Any, slot: str) -> Any:
        if one and slot != "codes":
            return p.clone()
        return _pick(p, axis, picks) if isinstance(p, QT) else aten.index(p, where)

    shape = with_shape(w.shape, axis, picks.shape[0])
    return if_consistent(map_value(w, part, shape=shape, readonly=False))
