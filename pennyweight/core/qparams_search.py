"""Qparams by search. Separate from qparams.py because a candidate's error is measured after storage (numerics.py)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import blocks, quantize_backends
from .numerics import encode, store_qparams, stored_value
from .qparams import BY_RANGE, RULES, Params, default_rule, only_stored, rule, scale_floor
from .spec import QuantSpec


@rule("mse")
def mse(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """Shrink the default rule's range by the factor in 1, 0.99 .. 0.5 that minimises the squared error of each block.

    The range shrinks towards zero, or towards the middle of the block if an offset is stored. Errors are computed with
    the parameters as stored. Never worse than the default rule, whose range is the first candidate.
    """
    choose = shrunk_range(x, spec, default_rule(spec), eps)

    def error(p: Params) -> Tensor:
        return squared_errors(x, spec, store_qparams(p, spec)[1])

    first = best = choose(1.0)
    start = least = error(first)
    for step in range(1, 51):
        p = choose(1 - step / 100)
        found = error(p)
        better = found < least
        least = torch.where(better, found, least)
        best = select_blocks(better, p, best)
    # Quantized scales share blocks, so the choice for one block changes the stored scales of others.
    return select_blocks(error(best).sum() <= start.sum(), best, first)


def shrunk_range(x: Tensor, spec: QuantSpec, name: str, eps: float | None) -> Callable[[float], Params]:
    """A function of a share: the parameters that the rule ``name`` chooses for a block view if the range of each block
    is that share of its own, towards zero, or towards the middle of the block if an offset is stored.

    A rule of the range sees the two ends of each block alone: rounding is monotonic, so they stay the ends.
    """
    floor, middle = scale_floor(x.dtype, spec, eps), None
    if x.numel():
        inner = blocks.inner_axes(x.ndim // 2)
        lo, hi = x.amin(inner, keepdim=True), x.amax(inner, keepdim=True)
        middle = None if spec.offset is None else lo / 2 + hi / 2
        x = torch.cat([lo, hi], -1) if name in BY_RANGE else x

    def choose(share: float) -> Params:
        y = x if share == 1 else x * share if middle is None else middle + (x - middle) * share
        return only_stored(RULES[name](y, spec, floor), spec, name)

    return choose


def squared_errors(view: Tensor, spec: QuantSpec, p: Params, weight: Tensor | None = None) -> Tensor:
    """sum_j h_j (q_j - x_j)^2 of each block, float32, with q rounded to nearest under parameters as stored.

    view [g0, b0, ..]; p and the result [g0, ..]; weight h broadcasts to the view; None: 1. Sums are pairwise in a fixed
    order (:func:`pairwise_sum`), so that a backend has the same bits.
    """
    shape = view.shape[::2]
    if not view.numel():
        return torch.zeros(shape, dtype=torch.float32, device=view.device)
    # one row of weights serves all rows of blocks
    repeated = weight is not None and view.ndim == 4 and view.shape[1] == 1 and (
        weight.shape[0] == 1 or weight.stride(0) == 0
    )  # fmt: skip
    if weight is not None:
        weight = _rows(weight[:1].expand(1, *view.shape[1:]) if repeated else weight.expand(view.shape))
    rows, flat = _rows(view), Params(*(None if part is None else part.reshape(-1) for part in p))
    fast = quantize_backends.squared_errors(rows, spec, flat, weight)
    if fast is not NotImplemented:
        return fast.view(shape)
    error = _rows((stored_value(encode(view, spec, p), spec, p) - view).float().square())
    if weight is not None:
        error = (error.unflatten(0, (-1, weight.shape[0])) * weight).flatten(0, 1)
    return pairwise_sum(error).view(shape)


def _rows(view: Tensor) -> Tensor:
    """A block view [g0, b0, ..] as [blocks, elements]."""
    rank = view.ndim // 2
    outer, inner = range(0, 2 * rank, 2), range(1, 2 * rank, 2)
    return view.permute(*outer, *inner).reshape(math.prod(view.shape[::2]), math.prod(view.shape[1::2]))


def pairwise_sum(x: Tensor) -> Tensor:
    """Sums of the rows of x [n, k]: of neighbouring vectors of 16, of these sums, .., then of halves of a vector."""
    x = F.pad(x, (0, -x.shape[1] % 16))
    x = x.unflatten(1, (x.shape[1] // 16, 16))
    while x.shape[1] > 1:
        x = F.pad(x, (0, 0, 0, x.shape[1] % 2))
        x = x[:, 0::2] + x[:, 1::2]
    for half in (8, 4, 2, 1):
        x = x[:, :, :half] + x[:, :, half:]
    return x.sum((1, 2))


def select_blocks(which: Tensor, a: Params, b: Params) -> Params:
    """Entries of a where ``which``, else of b."""
    pairs = zip(a, b, strict=True)
    return Params(*(None if x is None or y is None else torch.where(which, x, y) for x, y in pairs))
