"""Grouped matrix products for mixture-of-experts layers, under the recipe of a linear layer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...distributed.dtensor import is_dtensor
from .linear import cast, gradients, linear, output
from .quantize_operand import LIBRARY
from .recipes import Recipe, get_recipe


def grouped_mm(
    x: Tensor, w: Tensor, ends: Tensor, recipe: str | Recipe = "rowwise", bias: Tensor | None = None
) -> Tensor:
    """Rows of x [T, K] times the matrices of w [E, K, N]: rows ends[e - 1] to ends[e] by w[e]. Returns [T, N].

    The arguments are those of ``torch._grouped_mm`` (pass w [E, N, K] as ``w.transpose(-2, -1)``, which is free).
    bias: [E, N]. ends: ascending integers [E] up to T; an expert may have no rows. Rows beyond the last end give zeros.
    Experts never share scales: a per-tensor scale is per expert. ``ends`` is read on the host; in a graph this happens
    inside a single op. Raises ValueError for mismatched shapes or ends, and for DTensors.
    """
    how = get_recipe(recipe)
    if any(map(is_dtensor, (x, w, ends, bias))):
        raise ValueError("grouped_mm multiplies the experts of one rank; pass x.to_local(), w.to_local()")
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(f"grouped_mm: expected x [T, K] and w [E, K, N], got {[*x.shape]} and {[*w.shape]}")
    if ends.shape != w.shape[:1] or ends.is_floating_point():
        raise ValueError(f"grouped_mm: ends must be {w.shape[0]} integers, got {ends.dtype} {[*ends.shape]}")
    if bias is not None and bias.shape != (w.shape[0], w.shape[2]):
        raise ValueError(f"grouped_mm: bias must be {[w.shape[0], w.shape[2]]}, got {[*bias.shape]}")
    x = cast(x)
    if torch.compiler.is_compiling():
        return torch.ops.pennyweight.training_grouped_mm.default(x, w, ends, bias, how.key)
    runs = _runs(ends, x.shape[0])
    pieces = []
    for e, rows in enumerate(runs):
        one = None if bias is None else bias[e]
        pieces.append(linear(x[rows], w[e].transpose(0, 1), one, how))
    rest = x.shape[0] - (runs[-1].stop if runs else 0)
    if rest or not pieces:
        pieces.append((pieces[0] if pieces else x).new_zeros(rest, w.shape[2]))
    return torch.cat(pieces)


def _runs(ends: Tensor, count: int) -> list[slice]:
    """The rows of each expert."""
    stops = [int(e) for e in ends.tolist()]
    if any(b < a for a, b in zip([0, *stops], [*stops, count], strict=True)):
        raise ValueError(f"grouped_mm: ends must ascend from 0 to the {count} rows of x, got {stops}")
    return [slice(a, b) for a, b in zip([0, *stops], stops, strict=False)]


# -- custom op for graphs ----------------------------------------------------------------------------------------------

LIBRARY.define("training_grouped_mm(Tensor x, Tensor w, Tensor ends, Tensor? bias, str recipe) -> Tensor")
LIBRARY.define(
    "training_grouped_mm_backward(Tensor g, Tensor x, Tensor w, Tensor ends, Tensor? bias, str recipe, bool[] wanted)"
    " -> Tensor[]"
)


@lru_cache(maxsize=256)
def _recipe(key: str) -> Recipe:
    return Recipe.from_key(key)


def _forward(x: Tensor, w: Tensor, ends: Tensor, bias: Tensor | None, recipe: str) -> Tensor:
    y = x.new_zeros(x.shape[0], w.shape[2])
    for e, rows in enumerate(_runs(ends, x.shape[0])):
        y[rows] = output(x[rows], w[e].transpose(0, 1), None if bias is None else bias[e], _recipe(recipe))[0]
    return y


def _backward(
    g: Tensor, x: Tensor, w: Tensor, ends: Tensor, bias: Tensor | None, recipe: str, wanted: Sequence[bool]
) -> list[Tensor]:
    """The requested gradients of x, w and bias."""
    dtypes = (x.dtype, w.dtype, None if bias is None else bias.dtype)
    wholes: list[Any] = [
        t.new_zeros(t.shape) for t, yes in zip((x, w, bias), wanted, strict=True) if yes and t is not None
    ]
    for e, rows in enumerate(_runs(ends, x.shape[0])):
        grad_x, grad_w, grad_bias = gradients(g[rows], x[rows], w[e].transpose(0, 1), _recipe(recipe), wanted, dtypes)
        grads = ((rows, grad_x), (e, None if grad_w is None else grad_w.t()), (e, grad_bias))
        for whole, (place, grad) in zip(wholes, (m for m in grads if m[1] is not None), strict=True):
            whole[place] = grad
    return wholes


def _fake_forward(x: Tensor, w: Tensor, ends: Tensor, bias: Tensor | None, recipe: str) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


def _fake_backward(
    g: Tensor, x: Tensor, w: Tensor, ends: Tensor, bias: Tensor | None, recipe: str, wanted: Sequence[bool]
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t, yes in zip((x, w, bias), wanted, strict=True) if yes and t is not None]


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    x, w, ends, bias, ctx.recipe = inputs
    ctx.save_for_backward(x, w, ends, bias)


def _gradient(ctx: Any, g: Tensor) -> Any:
    wanted = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
    op = torch.ops.pennyweight.training_grouped_mm_backward.default
    found = iter(op(g, *ctx.saved_tensors, ctx.recipe, wanted))
    grad_x, grad_w, grad_bias = (next(found) if yes else None for yes in wanted)
    return grad_x, grad_w, None, grad_bias, None


LIBRARY.impl("training_grouped_mm", _forward, "CompositeExplicitAutograd")
LIBRARY.impl("training_grouped_mm_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake("pennyweight::training_grouped_mm", _fake_forward, lib=LIBRARY)
torch.library.register_fake("pennyweight::training_grouped_mm_backward", _fake_backward, lib=LIBRARY)
torch.library.register_autograd(
    "pennyweight::training_grouped_mm", _gradient, setup_context=_setup_context, lib=LIBRARY
)
