"""torchao.float8.float8_utils: scales of float8 tensors, and what is measured of them. Plain functions on tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..groupwise import compute_error
from .config import ScalingGranularity

__all__ = [
    "EPS", "FP8_TYPES", "_round_scale_down_to_power_of_2", "amax_to_scale", "compute_error", "is_row_major",
    "pad_tensor_for_matmul", "tensor_to_amax", "tensor_to_scale", "to_fp8_saturated",
]  # fmt: skip

EPS = 1e-12  # torchao's least absmax
FP8_TYPES = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}


def _largest(float8_dtype: torch.dtype) -> float:
    if float8_dtype not in FP8_TYPES:
        raise ValueError(f"Unsupported float8_dtype: {float8_dtype}")
    return torch.finfo(float8_dtype).max


@torch.no_grad()
def amax_to_scale(amax: Tensor, float8_dtype: torch.dtype, round_scales_to_power_of_2: bool = False) -> Tensor:
    """float32 factor max(dtype) / max(amax, 1e-12), by which a tensor is multiplied before it is cast; optionally
    rounded down to a power of two. Raises ValueError for another dtype."""
    scale = (_largest(float8_dtype) / amax.double().clamp(min=EPS)).float()  # in float64: eager and compiled agree
    return _round_scale_down_to_power_of_2(scale) if round_scales_to_power_of_2 else scale


@torch.no_grad()
def tensor_to_amax(
    x: Tensor, reduce_amax: bool = False, device_mesh: Any = None,
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE, axiswise_dim: int | None = None,
) -> Tensor:  # fmt: skip
    """max |x|, of the tensor or along ``axiswise_dim`` (kept with size 1). reduce_amax: over all ranks of the mesh."""
    if scaling_granularity is ScalingGranularity.TENSORWISE:
        amax = x.abs().max()
    else:
        assert axiswise_dim is not None, "axis-wise scaling needs axiswise_dim"
        amax = x.abs().amax(axiswise_dim, keepdim=True)
    if reduce_amax and dist.is_initialized():
        amax = amax.clone()
        dist.all_reduce(amax, dist.ReduceOp.MAX, None if device_mesh is None else device_mesh.get_group())
    return amax


@torch.no_grad()
def tensor_to_scale(
    hp_tensor: Tensor, float8_dtype: torch.dtype, reduce_amax: bool = False, device_mesh: Any = None,
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE, axiswise_dim: int | None = None,
    round_scales_to_power_of_2: bool = False,
) -> Tensor:  # fmt: skip
    """:func:`amax_to_scale` of :func:`tensor_to_amax`."""
    amax = tensor_to_amax(hp_tensor, reduce_amax, device_mesh, scaling_granularity, axiswise_dim)
    return amax_to_scale(amax, float8_dtype, round_scales_to_power_of_2)


def to_fp8_saturated(x: Tensor, float8_dtype: torch.dtype) -> Tensor:
    """Cast with clamping to the largest finite number. Raises ValueError for another dtype."""
    largest = _largest(float8_dtype)
    return x.clamp(-largest, largest).to(float8_dtype)


def is_row_major(stride: Sequence[int]) -> bool:
    """Whether the strides of a matrix are those of rows one after the other."""
    assert len(stride) == 2, "is_row_major only supports 2D tensors"
    return stride[0] > stride[1] and stride[1] == 1


def pad_tensor_for_matmul(tensor: Tensor, dims: int | Iterable[int]) -> Tensor:
    """A matrix with zeros appended so that the sizes of ``dims`` are multiples of 16."""
    assert tensor.dim() == 2
    wanted = {dims} if isinstance(dims, int) else {*dims}
    rows, columns = (-size % 16 if dim in wanted else 0 for dim, size in enumerate(tensor.shape))
    if tensor.dtype in FP8_TYPES:  # torch does not pad these on a CPU
        return F.pad(tensor.view(torch.uint8), (0, columns, 0, rows)).view(tensor.dtype)
    return F.pad(tensor, (0, columns, 0, rows))


def _round_scale_down_to_power_of_2(scale: Tensor) -> Tensor:
    assert scale.dtype == torch.float32, "scale must be float32 tensor"
    return torch.exp2(torch.floor(torch.log2(scale)))
