"""Linear layer of low-precision training: its three products are quantized along their contracted axis by a recipe.

Exact emulation: operands are quantized to the codes that hardware would use, products of codes are exact, and sums are
in float32. Hardware sums in another order, and Hopper's float8 units with fewer bits; gemm_table.py lists which
instructions run where.

NaN and inf propagate: an operand row with NaN or inf makes the result row NaN, or the whole result if rows share a
scale. Loss scaling and gradient clipping detect it as in float.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ...core.numerics import Parts
from ...core.tensor import AffineQuantizedTensor
from ...distributed.dtensor import is_dtensor, local_tensor, wait_tensor
from ...distributed.sharded_linear import WHOLE, ShardedGroups, is_uneven, local_arguments
from ...kernels.activation import autocast_dtype
from .gemm_table import QuantizedOperand, case_of, select, wide_dtype
from .quantize_operand import quantize_operand, rule_of_whole
from .recipes import Operand, Recipe, get_recipe

# Salts of the random numbers of the operands a and b.
_OUTPUT, _GRAD_INPUT, _GRAD_WEIGHT = (1, 2), (3, 4), (5, 6)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, recipe: str | Recipe = "rowwise") -> Tensor:
    """x · weightᵀ + bias, its three products quantized. x: [.., K]; weight: [N, K]; returns [.., N] in x's dtype.

    Under autocast x and the result have the autocast dtype; the weight is quantized from its own dtype, which is also
    the dtype of its gradient. DTensors: each rank multiplies its parts (distributed/sharded_linear.py); returns a
    DTensor. Raises ValueError for mismatched shapes, for other than floating-point dtypes, and for weights that are
    sharded other than by outputs or by inputs.
    """
    how = get_recipe(recipe)
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: expected weight [N, K] and input [.., K], got {[*weight.shape]} and {[*x.shape]}")
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"linear: input and weight must be floating point, got {x.dtype} and {weight.dtype}")
    x = cast(x)
    if is_dtensor(weight) or is_dtensor(x):
        if torch.compiler.is_compiling() and is_uneven(x, weight) and _exchanges(how):
            from .graph_break import call_outside_graph

            return call_outside_graph(_by_parts, x, weight, bias, how)
        return _by_parts(x, weight, bias, how)
    return _Linear.apply(x, weight, bias, how, WHOLE)


def _exchanges(how: Recipe) -> bool:
    """Whether ranks must communicate to choose scales."""
    sides = [s for gemm in (how.output, how.grad_input, how.grad_weight) for s in (gemm.a, gemm.b)]
    return any(isinstance(s, Operand) and rule_of_whole(s.spec, s.rule) is not None for s in sides)


def _by_parts(x: Tensor, weight: Tensor, bias: Tensor | None, how: Recipe) -> Tensor:
    (x, weight, bias), cut, put = local_arguments(x, weight, bias)
    return put(_Linear.apply(x, weight, bias, how, cut))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Recipe, cut: ShardedGroups) -> Tensor:
        rows = _matrix(x)
        y, seen = output(rows, weight, bias, how, cut)
        # If the weight's gradient can reuse the input's codes, save these (one byte per element) instead of the input.
        kept = seen if isinstance(seen, QuantizedOperand) and _serves_twice(how) else None
        ctx.how, ctx.cut, ctx.x_shape = how, cut, x.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.kept = None if kept is None else (kept.spec, kept.shape)
        if not ctx.needs_input_grad[1]:
            ctx.save_for_backward(None, None, weight)
        elif kept is None:
            ctx.save_for_backward(rows, None, weight)
        else:
            ctx.save_for_backward(kept.parts.codes, kept.parts.scale + kept.nan, weight)
        # As in torch's own products: FSDP2 loses its hook if a layer's output is a view that is written in place.
        return torch.ops.aten._unsafe_view.default(y.contiguous(), (*x.shape[:-1], weight.shape[0]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, scale, weight = ctx.saved_tensors
        g = _matrix(gradient)
        seen = x if ctx.kept is None else QuantizedOperand(Parts(x, scale), *ctx.kept)
        grad_x, grad_w, grad_bias = gradients(g, seen, weight, ctx.how, ctx.needs_input_grad[:3], ctx.dtypes, ctx.cut)
        return None if grad_x is None else grad_x.reshape(ctx.x_shape), grad_w, grad_bias, None, None


def _matrix(x: Tensor) -> Tensor:
    """x [.., K] as [M, K], K = 0 included."""
    return wait_tensor(x).reshape(math.prod(x.shape[:-1]), x.shape[-1])


def output(
    rows: Tensor, weight: Tensor, bias: Tensor | None, how: Recipe, cut: ShardedGroups = WHOLE
) -> tuple[Tensor, Tensor | QuantizedOperand]:
    """(rows [M, K] · weightᵀ + bias in the dtype of rows, the quantized rows)."""
    with _no_autocast(rows):
        a, b = _operands(rows, weight, how.output, how.seed, _OUTPUT, (cut.input, cut.weight))
        y = matmul(a, b, rows.dtype)
        if bias is not None:
            y = y + (bias.to(y.dtype) if cut.terms == 1 else bias.to(y.dtype) / cut.terms)
    return y.to(rows.dtype), a


def gradients(
    g: Tensor, x: Tensor | QuantizedOperand, weight: Tensor, how: Recipe, wanted: Sequence[bool],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype | None], cut: ShardedGroups = WHOLE,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The requested gradients of input, weight and bias, in these dtypes, from the output gradient g [M, N].

    x: the input [M, K], or its codes from the output's product."""
    grad_x = grad_w = grad_bias = None
    with _no_autocast(g):
        if wanted[0]:
            grad_x = _grad_input(g, weight, how, cut).to(dtypes[0])
        if wanted[1]:
            grad_w = _grad_weight(g, x, how, dtypes[1], cut)
        if wanted[2]:
            grad_bias = g.sum(0, dtype=wide_dtype(g.dtype)).to(dtypes[2])
    return grad_x, grad_w, grad_bias


