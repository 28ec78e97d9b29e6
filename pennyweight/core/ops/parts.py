"""Structural operations of the quantized tensor, applied to each part: shared helpers, and copies.

They work on stored axes; ``w.axes`` maps logical axes to stored ones. An op that would cut through a block, or that a
part does not support, returns NotImplemented and becomes a counted fallback. See view.py, slice.py and inplace.py for
the other ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing as _view

from .. import blocks
from ..layouts import READABLE, get_layout, pack_on_arrival, portable_layout, reads_layout
from ..spec import DTYPES
from ..tensor import FUNCTIONS, VALUE_SLOTS, AffineQuantizedTensor, each_part, implements

aten = torch.ops.aten
QT = AffineQuantizedTensor


def map_parts(w: QT, fn: Callable[[Any], Any], **changes: Any) -> QT:
    """Apply a function to all stored parts, including static activation parameters."""
    return w.with_(parts=each_part(w.parts, fn), **changes)


def map_value(w: QT, fn: Callable[[Any, str], Any], **changes: Any) -> Any:
    """Apply ``fn(part, slot)`` to the parts of the value. NotImplemented if ``fn`` returns that for any part.

    The spec is updated with the specs of nested quantized parts, whose block may have lost an axis.
    """
    parts = {slot: fn(p, slot) for slot in VALUE_SLOTS if (p := getattr(w, f"_{slot}")) is not None}
    if any(p is NotImplemented for p in parts.values()):
        return NotImplemented
    nested = {slot: p.spec for slot, p in parts.items() if isinstance(p, QT)}
    if nested:
        changes["spec"] = changes.get("spec", w.spec).with_(**nested)
    return w.with_(parts=w.parts._replace(**parts), **changes)


def stored_tensors(w: QT) -> Iterator[Tensor]:
    """The plain tensors that w is stored in, including those of nested parts, in a fixed order."""
    for p in w.parts:
        if isinstance(p, QT):
            yield from stored_tensors(p)
        elif p is not None:
            yield p


def to_sliceable(w: QT) -> QT:
    """w in a layout whose parts keep the order of axes: w itself, or a read-only unpacked copy."""
    return w if w.spec.layout in READABLE else to_portable(w).with_(readonly=True)


def to_portable(w: QT) -> QT:
    """w in a layout that every op reads and that is the same on every machine; writable if w is."""
    return w if w.spec.layout in READABLE else w.to_layout(portable_layout(w.spec))


def to_unpacked(w: QT) -> QT:
    """w in layout "plain"; a read-only copy if it was packed."""
    return w if w.spec.layout == "plain" else w.to_layout("plain").with_(readonly=True)


def is_bit_stream(w: QT, slot: str) -> bool:
    """Whether the last axis of a part other than the codes is a bit stream."""
    return slot == "zero_point" and w.spec.layout == "bits" and w.spec.zero_point_bits < 8 and w.ndim > 0


def shares_codes(w: QT, axis: int) -> bool:
    """Whether neighbours on a stored axis share a code, so that the axis can be cut only at multiples of ``dim``."""
    return w.spec.format.dim > 1 and axis == w.ndim - 1


def axes_of(w: QT) -> tuple[int, ...]:
    return tuple(range(w.ndim)) if w.axes is None else w.axes


def stored_axis(w: QT, dim: int) -> int:
    """Stored axis of a logical axis. Raises IndexError if out of range."""
    if not -w.ndim <= dim < w.ndim:
        raise IndexError(f"dimension {dim} is out of range for a quantized tensor of shape {tuple(w.shape)}")
    return axes_of(w)[dim]


def with_shape(shape: Sequence[int], dim: int, n: int) -> tuple[int, ...]:
    return (*shape[:dim], n, *shape[dim + 1 :])


def with_alias(w: QT, **changes: Any) -> QT:
    return map_parts(w, aten.alias.default, **changes)


def if_consistent(w: Any) -> Any:
    """w if the sizes of its parts match its spec and shape, else NotImplemented."""
    if w is NotImplemented:
        return w
    shape = w.stored_shape
    ok = w._scale is None or tuple(w._scale.shape) == blocks.counts(w.spec.block, shape)
    ok = ok and all(p is None or tuple(p.shape) == tuple(shape[-1:]) for p in (w._perm, w._pre_scale))
    if w.spec.layout == "plain":
        ok = ok and tuple(w._codes.shape) == w.spec.codes_shape(shape)
    return w if ok else NotImplemented


# -- copies ----------------------------------------------------------------------------------------------------------


@implements(aten.detach.default, aten.alias.default)
def _detach(func: Any, args: Any, kwargs: Any) -> Any:
    return _view(func, args, kwargs, map_parts(args[0], func))


@implements(aten.clone.default)
def _clone(func: Any, args: Any, kwargs: Any) -> Any:
    return map_parts(args[0], torch.clone, readonly=False)


@implements(aten._to_copy.default)
def _to_copy(func: Any, args: Any, kwargs: Any) -> Any:
    w: QT = args[0]
    dtype = kwargs.get("dtype") or w.dtype
    if dtype not in DTYPES.values():
        return NotImplemented
    device, before = torch.device(kwargs.get("device") or w.device), w.spec.layout
    if device.type != "meta" and not reads_layout(before, device):  # packed for another device
        w = w.to_layout(portable_layout(w.spec))
    repacked = _moves(w, device) and (w.readers is not None or get_layout(before).devices is not None)
    # packing on a CPU reads what has arrived, which a copy that is still under way has not
    non_blocking = bool(kwargs.get("non_blocking")) and not (repacked and device.type == "cpu")
    out = map_parts(w, lambda p: p.to(device, copy=True, non_blocking=non_blocking), dtype=dtype, readonly=False)
    if repacked:
        out = pack_on_arrival(out, before)
    return out.pin_memory() if kwargs.get("pin_memory") else out


def _moves(w: QT, device: torch.device) -> bool:
    """Whether a copy to ``device`` moves values to another one. Without an index it is the current one of its type."""
    if device.type == "meta" or w.is_meta:
        return False
    return device.type != w.device.type or device.index not in (None, w.device.index)


@implements(aten._pin_memory.default)
def _pin(func: Any, args: Any, kwargs: Any) -> Any:
    return map_parts(args[0], lambda p: p.pin_memory())


@implements(aten.is_pinned.default)
def _is_pinned(func: Any, args: Any, kwargs: Any) -> bool:
    return all(p.is_pinned() for p in args[0].parts if p is not None)


@implements(aten._has_compatible_shallow_copy_type.default)
def _compatible(func: Any, args: Any, kwargs: Any) -> bool:
    return isinstance(args[0], QT) and isinstance(args[1], QT)


@implements(torch.empty_like, table=FUNCTIONS)
def _empty_like(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns a quantized tensor, so that a checkpoint can be copied into a model made by ``Module.to_empty``.

    Only for direct calls: torch's own composite functions write float results into the tensor they get.
    """
    w = args[0]
    dtype = kwargs.get("dtype") or w.dtype
    if dtype not in DTYPES.values() or kwargs.get("requires_grad"):
        return NotImplemented
    device = kwargs.get("device") or w.device
    out = map_parts(w, lambda p: torch.empty_like(p, device=device), dtype=dtype, readonly=False)
    if w._perm is None:
        return out
    # Codes may be uninitialized, but perm is used as an index and must be a valid permutation.
    return out.with_(perm=torch.arange(w._perm.shape[0], dtype=w._perm.dtype, device=device))


@implements(
    aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
    aten.rand_like.default, aten.randn_like.default, aten.randint_like.default, aten.randint_like.low_dtype,
    aten.new_empty.default, aten.new_zeros.default, aten.new_ones.default, aten.new_full.default,
    aten.new_empty_strided.default,
)  # fmt: skip
def _factory(func: Any, args: Any, kwargs: Any) -> Tensor:
    """New float tensors of the logical shape, such as optimizer states; the weight's value is not used."""
    w = args[0]
    like = torch.empty_strided(w.shape, w.stride(), dtype=w.dtype, device="meta")
    return func(like, *args[1:], **{**kwargs, "device": kwargs.get("device") or w.device})
