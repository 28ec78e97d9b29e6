"""In-place operations on quantized tensors, and the fallback to a dequantized copy.

A write requantizes the new value into the same storages, so that every alias, view and optimizer sees it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

from ...support.arguments import show
from ...support.errors import ArgumentError, ArgumentTypeError
from .. import blocks, fallback, stochastic_rounding
from ..call_site import refuse_disk_offload
from ..distributed_hooks import answer
from ..formats import E8M0
from ..layouts import get_layout
from ..load_state_dict import warn_of_copy
from ..numerics import part_value, quantize, to_stored
from ..qparams import Params, choose
from ..spec import DTYPES, QuantSpec
from ..tensor import ATEN, FUNCTIONS, AffineQuantizedTensor, check_finite, implements

aten = torch.ops.aten
QT = AffineQuantizedTensor


class _RandomWords:
    """Random words for a sequence of writes."""

    def __init__(self, step: int, *key: int) -> None:
        self.step, self.key, self.writes = step, key, 0

    def words(self, shape: torch.Size, device: torch.device) -> Tensor:
        self.writes += 1
        return stochastic_rounding.random_bits(
            shape, stochastic_rounding.make_key(*self.key, self.writes), device
        ) + stochastic_rounding.as_int32(stochastic_rounding.step_mask(self.step))


_STOCHASTIC: ContextVar[_RandomWords | None] = ContextVar("pennyweight_stochastic_writes", default=None)


@contextmanager
def stochastic_writes(step: int, *key: int) -> Iterator[None]:
    """Within this context, writes use stochastic rounding, so that the mean of many writes is the value and updates
    smaller than a step of the codes are not lost. The random bits are a function of the key, the number of earlier
    writes in this context, the element and the step; over the steps they are spread evenly."""
    token = _STOCHASTIC.set(_RandomWords(step, *key))
    try:
        yield
    finally:
        _STOCHASTIC.reset(token)


def write_(target: QT, value: Tensor, *, update: bool = False) -> QT:
    """Requantize ``value`` into the storages of ``target``. value: anything that broadcasts to its shape.

    Writing the current value changes no bit, even if requantizing would. update: ``value`` is a small change of the
    current value; blocks keep their scale if it still fits. Raises RuntimeError if the target is a copy or shares a
    block's scale with elements outside it. Within :func:`stochastic_writes`, codes are rounded stochastically.
    """
    check_writable(target)
    stochastic = _STOCHASTIC.get()
    if stochastic is None:
        value = value.to(dtype=target.dtype)
    value = value.to(device=target.device).expand(target.shape)
    check_finite(value, f"value written to a quantized tensor {tuple(target.shape)}")
    if type(value) is Tensor and not value.is_meta and torch.equal(value, target._dequantize(value.dtype)):
        return target
    if target.axes is not None:
        value = value.permute([target.axes.index(i) for i in range(len(target.axes))])
    value = to_stored(value, target._perm, target._pre_scale)
    spec = target.spec.with_(layout="plain")
    if stochastic is None:
        plain = quantize(value, spec, params=_kept(target, value, spec, update))
    else:
        rule = "mx_rceil" if isinstance(spec.scale, QuantSpec) and spec.scale.format is E8M0 else None
        words = stochastic.words(value.shape, value.device)
        plain = quantize(value, spec, rule, params=_steady_scales(target, value, spec), words=words)
    parts = get_layout(target.spec.layout).pack(plain, target.spec, target.stored_shape)
    copy_parts_(target, QT(parts, target.spec, target.stored_shape, target.dtype))
    return target


def _kept(target: QT, value: Tensor, spec: QuantSpec, update: bool) -> Params | None:
    """The parameters to keep: a learned table always, scales if that prevents drift under updates; a zero."""
    if spec.format.kind == "learned":
        return _under_table(target, value, spec, update)
    kept = _kept_scales(target, value, spec) if update else None
    return _with_zeros(value, spec) if kept is None else kept


_ODD = 16  # shifts of more odd bits leave a 16-bit scale too few


def _with_zeros(value: Tensor, spec: QuantSpec) -> Params | None:
    """For integers with a real offset: parameters under which a block with exact zeros represents zero, as all other
    formats do. Otherwise torch's ``prune.remove``, which writes the masked weight, makes every pruned element nonzero.
    None: no such block.

    x = (q - mid) * scale + offset is exactly zero at q = mid - k in every arithmetic if offset = k * scale is exact in
    its dtype, so the scale has fewer significant bits than the dtype, by those of k's odd part. Of all k that with the
    smallest scale is taken.
    """
    if (
        spec.format.kind != "int" or spec.zero_point or not isinstance(spec.offset, torch.dtype)
        or spec.scale is not spec.offset or value.numel() == 0
    ):  # fmt: skip
        return None
    zero = value == 0
    if type(value) is Tensor and not value.is_meta and not bool(zero.any()):
        return None
    x = blocks.pad(value, spec.block)
    fresh, counts, inner = choose(x, spec), blocks.counts(spec.block, x.shape), blocks.inner_axes(x.ndim)
    assert fresh.scale is not None
    assert fresh.offset is not None
    view, info = blocks.split(x, counts), torch.finfo(spec.scale)
    low, high = view.amin(inner).clamp(max=0).double(), view.amax(inner).clamp(min=0).double()
    digits, limit = round(-math.log2(info.eps)) + 1, info.max / 2**spec.format.bits
    scale, shift = torch.full_like(low, limit), torch.zeros_like(low)
    for k in range(int(spec.mid - spec.format.hi), int(spec.mid - spec.format.lo) + 1):
        odd = abs(k) // (k & -k) if k else 1
        if odd < _ODD:
            zero_code = spec.mid - k
            needed = torch.maximum(_step(-low, zero_code - spec.format.lo), _step(high, spec.format.hi - zero_code))
            mantissa, exponent = torch.frexp(needed.clamp(info.smallest_normal, limit))
            bits = 2.0 ** (digits - (odd.bit_length() if odd > 1 else 0))
            needed = torch.ldexp((mantissa * bits).ceil() / bits, exponent)
            shift, scale = torch.where(needed < scale, k, shift), torch.minimum(needed, scale)
    has = blocks.split(blocks.pad(zero.to(torch.uint8), spec.block), counts).amax(inner) > 0
    has &= low < high  # zero is exact in a block of zeros
    dtype = fresh.scale.dtype
    return Params(
        torch.where(has, scale.to(dtype), fresh.scale), None, torch.where(has, (shift * scale).to(dtype), fresh.offset)
    )


def _step(end: Tensor, codes: float) -> Tensor:
    """The scale under which so many codes on one side of zero reach an end of the range."""
    return end / codes if codes else torch.where(end == 0, 0.0, torch.inf)


def _under_table(target: QT, value: Tensor, spec: QuantSpec, update: bool) -> Params:
    """Parameters under the existing table: the largest element of a block maps to the table's largest number. In an
    update, blocks that still use more than half of their range keep their scale."""
    assert target._table is not None
    x = blocks.pad(value, spec.block)
    fresh, reach = choose(x, spec), target._table.abs().max().float().clamp(min=2.0**-14)
    if spec.scale is None or not x.numel():
        return fresh._replace(table=target._table)
    assert fresh.scale is not None
    scale = fresh.scale.float() / reach
    if update and fresh.offset is None:
        old = part_value(target.plain_parts().scale, spec.scale, fresh.scale.shape, torch.float32)
        scale = torch.where((scale <= old * 1.01) & (2 * scale >= old), old, scale)
    return fresh._replace(scale=scale, table=target._table)


def _kept_scales(target: QT, value: Tensor, spec: QuantSpec) -> Params | None:
    """Parameters of an update in stored order: a block keeps its scale if the value fits it and reaches within a
    quarter of a step of an end of the code range. None: choose new ones, for formats where requantizing is stable.

    Symmetric integers are not stable: scale = absmax / 127.5, so a block whose largest code is 127 or -128 would get
    127/127.5 or 128/127.5 of its scale (at 4 bits 7/7.5 or 8/7.5). Repeated small updates would shrink the former and
    grow the latter without bound.
    """
    if (
        spec.format.kind != "int" or spec.zero_point or spec.offset is not None
        or not isinstance(spec.scale, torch.dtype) or value.numel() == 0
    ):  # fmt: skip
        return None
    x = blocks.pad(value, spec.block)
    fresh = choose(x, spec).scale
    assert fresh is not None
    scale = target.plain_parts().scale.to(fresh.dtype)
    view, inner = blocks.split(x, blocks.counts(spec.block, x.shape)), blocks.inner_axes(x.ndim)
    low, high = view.amin(inner) / scale, view.amax(inner) / scale
    bottom, top = spec.format.lo - spec.mid, spec.format.hi - spec.mid
    fits = (low >= bottom - 0.5) & (high <= top + 0.5)
    full = torch.maximum(-low, high) >= min(end for end in (-bottom, top) if end > 0) - 0.25
    return Params(torch.where(fits & full, scale, fresh))


# With stochastic rounding a new scale re-rounds all codes of its block, which adds noise. So scales change rarely: when
# a value would saturate (then with headroom), or when a quarter of the code range is no longer used.
_LEAST_USED, _ROOM = 0.75, 1 + 1 / 16


def _steady_scales(target: QT, value: Tensor, spec: QuantSpec) -> Params | None:
    """Parameters under which nothing saturates, because saturation would bias the mean. None: use the rule."""
    f = spec.format
    bottom, top = f.lo - spec.mid, f.hi - spec.mid
    if (
        f.kind == "learned" or spec.zero_point or spec.offset is not None or not isinstance(spec.scale, torch.dtype)
        or not bottom < 0 < top or value.numel() == 0
    ):  # fmt: skip
        return None
    x = blocks.pad(value, spec.block)
    inner, reach = blocks.inner_axes(x.ndim), min(top, -bottom)
    absmax = blocks.split(x, blocks.counts(spec.block, x.shape)).abs().amax(inner).float()
    scale = target.plain_parts().scale.float()
    used = absmax / (scale * reach)
    fresh = absmax / reach * torch.where(used > 1, _ROOM, 1.0)
    fresh = fresh.clamp(torch.finfo(torch.float32).smallest_normal)
    return Params(torch.where((used <= 1) & (used >= _LEAST_USED), scale, fresh))


def check_writable(target: QT) -> None:
    """Raise RuntimeError if the target is a copy, or shares scales or its channel order with other elements."""
    if target.readonly:
        raise RuntimeError(
            f"in-place change of a part of a quantized tensor {tuple(target.shape)} ({target.spec}): it is a copy, or "
            "shares scales or its channel order with elements outside it; dequantize the whole weight, change that, "
            "and copy_ it back"
        )


def copy_parts_(target: QT, source: QT) -> None:
    """Copy parts bit for bit; both have the same spec and layout. A ``perm`` or ``pre_scale`` that source lacks is left
    unchanged."""
    for part, other in zip(target.parts, source.parts, strict=True):
        if isinstance(part, QT):
            copy_parts_(part, other)
        elif part is not None and other is not None:
            part.copy_(other)


@implements(aten.copy_.default)
def _copy_(func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[:2]
    if not isinstance(target, QT):
        warn_of_copy(target, source)
        fallback.count("copy_/dequantize")
        return func(target, source._dequantize(target.dtype), *args[2:], **kwargs)
    if answer(func, args, kwargs) is not NotImplemented:
        return return_and_correct_aliasing(func, args, kwargs, target)
    if (
        isinstance(source, QT)
        and source.spec.with_(layout="plain") == target.spec.with_(layout="plain")
        and (source.shape, source.axes) == (target.shape, target.axes)
        and (source._perm is None, source._pre_scale is None) == (target._perm is None, target._pre_scale is None)
    ):
        check_writable(target)
        if source.act != target.act:
            warn_of_copy(target, source)
        moved: Any = source.to(target.device)
        copy_parts_(target, moved.to_layout(target.spec.layout))
    elif isinstance(source, QT):
        warn_of_copy(target, source)
        write_(target, source._dequantize(target.dtype))
    else:
        write_(target, source)
    return return_and_correct_aliasing(func, args, kwargs, target)


@implements(
    aten.add_.Tensor, aten.sub_.Tensor, aten.mul_.Tensor, aten.div_.Tensor, aten.add_.Scalar, aten.sub_.Scalar,
    aten.mul_.Scalar, aten.div_.Scalar, aten.addcmul_.default, aten.addcdiv_.default, aten.lerp_.Scalar,
)  # fmt: skip
def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Arithmetic in float32 on the value, requantized into the same storages. Used by PEFT merges and optimizers."""
    target, *rest = args
    rest = [_float(r) if isinstance(r, Tensor) else r for r in rest]
    if not isinstance(target, QT):
        return func(target, *rest, **kwargs)
    check_writable(target)
    write_(target, func(target._dequantize(torch.float32).clone(), *rest, **kwargs), update=True)
    return return_and_correct_aliasing(func, args, kwargs, target)


