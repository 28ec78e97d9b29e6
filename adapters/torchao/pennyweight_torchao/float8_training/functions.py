"""torchao.float8.float8_utils: scales of float8 tensors, and what is measured of them. Plain functions on tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ..groupwise import compute_error
from .config import Float8LinearConfig, ScalingGranularity

__all__ = [
    "EPS", "FP8_TYPES", "IS_ROCM", "_get_min_alignment", "_round_scale_down_to_power_of_2", "amax_history_to_scale",
    "amax_history_to_scale_stack", "amax_to_scale", "compute_error", "config_has_stateful_scaling",
    "fp8_tensor_statistics", "is_row_major", "pad_tensor_for_matmul", "tensor_to_amax", "tensor_to_scale",
    "to_fp8_saturated",
]  # fmt: skip

EPS = 1e-12  # torchao's least absmax
IS_ROCM = torch.cuda.is_available() and torch.version.hip is not None
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


def amax_history_to_scale(
    amax_history: Tensor, float8_dtype: torch.dtype, history_to_scale_fn_type: Literal["max"] = "max",
    round_scales_to_power_of_2: bool = False,
) -> Tensor:  # fmt: skip
    """:func:`amax_to_scale` of the largest of earlier absmaxes. Raises NotImplementedError for another rule."""
    if history_to_scale_fn_type != "max":
        raise NotImplementedError(f"Invalid history_to_scale_fn_type, only 'max': got {history_to_scale_fn_type!r}")
    return amax_to_scale(amax_history.max(), float8_dtype, round_scales_to_power_of_2)


def amax_history_to_scale_stack(
    amax_history: Tensor, float8_dtype: torch.dtype, history_to_scale_fn_type: Literal["max"] = "max",
    round_scales_to_power_of_2: bool = False,
) -> Tensor:  # fmt: skip
    """:func:`amax_history_to_scale` of each row of a matrix of histories."""
    if history_to_scale_fn_type != "max":
        raise NotImplementedError(f"Invalid history_to_scale_fn_type, only 'max': got {history_to_scale_fn_type!r}")
    return amax_to_scale(amax_history.amax(1), float8_dtype, round_scales_to_power_of_2)


def config_has_stateful_scaling(config: Float8LinearConfig) -> bool:
    """False: scales are recomputed in each product."""
    return False


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


def fp8_tensor_statistics(tensor: Any, float8_dtype: torch.dtype) -> tuple[int, ...]:
    """(number of zeros, number of codes at the largest number) of a float8 tensor: a training tensor or a weight."""
    codes = (tensor._data if hasattr(tensor, "_data") else tensor.qdata).float()
    return int((codes == 0).sum()), int((codes.abs() == _largest(float8_dtype)).sum())


def is_row_major(stride: Sequence[int]) -> bool:
    """Whether the strides of a matrix are those of rows one after the other."""
    assert len(stride) == 2, "is_row_major only supports 2D tensors"
    return stride[0] > stride[1] and stride[1] == 1


def _get_min_alignment(size: int, alignment_value: int) -> int:
    """The least multiple of ``alignment_value`` that is not less than ``size``."""
    return -(-size // alignment_value) * alignment_value


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
