"""torchao's weights for FBGEMM's GPU kernels (0.12 and 0.13): int4 in groups, float8 per row.

They have the numbers of Int4Tensor and Float8Tensor, and run on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....core.tensor import AffineQuantizedTensor as QT
from ....planning import configs as ours
from ....planning.configs.base import AnyDtype
from ....planning.granularity import PerRow
from ....planning.parameters import Site
from ....planning.scheme import Scheme
from ..class_view import View, ready
from ..int4_views import Int4PreshuffledTensor, Int4Tensor
from ..int8_float8_views import Float8Tensor, QuantizeTensorToFloat8Kwargs

__all__ = [
    "FbgemmConfig", "FbgemmFp8Tensor", "FbgemmInt4Tensor", "Int4GroupwisePreshuffleTensor", "to_fbgemm_fp8",
    "to_fbgemm_int4",
]  # fmt: skip

_UPPER_BOUND = 1200.0  # torchao's default bound of the inputs' absmax, which FBGEMM takes


def _bounded(activation_scale_ub: Any) -> None:
    """Raise NotImplementedError for a bound of the inputs other than the default, which no layer's inputs reach."""
    if activation_scale_ub is not None and float(activation_scale_ub) < _UPPER_BOUND:
        raise NotImplementedError(
            f"activation_scale_ub={float(activation_scale_ub)}: inputs are not clamped; pass None, and clamp the input"
        )


@dataclass(frozen=True)
class FbgemmConfig(ours.AOBaseConfig):
    """bfloat16 inputs with int4 weights in groups of ``block_size[-1]``, or float8 inputs and weights per row.

    ``preshuffle``: the order of the codes in memory, which the kernel decides here.
    """

    input_dtype: AnyDtype
    weight_dtype: AnyDtype
    output_dtype: AnyDtype
    block_size: Sequence[int] | None = None
    activation_scale_ub: float | None = None
    preshuffle: bool = False

    def __post_init__(self) -> None:
        given = (self.input_dtype, self.weight_dtype, self.output_dtype)
        if given not in _KINDS:
            raise NotImplementedError(f"FbgemmConfig of {given} is not supported; supported are {[*_KINDS]}")
        if _KINDS[given] == "int4" and not self.block_size:
            raise ValueError("FbgemmConfig with int4 weights needs block_size=[1, group], such as [1, 128]")
        _bounded(self.activation_scale_ub)

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        if self.weight_dtype is torch.int4:
            assert self.block_size
            return ours.Int4WeightOnlyConfig(group_size=self.block_size[-1]).scheme(site, on_indivisible)
        return ours.Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()).scheme(site, on_indivisible)


_KINDS = {
    (torch.bfloat16, torch.int4, torch.bfloat16): "int4",
    (torch.float8_e4m3fn, torch.float8_e4m3fn, torch.bfloat16): "float8",
}


class FbgemmInt4Tensor(View):
    """4-bit codes, two per byte, with a scale and a real zero point per group."""

    tensor_data_names = ["packed_weight", "scale", "zero_point"]  # noqa: RUF012
    tensor_attribute_names = ["group_size", "shape"]  # noqa: RUF012

    holds = staticmethod(Int4Tensor.holds)

    @classmethod
    def build(cls, packed_weight: Tensor, scale: Tensor, zero_point: Tensor, group_size: int, shape: Any) -> QT:
        return ready(Int4Tensor.build(packed_weight, scale, zero_point, (1, group_size), shape))

    @classmethod
    def from_float(cls, w: Tensor, block_size: Sequence[int]) -> QT:
        """tinygemm's numbers in groups of ``block_size[-1]``. Raises AssertionError for a block of another rank."""
        return ready(Int4Tensor.from_hp(w, block_size))


class Int4GroupwisePreshuffleTensor(Int4PreshuffledTensor):
    """FbgemmInt4Tensor in another order of codes, which the kernel decides here."""

    @classmethod
    def from_float(cls, w: Tensor, block_size: Sequence[int]) -> QT:
        """tinygemm's numbers in groups of ``block_size[-1]``."""
        return FbgemmInt4Tensor.from_float(w, block_size)


class FbgemmFp8Tensor(View):
    """float8 codes with a float32 scale per row, and float8 inputs with a scale per row."""

    tensor_data_names = ["float8_data", "scale", "activation_scale_ub"]  # noqa: RUF012
    tensor_attribute_names = ["dtype"]  # noqa: RUF012

    holds = staticmethod(lambda w: Float8Tensor.holds(w) and w.act is not None)

    @classmethod
    def build(cls, float8_data: Tensor, scale: Tensor, activation_scale_ub: Tensor, dtype: torch.dtype) -> QT:
        _bounded(activation_scale_ub)
        kwargs = QuantizeTensorToFloat8Kwargs(granularity=PerRow())
        return ready(Float8Tensor.build(float8_data, scale, act_quant_kwargs=kwargs, dtype=dtype))

    @classmethod
    def from_float(cls, w: Tensor, activation_scale_ub: float | None = None) -> QT:
        """scale = absmax of the row / the float8 maximum. Raises NotImplementedError for a bound below 1200."""
        _bounded(activation_scale_ub)
        kwargs = QuantizeTensorToFloat8Kwargs(granularity=PerRow())
        return ready(Float8Tensor.from_hp(w, granularity=PerRow(), act_quant_kwargs=kwargs))


to_fbgemm_int4 = FbgemmInt4Tensor.from_float
to_fbgemm_fp8 = FbgemmFp8Tensor.from_float