def _float(x: Tensor) -> Tensor:
    """x, with 16-bit floats widened to float32, so that the operands have one dtype."""
    if isinstance(x, QT):
        return x._dequantize(torch.float32)
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


@implements(aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default)
def _fill(func: Any, args: Any, kwargs: Any) -> Any:
    target, *value = args
    if not isinstance(target, QT):
        return func(target, *(v._dequantize(v.dtype) if isinstance(v, QT) else v for v in value))
    write_(target, func(torch.empty(target.shape, dtype=target.dtype, device=target.device), *value))
    return return_and_correct_aliasing(func, args, kwargs, target)


@implements(aten.resize_.default, aten.resize_as_.default)
def _resize_(func: Any, args: Any, kwargs: Any) -> Any:
    target, size = args[:2]
    shape = tuple(size.shape if isinstance(size, Tensor) else size)
    if not isinstance(target, QT):
        return target.resize_(shape)
    if shape != tuple(target.shape):
        raise ArgumentError(f"a quantized tensor {tuple(target.shape)} cannot be resized to {shape}; make a new one")
    return return_and_correct_aliasing(func, args, kwargs, target)


@implements(None)
def _fall_back(func: Any, args: Any, kwargs: Any) -> Any:
    """Compute on dequantized copies; requantize mutated arguments in place."""
    family = ATEN.get(func.namespace)
    if family is not None:
        return family(func, args, kwargs)
    if func._can_decompose():
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Autograd)):
            out = func.decompose(*args, **kwargs)
        if out is not NotImplemented:
            return out
    schema = func._schema
    writes = {a.name: a.alias_info is not None and a.alias_info.is_write for a in schema.arguments}
    aliases = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    first = next(a for a in tree_leaves((args, kwargs)) if isinstance(a, QT))
    fallback.record(str(func), first, returns_view=aliases)
    targets: list[tuple[QT, Tensor]] = []

    def plain(value: Any, write: bool) -> Any:
        if isinstance(value, QT):
            if write:
                check_writable(value)
            x = value._dequantize(value.dtype)
            if write:
                x = x.clone()
                targets.append((value, x))
            return x
        return type(value)(plain(v, write) for v in value) if isinstance(value, (list, tuple)) else value

    names = [a.name for a in schema.arguments]
    new_args = [plain(a, writes[n]) for a, n in zip(args, names, strict=False)]
    out = func(*new_args, **{n: plain(a, writes[n]) for n, a in kwargs.items()})
    for target, value in targets:
        if value.shape != target.shape:
            raise ArgumentError(f"{func} cannot change the shape of a quantized tensor in place: {tuple(target.shape)}")
        write_(target, value)
    back = {id(value): target for target, value in targets}
    return tree_map(lambda o: back.get(id(o), o), out) if back else out


