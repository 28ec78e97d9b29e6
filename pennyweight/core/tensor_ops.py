"""Structural operations of the quantized tensor, written once on its parts.

Everything here works on stored axes; a logical axis becomes a stored one through ``w.axes``. An op that would cut
through a block, or needs what a part cannot do, returns NotImplemented and thereby becomes a counted fallback.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing as _view

from . import blocks, fallback
from .layouts import get_layout
from .spec import DTYPES, QuantSpec
from .tensor import FUNCTIONS, AffineQuantizedTensor, each_part, implements

aten = torch.ops.aten
QT = AffineQuantizedTensor
VALUE_SLOTS = ("codes", "scale", "zero_point", "offset")


def _map(w: QT, fn: Callable[[Any], Any], **changes: Any) -> QT:
    """The same function over all stored parts, static activation parameters too."""
    return w.with_(parts=each_part(w.parts, fn), **changes)


def _map_value(w: QT, fn: Callable[[Any, str], Any], **changes: Any) -> Any:
    """``fn(part, slot)`` over the parts of the value. NotImplemented where it is so for a part.

    The spec follows its quantized parts, whose own block may have lost an axis.
    """
    parts = {slot: fn(p, slot) for slot in VALUE_SLOTS if (p := getattr(w, slot)) is not None}
    if any(p is NotImplemented for p in parts.values()):
        return NotImplemented
    nested = {slot: p.spec for slot, p in parts.items() if isinstance(p, QT)}
    if nested:
        changes["spec"] = changes.get("spec", w.spec).with_(**nested)
    return w.with_(parts=w.parts._replace(**parts), **changes)


def _packing(spec: QuantSpec) -> str:
    """The layout that is smallest and keeps the order of axes."""
    return "bits" if spec.format.bits < 8 else "plain"


def sliceable(w: QT) -> QT:
    """w in a layout whose parts keep the order of axes: itself, or a read-only unpacked copy."""
    return w if w.spec.layout in ("plain", "bits") else w.to_layout(_packing(w.spec)).with_(readonly=True)


def _unpacked(w: QT) -> QT:
    """w with one code an element; a read-only copy where it was packed."""
    return w if w.spec.layout == "plain" else w.to_layout("plain").with_(readonly=True)


def _axes(w: QT) -> tuple[int, ...]:
    return tuple(range(w.ndim)) if w.axes is None else w.axes


def _stored(w: QT, dim: int) -> int:
    """Stored axis of a logical one. Raises IndexError out of range."""
    if not -w.ndim <= dim < w.ndim:
        raise IndexError(f"dimension {dim} is out of range for a quantized tensor of shape {tuple(w.shape)}")
    return _axes(w)[dim]


def _resize(shape: Sequence[int], dim: int, n: int) -> tuple[int, ...]:
    return (*shape[:dim], n, *shape[dim + 1 :])


def _aliased(w: QT, **changes: Any) -> QT:
    return _map(w, aten.alias.default, **changes)


def _consistent(w: Any) -> Any:
    """w if its parts have the sizes that its spec says for its shape, else NotImplemented."""
    if w is NotImplemented:
        return w
    shape = w.stored_shape
    ok = w.scale is None or tuple(w.scale.shape) == blocks.counts(w.spec.block, shape)
    if w.spec.layout == "plain":
        ok = ok and tuple(w.codes.shape) == blocks.padded(w.spec.block, shape)
    return w if ok else NotImplemented


# -- copies ----------------------------------------------------------------------------------------------------------


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
    if dtype not in DTYPES.values():
        return NotImplemented
    device = torch.device(kwargs.get("device") or w.device)
    devices = get_layout(w.spec.layout).devices
    if devices is not None and device.type not in (*devices, "meta"):  # one device's packing cannot travel
        w = w.to_layout(_packing(w.spec))
    non_blocking = bool(kwargs.get("non_blocking"))
    out = _map(w, lambda p: p.to(device, copy=True, non_blocking=non_blocking), dtype=dtype, readonly=False)
    return out.pin_memory() if kwargs.get("pin_memory") else out


@implements(aten._pin_memory.default)
def _pin(func: Any, args: Any, kwargs: Any) -> Any:
    return _map(args[0], lambda p: p.pin_memory())


@implements(aten.is_pinned.default)
def _is_pinned(func: Any, args: Any, kwargs: Any) -> bool:
    return all(p.is_pinned() for p in args[0].parts if p is not None)


@implements(aten._has_compatible_shallow_copy_type.default)
def _compatible(func: Any, args: Any, kwargs: Any) -> bool:
    return isinstance(args[0], QT) and isinstance(args[1], QT)


@implements(torch.empty_like, table=FUNCTIONS)
def _empty_like(func: Any, args: Any, kwargs: Any) -> Any:
    """Quantized as well, so that ``Module.to_empty`` gives a model that a checkpoint can be copied into.

    Only where it is called by name: torch's own composite functions write their float results into such a tensor.
    """
    w = args[0]
    dtype = kwargs.get("dtype") or w.dtype
    if dtype not in DTYPES.values() or kwargs.get("requires_grad"):
        return NotImplemented
    device = kwargs.get("device") or w.device
    return _map(w, lambda p: torch.empty_like(p, device=device), dtype=dtype, readonly=False)


@implements(
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype,
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty_strided.default,
)  # fmt: skip
def _factory(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Fresh float tensors of the logical shape, as optimizer states are: nothing of the weight's value is needed."""
    w = args[0]
    like = torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device="meta")
    return func(like, *args[1:], **{**kwargs, "device": kwargs.get("device") or w.device})


