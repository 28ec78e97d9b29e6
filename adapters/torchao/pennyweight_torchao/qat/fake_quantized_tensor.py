"""torchao.quantization.qat.affine_fake_quantized_tensor: a float tensor that products see quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from ..base_tensor import TorchAOBaseTensor
from ..enums import MappingType, ZeroPointDomain
from ..primitives import _fake_quantize_affine
from ..qparams import (
    _choose_qparams_affine_dont_preserve_zero,
    _choose_qparams_affine_tinygemm,
    _get_and_check_qmin_qmax,
    choose_qparams_affine,
)
from .functions import _UnwrapAffineFakeQuantizedTensor

__all__ = [
    "AffineFakeQuantizedTensor", "_AffineFakeQuantizedTensor", "_to_affine_fake_quantized", "to_affine_fake_quantized",
]  # fmt: skip
aten = torch.ops.aten


@dataclass(frozen=True)
class _Quantized:
    """The fake quantization of a tensor: its values after quantization in blocks, differentiable."""

    mapping_type: MappingType
    block_size: tuple[int, ...]
    target_dtype: Any
    quant_min: int | None
    quant_max: int | None
    eps: float | None
    scale_dtype: torch.dtype | None
    zero_point_dtype: torch.dtype | None
    preserve_zero: bool
    zero_point_domain: ZeroPointDomain

    def __call__(self, t: AffineFakeQuantizedTensor) -> Tensor:
        low, high = _get_and_check_qmin_qmax(self.target_dtype, self.quant_min, self.quant_max)
        choose: Callable[..., Any] = choose_qparams_affine
        if not self.preserve_zero and self.zero_point_domain is ZeroPointDomain.FLOAT:
            choose = _choose_qparams_affine_tinygemm
        elif not self.preserve_zero and self.zero_point_domain is ZeroPointDomain.INT:
            choose = _choose_qparams_affine_dont_preserve_zero
        scale, zero_point = choose(
            t.original_tensor.detach(), self.mapping_type, self.block_size, self.target_dtype, low, high, self.eps,
            self.scale_dtype, self.zero_point_dtype,
        )  # fmt: skip
        x = _UnwrapAffineFakeQuantizedTensor.apply(t)
        return _fake_quantize_affine(
            x, self.block_size, scale, zero_point, torch.int32, low, high, self.zero_point_domain
        )  # fmt: skip


class _ToFakeQuantized(torch.autograd.Function):
    """Float tensor -> the tensor that products see quantized; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantized: _Quantized) -> Any:
        return AffineFakeQuantizedTensor(x, quantized, True)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None]:
        return gy, None


