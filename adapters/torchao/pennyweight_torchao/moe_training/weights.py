"""torchao.prototype.moe_training.tensor: weights of linear and expert layers with quantized products, and
``quantize_`` with their configs.

torchao puts the choice of products into the weight, pennyweight into the layer (``LowPrecisionLinear``). These classes
are for experts' parameters, which no layer owns. The value, the gradient and the state are floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pennyweight.planning.module_handlers import register_quantize_module_handler
from pennyweight.training import grouped_mm, linear

from ..enums import KernelPreference, ScaleCalculationMode
from .config import (
    Float8TrainingOpConfig,
    MoEScalingType,
    MoETrainingConfig,
    MXFP8TrainingOpConfig,
    TrainingOpBaseConfig,
)

__all__ = [
    "Float8TrainingWeightWrapperTensor", "MXFP8TrainingWeightWrapperTensor", "ScaledGroupedMMTensor",
    "TrainingWeightWrapperBaseTensor", "_swap_params", "unwrap_weight",
]  # fmt: skip

aten = torch.ops.aten
# Operators whose results are weights again: what parameters, optimizers, checkpoints and FSDP do with one.
_KEPT = {
    aten.t.default, aten.transpose.int, aten.detach.default, aten.alias.default, aten.empty_like.default,
    aten.new_zeros.default, aten.slice.Tensor, aten.view.default, aten.as_strided.default, aten._to_copy.default,
    aten._pin_memory.default, aten.split.Tensor, aten.clone.default,
}  # fmt: skip


class TrainingWeightWrapperBaseTensor(Tensor):
    """A float weight ``_data`` whose linear and grouped products are quantized as ``config`` says.

    F.linear(x, weight, bias), x @ weight.t() and torch._grouped_mm(x, weight, ends) compute their three products under
    the config's recipes; every other operator computes on ``_data``.
    """

    _data: Tensor
    config: Any

    @staticmethod
    def __new__(
        cls: type[TrainingWeightWrapperBaseTensor], tensor: Tensor, config: TrainingOpBaseConfig | None = None
    ) -> TrainingWeightWrapperBaseTensor:
        self: TrainingWeightWrapperBaseTensor = torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, tensor.stride(), tensor.storage_offset(), dtype=tensor.dtype, device=tensor.device,
            requires_grad=tensor.requires_grad,
        )  # fmt: skip
        self._data = tensor.detach()
        self.config = config
        return self

    def linear(self, x: Tensor, bias: Tensor | None) -> Any:
        """x [.., K] · weight [N, K]ᵀ + bias; NotImplemented: in high precision."""
        return linear(x, unwrap_weight(self), bias, self.config.linear_recipe())

    def grouped(self, x: Tensor, ends: Tensor, bias: Tensor | None) -> Tensor:
        """Tokens x [T, K] times experts [E, K, N]; see :func:`pennyweight.training.grouped_mm`."""
        y = grouped_mm(x, unwrap_weight(self), ends, self.config.grouped_recipe(), bias)
        return y if self.config.out_dtype is None else y.to(self.config.out_dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(data={self._data}, config={self.config!r})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_data"], self.config

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], config: Any, outer_size: Any, outer_stride: Any
    ) -> TrainingWeightWrapperBaseTensor:
        return cls(inner["_data"], config)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        handler = _FUNCTIONS.get(func)
        if handler is not None:
            result = handler(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        first: list[TrainingWeightWrapperBaseTensor] = []

        def unwrap(x: TrainingWeightWrapperBaseTensor) -> Tensor:
            first.append(x)
            return x._data

        plain = tree_map_only(TrainingWeightWrapperBaseTensor, unwrap, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        if func._schema.is_mutable and isinstance(args[0], TrainingWeightWrapperBaseTensor):
            return args[0]
        if func not in _KEPT:
            return out
        return tree_map_only(Tensor, lambda data: type(first[0])(data, first[0].config), out)


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Any) -> Tensor:  # type: ignore[override]
        return weight._data.view_as(weight._data)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g


def unwrap_weight(wrapper_tensor: Any) -> Tensor:
    """The float tensor of a weight; the gradient passes. Other tensors unchanged."""
    wrapped = isinstance(wrapper_tensor, TrainingWeightWrapperBaseTensor)
    return _Unwrap.apply(wrapper_tensor) if wrapped else wrapper_tensor


def _linear(input: Tensor, weight: Any, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, TrainingWeightWrapperBaseTensor):
        return NotImplemented
    return weight.linear(unwrap_weight(input), unwrap_weight(bias))


def _grouped(input: Tensor, mat2: Any, offs: Tensor | None = None, bias: Tensor | None = None, **more: Any) -> Any:
    """Tokens times experts. Other forms have no recipe, and compute in high precision."""
    wrapped = isinstance(mat2, TrainingWeightWrapperBaseTensor)
    if not wrapped or offs is None or input.ndim != 2 or mat2.ndim != 3:
        return NotImplemented
    return mat2.grouped(unwrap_weight(input), offs, unwrap_weight(bias))


def _product(input: Any, other: Any) -> Any:
    """x [.., K] times a weight [K, N]."""
    if not isinstance(other, TrainingWeightWrapperBaseTensor) or other.ndim != 2 or input.ndim < 1:
        return NotImplemented
    return other.t().linear(unwrap_weight(input), None)  # type: ignore[attr-defined]


_FUNCTIONS: dict[Any, Callable[..., Any]] = {F.linear: _linear, torch._grouped_mm: _grouped}
if hasattr(F, "grouped_mm"):
    _FUNCTIONS[F.grouped_mm] = _grouped
for _name in ("matmul", "mm", "__matmul__"):
    for _home in (torch, Tensor):
        if hasattr(_home, _name):
            _FUNCTIONS[getattr(_home, _name)] = _product


# -- torchao's classes -------------------------------------------------------------------------------------------------


class Float8TrainingWeightWrapperTensor(TrainingWeightWrapperBaseTensor):
    """With a :class:`Float8TrainingOpConfig`."""


class MXFP8TrainingWeightWrapperTensor(TrainingWeightWrapperBaseTensor):
    """With an :class:`MXFP8TrainingOpConfig`."""


class ScaledGroupedMMTensor(TrainingWeightWrapperBaseTensor):
    """torchao 0.12's: grouped products in float8 with one scale per row, all others in high precision."""

    def __init__(self, tensor: Tensor, config: TrainingOpBaseConfig | None = None) -> None:
        self.config = config or MoETrainingConfig()

    def linear(self, x: Tensor, bias: Tensor | None) -> Any:
        return NotImplemented


