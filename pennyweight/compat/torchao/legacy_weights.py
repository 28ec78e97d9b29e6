"""Weights of older torchao releases, and their hook into F.linear.

0.1 to 0.14   before configs and AffineQuantizedTensor: weights created by ``from_float``
0.8 to 0.17   weights that transform their input before the product
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...core.formats import INT8, UINT4
from ...core.spec import ActivationSpec, QuantSpec
from ...core.tensor import FUNCTIONS
from ...core.tensor import AffineQuantizedTensor as QT
from ...planning.configs.integer import INT8_EPS
from .base_tensor import TorchAOBaseTensor
from .class_view import View, ready
from .enums import ZeroPointDomain
from .linear_modules import _is_linear

__all__ = [
    "CallsBefore", "DynamicallyPerAxisQuantizedLinear", "Int4WeightOnlyQuantizedLinearWeight",
    "Int8DynamicallyQuantizedLinearWeight", "Int8WeightOnlyQuantizedLinearWeight",
    "LinearActivationWeightObservedTensor", "QuantizedLinearNotImplementedError", "QuantizedLinearWeightBase",
    "WeightOnlyInt8QuantLinear", "WeightTensorWithLinearActivationQuantizationMetadata",
    "WeightTensorWithLinearActivationScaleMetadata", "change_linear_weights_to_int4_woqtensors",
    "change_linear_weights_to_int8_dqtensors", "change_linear_weights_to_int8_woqtensors",
    "deregister_aqt_quantized_linear_dispatch", "insert_observers_", "register_aqt_quantized_linear_dispatch",
    "to_weight_tensor_with_linear_activation_quantization_metadata",
    "to_weight_tensor_with_linear_activation_scale_metadata",
]  # fmt: skip

# -- 0.1 to 0.14 -------------------------------------------------------------------------------------------------------

_INT8 = QuantSpec(INT8, (-1,))
_PER_TOKEN = ActivationSpec(QuantSpec(INT8, (-1,)), "dynamic", "absmax", 1e-5)


class QuantizedLinearWeightBase(View):
    """Base of the three below."""

    holds = staticmethod(lambda w: any(view.holds(w) for view in QuantizedLinearWeightBase.__subclasses__()))


class Int8WeightOnlyQuantizedLinearWeight(QuantizedLinearWeightBase):
    """int8, a scale per row."""

    holds = staticmethod(lambda w: w.spec.format is INT8 and w.act is None)

    @classmethod
    def from_float(cls, input_float: Tensor, qmin: int = -128, qmax: int = 127, dtype: torch.dtype = torch.int8) -> QT:
        """Symmetric, scale = absmax / 127.5."""
        return ready(QT.from_float(input_float, _INT8, "symmetric", INT8_EPS))


class Int8DynamicallyQuantizedLinearWeight(QuantizedLinearWeightBase):
    """int8, a scale per row, with int8 inputs, a scale per token."""

    holds = staticmethod(lambda w: w.spec.format is INT8 and w.act is not None)

    @classmethod
    def from_float(cls, input_float: Tensor, qmin: int = -128, qmax: int = 127, dtype: torch.dtype = torch.int8) -> QT:
        """Symmetric, scale = absmax / 127.5; inputs absmax / 127."""
        return ready(QT.from_float(input_float, _INT8, "symmetric", INT8_EPS, _PER_TOKEN))


class Int4WeightOnlyQuantizedLinearWeight(QuantizedLinearWeightBase):
    """int4 in groups, with tinygemm's real zero points."""

    holds = staticmethod(lambda w: w.spec.format is UINT4 and w.act is None)

    @classmethod
    def from_float(
        cls, input_float: Tensor, groupsize: int = 128, inner_k_tiles: int = 8,
        zero_point_domain: ZeroPointDomain = ZeroPointDomain.FLOAT, preserve_zero: bool = False,
        dtype: torch.dtype | None = None,
    ) -> QT:  # fmt: skip
        """scale = (max - min) / 15 of each group. Raises NotImplementedError for integer zero points."""
        if zero_point_domain is not ZeroPointDomain.FLOAT or preserve_zero:
            raise NotImplementedError(
                "integer zero points: use Int4WeightOnlyConfig(zero_point_domain=ZeroPointDomain.INT)"
            )
        kept = dtype or input_float.dtype
        spec = QuantSpec(UINT4, (groupsize,), scale=kept, offset=kept, mid=8)
        return ready(QT.from_float(input_float, spec, "minmax", 1e-6))


