"""Structural and in-place operations of the quantized tensor, written once on its parts.

Everything here works on stored axes; a logical axis becomes a stored one through ``w.axes``. An op that would cut
through a block returns NotImplemented and thereby becomes a counted fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing

from . import blocks, fallback
from .layouts import get_layout
from .numerics import Parts
from .tensor import (
    FUNCTIONS,
    AffineQuantizedTensor,
    copy_parts_,
    implements,
    stored_shape,
    write_,
)

aten = torch.ops.aten
QT = AffineQuantizedTensor
VALUE_SLOTS = ("codes", "scale", "zero_point", "offset")


def _view(func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    return return_and_correct_aliasing(func, args, kwargs, out)


def _map(w: QT, fn: Callable[[Tensor], Tensor], **changes: Any) -> QT:
    """The same function over all stored parts, static activation parameters too."""
    return w.with_(parts=Parts(*(None if p is None else fn(p) for p in w.parts)), **changes)


def _map_value(w: QT, fn: Callable[[Tensor, str], Tensor], **changes: Any) -> QT:
    """A function over the parts of the value: ``fn(part, slot)``."""
    parts = {s: fn(p, s) for s in VALUE_SLOTS if (p := getattr(w, s)) is not None}
    return w.with_(parts=w.parts._replace(**parts), **changes)


def sliceable(w: QT) -> QT:
    """w in a layout whose parts keep the order of axes: itself, or a read-only unpacked copy."""
    if w.spec.layout in ("plain", "bits"):
        return w
    name = "bits" if w.spec.format.bits < 8 else "plain"
    return w.to_layout(name).with_(readonly=True)


def _unpacked(w: QT) -> QT:
    """w with one code an element; a read-only copy where it was packed."""
    return w if w.spec.layout == "plain" else w.to_layout("plain").with_(readonly=True)


def _stored(w: QT, dim: int) -> int:
    """Stored axis of a logical one. Raises IndexError out of range."""
    rank = w.ndim
    if not -rank <= dim < rank:
        raise IndexError(f"dimension {dim} is out of range for a quantized tensor of shape {tuple(w.shape)}")
    dim %= rank
    return dim if w.axes is None else w.axes[dim]


def _axes(w: QT) -> tuple[int, ...]:
    return tuple(range(w.ndim)) if w.axes is None else w.axes


def _resize(shape: Sequence[int], dim: int, n: int) -> tuple[int, ...]:
    return (*shape[:dim], n, *shape[dim + 1 :])


# -- copies --------------------------------------------------------------------------------------------------------------


@implements(aten.detach.default, aten.alias.default)
def _detach(func: Any, args: Any, kwargs: Any) -> Any:
    return _view(func, args, kwargs, _map(args[0], func))


@implements(aten.clone.default)
def _clone(func: Any, args: Any, kwargs: Any) -> Any:
    return _map(args[0], torch.clone, readonly=False)


@implements(aten._to_copy.default)
def _to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    w: QT = args[0]
    dtype = kwargs.get("dtype") or w.dtype
    if not dtype.is_floating_point:
        return NotImplemented
    device = torch.device(kwargs.get("device") or w.device)
    devices = get_layout(w.spec.layout).devices
    if devices is not None and device.type not in devices:  # a packing of one device's kernels cannot travel
        w = w.to_layout("bits" if w.spec.format.bits < 8 else "plain")
    move = {k: v for k, v in kwargs.items() if k in ("device", "pin_memory", "non_blocking") and v is not None}
    return _map(w, lambda p: p.to(copy=True, device=device, non_blocking=move.get("non_blocking", False)), dtype=dtype)


@implements(aten._pin_memory.default)
def _pin(func: Any, args: Any, kwargs: Any) -> Any:
    return _map(args[0], lambda p: p.pin_memory())


@implements(aten.is_pinned.default)
def _is_pinned(func: Any, args: Any, kwargs: Any) -> bool:
    return all(p.is_pinned() for p in args[0].parts if p is not None)


@implements(aten._has_compatible_shallow_copy_type.default)
def _compatible(func: Any, args: Any, kwargs: Any) -> bool:
    return isinstance(args[0], QT) and isinstance(args[1], QT)


@implements(
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.new_empty.default,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty_strided.default,
)  # fmt: skip
def _factory(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Fresh float tensors of the logical shape: nothing of the weight's value is needed."""
    like = args[0].codes.new_empty(()).to(args[0].dtype).expand(args[0].shape)
    return func(like, *args[1:], **kwargs)


