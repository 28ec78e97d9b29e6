"""Weights of torchao 0.8 to 0.17 that transform their input before the product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.tensor import AffineQuantizedTensor as QT
from .base_tensor import TorchAOBaseTensor

__all__ = [
    "CallsBefore", "LinearActivationWeightObservedTensor", "WeightTensorWithLinearActivationQuantizationMetadata",
    "WeightTensorWithLinearActivationScaleMetadata", "insert_observers_",
    "to_weight_tensor_with_linear_activation_quantization_metadata",
    "to_weight_tensor_with_linear_activation_scale_metadata",
]  # fmt: skip


class _BeforeLinear(TorchAOBaseTensor):
    """A wrapped weight: linear(x, self) = linear(self.before(x), original_weight_tensor)."""

    tensor_data_names = ["original_weight_tensor"]  # noqa: RUF012
    original_weight_tensor: Tensor

    def __new__(cls, original_weight_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        w = original_weight_tensor
        return torch.Tensor._make_wrapper_subclass(cls, w.shape, strides=w.stride(), dtype=w.dtype, device=w.device)

    def before(self, x: Tensor) -> Any:
        """The transformed input."""
        raise NotImplementedError

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The weight as floats, without the input transform."""
        w: Any = self.original_weight_tensor
        return w.dequantize(dtype or self.dtype) if isinstance(w, QT) else w.to(dtype or self.dtype)


@_BeforeLinear.implements_torch_function(F.linear)
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    w = given["weight"]
    return F.linear(w.before(given["input"]), w.original_weight_tensor, given.get("bias"))


class CallsBefore(_BeforeLinear):
    """LinearActivationQuantizedTensor with a user-defined function."""

    tensor_attribute_names = ["input_quant_func", "quant_kwargs"]  # noqa: RUF012

    def __init__(
        self, original_weight_tensor: Tensor, input_quant_func: Callable[..., Any], quant_kwargs: dict[str, Any]
    ) -> None:
        self.original_weight_tensor, self.input_quant_func = original_weight_tensor, input_quant_func
        self.quant_kwargs = quant_kwargs

    def before(self, x: Tensor) -> Any:
        return self.input_quant_func(x, **self.quant_kwargs)


class WeightTensorWithLinearActivationScaleMetadata(_BeforeLinear):
    """linear(x) = F.linear(x / scale, weight): the run-time part of AWQ and SmoothQuant."""

    tensor_data_names = ["original_weight_tensor", "scale"]  # noqa: RUF012
    tensor_attribute_names: list[str] = []  # noqa: RUF012

    def __init__(self, original_weight_tensor: Tensor, scale: Tensor) -> None:
        self.original_weight_tensor, self.scale = original_weight_tensor, scale

    @classmethod
    def from_float(cls, input_float: Tensor, scale: Tensor) -> Any:
        return cls(input_float, scale)

    def before(self, x: Tensor) -> Tensor:
        return x / self.scale


class WeightTensorWithLinearActivationQuantizationMetadata(_BeforeLinear):
    """linear(x) = F.linear(input_quant_func_static(x, scale, zero_point, **quant_kwargs), weight)."""

    # Members other than the weight are optional in the base class and passed by name, since torchao's order differs.
    tensor_attribute_names: list[str] = []  # noqa: RUF012
    optional_tensor_data_names = ["scale", "zero_point"]  # noqa: RUF012
    optional_tensor_attribute_names = ["input_quant_func_static", "quant_kwargs"]  # noqa: RUF012

    def __init__(
        self, original_weight_tensor: Tensor, input_quant_func_static: Any, scale: Tensor,
        zero_point: Tensor | None = None, quant_kwargs: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.original_weight_tensor, self.scale, self.zero_point = original_weight_tensor, scale, zero_point
        self.input_quant_func_static, self.quant_kwargs = input_quant_func_static, quant_kwargs or {}

    @classmethod
    def from_float(
        cls, input_float: Tensor, input_quant_func: Any, scale: Tensor, zero_point: Tensor | None = None,
        quant_kwargs: dict[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        return cls(input_float, input_quant_func, scale, zero_point, quant_kwargs)

    def before(self, x: Tensor) -> Any:
        return self.input_quant_func_static(x, self.scale, self.zero_point, **self.quant_kwargs)


class LinearActivationWeightObservedTensor(_BeforeLinear):
    """A float weight that passes itself and each input to observers."""

    tensor_attribute_names = ["input_observer", "weight_observer"]  # noqa: RUF012

    def __init__(self, original_weight_tensor: Tensor, input_observer: Any = None, weight_observer: Any = None) -> None:
        self.original_weight_tensor = original_weight_tensor
        self.input_observer, self.weight_observer = input_observer, weight_observer

    @classmethod
    def from_float(cls, original_weight_tensor: Tensor, input_observer: Any = None, weight_observer: Any = None) -> Any:
        return cls(original_weight_tensor, input_observer, weight_observer)

    def before(self, x: Tensor) -> Tensor:
        if self.input_observer is not None:
            self.input_observer(x)
        if self.weight_observer is not None:
            self.weight_observer(self.original_weight_tensor)
        return x


def insert_observers_(
    model: nn.Module, input_observer: Any = None, weight_observer: Any = None, *, filter_fn: Any = None
) -> None:
    """Wrap the weight of each linear layer, or of those the filter matches, with copies of the observers."""
    import copy

    from .quant_api import _is_linear

    for name, module in model.named_modules():
        if (filter_fn or _is_linear)(module, name):
            observed = LinearActivationWeightObservedTensor(
                module.weight.detach(), copy.deepcopy(input_observer), copy.deepcopy(weight_observer)
            )
            module.weight = nn.Parameter(observed, requires_grad=False)


to_weight_tensor_with_linear_activation_scale_metadata = WeightTensorWithLinearActivationScaleMetadata.from_float
to_weight_tensor_with_linear_activation_quantization_metadata = (
    WeightTensorWithLinearActivationQuantizationMetadata.from_float
)
