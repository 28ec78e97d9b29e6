"""torchao.quantization.qat.utils: fake quantization of groups, tokens and rows, as functions."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from ..enums import ZeroPointDomain
from ..int8_matmul import _get_per_token_block_size
from ..primitives import _fake_quantize_affine
from ..qparams import require

__all__ = ["_fake_quantize_per_channel_group", "_fake_quantize_per_token", "_get_qmin_qmax", "_log_deprecation_warning"]


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