# -- functions that access storage without dispatching ---------------------------------------------------------------


@implements(torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__dlpack__, table=FUNCTIONS)
def _export(func: Any, args: Any, kwargs: Any) -> Any:
    refuse_disk_offload(args[0])
    fallback.record(f"Tensor.{func.__name__}", args[0])
    return func(args[0].dequantize(), *args[1:], **kwargs)


@implements(aten.is_set_to.default)
def _is_set_to(func: Any, args: Any, kwargs: Any) -> Any:
    a, b = args
    if not isinstance(a, QT) or not isinstance(b, QT):
        return False
    return a.data_ptr() == b.data_ptr() and (a.spec, a.axes, a.shape) == (b.spec, b.axes, b.shape)


@implements(
    torch.Tensor.data_ptr, getattr(torch.Tensor, "const_data_ptr", torch.Tensor.data_ptr),  # new in torch 2.13
    torch.Tensor.untyped_storage, torch.Tensor.share_memory_, torch.Tensor.is_shared, table=FUNCTIONS,
)  # fmt: skip
def _own_storage(func: Any, args: Any, kwargs: Any) -> Any:
    """Called through ``torch.Tensor``, which bypasses the methods of the subclass."""
    return getattr(args[0], func.__name__)(*args[1:], **kwargs)


