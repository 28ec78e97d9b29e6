"""Qparams by search. Separate from qparams.py because a candidate's error is measured after storage (numerics.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from . import blocks
from .numerics import encode, store_qparams, stored_value
from .qparams import RULES, Params, default_rule, only_stored, rule
from .spec import QuantSpec


@rule("mse")
def mse(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """Shrink the default rule's range by the factor in 1, 0.99 .. 0.5 that minimises the squared error of each block.

    The range shrinks towards zero, or towards the middle of the block if an offset is stored. Errors are computed with
    the parameters as stored. Never worse than the default rule, whose range is the first candidate.
    """
    base = RULES[default_rule(spec)]
    inner = blocks.inner_axes(x.ndim // 2)
    middle: Tensor | float = 0.0
    if spec.offset is not None and x.numel():
        lo, hi = x.amin(inner, keepdim=True), x.amax(inner, keepdim=True)
        middle = lo / 2 + hi / 2

    def error(p: Params) -> Tensor:
        decoded = store_qparams(p, spec)[1]
        return (stored_value(encode(x, spec, decoded), spec, decoded) - x).float().square().sum(inner)

    first = best = only_stored(base(x, spec, eps), spec, "mse")
    start = least = error(first)
    for step in range(1, 51):
        p = only_stored(base(middle + (x - middle) * (1 - step / 100), spec, eps), spec, "mse")
        found = error(p)
        better = found < least
        least = torch.where(better, found, least)
        best = select_blocks(better, p, best)
    # Quantized scales share blocks, so the choice for one block changes the stored scales of others.
    return select_blocks(error(best).sum() <= start.sum(), best, first)


def select_blocks(which: Tensor, a: Params, b: Params) -> Params:
    """Entries of a where ``which``, else of b."""
    pairs = zip(a, b, strict=True)
    return Params(*(None if x is None or y is None else torch.where(which, x, y) for x, y in pairs))
