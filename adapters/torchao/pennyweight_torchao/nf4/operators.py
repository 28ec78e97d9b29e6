"""torchao's operators of NF4 weights, where they differ from those of other quantized tensors, and your own.

    .to(dtype), .bfloat16() ..   a plain dequantized tensor; without a dtype, and in Module.to, it stays quantized
    copy_(other)                 the other tensor in torchao's numbers, in the blocks of this one
    view, reshape, as_strided    to one or two axes: quantized, read-only
    new_zeros(size)              a quantized tensor of zeros

They apply to weights with torchao's numbers (:func:`.parts.is_torchao`) only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverloadPacket

from pennyweight.core.call_site import converts_module
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import ATEN, FUNCTIONS
from pennyweight.core.tensor import AffineQuantizedTensor as QT

from . import parts
from .parts import is_torchao

__all__ = ["implements", "implements_torch_function"]

aten = torch.ops.aten
Handler = Callable[[Any, Any, Any], Any]
NF4_OPS_TABLE: dict[Any, Any] = {}  # aten op -> your handler(func, args, kwargs)
NF4_TORCH_FUNCTIONS: dict[Any, Any] = {}  # torch function -> your handler(*args, **kwargs)


def implements(aten_ops: Sequence[Any]) -> Callable[[Any], Any]:
    """Decorator: ``handler(func, args, kwargs)`` computes these aten ops if an argument is an NF4 weight, until they
    are removed from ``NF4_OPS_TABLE``."""

    def add(handler: Any) -> Any:
        for op in aten_ops:
            for each in [getattr(op, name) for name in op.overloads()] if isinstance(op, OpOverloadPacket) else [op]:
                if each not in NF4_OPS_TABLE:
                    _extend(ATEN, each, _theirs)
                NF4_OPS_TABLE[each] = handler
        return handler

    return add


def implements_torch_function(torch_function: Any) -> Callable[[Any], Any]:
    """Decorator: ``handler(*args, **kwargs)`` computes this torch function if an argument is an NF4 weight. If it
    raises NotImplementedError, the function runs as usual."""

    def add(handler: Any) -> Any:
        if torch_function not in NF4_TORCH_FUNCTIONS:
            _extend(FUNCTIONS, torch_function, _their_function)
        NF4_TORCH_FUNCTIONS[torch_function] = handler
        return handler

    return add


def _extend(table: dict[Any, Handler], op: Any, handler: Callable[[Handler, Any, Any, Any], Any]) -> None:
    """Let ``handler(previous, func, args, kwargs)`` compute an op of NF4 weights, and the previous handler others."""
    previous = table.get(op, _none)

    def chosen(func: Any, args: Any, kwargs: Any) -> Any:
        if not any(map(is_torchao, _flat(args))):
            return previous(func, args, kwargs)
        return handler(previous, func, args, kwargs)

    table[op] = chosen


def _flat(args: Any) -> list[Any]:
    return [a for arg in args for a in (arg if isinstance(arg, (list, tuple)) else (arg,))]


def _none(func: Any, args: Any, kwargs: Any) -> Any:
    return NotImplemented


def _theirs(previous: Handler, func: Any, args: Any, kwargs: Any) -> Any:
    return NF4_OPS_TABLE.get(func, previous)(func, args, kwargs)


def _their_function(previous: Handler, func: Any, args: Any, kwargs: Any) -> Any:
    handler = NF4_TORCH_FUNCTIONS.get(func)
    if handler is None:
        return previous(func, args, kwargs)
    try:
        return handler(*args, **kwargs)
    except NotImplementedError:
        return previous(func, args, kwargs)


# -- dtypes ------------------------------------------------------------------------------------------------------------


def _to(previous: Handler, func: Any, args: Any, kwargs: Any) -> Any:
    """Also with the weight's own dtype, for which torch would return the weight itself."""
    if not is_torchao(args[0]):
        return previous(func, args, kwargs)
    rest = {name: value for name, value in kwargs.items() if name != "copy"}
    device, dtype, non_blocking, memory_format = torch._C._nn._parse_to(*args[1:], **rest)
    if dtype is None or converts_module():
        return previous(func, args, kwargs)
    x = parts.get_original_weight(args[0])
    return x.to(device or x.device, dtype, non_blocking, memory_format=memory_format or torch.preserve_format)


def _to_copy(previous: Handler, func: Any, args: Any, kwargs: Any) -> Any:
    """``.float()``, ``.bfloat16()`` and others; a change of only the device arrives with the weight's dtype."""
    w, dtype = args[0], kwargs.get("dtype")
    if dtype in (None, w.dtype) or converts_module():
        return previous(func, args, kwargs)
    return func(parts.get_original_weight(w), **kwargs)


# -- writes and new tensors --------------------------------------------------------------------------------------------


