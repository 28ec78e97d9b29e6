"""Casts to torchao's float8 tensor of training, with a given scale or one computed from the tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pennyweight.distributed.dtensor import is_dtensor, local_tensor, wrap_like

from .config import ScalingGranularity
from .functions import tensor_to_scale, to_fp8_saturated
from .products import GemmInputRole, LinearMMConfig
from .training_tensor import Float8TrainingTensor

__all__ = ["hp_tensor_and_scale_to_float8", "hp_tensor_to_float8_dynamic", "tensor_already_casted_to_fp8"]


class _ToFloat8(torch.autograd.Function):
    """data = saturated float8 of x * scale, computed in float32. The gradient passes unchanged."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, tensor: Tensor, scale: Tensor, float8_dtype: torch.dtype, linear_mm_config: LinearMMConfig | None,
        gemm_input_role: GemmInputRole | None, axiswise_dim: int | None,
    ) -> Tensor:  # fmt: skip
        assert is_dtensor(tensor) == is_dtensor(scale), "tensor and scale must both be DTensors, or neither"
        data = to_fp8_saturated(local_tensor(tensor).to(torch.float32) * local_tensor(scale), float8_dtype)
        mine = Float8TrainingTensor(
            data, local_tensor(scale), tensor.dtype, linear_mm_config, gemm_input_role, axiswise_dim
        )
        return wrap_like(mine, tensor)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:  # type: ignore[override]
        return g, None, None, None, None, None


def hp_tensor_and_scale_to_float8(
    hp_tensor: Tensor, s: Tensor, float8_dtype: torch.dtype, linear_mm_config: LinearMMConfig | None = None,
    gemm_input_role: GemmInputRole | None = GemmInputRole.INPUT, axiswise_dim: int | None = None,
) -> Any:  # fmt: skip
    """``hp_tensor`` multiplied by ``s`` and cast, as a :class:`Float8TrainingTensor`; of a DTensor, a DTensor of these.
    The gradient passes unchanged. Raises ValueError for another dtype than float8."""
    return _ToFloat8.apply(hp_tensor, s, float8_dtype, linear_mm_config, gemm_input_role, axiswise_dim)


def tensor_already_casted_to_fp8(tensor: Tensor) -> bool:
    """Whether a tensor, or this rank's part of a DTensor, is a :class:`Float8TrainingTensor`."""
    if is_dtensor(tensor):
        return tensor_already_casted_to_fp8(local_tensor(tensor))
    if isinstance(getattr(tensor, "elem", None), Tensor):  # a result of a collective that is still under way
        return tensor_already_casted_to_fp8(tensor.elem)  # type: ignore[attr-defined]
    return isinstance(tensor, Float8TrainingTensor)


def hp_tensor_to_float8_dynamic(
    hp_tensor: Tensor, float8_dtype: torch.dtype, linear_mm_config: LinearMMConfig | None, reduce_amax: bool = False,
    gemm_input_role: GemmInputRole = GemmInputRole.INPUT, device_mesh: Any = None,
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE, axiswise_dim: int | None = None,
    round_scales_to_power_of_2: bool = False,
) -> Any:  # fmt: skip
    """``hp_tensor`` as a float8 training tensor whose absmax, of the tensor or along ``axiswise_dim``, is the largest
    number of the format. The gradient passes unchanged."""
    scale = tensor_to_scale(
        hp_tensor, float8_dtype, reduce_amax, device_mesh, scaling_granularity, axiswise_dim, round_scales_to_power_of_2
    )
    return hp_tensor_and_scale_to_float8(
        hp_tensor, scale, float8_dtype, linear_mm_config, gemm_input_role, axiswise_dim
    )
