"""Experts: each a product of its own rows with its own weight, under the recipe of a linear layer."""

from __future__ import annotations

import torch
from torch import Tensor

from .gemm import linear
from .recipes import Recipe, get_recipe


def grouped_mm(
    x: Tensor, w: Tensor, ends: Tensor, recipe: str | Recipe = "rowwise", bias: Tensor | None = None
) -> Tensor:
    """Rows of x [T, K] times the matrices of w [E, K, N]: rows ends[e - 1] to ends[e] by w[e]. Returns [T, N].

    The arguments are ``torch._grouped_mm``'s (w of [E, N, K] is passed as ``w.transpose(-2, -1)``, which costs
    nothing). bias: [E, N]. ends: integers [E] that ascend up to T; an expert may have no rows. Rows beyond the last end
    give zeros. Scales never mix experts: a whole-tensor scale is one of an expert's rows. ``ends`` is read on the host,
    so that torch.compile breaks its graph here. Raises ValueError where shapes or ends do not fit.
    """
    how = get_recipe(recipe)
    if x.ndim != 2 or w.ndim != 3 or x.shape[1] != w.shape[1]:
        raise ValueError(f"grouped_mm: x is [T, K] and w [E, K, N], not {[*x.shape]} and {[*w.shape]}")
    if ends.shape != w.shape[:1] or ends.is_floating_point():
        raise ValueError(f"grouped_mm: ends are {w.shape[0]} integers, not {ends.dtype} {[*ends.shape]}")
    if bias is not None and bias.shape != (w.shape[0], w.shape[2]):
        raise ValueError(f"grouped_mm: bias is {[w.shape[0], w.shape[2]]}, not {[*bias.shape]}")
    stops = [int(e) for e in ends.tolist()]
    if any(b < a for a, b in zip([0, *stops], [*stops, x.shape[0]], strict=False)):
        raise ValueError(f"grouped_mm: ends must ascend from 0 to the {x.shape[0]} rows of x, got {stops}")
    pieces = []
    for e, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
        one = None if bias is None else bias[e]
        pieces.append(linear(x[start:stop], w[e].transpose(0, 1), one, how))
    rest = x.shape[0] - (stops[-1] if stops else 0)
    if rest or not pieces:
        pieces.append((pieces[0] if pieces else x).new_zeros(rest, w.shape[2]))
    return torch.cat(pieces)


__all__ = ["grouped_mm"]