_CLASSES = {
    Float8TrainingOpConfig: Float8TrainingWeightWrapperTensor,
    MXFP8TrainingOpConfig: MXFP8TrainingWeightWrapperTensor,
    MoETrainingConfig: ScaledGroupedMMTensor,
}


def _swap_params(
    module: nn.Module, *, module_filter_fn: Callable[[nn.Module, str], bool] | None = None, config: Any = None,
    target_parameter_name: str | None = None,
) -> nn.Module:  # fmt: skip
    """Replace the parameters of a module, and of modules in it that the filter selects, by weights with quantized
    products; returns the module. target_parameter_name: only parameters of that name. Raises ValueError for an unknown
    config."""
    if type(config) not in _CLASSES:
        raise ValueError(f"Unsupported config type: {type(config)}")
    for name, inner in module.named_modules():
        if module_filter_fn is not None and not module_filter_fn(inner, name):
            continue
        for own, p in list(inner.named_parameters(recurse=False)):
            if target_parameter_name in (None, own) and not isinstance(p, TrainingWeightWrapperBaseTensor):
                weight = _CLASSES[type(config)](p.detach(), config)
                setattr(inner, own, nn.Parameter(weight, requires_grad=p.requires_grad))
    return module


def _transform(module: nn.Module, config: Any, parameter_name: str | None = None) -> nn.Module:
    # quantize_ names "weight" for a module that is selected as a whole; a bias has no product, so this is equal
    only = None if parameter_name == "weight" else parameter_name
    return _swap_params(module, config=config, target_parameter_name=only)


for _config in _CLASSES:
    register_quantize_module_handler(_config)(_transform)
_ENUMS: list[Any] = [KernelPreference, MoEScalingType, ScaleCalculationMode]
for _enum in _ENUMS:  # Python 3.11.0 to 3.11.3 pickle a member by getattr, which torch.load does not allow
    _enum.__reduce_ex__ = lambda member, protocol: (type(member), (member.value,))
torch.serialization.add_safe_globals([*_CLASSES, *_CLASSES.values(), *_ENUMS])
