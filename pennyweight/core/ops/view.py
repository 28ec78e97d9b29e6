"""Transpose, permute, squeeze, unsqueeze, expand and view of quantized tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing as _view

from ...support.errors import ArgumentError
from .. import blocks, fallback
from ..distributed_hooks import answer
from ..tensor import AffineQuantizedTensor, implements, stored_shape
from .parts import (
    axes_of,
    if_consistent,
    is_bit_stream,
    map_value,
    shares_codes,
    stored_axis,
    to_sliceable,
    to_unpacked,
    with_alias,
)

aten = torch.ops.aten
QT = AffineQuantizedTensor


# -- order of axes ---------------------------------------------------------------------------------------------------


def _permuted(w: QT, order: Sequence[int]) -> QT:
    axes = axes_of(w)
    return with_alias(w, axes=tuple(axes[d] for d in order), shape=tuple(w.shape[d] for d in order))


@implements(aten.t.default)
def _t(func: Any, args: Any, kwargs: Any) -> Any:
    w = args[0]
    if w.ndim > 2:
        raise ArgumentError(f"t() expects at most 2 axes, the quantized tensor has shape {tuple(w.shape)}")
    return _view(func, args, kwargs, _permuted(w, range(w.ndim)[::-1]))


@implements(aten.transpose.int)
def _transpose(func: Any, args: Any, kwargs: Any) -> Any:
    w, a, b = args
    order = list(range(w.ndim))
    stored_axis(w, a), stored_axis(w, b)
    order[a], order[b] = order[b], order[a]
    return _view(func, args, kwargs, _permuted(w, order))


@implements(aten.permute.default)
def _permute(func: Any, args: Any, kwargs: Any) -> Any:
    w, dims = args
    order = [d % max(w.ndim, 1) for d in dims]
    if sorted(order) != list(range(w.ndim)):
        raise ArgumentError(f"permute{tuple(dims)} of a quantized tensor of shape {tuple(w.shape)}: not a permutation")
    return _view(func, args, kwargs, _permuted(w, order))


@implements(aten.as_strided.default)
def _as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """Supports only permutations of axes, which compiled functions use to return a transposed input.

    Raises RuntimeError otherwise: a quantized tensor has no strided storage.
    """
    w, size, stride = args[:3]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    axes = list(zip(w.shape, w.stride(), strict=True))
    wanted = list(zip(size, stride, strict=True))
    if offset or sorted(axes) != sorted(wanted) or (len(set(axes)) < len(axes) and axes != wanted) or w.readonly:
        raise ArgumentError(
            f"as_strided({tuple(size)}, {tuple(stride)}, {offset}) of a quantized tensor {tuple(w.shape)} ({w.spec}): "
            "it has no strided storage; use slices and transposes, and clone() a part that a compiled function returns"
        )
    return _view(func, args, kwargs, _permuted(w, [axes.index(pair) for pair in wanted]))


# -- number of axes --------------------------------------------------------------------------------------------------


def drop_axis(w: QT, axis: int) -> Any:
    """Remove a stored axis of size one."""
    w = to_sliceable(w)
    if shares_codes(w, axis):
        return NotImplemented
    if axis == w.ndim - 1:
        if w._pre_scale is not None:
            return NotImplemented
        w = to_unpacked(w).with_(perm=None)  # a single entry has only one order
    block = w.spec.block
    if block is not None:
        full = (1,) * (w.ndim - len(block)) + block
        block = (*full[:axis], *full[axis + 1 :])
    axes = axes_of(w)
    left = tuple(a - (a > axis) for a in axes if a != axis)
    shape = tuple(n for n, a in zip(w.shape, axes, strict=True) if a != axis)

    def part(p: Any, slot: str) -> Any:
        return drop_axis(p, axis) if isinstance(p, QT) else aten.squeeze.dim(p, axis)

    return if_consistent(map_value(w, part, spec=w.spec.with_(block=block), axes=left, shape=shape))


def insert_axis(w: QT, dim: int) -> Any:
    """Insert a logical axis of size one. It is stored first, so that blocks stay right-aligned."""
    w = to_sliceable(w)
    axes = tuple(a + 1 for a in axes_of(w))

    def part(p: Any, slot: str) -> Any:
        return insert_axis(p, 0) if isinstance(p, QT) else aten.unsqueeze(p, 0)

    shape = (*w.shape[:dim], 1, *w.shape[dim:])
    return map_value(w, part, axes=(*axes[:dim], 0, *axes[dim:]), shape=shape)


@implements(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(func: Any, args: Any, kwargs: Any) -> Any:
    w = args[0]
    asked = range(w.ndim) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = {d % w.ndim for d in asked if stored_axis(w, d) >= 0 and w.shape[d] == 1}
    out = with_unit_axes(w, tuple(n for d, n in enumerate(w.shape) if d not in gone))
    return out if out is NotImplemented else _view(func, args, kwargs, out)


@implements(aten.unsqueeze.default)
def _unsqueeze(func: Any, args: Any, kwargs: Any) -> Any:
    w, dim = args
    if not -w.ndim - 1 <= dim <= w.ndim:
        raise IndexError(f"unsqueeze({dim}) of a quantized tensor of shape {tuple(w.shape)}")
    return _view(func, args, kwargs, insert_axis(w, dim % (w.ndim + 1)))


@implements(aten.expand.default)
def _expand(func: Any, args: Any, kwargs: Any) -> Any:
    """Repeat axes of size one without copying. Matrix products detect the zero stride and use the single weight."""
    w, size = args[:2]
    out: Any = w
    for _ in range(len(size) - w.ndim):
        out = insert_axis(out, 0)
    shape = tuple(n if s == -1 else s for s, n in zip(size, out.shape, strict=True))
    if any(n not in (1, s) for s, n in zip(shape, out.shape, strict=True)):
        raise ArgumentError(f"expand{tuple(size)} of a quantized tensor of shape {tuple(w.shape)}: sizes do not match")
    out = with_alias(out) if shape == tuple(out.shape) else _expanded(to_sliceable(out), shape)
    return out if out is NotImplemented else _view(func, args, kwargs, out)


def _expanded(w: QT, shape: tuple[int, ...]) -> Any:
    stored = stored_shape(shape, w.axes)
    if stored[-1] != w.stored_shape[-1]:
        if shares_codes(w, w.ndim - 1) or w._pre_scale is not None:
            return NotImplemented
        w = to_unpacked(w).with_(perm=None)
    part_shape = blocks.counts(w.spec.block, stored)

    def part(p: Any, slot: str) -> Any:
        if slot == "codes":
            return p.expand(*(-1 if n == m else n for n, m in zip(stored, w.stored_shape, strict=True)))
        if is_bit_stream(w, slot):
            return p.expand(*part_shape[:-1], -1)
        return _expanded(p, part_shape) if isinstance(p, QT) else p.expand(part_shape)

    return if_consistent(map_value(w, part, shape=shape, readonly=True))


@implements(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _reshape(func: Any, args: Any, kwargs: Any) -> Any:
    w, size = args
    if list(size) == [-1]:
        flat = answer(aten.view.default, args, kwargs)
        if flat is not NotImplemented:
            return flat
    shape = _infer(w, size)
    out = with_unit_axes(w, shape)
    if out is NotImplemented:
        out = reshape_leading_axes(w, shape)
    if out is NotImplemented and func is aten._unsafe_view.default:  # reshape has cloned w in its stored axis order
        fallback.record(str(func), w)
        return w._dequantize(w.dtype).reshape(shape)
    return out if out is NotImplemented else _view(func, args, kwargs, out)


def with_unit_axes(w: QT, shape: tuple[int, ...]) -> Any:
    """w with its axes of size one dropped and those of ``shape`` inserted; the order of the others is kept."""
    if shape == tuple(w.shape):
        return with_alias(w)
    if [n for n in shape if n != 1] != [n for n in w.shape if n != 1]:
        return NotImplemented
    out: Any = w
    for d in reversed(range(w.ndim)):
        if out.shape[d] == 1 and out.ndim > 1:
            out = drop_axis(out, stored_axis(out, d))
            if out is NotImplemented:
                return out
    for d, n in enumerate(shape):
        if n == 1 and (d >= out.ndim or out.shape[d] != 1):
            out = insert_axis(out, d)
    return out if tuple(out.shape) == shape else NotImplemented


def reshape_leading_axes(w: QT, shape: tuple[int, ...]) -> Any:
    """Regroup leading axes of block size 1; trailing axes stay unchanged, or are in one block before and after."""
    if w.axes is not None or not shape or 0 in shape:
        return NotImplemented
    old = tuple(w.shape)
    sizes, counts = blocks.resolve(w.spec.block, old), blocks.counts(w.spec.block, old)
    lead = next((i for i, b in enumerate(sizes) if b != 1), len(old) - 1)
    tail = old[lead:]
    single = all(c == 1 and b == n for b, c, n in zip(sizes[lead:], counts[lead:], tail, strict=True))
    if len(tail) <= len(shape) and shape[len(shape) - len(tail) :] == tail:
        new, block = len(shape) - len(tail), w.spec.block
        if block is not None:
            block = ((1,) * (len(old) - len(block)) + block)[lead:]
    else:
        count = math.prod(old[:lead])
        new = next((i for i in range(len(shape) + 1) if math.prod(shape[:i]) == count), -1)
        if not single or new < 0 or new == len(shape) or shares_codes(w, w.ndim - 1):
            return NotImplemented
        if w._perm is not None or w._pre_scale is not None:
            return NotImplemented
        block = None if w.spec.block is None else (-1,) * (len(shape) - new)
        w = to_unpacked(w)
    w = to_sliceable(w)
    part_shape = (*shape[:new], *blocks.counts(block, shape)[new:])

    def part(p: Any, slot: str) -> Any:
        if slot == "codes":
            return p.reshape(*shape[:new], *(p.shape[lead:] if shape[new:] == tail else shape[new:]))
        if is_bit_stream(w, slot):  # only where the last axis stays
            return p.reshape(*part_shape[:-1], p.shape[-1])
        return _reshape_part(p, part_shape)

    out = if_consistent(map_value(w, part, shape=shape, spec=w.spec.with_(block=block)))
    if out is NotImplemented or out._codes.data_ptr() == w._codes.data_ptr():
        return out
    return out.with_(readonly=True)  # strides that no view can have


def _reshape_part(p: Any, shape: tuple[int, ...]) -> Any:
    if not isinstance(p, QT):
        return p.reshape(shape)
    out = with_unit_axes(p, shape)
    return reshape_leading_axes(p, shape) if out is NotImplemented else out


def _infer(w: QT, size: Sequence[int]) -> tuple[int, ...]:
    """The shape of view(size), with -1 resolved. Raises RuntimeError if the number of elements differs."""
    known = math.prod(n for n in size if n != -1)
    missing = w.numel() // known if known else 0
    shape = tuple(missing if n == -1 else n for n in size)
    if math.prod(shape) != w.numel():
        raise ArgumentError(f"view{tuple(size)} of a quantized tensor of shape {tuple(w.shape)}: sizes do not match")
    return shape