def _grad_input(g: Tensor, weight: Tensor, how: Recipe, cut: ShardedGroups) -> Tensor:
    """g · w, in float32 or g's dtype."""
    gemm = how.grad_input
    if isinstance(gemm.b, str):
        w = quantize_operand(weight, how.output.b, how.seed, _OUTPUT[1], 0, cut.weight)
        a = quantize_operand(g, gemm.a, how.seed, _GRAD_INPUT[0], 0, cut.gradient)
        return matmul(a, _value(w, g.dtype).t(), g.dtype)
    return matmul(*_operands(g, weight.t(), gemm, how.seed, _GRAD_INPUT, (cut.gradient, cut.weight)), g.dtype)


def _grad_weight(
    g: Tensor, x: Tensor | QuantizedOperand, how: Recipe, dtype: torch.dtype, cut: ShardedGroups
) -> Tensor:
    """gᵀ · x in ``dtype``. x: the input, or its codes from the output's product."""
    gemm = how.grad_weight
    again = () if _serves_twice(how) else cut.input  # saved codes are not quantized again on any rank
    if isinstance(x, Tensor) and not isinstance(gemm.b, str):
        a, b = _operands(g.t(), x.t(), gemm, how.seed, _GRAD_WEIGHT, (cut.gradient, again))
    else:
        a, b = quantize_operand(g.t(), gemm.a, how.seed, _GRAD_WEIGHT[0], 0, cut.gradient), x
        if isinstance(gemm.b, str):
            seen = quantize_operand(x, how.output.a, how.seed, _OUTPUT[0], 0, again) if isinstance(x, Tensor) else x
            b = _value(seen, g.dtype)
        b = b.t()
    return matmul(a, b, dtype if gemm.quantized and not isinstance(gemm.b, str) else g.dtype).to(dtype)


def _operands(a: Tensor, b: Tensor, gemm: Any, seed: int, salts: tuple[int, int], over: Any) -> tuple[Any, Any]:
    """Both quantized sides of a product; unchanged if one is empty, because the other might be padded."""
    full = a.numel() and b.numel()
    one, two = (
        quantize_operand(t, side, seed, salt, gemm.hadamard, groups) if full or not t.numel() else t
        for t, side, salt, groups in zip((a, b), (gemm.a, gemm.b), salts, over, strict=True)
    )
    return one, two


def _serves_twice(how: Recipe) -> bool:
    """Whether the output's product and the weight's gradient use the same codes of the input."""
    operand, gemm = how.output.a, how.grad_weight
    if not isinstance(operand, Operand) or not isinstance(operand.spec.scale, torch.dtype):
        return False
    if isinstance(gemm.b, str):
        return not how.output.hadamard
    alike = operand == gemm.b and operand.spec.block is None and not operand.chance
    return alike and not (gemm.hadamard or how.output.hadamard)


# -- products ----------------------------------------------------------------------------------------------------------


def matmul(a: Tensor | QuantizedOperand, b: Tensor | QuantizedOperand, dtype: torch.dtype) -> Tensor:
    """a · bᵀ. Both quantized: by the table of products, in float32, or in ``dtype`` if hardware rounds to it. Otherwise
    in ``dtype``, with quantized operands dequantized."""
    if not (isinstance(a, QuantizedOperand) and isinstance(b, QuantizedOperand)):
        return F.linear(_value(a, dtype), _value(b, dtype))
    y = select(case_of(a, b, dtype)).run(a, b, dtype)
    for nan in (a.nan, None if b.nan is None else b.nan.t()):
        y = y if nan is None else y + nan.to(y.dtype)
    return y


def _value(x: Tensor | QuantizedOperand, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if isinstance(x, Tensor) else x.value(wide_dtype(dtype)).to(dtype)


def cast(x: Tensor) -> Tensor:
    """x cast to autocast's dtype."""
    return x.to(autocast_dtype(x) or x.dtype)


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(x.device.type, enabled=False) if autocast_dtype(x) else nullcontext()


# -- the layer --------------------------------------------------------------------------------------------------------


class LowPrecisionLinear(nn.Linear):
    """nn.Linear whose three products are quantized. Parameters, their names and its state dict are nn.Linear's.

    After ``pennyweight.quantize_`` it runs the quantized weight like any other layer.
    """

    recipe: Recipe

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, recipe: str | Recipe = "rowwise", **factory: Any
    ) -> None:
        super().__init__(in_features, out_features, bias, **factory)
        self.recipe = get_recipe(recipe)

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(local_tensor(self.weight), AffineQuantizedTensor):
            return F.linear(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias, self.recipe)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


def convert_(module: nn.Module, recipe: Recipe) -> nn.Module:
    """Convert an nn.Linear in place: changes its class; the object, its parameters and its hooks stay the same."""
    module.__class__ = LowPrecisionLinear
    module.recipe = recipe  # type: ignore[assignment]
    return module


def restore_(module: nn.Module) -> nn.Module:
    """Inverse of :func:`convert_`."""
    module.__class__ = nn.Linear
    del module.recipe
    return module
