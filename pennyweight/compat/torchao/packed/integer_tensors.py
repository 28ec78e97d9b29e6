"""Tensors of unsigned integers of 2 and 4 bits, packed along the last axis: UInt2Tensor, UInt4Tensor, and torchao's
prototypes of weights over them.

They hold integers, not quantized floats: ``elem`` has the bytes, ``.to(dtype)`` gives the integers as a plain tensor.
Structural operations keep them packed, except those that would cut a byte, which raise NotImplementedError.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..base_tensor import TorchAOBaseTensor
from ..qparams import require
from .bit_fields import _down_size, _pack, _unpack, _up_size

__all__ = ["BitnetTensor", "PerChannelSymmetricWeightUInt4Tensor", "UInt2Tensor", "UInt4Tensor"]

aten = torch.ops.aten


class _Packed(TorchAOBaseTensor):
    """Integers of ``bits`` bits; the first of a byte is its highest."""

    bits: ClassVar[int]
    reported: ClassVar[torch.dtype]  # the dtype of the tensor
    tensor_data_names = ["elem"]  # noqa: RUF012
    tensor_attribute_names: list[str] = []  # noqa: RUF012
    elem: Tensor

    def __new__(cls, elem: Tensor, *args: Any, **kwargs: Any) -> Any:
        require(elem.dtype == torch.uint8, f"{cls.__name__} holds bytes (uint8), got {elem.dtype}")
        shape = _up_size(cls.bits, elem.shape)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=cls.reported, device=elem.device)

    def __init__(self, elem: Tensor, *args: Any, **kwargs: Any) -> None:
        self.elem = elem

    @classmethod
    def from_unpacked(cls, unpacked: Tensor) -> Any:
        """The tensor of integers below 2**bits. Raises AssertionError unless whole bytes divide the last axis."""
        return cls(_pack(cls.bits, unpacked))

    def plain(self) -> Tensor:
        """The integers, uint8."""
        return _unpack(self.bits, self.elem)

    def like(self, elem: Tensor) -> Any:
        """A tensor of other bytes of the same kind."""
        return type(self)(elem)

    def tolist(self) -> Any:
        return self.plain().tolist()

    def __eq__(self, other: Any) -> bool:  # type: ignore[override]
        """Whether all integers are equal, as in torchao."""
        return isinstance(other, _Packed) and torch.equal(self.elem, other.elem)

    def __ne__(self, other: Any) -> bool:  # type: ignore[override]
        return not self == other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.tolist()}, dtype=torch.uint{self.bits})"


@_Packed.implements_torch_function([Tensor.to])
def _to(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """A dtype gives plain integers, also the tensor's own; a device alone keeps the class."""
    w = args[0]
    device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args[1:], **kwargs)
    if dtype is None:
        return w.like(w.elem.to(device, non_blocking=non_blocking))
    return w.plain().to(device or w.device, dtype, non_blocking)