def _change(model: nn.Module, filter_fn: Any, view: Any, **kwargs: Any) -> None:
    for name, module in model.named_modules():
        if (filter_fn or _is_linear)(module, name):
            module.weight = nn.Parameter(view.from_float(module.weight.detach(), **kwargs), requires_grad=False)


def change_linear_weights_to_int8_dqtensors(model: nn.Module, filter_fn: Any = None, **kwargs: Any) -> None:
    """Quantize the weights of linear layers in place: int8 with int8 inputs."""
    _change(model, filter_fn, Int8DynamicallyQuantizedLinearWeight, **kwargs)


def change_linear_weights_to_int8_woqtensors(model: nn.Module, filter_fn: Any = None, **kwargs: Any) -> None:
    """Quantize the weights of linear layers in place: int8."""
    _change(model, filter_fn, Int8WeightOnlyQuantizedLinearWeight, **kwargs)


def change_linear_weights_to_int4_woqtensors(
    model: nn.Module, groupsize: int = 128, inner_k_tiles: int = 8, filter_fn: Any = None, **kwargs: Any
) -> None:
    """Quantize the weights of linear layers in place: int4 in groups."""
    _change(model, filter_fn, Int4WeightOnlyQuantizedLinearWeight, groupsize=groupsize, **kwargs)


class _FromFloat(nn.Linear):
    """A linear layer created from a float one."""

    view: Any = None

    @classmethod
    def from_float(cls, mod: nn.Linear) -> Any:
        """A layer with the quantized weight and the bias of ``mod``."""
        new = cls(mod.in_features, mod.out_features, mod.bias is not None, device="meta")
        new.weight = nn.Parameter(cls.view.from_float(mod.weight.detach()), requires_grad=False)
        new.bias = mod.bias
        return new


class WeightOnlyInt8QuantLinear(_FromFloat):
    """A linear layer of int8 weights."""

    view = Int8WeightOnlyQuantizedLinearWeight


class DynamicallyPerAxisQuantizedLinear(_FromFloat):
    """A linear layer of int8 weights with int8 inputs."""

    view = Int8DynamicallyQuantizedLinearWeight


# -- 0.8 to 0.17 -------------------------------------------------------------------------------------------------------


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


# -- user-defined implementations of F.linear, tried before the kernel table -------------------------------------------


class QuantizedLinearNotImplementedError(NotImplementedError):
    """Raised by a condition or an implementation to continue with the next one."""


_WAYS: dict[Callable[..., bool], Callable[..., Tensor]] = {}
_TABLE = FUNCTIONS[F.linear]


def register_aqt_quantized_linear_dispatch(
    dispatch_condition: Callable[[Tensor, Any, Tensor | None], bool],
    impl: Callable[[Tensor, Any, Tensor | None], Tensor],
) -> None:
    """Use ``impl(input, weight, bias)`` for linear if ``dispatch_condition(input, weight, bias)`` is true.

    In eager mode and under torch.compile; not in layers bound to a kernel by freeze_.
    """
    _WAYS[dispatch_condition] = impl
    FUNCTIONS[F.linear] = _registered_linear


def deregister_aqt_quantized_linear_dispatch(dispatch_condition: Callable[[Tensor, Any, Tensor | None], bool]) -> None:
    """Undo it. Raises ValueError for a condition that is not registered."""
    if dispatch_condition not in _WAYS:
        raise ValueError(f"no implementation is registered for {dispatch_condition}")
    del _WAYS[dispatch_condition]
    if not _WAYS:
        FUNCTIONS[F.linear] = _TABLE


def _registered_linear(func: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    three = given["input"], given["weight"], given.get("bias")
    for condition, impl in _WAYS.items():
        try:
            if condition(*three):
                return impl(*three)
        except QuantizedLinearNotImplementedError:
            continue
    return _TABLE(func, args, kwargs)
