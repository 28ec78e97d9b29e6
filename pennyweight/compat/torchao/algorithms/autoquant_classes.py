"""The candidates of autoquant: classes whose ``from_float`` makes our tensor under one config, and float dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ....core.tensor import AffineQuantizedTensor as QT
from ....planning.configs import (
    AOBaseConfig,
    Float8DynamicActivationFloat8WeightConfig,
    Float8WeightOnlyConfig,
    Int8WeightOnlyConfig,
)
from ....planning.granularity import PerRow, PerTensor
from ....planning.layer_timing import least_seconds, wait_for
from ..base_tensor import TorchAOBaseTensor
from ..class_view import View
from ..v0_8_configs import GemliteUIntXWeightOnlyConfig, Int4WeightOnlyConfig, Int8DynamicActivationInt8WeightConfig
from .quantized_layers import quantized_weight

__all__ = [
    "ALL_AUTOQUANT_CLASS_LIST",
    "DEFAULT_AUTOQUANT_CLASS_LIST",
    "DEFAULT_FLOAT_AUTOQUANT_CLASS_LIST",
    "DEFAULT_INT4_AUTOQUANT_CLASS_LIST",
    "DEFAULT_SPARSE_AUTOQUANT_CLASS_LIST",
    "GEMLITE_INT4_AUTOQUANT_CLASS_LIST",
    "OTHER_AUTOQUANT_CLASS_LIST",
    "AQBFloat16LinearWeight",
    "AQDefaultLinearWeight",
    "AQFloat8PerRowScalingDynamicallyQuantizedLinearWeight",
    "AQFloat8PerTensorScalingDynamicallyQuantizedLinearWeight",
    "AQFloat8WeightOnlyQuantizedLinearWeight",
    "AQFloat16LinearWeight",
    "AQFloat32LinearWeight",
    "AQGemliteInt4G32WeightOnlyQuantizedLinearWeight",
    "AQGemliteInt4G64WeightOnlyQuantizedLinearWeight",
    "AQGemliteInt4G128WeightOnlyQuantizedLinearWeight",
    "AQGemliteInt4G256WeightOnlyQuantizedLinearWeight",
    "AQInt4G32WeightOnlyQuantizedLinearWeight",
    "AQInt4G64WeightOnlyQuantizedLinearWeight",
    "AQInt4G128WeightOnlyQuantizedLinearWeight",
    "AQInt4G128WeightOnlyQuantizedMarlinSparseLinearWeight",
    "AQInt4G256WeightOnlyQuantizedLinearWeight",
    "AQInt8DynamicallyQuantizedLinearWeight",
    "AQInt8DynamicallyQuantizedSemiSparseLinearWeight",
    "AQInt8WeightOnlyQuantizedLinearWeight",
    "AQInt8WeightOnlyQuantizedLinearWeight2",
    "AQInt8WeightOnlyQuantizedLinearWeight3",
    "AQMixin",
    "BFloat16Tensor",
    "Float16Tensor",
    "Float32Tensor",
]  # fmt: skip


class AQMixin:
    """``_autoquant_test``: milliseconds of a linear layer with this class."""

    @staticmethod
    def _quantized_linear_op(act_mat: Tensor, w_qtensor: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(act_mat, w_qtensor, bias)

    @classmethod
    @torch.no_grad()
    def _autoquant_test(
        cls, act_mat: Tensor, weight: Tensor, bias: Tensor | None, best_time: float, mode: Any = None
    ) -> float:
        w = cls.from_float(weight)  # type: ignore[attr-defined]
        return (
            1e3 * least_seconds([lambda: cls._quantized_linear_op(act_mat, w, bias)], 0.03, wait_for(weight.device))[0]
        )


class _Quantized(AQMixin, View):
    """A weight under one config. isinstance() tests the format, the block and the activation."""

    config: ClassVar[Callable[[], AOBaseConfig]]

    @classmethod
    def from_float(cls, weight: Tensor) -> Tensor:
        return quantized_weight(weight.detach(), cls.config())

    @classmethod
    def holds(cls, w: QT) -> bool:  # type: ignore[override]
        if w.ndim != 2:
            return False
        like: Any = quantized_weight(torch.empty(w.shape, dtype=w.dtype, device="meta"), cls.config())
        return (w.spec.with_(layout="plain"), w.act) == (like.spec.with_(layout="plain"), like.act)


def _quantized(name: str, doc: str, config: Callable[[], AOBaseConfig], base: Any = _Quantized) -> Any:
    body = {"__module__": __name__, "__doc__": doc, "config": staticmethod(config)}
    return type(base)(name, (base,), body)


AQInt8DynamicallyQuantizedLinearWeight = _quantized(
    "AQInt8DynamicallyQuantizedLinearWeight", "int8 weights and inputs.", Int8DynamicActivationInt8WeightConfig
)
AQInt8WeightOnlyQuantizedLinearWeight = _quantized(
    "AQInt8WeightOnlyQuantizedLinearWeight", "int8 weights.", Int8WeightOnlyConfig
)
# torchao's other two ways to multiply with the same weight: here the kernel table chooses
AQInt8WeightOnlyQuantizedLinearWeight2 = _quantized(
    "AQInt8WeightOnlyQuantizedLinearWeight2", "int8 weights.", Int8WeightOnlyConfig,
    AQInt8WeightOnlyQuantizedLinearWeight,
)  # fmt: skip
AQInt8WeightOnlyQuantizedLinearWeight3 = _quantized(
    "AQInt8WeightOnlyQuantizedLinearWeight3", "int8 weights.", Int8WeightOnlyConfig,
    AQInt8WeightOnlyQuantizedLinearWeight,
)  # fmt: skip
(
    AQInt4G32WeightOnlyQuantizedLinearWeight,
    AQInt4G64WeightOnlyQuantizedLinearWeight,
    AQInt4G128WeightOnlyQuantizedLinearWeight,
    AQInt4G256WeightOnlyQuantizedLinearWeight,
) = (
    _quantized(
        f"AQInt4G{size}WeightOnlyQuantizedLinearWeight", f"int4 weights in groups of {size}, as tinygemm's.",
        lambda size=size: Int4WeightOnlyConfig(group_size=size),  # type: ignore[misc]
    )
    for size in (32, 64, 128, 256)
)  # fmt: skip
(
    AQGemliteInt4G32WeightOnlyQuantizedLinearWeight,
    AQGemliteInt4G64WeightOnlyQuantizedLinearWeight,
    AQGemliteInt4G128WeightOnlyQuantizedLinearWeight,
    AQGemliteInt4G256WeightOnlyQuantizedLinearWeight,
) = (
    _quantized(
        f"AQGemliteInt4G{size}WeightOnlyQuantizedLinearWeight", f"int4 in groups of {size}, integer zero points.",
        lambda size=size: GemliteUIntXWeightOnlyConfig(group_size=size),  # type: ignore[misc]
    )
    for size in (32, 64, 128, 256)
)  # fmt: skip
AQFloat8WeightOnlyQuantizedLinearWeight = _quantized(
    "AQFloat8WeightOnlyQuantizedLinearWeight", "float8 weights.", Float8WeightOnlyConfig
)
AQFloat8PerRowScalingDynamicallyQuantizedLinearWeight = _quantized(
    "AQFloat8PerRowScalingDynamicallyQuantizedLinearWeight", "float8 weights and inputs, a scale per row.",
    lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()),
)  # fmt: skip
AQFloat8PerTensorScalingDynamicallyQuantizedLinearWeight = _quantized(
    "AQFloat8PerTensorScalingDynamicallyQuantizedLinearWeight", "float8 weights and inputs, a scale per tensor.",
    lambda: Float8DynamicActivationFloat8WeightConfig(granularity=PerTensor()),
)  # fmt: skip


class _Sparse(_Quantized):
    @classmethod
    def from_float(cls, weight: Tensor) -> Tensor:
        raise NotImplementedError(
            f"{cls.__name__}: 2:4 sparse weights change the values, half of them to zero, and have no kernel here; use "
            "AQInt8DynamicallyQuantizedLinearWeight or AQInt4G128WeightOnlyQuantizedLinearWeight"
        )

    @classmethod
    def holds(cls, w: QT) -> bool:  # type: ignore[override]
        return False


AQInt4G128WeightOnlyQuantizedMarlinSparseLinearWeight = _quantized(
    "AQInt4G128WeightOnlyQuantizedMarlinSparseLinearWeight", "Sparse int4: never chosen.", Int4WeightOnlyConfig, _Sparse
)
AQInt8DynamicallyQuantizedSemiSparseLinearWeight = _quantized(
    "AQInt8DynamicallyQuantizedSemiSparseLinearWeight", "Sparse int8: never chosen.", Int8WeightOnlyConfig, _Sparse
)


class AQDefaultLinearWeight(AQMixin):
    """The float weight as it is."""

    @classmethod
    def from_float(cls, weight: Tensor) -> Tensor:
        return weight


class Float32Tensor(TorchAOBaseTensor):
    """A weight in float32, whatever the input's dtype: linear(x, w) = linear(x.float(), w).to(x.dtype)."""

    tensor_data_names = ["weight"]  # noqa: RUF012
    tensor_attribute_names: list[str] = []  # noqa: RUF012
    kept: ClassVar[torch.dtype] = torch.float32
    weight: Tensor

    @staticmethod
    def __new__(cls: Any, weight: Tensor, skip_weight_conversion: bool = False) -> Float32Tensor:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[return-value]
            cls, weight.shape, dtype=weight.dtype, device=weight.device, requires_grad=False
        )

    def __init__(self, weight: Tensor, skip_weight_conversion: bool = False) -> None:
        self.weight = weight if skip_weight_conversion else weight.to(self.kept)

    @classmethod
    def from_float(cls, weight: Tensor) -> Any:
        return cls(weight.detach())

    @classmethod
    def _quantized_linear_op(cls, act_mat: Tensor, w_qtensor: Any, bias: Tensor | None) -> Tensor:
        b = None if bias is None else bias.to(cls.kept)
        return F.linear(act_mat.to(cls.kept), w_qtensor.weight, b).to(act_mat.dtype)