# -- order of axes -------------------------------------------------------------------------------------------------------


def _permuted(w: QT, order: Sequence[int]) -> QT:
    axes = _axes(w)
    new = tuple(axes[d] for d in order)
    return _map(w, lambda p: aten.alias.default(p), axes=new, shape=tuple(w.shape[d] for d in order))


@implements(aten.t.default)
def _t(func: Any, args: Any, kwargs: Any) -> Any:
    w = args[0]
    return _view(func, args, kwargs, _permuted(w, (1, 0)[: w.ndim] if w.ndim == 2 else range(w.ndim)))


@implements(aten.transpose.int)
def _transpose(func: Any, args: Any, kwargs: Any) -> Any:
    w, a, b = args
    _stored(w, a), _stored(w, b)
    order = list(range(w.ndim))
    order[a % w.ndim], order[b % w.ndim] = b % w.ndim, a % w.ndim
    return _view(func, args, kwargs, _permuted(w, order))


@implements(aten.permute.default)
def _permute(func: Any, args: Any, kwargs: Any) -> Any:
    w, dims = args
    order = [d % w.ndim for d in dims]
    if sorted(order) != list(range(w.ndim)):
        raise RuntimeError(f"permute{tuple(dims)} of a quantized tensor of shape {tuple(w.shape)}: not a permutation")
    return _view(func, args, kwargs, _permuted(w, order))


# -- parts of an axis ----------------------------------------------------------------------------------------------------