@_Packed.implements([aten._to_copy.default, aten.view.dtype])
def _as_dtype(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    w, dtype = args[0], args[1] if len(args) > 1 else kwargs["dtype"]
    if func is aten.view.dtype and dtype not in (torch.uint8, torch.int8):
        raise NotImplementedError(f"view of a {type(w).__name__} as {dtype}: use .to(dtype)")
    return w.plain().to(kwargs.get("device") or w.device, dtype)


@_Packed.implements([aten.view.default, aten._unsafe_view.default, aten.reshape.default])
def _view(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    w, size = args[0], list(args[1])
    if -1 in size:
        size[size.index(-1)] = w.numel() // -math.prod(size)
    return w.like(w.elem.reshape(_down_size(w.bits, size)))


@_Packed.implements([aten.t.default, aten.transpose.int, aten.transpose_copy.int])
def _transpose(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    w = args[0]
    return w.like(_pack(w.bits, func(w.plain(), *args[1:]).contiguous()))


@_Packed.implements([aten.slice.Tensor])
def _slice(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    w, dim, start, stop, step = (*args, *(0, None, None, 1)[len(args) - 1 :])
    if dim % w.dim() != w.dim() - 1:
        return w.like(func(w.elem, dim, start, stop, step))
    first, last, _ = slice(start, stop).indices(w.shape[-1])
    unit = 8 // w.bits
    if step != 1 or first % unit or last % unit:
        raise NotImplementedError(
            f"a slice {first}:{last}:{step} of a {type(w).__name__} cuts bytes of {unit}; use .to(torch.uint8)"
        )
    return w.like(func(w.elem, dim, first // unit, last // unit, 1))


@_Packed.implements([aten.select.int, aten.unbind.int])
def _select(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """One index of an axis other than the last; of the last axis, plain integers."""
    w, dim = args[0], args[1] if len(args) > 1 else 0
    if dim % w.dim() == w.dim() - 1:
        return func(w.plain(), dim, *args[2:])
    out = func(w.elem, dim, *args[2:])
    return w.like(out) if isinstance(out, Tensor) else [w.like(one) for one in out]


@_Packed.implements([aten.equal.default, aten.allclose.default, aten.eq.Tensor])
def _compare(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return func(*(a.plain() if isinstance(a, _Packed) else a for a in args), **kwargs)


class UInt4Tensor(_Packed):
    """Two 4-bit integers per byte."""

    bits, reported = 4, torch.uint4


class UInt2Tensor(_Packed):
    """Four 2-bit integers per byte. ``from_packed`` is torchao's name of ``from_unpacked``."""

    bits, reported = 2, torch.uint8

    @classmethod
    def from_packed(cls, unpacked: Tensor) -> Any:
        return cls.from_unpacked(unpacked)


class BitnetTensor(UInt2Tensor):
    """sign(x) + 1 of a weight: 0, 1 or 2. Products use these integers in float32, without a scale; for weights -1, 0, 1
    under a scale use pennyweight.training.BitNetTrainingConfig, or SpecConfig(TERNARY_TENSOR)."""

    @classmethod
    def from_float(cls, w: Tensor) -> Any:
        return cls.from_unpacked((w.sign() + 1).to(torch.uint8))


@BitnetTensor.implements([aten.mm.default, aten.addmm.default])
def _bitnet_product(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    return func(*((a.plain() if isinstance(a, _Packed) else a).to(torch.float32) for a in args))


class PerChannelSymmetricWeightUInt4Tensor(UInt4Tensor):
    """clamp(round(x / scale), 0, 15) with scale = max|row| / 7.5: negative numbers become zero, as in torchao. For a
    weight use Int4WeightOnlyConfig."""

    tensor_data_names = ["elem", "scales"]  # noqa: RUF012
    scales: Tensor

    def __init__(self, elem: Tensor, scales: Tensor, **kwargs: Any) -> None:
        self.elem, self.scales = elem, scales

    @classmethod
    def from_unpacked(cls, unpacked: Tensor, scales: Tensor) -> Any:  # type: ignore[override]
        return cls(_pack(cls.bits, unpacked), scales)

    @classmethod
    def from_float(cls, w_fp32: Tensor) -> Any:
        eps = torch.finfo(torch.float32).eps
        scale = (w_fp32.abs().amax(1) / 7.5).clamp(min=eps).to(w_fp32.dtype)
        codes = (w_fp32 / scale.unsqueeze(1)).round().clamp(0, 15)
        return cls.from_unpacked(codes.to(torch.uint8), scale)

    def like(self, elem: Tensor) -> Any:
        return type(self)(elem, self.scales)


@PerChannelSymmetricWeightUInt4Tensor.implements([aten.mm.default, aten.addmm.default])
def _scaled_product(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """x @ codes * scales (+ bias), with the weight transposed."""
    x, w = args[-2:]
    y = torch.mm(x, w.plain().to(x.dtype)) * w.scales
    return y if func is aten.mm.default else args[0] + y