@Float32Tensor.implements_torch_function([F.linear, torch.ops.aten.linear.default])
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    w = given["weight"]
    return type(w)._quantized_linear_op(given["input"], w, given.get("bias"))


class BFloat16Tensor(Float32Tensor):
    """A weight in bfloat16, whatever the input's dtype."""

    kept = torch.bfloat16


class Float16Tensor(Float32Tensor):
    """A weight in float16, whatever the input's dtype."""

    kept = torch.float16


class AQFloat32LinearWeight(Float32Tensor, AQMixin):
    """float32."""


class AQBFloat16LinearWeight(BFloat16Tensor, AQMixin):
    """bfloat16."""


class AQFloat16LinearWeight(Float16Tensor, AQMixin):
    """float16."""


DEFAULT_AUTOQUANT_CLASS_LIST = [
    AQDefaultLinearWeight, AQInt8WeightOnlyQuantizedLinearWeight, AQInt8WeightOnlyQuantizedLinearWeight2,
    AQInt8DynamicallyQuantizedLinearWeight,
]  # fmt: skip
DEFAULT_INT4_AUTOQUANT_CLASS_LIST = [
    AQDefaultLinearWeight, AQInt8DynamicallyQuantizedLinearWeight, AQInt4G64WeightOnlyQuantizedLinearWeight,
]  # fmt: skip
GEMLITE_INT4_AUTOQUANT_CLASS_LIST = [
    AQDefaultLinearWeight, AQInt8DynamicallyQuantizedLinearWeight, AQGemliteInt4G64WeightOnlyQuantizedLinearWeight,
]  # fmt: skip
DEFAULT_FLOAT_AUTOQUANT_CLASS_LIST = [AQFloat32LinearWeight, AQBFloat16LinearWeight, AQFloat16LinearWeight]
OTHER_AUTOQUANT_CLASS_LIST = [
    AQDefaultLinearWeight, AQFloat8WeightOnlyQuantizedLinearWeight,
    AQFloat8PerRowScalingDynamicallyQuantizedLinearWeight, AQFloat8PerTensorScalingDynamicallyQuantizedLinearWeight,
]  # fmt: skip
DEFAULT_SPARSE_AUTOQUANT_CLASS_LIST = [
    AQDefaultLinearWeight, AQInt4G128WeightOnlyQuantizedMarlinSparseLinearWeight,
    AQInt8DynamicallyQuantizedSemiSparseLinearWeight,
]  # fmt: skip
# Without repetitions, and without the sparse classes, which no processor of ours runs
ALL_AUTOQUANT_CLASS_LIST = list(dict.fromkeys([
    *DEFAULT_AUTOQUANT_CLASS_LIST, *DEFAULT_INT4_AUTOQUANT_CLASS_LIST, *DEFAULT_FLOAT_AUTOQUANT_CLASS_LIST,
    AQGemliteInt4G64WeightOnlyQuantizedLinearWeight, *OTHER_AUTOQUANT_CLASS_LIST,
]))  # fmt: skip

torch.serialization.add_safe_globals([
    AQFloat32LinearWeight, AQBFloat16LinearWeight, AQFloat16LinearWeight, Float32Tensor, BFloat16Tensor, Float16Tensor,
])  # fmt: skip