def cut(w: QT, dim: int, start: int, stop: int, step: int = 1) -> Any:
    """w[.., start:stop:step, ..] along logical ``dim``, quantized; NotImplemented where that cuts through blocks."""
    axis = _stored(w, dim)
    n = w.shape[dim]
    start, stop = (max(0, i + n) if i < 0 else min(i, n) for i in (start, stop))
    stop = max(start, stop)
    length = -(-(stop - start) // step)
    shape = _resize(w.shape, dim % w.ndim, length)
    if (start, stop, step) == (0, n, 1):
        return _map(w, lambda p: aten.alias.default(p), shape=shape)
    w = sliceable(w)
    if axis == w.ndim - 1 and w.spec.layout == "bits":
        w = _unpacked(w)
    size = blocks.resolve(w.spec.block, w.stored_shape)[axis]
    count = blocks.counts(w.spec.block, w.stored_shape)[axis]
    if size == 1:  # every part has an entry per element
        return _map_value(w, lambda p, s: aten.slice(p, axis, start, stop, step), shape=shape)
    first, last = start // size, -(-stop // size)
    whole = start % size == 0 and (stop % size == 0 or stop == n)
    if length == 0:
        first, last = 0, 1
    if count == 1 or last - first == 1 or (whole and step == 1):
        multi = last - first > 1

        def part(p: Tensor, slot: str) -> Tensor:
            if slot != "codes":
                return aten.slice(p, axis, first, last)
            return aten.slice(p, axis, start, last * size if multi else stop, step)

        readonly = w.readonly or not (whole and step == 1)
        out = _map_value(w, part, shape=shape, readonly=readonly)
        return out if _consistent(out) else NotImplemented
    return NotImplemented


def _consistent(w: QT) -> bool:
    """Whether the parts have the sizes that the spec says for this shape."""
    return w.scale is None or tuple(w.scale.shape) == blocks.counts(w.spec.block, w.stored_shape)


@implements(aten.slice.Tensor)
def _slice(func: Any, args: Any, kwargs: Any) -> Any:
    w, dim, start, stop, step = (*args, *(0, None, None, 1)[len(args) - 1 :])
    n = w.shape[dim]
    out = cut(w, dim, 0 if start is None else start, n if stop is None else stop, step)
    return out if out is NotImplemented else _view(func, args, kwargs, out)


@implements(aten.select.int)
def _select(func: Any, args: Any, kwargs: Any) -> Any:
    w, dim, index = args
    axis, n = _stored(w, dim), w.shape[dim]
    if not -n <= index < n:
        raise IndexError(f"index {index} is out of range for axis {dim} of a quantized tensor {tuple(w.shape)}")
    if w.ndim == 1:
        return NotImplemented  # a single number: nothing is won by keeping it quantized
    one = cut(w, dim, index % n, index % n + 1)
    if one is NotImplemented:
        return one
    out = _drop_axis(one, axis)
    return out if out is NotImplemented else _view(func, args, kwargs, out)


def _drop_axis(w: QT, axis: int) -> Any:
    """Remove a stored axis of size one."""
    block = w.spec.block
    w = sliceable(w)
    if axis == w.ndim - 1 and w.spec.layout == "bits":
        w = _unpacked(w)
    if block is not None:
        full = (1,) * (w.ndim - len(block)) + block
        block = (*full[:axis], *full[axis + 1 :])
    axes = _axes(w)
    logical = axes.index(axis)
    left = tuple(a - (a > axis) for a in axes if a != axis)
    shape = tuple(n for i, n in enumerate(w.shape) if i != logical)
    spec = w.spec.with_(block=block)
    for slot in ("scale", "offset"):  # a quantized scale drops the axis itself
        if isinstance(getattr(w, slot), QT):
            return NotImplemented if _sub_block_rank(getattr(w, slot)) else _squeeze_nested(w, axis, spec, left, shape)
    return _map_value(w, lambda p, s: aten.squeeze(p, axis), spec=spec, axes=left, shape=shape)


def _sub_block_rank(w: QT) -> bool:
    """Whether a nested part's own block spans leading axes, so that dropping one would change its meaning."""
    return w.spec.block is not None and len(w.spec.block) > 1


def _squeeze_nested(w: QT, axis: int, spec: Any, axes: Any, shape: Any) -> QT:
    return _map_value(w, lambda p, s: _drop_axis(p, axis) if isinstance(p, QT) else aten.squeeze(p, axis),
                      spec=spec, axes=axes, shape=shape)  # fmt: skip


@implements(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(func: Any, args: Any, kwargs: Any) -> Any:
    w = args[0]
    asked = range(w.ndim) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    dims = sorted((d % w.ndim for d in asked if w.shape[d] == 1), reverse=True)
    out: Any = w
    for d in dims:
        if out is NotImplemented or out.ndim == 1:
            return NotImplemented
        out = _drop_axis(out, _stored(out, d))
    if out is w:
        out = _map(w, lambda p: aten.alias.default(p))
    return out if out is NotImplemented else _view(func, args, kwargs, out)


@implements(aten.unsqueeze.default)
def _unsqueeze(func: Any, args: Any, kwargs: Any) -> Any:
    w, dim = args
    if not -w.ndim - 1 <= dim <= w.ndim:
        raise IndexError(f"unsqueeze({dim}) of a quantized tensor of shape {tuple(w.shape)}")
    out = _insert_axis(w, dim % (w.ndim + 1))
    return _view(func, args, kwargs, out)


@implements(aten.expand.default)
def _expand(func: Any, args: Any, kwargs: Any) -> Any:
    """Repeat axes of size one without copying. Products see the stride of zero and use the one weight there is."""
    w, size = args[:2]
    out = w
    for _ in range(len(size) - w.ndim):
        out = _insert_axis(out, 0)
    shape = tuple(n if s == -1 else s for s, n in zip(size, out.shape, strict=True))
    grown = [_stored(out, d) for d in range(out.ndim) if shape[d] != out.shape[d]]
    if any(out.stored_shape[axis] != 1 for axis in grown):
        raise RuntimeError(f"expand{tuple(size)} of a quantized tensor of shape {tuple(w.shape)}: sizes do not match")
    if grown and (w.spec.block is None or isinstance(w.scale, QT) or isinstance(w.offset, QT)):
        return NotImplemented
    to = [shape[_axes(out).index(axis)] if axis in grown else -1 for axis in range(out.ndim)]
    out = _map_value(sliceable(out), lambda p, s: p.expand(to), shape=shape, readonly=True)
    return _view(func, args, kwargs, out) if _consistent(out) else NotImplemented


@implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, args: Any, kwargs: Any) -> Any:
    w, size, dim = (*args, 0)[:3] if len(args) < 3 else args
    dim = kwargs.get("dim", dim)
    n = w.shape[dim]
    sizes = [min(size, n - i) for i in range(0, max(n, 1), max(size, 1))] if isinstance(size, int) else size
    outs, start = [], 0
    for length in sizes:
        out = cut(w, dim, start, start + length)
        if out is NotImplemented:
            return out
        outs.append(out)
        start += length
    return _view(func, args, kwargs, outs)


@implements(aten.unbind.int)
def _unbind(func: Any, args: Any, kwargs: Any) -> Any:
    w, dim = (*args, 0)[:2]
    outs = [_select(aten.select.int, (w, dim, i), {}) for i in range(w.shape[dim])] if w.ndim > 1 else [NotImplemented]
    return NotImplemented if any(o is NotImplemented for o in outs) else _view(func, args, kwargs, outs)


@implements(aten.cat.default)
def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    tensors, dim = (*args, kwargs.get("dim", 0))[:2]
    first = next(t for t in tensors if isinstance(t, QT))
    axis, d = _stored(first, dim), dim % first.ndim
    if not all(
        isinstance(t, QT)
        and (t.spec.with_(layout="plain"), t.act, t.axes, t.dtype, t.ndim)
        == (first.spec.with_(layout="plain"), first.act, first.axes, first.dtype, first.ndim)
        and _resize(t.shape, d, 0) == _resize(first.shape, d, 0)
        and not isinstance(t.scale, QT)
        and not isinstance(t.offset, QT)
        for t in tensors
    ):
        return NotImplemented
    whole = [_unpacked(t) for t in tensors]
    for t in whole[:-1]:
        if t.codes.shape[axis] != t.stored_shape[axis]:
            return NotImplemented  # padding would land in the middle
    shape = _resize(first.shape, d, sum(t.shape[d] for t in tensors))
    parts = {s: torch.cat([getattr(t, s) for t in whole], axis) for s in VALUE_SLOTS if getattr(first, s) is not None}
    out = whole[0].with_(parts=whole[0].parts._replace(**parts), shape=shape, readonly=False)
    sizes = {blocks.resolve(t.spec.block, t.stored_shape)[axis] for t in (*whole[:-1], out)}
    if (
        len(sizes) > 1
        or not _consistent(out)
        or tuple(out.codes.shape) != blocks.padded(out.spec.block, out.stored_shape)
    ):
        return NotImplemented
    return out.to_layout("bits") if first.spec.layout != "plain" and first.spec.format.bits < 8 else out


@implements(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _reshape(func: Any, args: Any, kwargs: Any) -> Any:
    """Regroup leading axes on which every element has its own block entry; the blocked axes stay as they are."""
    w, size = args
    shape = _infer(w, size)
    if shape == tuple(w.shape):
        return _view(func, args, kwargs, _map(w, lambda p: aten.alias.default(p)))
    if [n for n in shape if n != 1] == [n for n in w.shape if n != 1]:
        out = _move_singletons(w, shape)
        return out if out is NotImplemented else _view(func, args, kwargs, out)
    if w.axes is not None:
        return NotImplemented
    old = tuple(w.shape)
    keep = 0
    while keep < min(len(old), len(shape)) and old[-1 - keep] == shape[-1 - keep]:
        keep += 1
    blocked = [i for i, b in enumerate(blocks.resolve(w.spec.block, old)) if b != 1]
    if w.spec.block is None or not blocked or len(old) - blocked[0] > keep or keep == 0:
        return NotImplemented
    w = sliceable(w)
    keep = len(old) - blocked[0]
    lead = shape[: len(shape) - keep]
    if isinstance(w.scale, QT) or isinstance(w.offset, QT):
        return NotImplemented
    block = w.spec.block[-keep:] if len(w.spec.block) > keep else w.spec.block
    out = _map_value(
        w, lambda p, s: p.reshape(*lead, *p.shape[p.ndim - keep :]), shape=shape, spec=w.spec.with_(block=block)
    )
    return _view(func, args, kwargs, out) if _consistent(out) else NotImplemented


def _move_singletons(w: QT, shape: tuple[int, ...]) -> Any:
    """w with its axes of size one dropped and those of ``shape`` put in; the order of the others is kept."""
    out: Any = w
    for d in reversed(range(w.ndim)):
        if out.shape[d] == 1 and out.ndim > 1:
            out = _drop_axis(out, _stored(out, d))
            if out is NotImplemented:
                return out
    for d, n in enumerate(shape):
        if n == 1 and (d >= out.ndim or out.shape[d] != 1):
            out = _insert_axis(out, d)
    return out if tuple(out.shape) == shape else NotImplemented


def _insert_axis(w: QT, dim: int) -> QT:
    """A new logical axis of size one; it is stored first, so that blocks stay right-aligned."""
    w = sliceable(w)
    axes = tuple(a + 1 for a in _axes(w))
    return _map_value(
        w,
        lambda p, s: aten.unsqueeze(p, 0),
        axes=(*axes[:dim], 0, *axes[dim:]),
        shape=(*w.shape[:dim], 1, *w.shape[dim:]),
    )


def _infer(w: QT, size: Sequence[int]) -> tuple[int, ...]:
    known = 1
    for n in size:
        known *= n if n != -1 else 1
    if -1 in size:
        if known == 0 or w.numel() % known:
            raise RuntimeError(f"view{tuple(size)} of a quantized tensor of shape {tuple(w.shape)}: sizes do not match")
        return tuple(w.numel() // known if n == -1 else n for n in size)
    if known != w.numel():
        raise RuntimeError(f"view{tuple(size)} of a quantized tensor of shape {tuple(w.shape)}: sizes do not match")
    return tuple(size)


@implements(aten.index.Tensor, aten.index_select.default)
def _index(func: Any, args: Any, kwargs: Any) -> Any:
    """Rows by tensor index, along leading axes with a block entry per element."""
    w = args[0]
    if func is aten.index_select.default:
        if args[2].ndim != 1:
            return NotImplemented
        index: list[Any] = [None] * (args[1] % w.ndim) + [args[2]]
    else:
        index = list(args[1])
    if w.axes is not None or w.spec.block is None:
        return NotImplemented
    sizes = blocks.resolve(w.spec.block, w.shape)
    used = [i for i, ix in enumerate(index) if ix is not None]
    if len(used) != 1 or used[0] >= w.ndim - 1 or any(sizes[i] != 1 for i in range(used[0] + 1)):
        return NotImplemented
    w = sliceable(w)
    if isinstance(w.scale, QT) or isinstance(w.offset, QT):
        return NotImplemented
    axis = used[0]
    out = _map_value(w, lambda p, s: aten.index(p, index), shape=_index_shape(w, index[axis], axis), readonly=False)
    return out if _consistent(out) else NotImplemented


def _index_shape(w: QT, index: Tensor, axis: int) -> tuple[int, ...]:
    picked = (int(index.sum()),) if index.dtype in (torch.bool, torch.uint8) else tuple(index.shape)
    taken = index.ndim if index.dtype in (torch.bool, torch.uint8) else 1
    return (*w.shape[:axis], *picked, *w.shape[axis + taken :])


# -- in place ------------------------------------------------------------------------------------------------------------


@implements(aten.copy_.default)
def _copy_(func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[:2]
    if not isinstance(target, QT):
        return func(target, source._dequantize(target.dtype), *args[2:], **kwargs)
    if (
        isinstance(source, QT)
        and source.spec.with_(layout="plain") == target.spec.with_(layout="plain")
        and (source.shape, source.axes) == (target.shape, target.axes)
        and not target.readonly
    ):
        copy_parts_(target, source.to(target.device).to_layout(target.spec.layout))
    else:
        write_(target, source._dequantize(target.dtype) if isinstance(source, QT) else source)
    return return_and_correct_aliasing(func, args, kwargs, target)


@implements(
    aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.add_.Scalar, aten.sub_.Scalar,
    aten.mul_.Scalar, aten.div_.Scalar, aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default,
)  # fmt: skip
def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Arithmetic in float32 on the value, requantized into the same storages. PEFT merges this way."""
    target, *rest = args
    rest = [r._dequantize(r.dtype) if isinstance(r, QT) else r for r in rest]
    if not isinstance(target, QT):
        return func(target, *rest, **kwargs)
    if target.readonly:
        write_(target, target._dequantize(target.dtype))  # raises, with the remedy
    write_(target, func(target._dequantize(torch.float32).clone(), *rest, **kwargs))
    return return_and_correct_aliasing(func, args, kwargs, target)


# -- functions that reach into storage without dispatching ---------------------------------------------------------------


@implements(torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__, table=FUNCTIONS)
def _export(func: Any, args: Any, kwargs: Any) -> Any:
    fallback.note(f"Tensor.{func.__name__}", args[0])
    return func(args[0].dequantize(), *args[1:], **kwargs)


@implements(torch.Tensor.__setitem__, table=FUNCTIONS)
def _setitem(func: Any, args: Any, kwargs: Any) -> Any:
    """w[index] = value changes elements that share scales with others, so the whole tensor is requantized."""
    w, index, value = args
    if not isinstance(w, QT):
        func(w, index, value.dequantize() if isinstance(value, QT) else value)
        return
    fallback.note("Tensor.__setitem__", w)
    x = w.dequantize()
    x[index] = value.dequantize() if isinstance(value, QT) else value
    with torch.no_grad():
        write_(w, x)


__all__ = ["cut", "sliceable", "stored_shape"]
