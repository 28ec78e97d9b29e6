"""torchao.quantization.qat.utils: fake quantization of groups, tokens and rows, as functions."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..enums import MappingType, ZeroPointDomain
from ..int8_matmul import _get_per_token_block_size
from ..primitives import _fake_quantize_affine, _fake_quantize_affine_cachemask
from ..qparams import choose_qparams_affine, require

__all__ = [
    "_Float8RowwiseFakeQuantize", "_GenericFakeQuantize",
    "_choose_qparams_per_token_asymmetric", "_fake_quantize_per_channel_group", "_fake_quantize_per_token",
    "_get_qmin_qmax", "_log_deprecation_warning",
]  # fmt: skip


def _get_qmin_qmax(n_bit: int, symmetric: bool = True) -> tuple[int, int]:
    """Least and greatest code of ``n_bit`` bits: signed, or with ``symmetric=False`` unsigned."""
    return (-(2 ** (n_bit - 1)), 2 ** (n_bit - 1) - 1) if symmetric else (0, 2**n_bit - 1)


def _fake_quantize_per_channel_group(
    input: Tensor, scales: Tensor, zero_points: Tensor, quant_min: int, quant_max: int, group_size: int,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
) -> Tensor:  # fmt: skip
    """Values of the matrix ``input`` [N, K] after quantization in groups; scales, zero_points: [N, K / group_size].

    The gradient is straight-through within quant_min..quant_max and zero outside; scales and zero points get theirs.
    Raises AssertionError for another number of axes, and for a group size of 1 or one that does not divide the rows.
    """
    require(input.dim() == 2, f"expected a matrix, got a tensor of shape {list(input.shape)}")
    require(group_size > 1, f"group_size must be greater than 1, got {group_size}")
    columns = input.shape[-1]
    require(columns % group_size == 0, f"group_size {group_size} does not divide the {columns} columns")
    return _fake_quantize_affine(
        input, (1, group_size), scales, zero_points, torch.int32, quant_min, quant_max, zero_point_domain
    )


def _fake_quantize_per_token(
    input: Tensor, scales: Tensor, zero_points: Tensor, quant_min: int, quant_max: int
) -> Tensor:
    """Values of ``input`` [.., K] after quantization with one scale and zero point per token, in its dtype.

    Raises AssertionError unless scales and zero_points have one number per token.
    """
    tokens = input.numel() // max(1, input.shape[-1])
    for name, part in (("scales", scales), ("zero_points", zero_points)):
        require(
            part.numel() == tokens, f"num_tokens: {tokens} of {list(input.shape)}; {name} has {list(part.shape)}"
        )  # fmt: skip
    block = _get_per_token_block_size(input)
    out = _fake_quantize_affine(input, block, scales, zero_points, torch.int32, quant_min, quant_max)
    return out.reshape_as(input).to(input.dtype)


def _choose_qparams_per_token_asymmetric(
    input: Tensor, scales_precision: torch.dtype = torch.float32, zero_points_precision: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """int8 scales and zero points [.., 1] of the tokens of ``input`` [.., K]; scales are at least float32's epsilon."""
    scale, zero_point = choose_qparams_affine(
        input, MappingType.ASYMMETRIC, _get_per_token_block_size(input), torch.int8, -128, 127,
        torch.finfo(torch.float32).eps, scales_precision, zero_points_precision,
    )  # fmt: skip
    shape = (*input.shape[:-1], 1)
    return scale.reshape(shape), zero_point.reshape(shape)


class _GenericFakeQuantize(torch.autograd.Function):
    """:func:`_fake_quantize_affine` of blocks with a mask as gradient: one within the codes, zero outside (0.9)."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, block_size: list[int], scales: Tensor, zero_points: Tensor, quant_min: int,
        quant_max: int, zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
    ) -> Tensor:  # fmt: skip
        x = getattr(input, "original_tensor", input)
        values, mask = _fake_quantize_affine_cachemask(
            x, block_size, scales, zero_points, torch.int32, quant_min, quant_max, zero_point_domain
        )
        ctx.save_for_backward(mask)
        return values

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        return gy * ctx.saved_tensors[0], None, None, None, None, None, None


class _Float8RowwiseFakeQuantize(torch.autograd.Function):
    """float8 values of x with a scale per index of all axes but one, in the dtype of x; straight-through gradient.

    scale = finfo(float8_dtype).max / max|x|, divided in float64 and rounded to float32. max|x| is at least 1e-12.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, float8_dtype: torch.dtype, axiswise_dim: int) -> Tensor:
        limit = torch.finfo(float8_dtype).max
        largest = x.abs().amax(axiswise_dim, keepdim=True).to(torch.float64)
        scale = (limit / largest.clamp(min=1e-12)).to(torch.float32)
        codes = (x.to(torch.float32) * scale).clamp(-limit, limit).to(float8_dtype)
        return (codes.to(x.dtype) / scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None]:
        return gy, None, None


def _log_deprecation_warning(old_api_object: Any) -> None:
    """Warn that a name of torchao before 0.13 is used, and give the current one."""
    warnings.warn(
        f"'{type(old_api_object).__name__}' is deprecated and will be removed in a future release of torchao; use "
        'quantize_(model, QATConfig(base_config, step="prepare")), train, and '
        'quantize_(model, QATConfig(base_config, step="convert")). Without a base config: '
        "QATConfig(activation_config=IntxFakeQuantizeConfig(..), weight_config=IntxFakeQuantizeConfig(..))",
        stacklevel=4,
    )


class AnyOfBase(type):
    """Metaclass of an old name, a subclass of the class with the new name: isinstance() holds for instances of both.

    Clients test for the name of their release what a function of another release returned.
    """

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.__base__)  # type: ignore[arg-type]