def _double(w: QT) -> bool:
    """Whether w has torchao's parts: quantized scales in the order of the flattened weight."""
    return isinstance(w.spec.scale, QuantSpec) and w.axes is None


def _copy(previous: Handler, func: Any, args: Any, kwargs: Any) -> Any:
    target, source = args[:2]
    if not is_torchao(target) or not _double(target) or source.shape != target.shape or source.is_meta:
        return previous(func, args, kwargs)
    plain = target.spec.with_(layout="plain")
    if isinstance(source, QT) and source.spec.with_(layout="plain") == plain and source.axes is None:
        return previous(func, args, kwargs)
    block, scaler_block = parts.block_size(target), parts.scaler_block_size(target)
    if target.numel() % (block * scaler_block):
        return previous(func, args, kwargs)
    x = parts.get_original_weight(source) if isinstance(source, QT) else source
    new = parts.quantize(x.detach().to(target.device, target.dtype), block, scaler_block)
    return previous(func, (target, new, *args[2:]), kwargs)


def _new_zeros(previous: Handler, func: Any, args: Any, kwargs: Any) -> Any:
    w, size = args[0], _size(args[1:] or (kwargs.get("size"),))
    out = previous(func, args, kwargs)  # torch.distributed has its own use of it
    dtype = kwargs.get("dtype")
    if out is not NotImplemented or size is None or not _double(w) or dtype not in (None, w.dtype):
        return out
    block, scaler_block = parts.block_size(w), parts.scaler_block_size(w)
    elements = math.prod(size)
    if len(size) > 2 or elements % (block * scaler_block):
        raise NotImplementedError(
            f"aten.new_zeros(NF4Tensor) with new size {size}: needs one or two axes and a multiple of {block} elements "
            f"times {scaler_block} scalers; use torch.zeros for a plain tensor"
        )
    device = kwargs.get("device") or w.device
    n = elements // block
    q = torch.zeros(n, dtype=torch.int8, device=device)
    factor = torch.ones(n // scaler_block, dtype=w.dtype, device=device)
    data = torch.full((elements // 2,), 0x77, dtype=torch.uint8, device=device)  # two codes of zero
    meta = parts.describe(w, size)
    return parts.build(meta, block, n, scaler_block, q, factor, factor.new_zeros(()), data, parts.nf4(w).to(device))


# -- shapes ------------------------------------------------------------------------------------------------------------


def _size(args: Any) -> tuple[int, ...] | None:
    """The sizes given one by one or as a sequence; None if these are no sizes."""
    sizes = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
    return tuple(sizes) if all(isinstance(n, int) and not isinstance(n, bool) for n in sizes) else None


def with_shape(w: QT, size: tuple[int, ...]) -> QT:
    """A read-only copy of w with another shape of as many elements."""
    block = parts.block_size(w)
    given = (block, w.numel() // block, parts.scaler_block_size(w))
    tensors = (parts.quantized_scalers, parts.quantization_factor, parts.scaler_mean, parts.quantized_data, parts.nf4)
    new = parts.build(parts.describe(w, size), *given, *(get(w) for get in tensors))
    return new.with_(readonly=True).requires_grad_(w.requires_grad)


def _view(previous: Handler, func: Any, args: Any, kwargs: Any) -> Any:
    w, size = args[0], _size(args[1:])
    out = previous(func, args, kwargs)  # torch.distributed flattens its shards
    if out is not NotImplemented or size is None or len(size) not in (1, 2) or not _double(w):
        return out
    if size.count(-1) == 1 and math.prod(size):
        size = tuple(w.numel() // -math.prod(size) if n == -1 else n for n in size)
    if size == tuple(w.shape) or math.prod(size) != w.numel():
        return NotImplemented  # torch returns an alias, or says what is wrong with the sizes
    return with_shape(w, size)


def _as_strided(previous: Handler, func: Any, args: Any, kwargs: Any) -> Any:
    w, size, stride, *offset = args
    plain = parts.describe(w, size)
    contiguous = tuple(stride) == plain.original_strides and not (offset and offset[0])
    if not contiguous or len(size) not in (1, 2) or math.prod(size) != w.numel() or tuple(size) == tuple(w.shape):
        return previous(func, args, kwargs)
    return with_shape(w, tuple(size)) if _double(w) else previous(func, args, kwargs)


for _function, _handler in (
    (Tensor.to, _to), (Tensor.new_zeros, _new_zeros), (Tensor.view, _view), (Tensor.reshape, _view),
):  # fmt: skip
    _extend(FUNCTIONS, _function, _handler)
for _op, _handler in (
    (aten._to_copy.default, _to_copy), (aten.copy_.default, _copy), (aten.as_strided.default, _as_strided),
):  # fmt: skip
    _extend(ATEN, _op, _handler)
