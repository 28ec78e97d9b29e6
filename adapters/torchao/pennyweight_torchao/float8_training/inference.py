"""torchao.float8.inference: products of float8 matrices whose scales multiply, and checks of granularities."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pennyweight.planning.granularity import PerBlock, PerRow, PerTensor

from ..enums import Float8MMConfig
from .functions import is_row_major, pad_tensor_for_matmul
from .products import multiply

__all__ = [
    "_check_hardware_support",
    "_is_1_128_scaled",
    "_is_128_128_scaled",
    "_is_rowwise_scaled",
    "_is_tensorwise_scaled",
    "_normalize_granularity",
    "addmm_float8_unwrapped_inference",
    "preprocess_data",
    "preprocess_scale",
]  # fmt: skip


def preprocess_data(a_data: Tensor, b_data: Tensor, scaled_mm_config: Float8MMConfig) -> tuple[Tensor, Tensor]:
    """Codes a [M, K] in rows and b [K, N] in columns in memory; K padded to a multiple of 16 if the options ask for
    it. Raises AssertionError if the inner sizes differ."""
    if scaled_mm_config.pad_inner_dim:
        assert a_data.size(1) == b_data.size(0), (
            f"Inner dims must match for mm, got {a_data.size(1)} and {b_data.size(0)}"
        )
        a_data, b_data = pad_tensor_for_matmul(a_data, 1), pad_tensor_for_matmul(b_data, 0)
    if not is_row_major(a_data.stride()):
        a_data = a_data.contiguous()
    if is_row_major(b_data.stride()):
        b_data = b_data.t().contiguous().t()
    return a_data, b_data


def preprocess_scale(input_scale: Tensor, input_shape: tuple[int, ...]) -> Tensor:
    """A scale as [1, 1] if it is one number; else with an axis of size 1 appended, and earlier axes flattened."""
    if input_scale.numel() == 1:
        return input_scale.reshape(1, 1)
    scale = input_scale.unsqueeze(-1)
    return scale.reshape(-1, scale.shape[-1]) if scale.dim() > 2 else scale


def addmm_float8_unwrapped_inference(
    a_data: Tensor, a_scale: Tensor, b_data: Tensor, b_scale: Tensor, output_dtype: torch.dtype,
    output_scale: Tensor | None = None, bias: Tensor | None = None, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """(a_data * a_scale) · (b_data * b_scale) [* output_scale] [+ bias]; see
    :func:`torchao.float8.float8_ops.addmm_float8_unwrapped`, whose scales divide."""
    return multiply(a_data, a_scale, b_data, b_scale, output_dtype, output_scale, bias)


# -- granularity -------------------------------------------------------------------------------------------------------


def _sizes(x: Any) -> tuple[int, ...]:
    assert hasattr(x, "block_size"), "Expecting input to have `block_size` attribute"
    return tuple(x.block_size)


def _is_rowwise_scaled(x: Any) -> bool:
    """Whether each row of the last axis has one scale."""
    return _sizes(x) == (1,) * (x.dim() - 1) + (x.shape[-1],)


def _is_tensorwise_scaled(x: Any) -> bool:
    """Whether the tensor has one scale."""
    return all(b in (-1, n) for b, n in zip(_sizes(x), x.shape, strict=True))


def _is_1_128_scaled(x: Any) -> bool:
    """Whether 128 neighbours of a row have one scale."""
    sizes = _sizes(x)
    return len(sizes) >= 2 and set(sizes[:-1]) == {1} and sizes[-1] == 128


def _is_128_128_scaled(x: Any) -> bool:
    """Whether blocks of 128 by 128 have one scale."""
    return _sizes(x) == (128, 128)


def _normalize_granularity(granularity: Any) -> tuple[Any, Any]:
    """(granularity of the activation, of the weight): per tensor by default. Both per tensor, both per row, or blocks
    of 1 by 128 and of 128 by 128. Raises ValueError for another pair."""
    if granularity is None:
        return PerTensor(), PerTensor()
    if isinstance(granularity, (PerTensor, PerRow)):
        return granularity, granularity
    if not isinstance(granularity, (tuple, list)) or len(granularity) != 2:
        raise ValueError(f"Invalid granularity specification: {granularity}.")
    one, two = granularity
    same = any(isinstance(one, kind) and isinstance(two, kind) for kind in (PerTensor, PerRow))
    if not same and (one, two) != (PerBlock((1, 128)), PerBlock((128, 128))):
        raise ValueError(f"Unsupported granularity types: {granularity}.")
    return one, two


def _check_hardware_support(granularities: tuple[Any, Any]) -> None:
    """Raise ValueError for granularities that are not a pair of :func:`_normalize_granularity`. Every device computes
    the others here."""
    try:
        _normalize_granularity(granularities)
    except ValueError as e:
        raise ValueError(f"Invalid granularities {granularities}.") from e
