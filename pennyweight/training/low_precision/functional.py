"""The one function of low-precision training: a linear layer whose three products are quantized along the axis that
they contract, each as its recipe says.

Exact emulation: operands are quantized to the codes that hardware would see, their products are exact, and sums are in
float32. Hardware adds in another order, and Hopper's float8 units in fewer bits; gemm_table.py says which instructions
run where.

What is not a number stays so: a row of an operand that has a NaN or an infinity makes its row of the result NaN, or all
of the result where rows share a scale. Loss scaling and clipping see it as they do in float.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...core.distributed.full_tensor import is_dtensor, wait_tensor
from ...core.numerics import Parts
from ...kernels.activation import autocast_dtype
from .dtensor import WHOLE, ShardedGroups, is_uneven, local_arguments
from .gemm_table import QuantizedOperand, case_of, select, wide_dtype
from .quantize_operand import quantize_operand, rule_of_whole
from .recipes import Operand, Recipe, get_recipe

# What tells apart the random numbers of the operands, as pairs for a and b.
_OUTPUT, _GRAD_INPUT, _GRAD_WEIGHT = (1, 2), (3, 4), (5, 6)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, recipe: str | Recipe = "rowwise") -> Tensor:
    """x · weightᵀ + bias, its three products quantized. x: [.., K]; weight: [N, K]; returns [.., N] in x's dtype.

    Under autocast x is cast to its dtype, and so is the result; the weight is quantized from what it is kept as, and
    its gradient has that dtype. DTensors: each rank multiplies its parts, see spread.py; returns a DTensor. Raises
    ValueError for shapes that do not fit, for what is not floating point, and for weights that are cut otherwise than
    by outputs or by inputs.
    """
    how = get_recipe(recipe)
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"linear: the weight is [N, K] and the input [.., K], not {[*weight.shape]} and {[*x.shape]}")
    if not (x.is_floating_point() and weight.is_floating_point()):
        raise ValueError(f"linear: input and weight must be floating point, not {x.dtype} and {weight.dtype}")
    x = cast(x)
    if is_dtensor(weight) or is_dtensor(x):
        if torch.compiler.is_compiling() and is_uneven(x, weight) and _exchanges(how):
            from .graph_break import call_outside_graph

            return call_outside_graph(_by_parts, x, weight, bias, how)
        return _by_parts(x, weight, bias, how)
    return _Linear.apply(x, weight, bias, how, WHOLE)


def _exchanges(how: Recipe) -> bool:
    """Whether ranks exchange anything to choose scales."""
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
        # Where the input's codes serve the weight's gradient too they are kept, a byte an element, not the input.
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
        # As torch's own products do: FSDP2 loses its hook where a layer's output is a view that is written to.
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
    """rows [M, K] · weightᵀ + bias in the dtype of rows, and rows as the product saw them."""
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
    """Gradients of input, weight and bias that are wanted, in those dtypes, from the output's, g [M, N].

    x: the input [M, K], or its codes as the output's product saw them."""
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
    """gᵀ · x in ``dtype``. x: the input, or its codes as the output's product saw them."""
    gemm = how.grad_weight
    again = () if _serves_twice(how) else cut.input  # codes that were kept are not chosen anew on any rank
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
    """Both sides of a product; as they are where one is empty, because the other might be padded."""
    full = a.numel() and b.numel()
    one, two = (
        quantize_operand(t, side, seed, salt, gemm.hadamard, groups) if full or not t.numel() else t
        for t, side, salt, groups in zip((a, b), (gemm.a, gemm.b), salts, over, strict=True)
    )
    return one, two


def _serves_twice(how: Recipe) -> bool:
    """Whether the codes of the input in the output's product are those in the weight's gradient."""
    mine, gemm = how.output.a, how.grad_weight
    if not isinstance(mine, Operand) or not isinstance(mine.spec.scale, torch.dtype):
        return False
    if isinstance(gemm.b, str):
        return not how.output.hadamard
    alike = mine == gemm.b and mine.spec.block is None and not mine.chance
    return alike and not (gemm.hadamard or how.output.hadamard)


# -- products ----------------------------------------------------------------------------------------------------------


def matmul(a: Tensor | QuantizedOperand, b: Tensor | QuantizedOperand, dtype: torch.dtype) -> Tensor:
    """a · bᵀ. Both quantized: by the table of products, in float32, or in ``dtype`` where hardware rounds. One or none:
    in ``dtype``, on the value of the other."""
    if not (isinstance(a, QuantizedOperand) and isinstance(b, QuantizedOperand)):
        return F.linear(_value(a, dtype), _value(b, dtype))
    y = select(case_of(a, b, dtype)).run(a, b, dtype)
    for nan in (a.nan, None if b.nan is None else b.nan.t()):
        y = y if nan is None else y + nan.to(y.dtype)
    return y


def _value(x: Tensor | QuantizedOperand, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if isinstance(x, Tensor) else x.value(wide_dtype(dtype)).to(dtype)


def cast(x: Tensor) -> Tensor:
    """x in autocast's dtype."""
    return x.to(autocast_dtype(x) or x.dtype)


def _no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    return torch.autocast(x.device.type, enabled=False) if autocast_dtype(x) else nullcontext()


__all__ = ["cast", "gradients", "linear", "matmul", "output"]
