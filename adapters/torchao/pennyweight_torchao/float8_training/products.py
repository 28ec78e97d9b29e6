"""Products of float8 matrices as torchao calls them: options, roles of the operands, and the product itself."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from pennyweight.core.numerics import Parts
from pennyweight.core.spec import QuantSpec
from pennyweight.io.codecs.torchao.tensor_class import FLOAT8
from pennyweight.training.low_precision.gemm_table import QuantizedOperand, case_of, select

__all__ = ["GemmInputRole", "LinearMMConfig", "ScaledMMConfig", "addmm_float8_unwrapped", "choose_scaled_mm_config"]


class ScaledMMConfig(NamedTuple):
    """Options of one product. emulate: multiply the values in float32 instead of the codes. pad_inner_dim: pad the
    contracted axis to a multiple of 16. The others are for GPUs and do not change results here."""

    emulate: bool = False
    use_fast_accum: bool = False
    fp8_output: bool = False
    pad_inner_dim: bool = False


class LinearMMConfig(NamedTuple):
    """Options of the three products of a linear layer."""

    output: ScaledMMConfig = ScaledMMConfig(use_fast_accum=True)
    grad_input: ScaledMMConfig = ScaledMMConfig()
    grad_weight: ScaledMMConfig = ScaledMMConfig()


class GemmInputRole(Enum):
    """What a tensor is in the products of a linear layer."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


_PRODUCTS = {
    (GemmInputRole.INPUT, GemmInputRole.WEIGHT): "output",
    (GemmInputRole.GRAD_OUTPUT, GemmInputRole.WEIGHT): "grad_input",
    (GemmInputRole.GRAD_OUTPUT, GemmInputRole.INPUT): "grad_weight",
}


def choose_scaled_mm_config(
    a_role: GemmInputRole, a_linear_mm_config: LinearMMConfig, b_role: GemmInputRole, b_linear_mm_config: LinearMMConfig
) -> ScaledMMConfig:
    """Options of the product of two operands with these roles. Raises AssertionError for roles that no product of a
    linear layer has, and if the operands disagree."""
    product = _PRODUCTS.get((a_role, b_role))
    if product is None:
        known = ", ".join(f"{a.value} x {b.value}" for a, b in _PRODUCTS)
        raise AssertionError(f"unexpected a_role {a_role} and b_role {b_role}; products are {known}")
    one, two = getattr(a_linear_mm_config, product), getattr(b_linear_mm_config, product)
    assert one == two, f"linear_mm_config.{product} mismatch: {one} vs {two}"
    return one


def addmm_float8_unwrapped(
    a_data: Tensor, a_scale: Tensor, b_data: Tensor, b_scale: Tensor, output_dtype: torch.dtype,
    output_scale: Tensor | None = None, bias: Tensor | None = None, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """(a_data / a_scale) · (b_data / b_scale) [* output_scale] [+ bias], by our table of products.

    a_data [M, K] and b_data [K, N] are float8; scales have one number, or are [M, 1] and [1, N]. Sums of products of
    codes in float32, rounded once to ``output_dtype``. use_fast_accum is for GPUs. Raises ValueError for mismatched
    shapes, dtypes that are not the OCP standard's float8, and scales that change along the contraction.
    """
    inverses = (a_scale.float().reciprocal(), b_scale.float().reciprocal())
    return multiply(a_data, inverses[0], b_data, inverses[1], output_dtype, output_scale, bias)


def multiply(
    a_data: Tensor, a_scale: Tensor, b_data: Tensor, b_scale: Tensor, output_dtype: torch.dtype,
    output_scale: Tensor | None = None, bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As :func:`addmm_float8_unwrapped`, of scales that multiply: (a_data * a_scale) · (b_data * b_scale)."""
    if a_data.ndim != 2 or b_data.ndim != 2 or a_data.shape[1] != b_data.shape[0]:
        raise ValueError(f"float8 product: shapes {list(a_data.shape)} and {list(b_data.shape)} do not match")
    a, b = _operand(a_data, a_scale, "a"), _operand(b_data.t(), b_scale, "b")
    y = select(case_of(a, b, output_dtype)).run(a, b, output_dtype)
    y = y if output_scale is None else y * output_scale
    return (y if bias is None else y + bias.to(y.dtype)).to(output_dtype)


def _operand(data: Tensor, scale: Tensor, name: str) -> QuantizedOperand:
    """A matrix [rows, contracted] with a scale for it, or for each row."""
    rows = scale.numel() > 1
    if data.dtype not in FLOAT8:
        raise ValueError(f"float8 product: {name} must be float8_e4m3fn or float8_e5m2, got {data.dtype}")
    if rows and scale.numel() != data.shape[0]:
        raise ValueError(
            f"float8 product: the scale of {name} must have one number, or one for each of {data.shape[0]} "
            f"{'rows' if name == 'a' else 'columns'}, got {list(scale.shape)}; cast with the other axiswise_dim"
        )
    spec = QuantSpec(FLOAT8[data.dtype], (-1,) if rows else None, torch.float32)
    parts = Parts(data.contiguous(), scale.float().reshape(-1, 1))
    return QuantizedOperand(parts, spec, (data.shape[0], data.shape[1]))