@implements(
    torch.matrix_power, torch.linalg.matrix_power, torch.Tensor.matrix_power, F.gaussian_nll_loss, torch.stft,
    torch.Tensor.stft, table=FUNCTIONS,
)  # fmt: skip
def _dense(func: Any, args: Any, kwargs: Any) -> Any:
    """Functions that need strides, or that write their result into a clone of an operand, which would quantize it."""
    operands = [a for a in tree_leaves((args, kwargs)) if isinstance(a, QT)]
    fallback.record(func.__name__, operands[0])
    args, kwargs = tree_map(lambda a: a.dequantize() if isinstance(a, QT) else a, (args, kwargs))
    return func(*args, **kwargs)


@implements(torch.Tensor.data.__set__, table=FUNCTIONS)  # type: ignore[attr-defined]
def _set_data(func: Any, args: Any, kwargs: Any) -> None:
    """See ``AffineQuantizedTensor.data``."""
    target, value = args
    if not isinstance(target, QT):
        func(target, value)
        return
    if not isinstance(value, Tensor):
        raise ArgumentTypeError(f"data of a quantized tensor must be a tensor, got {show(value)}")
    here = f"data of a quantized tensor {tuple(target.shape)} ({target.spec})"
    if value.shape != target.shape:
        raise ValueError(f"{here} cannot be replaced by {tuple(value.shape)}; assign a new parameter instead")
    if value.is_meta != target.is_meta:  # torch refuses it for float tensors too
        raise ValueError(
            f"{here} on {target.device} cannot be replaced by values on {value.device}; assign a new parameter"
        )
    if not isinstance(value, QT):
        if value.dtype not in DTYPES.values():
            raise ValueError(
                f"{here} cannot be replaced by values of {value.dtype}; expected one of {', '.join(DTYPES)}: convert "
                f"them first, such as values.to({target.dtype})"
            )
        value = _in_new_parts(target, value, here)
    target.adopt(value)