# -- order of axes ---------------------------------------------------------------------------------------------------


def _permuted(w: QT, order: Sequence[int]) -> QT:
    axes = _axes(w)
    return _aliased(w, axes=tuple(axes[d] for d in order), shape=tuple(w.shape[d] for d in order))


@implements(aten.t.default)
def _t(func: Any, args: Any, kwargs: Any) -> Any:
    w = args[0]
    if w.ndim > 2:
        raise RuntimeError(f"t() expects at most 2 axes, the quantized tensor has shape {tuple(w.shape)}")
    return _view(func, args, kwargs, _permuted(w, range(w.ndim)[::-1]))


@implements(aten.transpose.int)
def _transpose(func: Any, args: Any, kwargs: Any) -> Any:
    w, a, b = args
    order = list(range(w.ndim))
    _stored(w, a), _stored(w, b)
    order[a], order[b] = order[b], order[a]
    return _view(func, args, kwargs, _permuted(w, order))


@implements(aten.permute.default)
def _permute(func: Any, args: Any, kwargs: Any) -> Any:
    w, dims = args
    order = [d % max(w.ndim, 1) for d in dims]
    if sorted(order) != list(range(w.ndim)):
        raise RuntimeError(f"permute{tuple(dims)} of a quantized tensor of shape {tuple(w.shape)}: not a permutation")
    return _view(func, args, kwargs, _permuted(w, order))


@implements(aten.as_strided.default)
def _as_strided(func: Any, args: Any, kwargs: Any) -> Any:
    """Another order of axes, which is how compiled functions give back a transposed input; nothing else.

    Raises RuntimeError: strides and offsets are those of elements in a storage, which a quantized tensor has not.
    """
    w, size, stride = args[:3]
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    mine = list(zip(w.shape, w.stride(), strict=True))
    wanted = list(zip(size, stride, strict=True))
    if offset or sorted(mine) != sorted(wanted) or (len(set(mine)) < len(mine) and mine != wanted) or w.readonly:
        raise RuntimeError(
            f"as_strided({tuple(size)}, {tuple(stride)}, {offset}) of a quantized tensor {tuple(w.shape)} ({w.spec}): "
            "it has no strided storage; use slices and transposes, and clone() a part that a compiled function returns"
        )
    return _view(func, args, kwargs, _permuted(w, [mine.index(pair) for pair in wanted]))


# -- parts of an axis ------------------------------------------------------------------------------------------------