class AffineFakeQuantizedTensor(TorchAOBaseTensor):
    """A float tensor that F.linear, mm and addmm read as ``get_value()``: quantized and dequantized, with torchao's
    gradient. Optimizers update the float values.

    original_tensor      the float tensor
    apply_fake_quant_fn  a tensor of this class -> its quantized values
    fake_quant_enabled   whether products see the quantized values
    """

    tensor_data_names = ["original_tensor"]  # noqa: RUF012
    tensor_attribute_names = ["apply_fake_quant_fn", "fake_quant_enabled"]  # noqa: RUF012

    def __new__(
        cls, original_tensor: Tensor, apply_fake_quant_fn: Callable[[Any], Tensor], fake_quant_enabled: bool = True,
        **kwargs: Any,
    ) -> AffineFakeQuantizedTensor:  # fmt: skip
        for name in ("dtype", "device", "requires_grad"):
            kwargs.setdefault(name, getattr(original_tensor, name))
        new: Any = Tensor._make_wrapper_subclass(cls, original_tensor.shape, **kwargs)  # type: ignore[attr-defined]
        return new  # type: ignore[no-any-return]

    def __init__(
        self, original_tensor: Tensor, apply_fake_quant_fn: Callable[[Any], Tensor], fake_quant_enabled: bool = True,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        self.original_tensor, self.apply_fake_quant_fn = original_tensor, apply_fake_quant_fn
        self.fake_quant_enabled = fake_quant_enabled

    @classmethod
    def from_float(
        cls, original_input: Tensor, mapping_type: MappingType, block_size: Sequence[int], target_dtype: torch.dtype,
        quant_min: int | None = None, quant_max: int | None = None, eps: float | None = None,
        scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype | None = None,
        preserve_zero: bool = True, zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
    ) -> AffineFakeQuantizedTensor:  # fmt: skip
        """Quantizes in blocks, see :func:`choose_qparams_affine`; ``preserve_zero=False`` lets ranges exclude zero.

        Raises ValueError for a domain of None.
        """
        if zero_point_domain is None:
            raise ValueError("Please use ZeroPointDomain.NONE instead of None")
        quantized = _Quantized(
            mapping_type, tuple(block_size), target_dtype, quant_min, quant_max, eps, scale_dtype, zero_point_dtype,
            preserve_zero, zero_point_domain,
        )  # fmt: skip
        return _ToFakeQuantized.apply(original_input, quantized)

    def get_value(self) -> Tensor:
        """What products see."""
        if self.fake_quant_enabled:
            return self.apply_fake_quant_fn(self)
        return _UnwrapAffineFakeQuantizedTensor.apply(self)

    def _create_new(self, new_value: Tensor) -> AffineFakeQuantizedTensor:
        """Another float tensor with this fake quantization."""
        return type(self)(new_value, self.apply_fake_quant_fn, self.fake_quant_enabled, requires_grad=False)


Fake = AffineFakeQuantizedTensor
_AffineFakeQuantizedTensor = AffineFakeQuantizedTensor
to_affine_fake_quantized = _to_affine_fake_quantized = AffineFakeQuantizedTensor.from_float


def _values(args: Any) -> Any:
    return tree_map_only(Fake, lambda t: t.get_value(), args)


def _floats(args: Any) -> Any:
    return tree_map_only(Fake, lambda t: t.original_tensor, args)


@Fake.implements_torch_function(F.linear)
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    return F.linear(*_values(args), **_values(kwargs))


@Fake.implements([aten.mm.default, aten.addmm.default, aten.linear.default])
def _product(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    return func(*_values(args), **kwargs)


@Fake.implements([aten.t.default])
def _transposed(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    old = args[0]
    new = old._create_new(func(old.original_tensor))
    if isinstance(old.apply_fake_quant_fn, _Quantized):
        new.apply_fake_quant_fn = replace(
            old.apply_fake_quant_fn, block_size=old.apply_fake_quant_fn.block_size[::-1]
        )  # fmt: skip
    return return_and_correct_aliasing(func, args, kwargs, new)


@Fake.implements([
    getattr(getattr(aten, name), overload)
    for name, overload in (
        ("add", "Tensor"), ("add_", "Tensor"), ("sub_", "Tensor"), ("mul_", "Tensor"), ("mul_", "Scalar"),
        ("div_", "Tensor"), ("addcdiv_", "default"), ("addcmul_", "default"), ("lerp_", "Scalar"),
        ("zero_", "default"), ("fill_", "Scalar"), ("copy_", "default"),
    )
])  # fmt: skip
def _updated(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Changes of the float values."""
    first = next(a for a in args if isinstance(a, Fake))
    out = func(*_floats(args), **_floats(kwargs))
    if not isinstance(args[0], Fake) and func._schema.is_mutable:  # a plain tensor was changed
        return args[0]
    return return_and_correct_aliasing(func, args, kwargs, first._create_new(out))


@Fake.implements([aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default, aten.new_zeros.default])
def _plain(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    """Plain tensors: optimizer states, and the buffers of FSDP."""
    return func(*_floats(args), **kwargs)


@Fake.implements([aten.split.Tensor])
def _split(func: Any, types: Any, args: Any, kwargs: Any) -> list[Any]:
    parts = [args[0]._create_new(part) for part in func(*_floats(args), **kwargs)]
    return [return_and_correct_aliasing(func, args, kwargs, part) for part in parts]
