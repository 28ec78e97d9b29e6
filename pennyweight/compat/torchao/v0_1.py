"""torchao 0.1 to 0.14, before configs and AffineQuantizedTensor: weights created by ``from_float``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...core.formats import INT8, UINT4
from ...core.spec import ActivationSpec, QuantSpec
from ...core.tensor import AffineQuantizedTensor as QT
from ...planning.configs.integer import INT8_EPS
from .class_view import View
from .enums import ZeroPointDomain
from .part_conversion import ready

__all__ = [
    "DynamicallyPerAxisQuantizedLinear", "Int4WeightOnlyQuantizedLinearWeight", "Int8DynamicallyQuantizedLinearWeight",
    "Int8WeightOnlyQuantizedLinearWeight", "QuantizedLinearWeightBase", "WeightOnlyInt8QuantLinear",
    "change_linear_weights_to_int4_woqtensors", "change_linear_weights_to_int8_dqtensors",
    "change_linear_weights_to_int8_woqtensors",
]  # fmt: skip

_INT8 = QuantSpec(INT8, (-1,))
_PER_TOKEN = ActivationSpec(QuantSpec(INT8, (-1,)), "dynamic", "absmax", 1e-5)


class QuantizedLinearWeightBase(View):
    """Base of the three below."""

    @staticmethod
    def holds(w: QT) -> bool:
        return any(view.holds(w) for view in QuantizedLinearWeightBase.__subclasses__())


class Int8WeightOnlyQuantizedLinearWeight(QuantizedLinearWeightBase):
    """int8, a scale per row."""

    @staticmethod
    def holds(w: QT) -> bool:
        return w.spec.format is INT8 and w.act is None

    @classmethod
    def from_float(cls, input_float: Tensor, qmin: int = -128, qmax: int = 127, dtype: torch.dtype = torch.int8) -> QT:
        """Symmetric, scale = absmax / 127.5."""
        return ready(QT.from_float(input_float, _INT8, "symmetric", INT8_EPS))


class Int8DynamicallyQuantizedLinearWeight(QuantizedLinearWeightBase):
    """int8, a scale per row, with int8 inputs, a scale per token."""

    @staticmethod
    def holds(w: QT) -> bool:
        return w.spec.format is INT8 and w.act is not None

    @classmethod
    def from_float(cls, input_float: Tensor, qmin: int = -128, qmax: int = 127, dtype: torch.dtype = torch.int8) -> QT:
        """Symmetric, scale = absmax / 127.5; inputs absmax / 127."""
        return ready(QT.from_float(input_float, _INT8, "symmetric", INT8_EPS, _PER_TOKEN))


class Int4WeightOnlyQuantizedLinearWeight(QuantizedLinearWeightBase):
    """int4 in groups, with tinygemm's real zero points."""

    @staticmethod
    def holds(w: QT) -> bool:
        return w.spec.format is UINT4 and w.act is None

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
    from .quant_api import _is_linear

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