def cut(w: QT, dim: int, start: int, stop: int, step: int = 1) -> Any:
    """w[.., start:stop:step, ..] along logical ``dim``, quantized; NotImplemented where that cuts through blocks.

    A piece that keeps one scale while elements outside it share it is marked read-only.
    """
    axis, n = _stored(w, dim), w.shape[dim]
    start, stop = (max(0, i + n) if i < 0 else min(i, n) for i in (start, stop))
    stop = max(start, stop)
    if (start, stop, step) == (0, n, 1):
        return _aliased(w)
    return _cut(w, axis, start, stop, step, _resize(w.shape, dim % w.ndim, -(-(stop - start) // step)))


def _cut(w: QT, axis: int, start: int, stop: int, step: int, shape: tuple[int, ...]) -> Any:
    w = sliceable(w)
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
    end = last * size if last - first > 1 else stop  # padding goes with the blocks it completes
    bits = w.spec.format.bits if w.spec.layout == "bits" and axis == w.ndim - 1 else 8
    if bits < 8 and (step != 1 or start * bits % 8 or end * bits % 8):  # not at bytes of the stream
        w, bits = _unpacked(w), 8
        readonly = True

    def part(p: Any, slot: str) -> Any:
        if slot == "codes":
            return aten.slice(p, axis, start * bits // 8, -(-end * bits // 8), step)
        if size == 1:
            return _slice_part(p, axis, start, stop, step)
        return _slice_part(p, axis, first, last, 1)

    return _consistent(_map_value(w, part, shape=shape, readonly=readonly))


def _slice_part(p: Any, axis: int, start: int, stop: int, step: int) -> Any:
    return cut(p, axis, start, stop, step) if isinstance(p, QT) else aten.slice(p, axis, start, stop, step)


@implements(aten.slice.Tensor)
def _slice(func: Any, args: Any, kwargs: Any) -> Any:
    filled = (*args, *(0, None, None, 1)[len(args) - 1 :])
    w, dim, start, stop, step = filled
    out = cut(w, dim, 0 if start is None else start, w.shape[dim] if stop is None else stop, step)
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
    out = one if one is NotImplemented else _drop_axis(one, axis)
    return out if out is NotImplemented else _view(func, args, kwargs, out)


@implements(aten.split.Tensor, aten.split_with_sizes.default)
def _split(func: Any, args: Any, kwargs: Any) -> Any:
    w, size = args[:2]
    dim = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    _stored(w, dim)
    n = w.shape[dim]
    sizes = [min(size, n - i) for i in range(0, max(n, 1), max(size, 1))] if isinstance(size, int) else size
    if sum(sizes) != n:
        raise RuntimeError(f"split into {sizes} along axis {dim} of a quantized tensor {tuple(w.shape)}: sizes differ")
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    outs = [cut(w, dim, start, start + length) for start, length in zip(starts, sizes, strict=True)]
    return NotImplemented if any(o is NotImplemented for o in outs) else _view(func, args, kwargs, outs)


@implements(aten.unbind.int)
def _unbind(func: Any, args: Any, kwargs: Any) -> Any:
    w = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if w.ndim == 1:
        return NotImplemented
    ones = [cut(w, dim, i, i + 1) for i in range(w.shape[dim])]
    outs = [o if o is NotImplemented else _drop_axis(o, _stored(w, dim)) for o in ones]
    return NotImplemented if any(o is NotImplemented for o in outs) else _view(func, args, kwargs, outs)


@implements(aten.cat.default)
def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    first = next(t for t in tensors if isinstance(t, QT))
    axis, d = _stored(first, dim), dim % first.ndim
    if not all(
        isinstance(t, QT)
        and (t.act, t.axes, t.dtype, t.ndim) == (first.act, first.axes, first.dtype, first.ndim)
        and _resize(t.shape, d, 0) == _resize(first.shape, d, 0)
        and all(a is b or (a is not None and b is not None and torch.equal(a, b))
                for a, b in zip(t.parts[4:], first.parts[4:], strict=True))
        for t in tensors
    ):  # fmt: skip
        return NotImplemented
    out = _join(tensors, axis, _resize(first.shape, d, sum(t.shape[d] for t in tensors)))
    if out is NotImplemented or first.spec.layout == "plain":
        return out
    return out.to_layout(_packing(out.spec))


def _join(tensors: Sequence[QT], axis: int, shape: tuple[int, ...]) -> Any:
    whole = [_unpacked(t) for t in tensors]
    first = whole[0]
    inner = [t.codes.shape[axis] != t.stored_shape[axis] for t in whole[:-1]]
    if any(inner) or any(t.spec != first.spec for t in whole):  # padding would land in the middle
        return NotImplemented

    def part(p: Any, slot: str) -> Any:
        pieces = [getattr(t, slot) for t in whole]
        if isinstance(p, QT):
            return _join(pieces, axis, _resize(p.shape, axis, sum(q.shape[axis] for q in pieces)))
        return torch.cat(pieces, axis)

    out = _map_value(first, part, shape=shape, readonly=False)
    if out is NotImplemented:
        return out
    sizes = {blocks.resolve(t.spec.block, t.stored_shape)[axis] for t in (*whole[:-1], out)}
    return _consistent(out) if len(sizes) == 1 else NotImplemented


@implements(aten.stack.default)
def _stack(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = args[0]
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not all(isinstance(t, QT) for t in tensors):
        return NotImplemented
    dim %= tensors[0].ndim + 1
    grown = [_insert_axis(t, dim) for t in tensors]
    return NotImplemented if any(t is NotImplemented for t in grown) else _cat(func, (grown, dim), {})


@implements(aten.index.Tensor, aten.index_select.default)
def _index(func: Any, args: Any, kwargs: Any) -> Any:
    """By one tensor of indices or a mask along an axis: one with an entry per element, or covered by one block."""
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
        return rows if rows is NotImplemented else _regroup(rows, (*picks.shape, *w.shape[1:]))
    return _pick(w, axis, picks)


def _pick(w: QT, axis: int, picks: Tensor) -> Any:
    w = sliceable(w)
    if axis == w.ndim - 1:
        w = _unpacked(w)
    size = blocks.resolve(w.spec.block, w.stored_shape)[axis]
    one = size > 1 and blocks.counts(w.spec.block, w.stored_shape)[axis] == 1
    if not one and size != 1:
        return NotImplemented
    where = [None] * axis + [picks]

    def part(p: Any, slot: str) -> Any:
        if one and slot != "codes":
            return p.clone()
        return _pick(p, axis, picks) if isinstance(p, QT) else aten.index(p, where)

    shape = _resize(w.shape, axis, picks.shape[0])
    return _consistent(_map_value(w, part, shape=shape, readonly=False))


# -- number of axes --------------------------------------------------------------------------------------------------


def _drop_axis(w: QT, axis: int) -> Any:
    """Remove a stored axis of size one."""
    w = sliceable(w)
    if axis == w.ndim - 1:
        w = _unpacked(w)
    block = w.spec.block
    if block is not None:
        full = (1,) * (w.ndim - len(block)) + block
        block = (*full[:axis], *full[axis + 1 :])
    axes = _axes(w)
    left = tuple(a - (a > axis) for a in axes if a != axis)
    shape = tuple(n for n, a in zip(w.shape, axes, strict=True) if a != axis)

    def part(p: Any, slot: str) -> Any:
        return _drop_axis(p, axis) if isinstance(p, QT) else aten.squeeze.dim(p, axis)

    return _consistent(_map_value(w, part, spec=w.spec.with_(block=block), axes=left, shape=shape))


def _insert_axis(w: QT, dim: int) -> Any:
    """A new logical axis of size one; it is stored first, so that blocks stay right-aligned."""
    w = sliceable(w)
    axes = tuple(a + 1 for a in _axes(w))

    def part(p: Any, slot: str) -> Any:
        return _insert_axis(p, 0) if isinstance(p, QT) else aten.unsqueeze(p, 0)

    shape = (*w.shape[:dim], 1, *w.shape[dim:])
    return _map_value(w, part, axes=(*axes[:dim], 0, *axes[dim:]), shape=shape)


@implements(aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default)
def _squeeze(func: Any, args: Any, kwargs: Any) -> Any:
    w = args[0]
    asked = range(w.ndim) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = {d % w.ndim for d in asked if _stored(w, d) >= 0 and w.shape[d] == 1}
    out = _reaxed(w, tuple(n for d, n in enumerate(w.shape) if d not in gone))
    return out if out is NotImplemented else _view(func, args, kwargs, out)


@implements(aten.unsqueeze.default)
def _unsqueeze(func: Any, args: Any, kwargs: Any) -> Any:
    w, dim = args
    if not -w.ndim - 1 <= dim <= w.ndim:
        raise IndexError(f"unsqueeze({dim}) of a quantized tensor of shape {tuple(w.shape)}")
    return _view(func, args, kwargs, _insert_axis(w, dim % (w.ndim + 1)))


@implements(aten.expand.default)
def _expand(func: Any, args: Any, kwargs: Any) -> Any:
    """Repeat axes of size one without copying. Products see the stride of zero and use the one weight there is."""
    w, size = args[:2]
    out: Any = w
    for _ in range(len(size) - w.ndim):
        out = _insert_axis(out, 0)
    shape = tuple(n if s == -1 else s for s, n in zip(size, out.shape, strict=True))
    if any(n not in (1, s) for s, n in zip(shape, out.shape, strict=True)):
        raise RuntimeError(f"expand{tuple(size)} of a quantized tensor of shape {tuple(w.shape)}: sizes do not match")
    out = _aliased(out) if shape == tuple(out.shape) else _expanded(sliceable(out), shape)
    return out if out is NotImplemented else _view(func, args, kwargs, out)


def _expanded(w: QT, shape: tuple[int, ...]) -> Any:
    stored = w.with_(shape=shape).stored_shape
    if stored[-1] != w.stored_shape[-1]:
        w = _unpacked(w)
    part_shape = blocks.counts(w.spec.block, stored)

    def part(p: Any, slot: str) -> Any:
        if slot == "codes":
            return p.expand(*(-1 if n == m else n for n, m in zip(stored, w.stored_shape, strict=True)))
        return _expanded(p, part_shape) if isinstance(p, QT) else p.expand(part_shape)

    return _consistent(_map_value(w, part, shape=shape, readonly=True))


@implements(aten.view.default, aten._unsafe_view.default, aten.reshape.default)
def _reshape(func: Any, args: Any, kwargs: Any) -> Any:
    w, size = args
    shape = _infer(w, size)
    out = _reaxed(w, shape)
    if out is NotImplemented:
        out = _regroup(w, shape)
    if out is NotImplemented and func is aten._unsafe_view.default:  # reshape has cloned w, in its own order of axes
        fallback.note(str(func), w)
        return w._dequantize(w.dtype).reshape(shape)
    return out if out is NotImplemented else _view(func, args, kwargs, out)


def _reaxed(w: QT, shape: tuple[int, ...]) -> Any:
    """w with its axes of size one dropped and those of ``shape`` put in; the order of the others is kept."""
    if shape == tuple(w.shape):
        return _aliased(w)
    if [n for n in shape if n != 1] != [n for n in w.shape if n != 1]:
        return NotImplemented
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


def _regroup(w: QT, shape: tuple[int, ...]) -> Any:
    """Regroup leading axes that have an entry per element; trailing axes stay, or lie in one block before and after."""
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
        if not single or new < 0 or new == len(shape):
            return NotImplemented
        block = None if w.spec.block is None else (-1,) * (len(shape) - new)
        w = _unpacked(w)
    w = sliceable(w)
    part_shape = (*shape[:new], *blocks.counts(block, shape)[new:])

    def part(p: Any, slot: str) -> Any:
        if slot == "codes":
            return p.reshape(*shape[:new], *(p.shape[lead:] if shape[new:] == tail else shape[new:]))
        return _reshape_part(p, part_shape)

    out = _consistent(_map_value(w, part, shape=shape, spec=w.spec.with_(block=block)))
    if out is NotImplemented or out.codes.data_ptr() == w.codes.data_ptr():
        return out
    return out.with_(readonly=True)  # strides that no view can have


def _reshape_part(p: Any, shape: tuple[int, ...]) -> Any:
    if not isinstance(p, QT):
        return p.reshape(shape)
    out = _reaxed(p, shape)
    return _regroup(p, shape) if out is NotImplemented else out


def _infer(w: QT, size: Sequence[int]) -> tuple[int, ...]:
    """The shape that view(size) asks for. Raises RuntimeError where the numbers of elements differ."""
    known = math.prod(n for n in size if n != -1)
    missing = w.numel() // known if known else 0
    shape = tuple(missing if n == -1 else n for n in size)
    if math.prod(shape) != w.numel():
        raise RuntimeError(f"view{tuple(size)} of a quantized tensor of shape {tuple(w.shape)}: sizes do not match")
    return shape


__all__ = ["cut", "sliceable"]