def _in_new_parts(old: QT, value: Tensor, name: str) -> QT:
    """A float value under the spec of ``old``; the current value gives the same bits.

    Blocks keep their scale if it still fits, because the value may be the current one with changes: a mask, a sum.
    """
    with torch.inference_mode(False), torch.no_grad():  # the parts of a parameter outlive an inference mode
        new = aten._to_copy.default(old.detach(), dtype=value.dtype, device=value.device)
        write_(new, value.detach(), update=True)
        if old.spec.offset is not None and type(value) is Tensor and not value.is_meta:
            lost = int(((value == 0) & (new._dequantize(new.dtype) != 0)).sum())
            if lost:
                warnings.warn(
                    f"{name}: {lost} of {int((value == 0).sum())} exact zeros became nonzero, because a format with "
                    "quantized offsets cannot keep them; prune a float model, then quantize it under a format that "
                    'represents zero, such as "int8" or "uint4"',
                    UserWarning,
                    stacklevel=4,
                )
    return new


@implements(torch.Tensor.__setitem__, table=FUNCTIONS)
def _setitem(func: Any, args: Any, kwargs: Any) -> None:
    """w[index] = value changes elements that share scales with others, so the whole tensor is requantized."""
    w, index, value = args
    if isinstance(value, QT):
        value = value.dequantize()
    if not isinstance(w, QT):
        func(w, index, value)
        return
    fallback.record("Tensor.__setitem__", w)
    check_writable(w)
    x = w.dequantize()
    x[index] = value
    with torch.no_grad():
        write_(w, x)
