"""torchao.prototype.moe_training.utils: float8 operands whose scales are per expert, and padding of experts' tokens."""

from __future__ import annotations

import random
from itertools import pairwise

import torch
from torch import Tensor

from ..enums import KernelPreference
from ..float8_training.config import ScalingGranularity
from ..float8_training.functions import tensor_to_scale, to_fp8_saturated

__all__ = [
    "_is_column_major", "_is_row_major", "generate_jagged_offs", "pad_token_groups", "round_up",
    "torch_pad_token_groups", "torch_to_3d_rowwise_float8_transpose_rhs", "torch_to_float8_per_group_colwise",
    "torch_to_float8_per_group_rowwise", "torch_unpad_token_groups", "unpad_token_groups",
]  # fmt: skip


def _is_column_major(x: Tensor) -> bool:
    """Whether neighbours of a column are neighbours in memory."""
    assert x.ndim in (2, 3), f"input tensor must be 2D or 3D, got {list(x.shape)}"
    return x.stride(-2) == 1


def _is_row_major(x: Tensor) -> bool:
    """Whether neighbours of a row are neighbours in memory."""
    assert x.ndim in (2, 3), f"input tensor must be 2D or 3D, got {list(x.shape)}"
    return x.stride(-1) == 1


def round_up(x: int, y: int) -> int:
    """The least multiple of y that is not less than x."""
    return -(-x // y) * y


# -- casts -------------------------------------------------------------------------------------------------------------


def _cast(x: Tensor, axis: int, dtype: torch.dtype, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """(codes, scale) with x = codes / scale."""
    scale = tensor_to_scale(
        x, dtype, scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=axis,
        round_scales_to_power_of_2=power_of_two,
    )  # fmt: skip
    return to_fp8_saturated(x.float() * scale, dtype), scale


def _runs(offs: Tensor) -> list[slice]:
    ends = [0, *offs.tolist()]
    return [slice(a, b) for a, b in pairwise(ends)]


def torch_to_float8_per_group_colwise(
    A_col_major: Tensor, offs: Tensor, target_dtype: torch.dtype = torch.float8_e4m3fn,
    round_scales_to_power_of_2: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(float8 codes of a matrix [T, N], one scale for each column of each group of rows: [groups * N])."""
    assert A_col_major.ndim == 2, f"A must be 2D, got {list(A_col_major.shape)}"
    codes, scales = torch.empty_like(A_col_major, dtype=target_dtype), []
    for rows in _runs(offs):
        piece, scale = _cast(A_col_major[rows], 0, target_dtype, round_scales_to_power_of_2)
        codes.view(torch.uint8)[rows] = piece.view(torch.uint8)
        scales.append(scale.reshape(-1))
    return codes, torch.cat(scales)


def torch_to_float8_per_group_rowwise(
    x: Tensor, offs: Tensor, target_dtype: torch.dtype, round_scales_to_power_of_2: bool = False
) -> tuple[Tensor, Tensor]:
    """(float8 codes of a matrix [M, T], one scale for each row of each group of columns: [groups * M])."""
    assert x.ndim == 2, f"input tensor must be 2D, got {list(x.shape)}"
    codes, scales = torch.empty_like(x, dtype=target_dtype), []
    for columns in _runs(offs):
        piece, scale = _cast(x[:, columns], -1, target_dtype, round_scales_to_power_of_2)
        codes.view(torch.uint8)[:, columns] = piece.view(torch.uint8)
        scales.append(scale.reshape(-1))
    return codes, torch.cat(scales)


def torch_to_3d_rowwise_float8_transpose_rhs(
    input_hp_t: Tensor, target_dtype: torch.dtype = torch.float8_e4m3fn, round_scales_to_power_of_2: bool = False
) -> tuple[Tensor, Tensor]:
    """(codes [E, N, K], scales [E, 1, K]) of experts [E, K, N] in column-major memory: one scale for each k."""
    assert _is_column_major(input_hp_t), "input tensor must be column-major"
    codes, scale = _cast(input_hp_t, -1, target_dtype, round_scales_to_power_of_2)
    return codes.contiguous().transpose(-2, -1), scale.transpose(-2, -1)


# -- groups of tokens --------------------------------------------------------------------------------------------------


def generate_jagged_offs(
    E: int, M: int, multiple_of: int = 32, dtype: torch.dtype = torch.int32, device: torch.device | str = "cuda"
) -> Tensor:
    """Random ascending ends of E groups of M rows, multiples of ``multiple_of``, by Python's random numbers. Raises
    ValueError if M is not such a multiple, or too small for E groups."""
    if M % multiple_of:
        raise ValueError(f"M must be divisible by {multiple_of}, got {M}")
    possible = range(multiple_of, M + 1, multiple_of)
    if len(possible) < E:
        raise ValueError(f"E cannot be larger than the number of possible values: {E} > {len(possible)}")
    return torch.tensor([*sorted(random.sample(possible[:-1], E - 1)), M], dtype=dtype, device=device)


def torch_pad_token_groups(inputs: Tensor, group_offsets: Tensor, alignment_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens with zeros after each group, its starts, its ends): each group has a multiple of ``alignment_size`` rows.

    inputs: [T, K]; group_offsets: ends of the groups. The result has ``round_up(T + groups * alignment_size)`` rows, so
    that its size does not depend on the groups.
    """
    sizes = group_offsets.diff(prepend=group_offsets.new_zeros(1))
    padded = (sizes + alignment_size - 1) // alignment_size * alignment_size
    ends = padded.cumsum(0, dtype=torch.int32)
    rows = round_up(inputs.shape[0] + len(group_offsets) * alignment_size, alignment_size)
    out = inputs.new_zeros(rows, inputs.shape[1])
    for chunk, start in zip(inputs.split(sizes.tolist()), (ends - padded).tolist(), strict=True):
        out[start : start + chunk.shape[0]] = chunk
    return out, ends - padded, ends


def torch_unpad_token_groups(
    padded_inputs: Tensor, group_offsets: Tensor, padded_group_start_offsets: Tensor, num_tokens: int,
    alignment_size: int,
) -> Tensor:  # fmt: skip
    """Inverse of :func:`torch_pad_token_groups`. Raises RuntimeError if the groups do not have ``num_tokens`` rows."""
    sizes = group_offsets.diff(prepend=group_offsets.new_zeros(1)).tolist()
    starts = padded_group_start_offsets.tolist()
    out = torch.cat([padded_inputs[a : a + n] for a, n in zip(starts, sizes, strict=True)])
    if out.shape[0] != num_tokens:
        raise RuntimeError(f"Unpad output size mismatch: expected {num_tokens} tokens but got {out.shape[0]} tokens.")
    return out


def pad_token_groups(
    input_act: Tensor, group_end_offsets: Tensor, alignment_size: int = 32,
    kernel_preference: KernelPreference | None = KernelPreference.AUTO,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """:func:`torch_pad_token_groups`, on every device."""
    return torch_pad_token_groups(input_act, group_end_offsets, alignment_size)


def unpad_token_groups(
    padded_output: Tensor, original_group_end_offsets: Tensor, padded_group_start_offsets: Tensor, num_tokens: int,
    alignment_size: int = 32, kernel_preference: KernelPreference | None = KernelPreference.AUTO,
) -> Tensor:  # fmt: skip
    """:func:`torch_unpad_token_groups`, on every device."""
    return torch_unpad_token_groups(
        padded_output, original_group_end_offsets, padded_group_start_offsets, num_tokens, alignment_size
    )
