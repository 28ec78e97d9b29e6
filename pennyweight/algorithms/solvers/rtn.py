"""Round-to-nearest (RTN), the default solver and the baseline of all others, and the output error they minimise."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...core import quantize_backends
from ...core.numerics import Parts, decibels, dequantize, quantize
from ...core.tensor import AffineQuantizedTensor, check_finite
from ...planning.scheme import Scheme, stored_scale
from ..base import Solution, Solver, Task, register

COLUMNS = 512  # of a Hessian that are multiplied at once
_CHUNK = 1 << 24  # elements quantized at a time; bounds the float32 temporaries


def output_error(difference: Tensor, hessian: Tensor) -> Tensor:
    """E|d x|^2 = d H d^T of each row: difference [N, K], hessian [G, K, K] -> [N], in float32."""
    rows = difference.unflatten(0, (hessian.shape[0], -1))
    total = torch.zeros(rows.shape[:2], dtype=rows.dtype, device=rows.device)
    for product, columns in _half_products(rows, hessian):
        total += product.mul_(columns).sum(-1)
    return total.flatten()


def total_error(difference: Tensor, hessian: Tensor) -> float:
    """Sum of :func:`output_error` in float64: with nearly collinear inputs the products cancel."""
    rows = difference.unflatten(0, (hessian.shape[0], -1)).double()
    total = 0.0
    for product, columns in _half_products(rows, hessian):
        total += float(product.mul_(columns).sum())
    return max(0.0, total)


def _half_products(rows: Tensor, hessian: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(product, the same columns of d) for blocks of columns of d H, with a symmetric H [G, K, K] and d [G, n, K], so
    that the products of both add up to d H d^T: what is above the block's own part of H counts twice, what is below it
    not. Half the work of the whole product, and no copy of a large H in the dtype of d."""
    for begin in range(0, hessian.shape[-1], COLUMNS):
        columns = slice(begin, begin + COLUMNS)
        d = rows[:, :, columns]
        h = hessian[:, : begin + COLUMNS, columns].to(rows.dtype)
        yield torch.matmul(d, h[:, begin:]).baddbmm_(rows[:, :, :begin], h[:, :begin], alpha=2), d


def nearest_parts(task: Task) -> tuple[Parts, Tensor]:
    """(plain parts of round-to-nearest under the scheme's own rule, their dequantized matrix)."""
    parts = quantize(task.weight, task.spec, task.rule, task.eps)
    return parts, dequantize(parts, task.spec, task.weight.shape)


@register("nearest")
@dataclass(frozen=True)
class Nearest(Solver):
    """Rounds each element to the nearest value of its block's grid; learned tables are k-means of the weight alone.
    Needs no data."""

    learns: ClassVar = True

    def solve(self, task: Task) -> Solution:
        return Solution(nearest_parts(task)[0])


# -- whole weights -----------------------------------------------------------------------------------------------------


def quantize_weight(
    x: Tensor, scheme: Scheme, name: str = "weight", layout: str = "plain"
) -> tuple[AffineQuantizedTensor, float]:
    """Quantize x [.., contracted] under a scheme: (tensor in ``layout``, SQNR in dB). Raises ValueError for NaN or inf.

    Without a fast kernel for the device it works on chunks of rows, so that temporaries stay small.
    """
    spec = scheme.weight.with_(layout=layout)
    fast = quantize_backends.quantize(x, spec, scheme.rule, scheme.eps)
    if fast is not NotImplemented and math.isfinite(fast.signal):
        parts = fast.parts._replace(**static_parts(scheme, x.device))
        return AffineQuantizedTensor(parts, spec, x.shape, x.dtype, scheme.act), decibels(fast.signal, fast.noise)
    check_finite(x, name)
    spec = spec.with_(layout="plain")
    step = max(1, x.shape[0] if x.ndim else 1)
    if x.ndim > 1 and x.shape[0] > 1 and spec.rows_independent(x.shape):
        step = min(step, max(1, _CHUNK // max(1, x[0].numel())))
    pieces, signal, noise = [], 0.0, 0.0
    for start in range(0, max(1, x.shape[0] if x.ndim else 1), step):
        piece = x[start : start + step] if x.ndim else x
        parts = quantize(piece, spec, scheme.rule, scheme.eps)
        pieces.append(parts)
        if not (x.is_meta or isinstance(x, torch._subclasses.FakeTensor)):  # these have no values
            exact = piece.float()
            signal += float(torch.linalg.vector_norm(exact)) ** 2
            noise += float(torch.linalg.vector_norm(dequantize(parts, spec, piece.shape).sub_(exact))) ** 2
    parts = pieces[0] if len(pieces) == 1 else Parts(*map(_join, zip(*pieces, strict=True)))
    parts = parts._replace(**static_parts(scheme, x.device))
    w = AffineQuantizedTensor(parts, spec, x.shape, x.dtype, scheme.act).to_layout(layout)
    return w, decibels(signal, noise)


def _join(slot: tuple[Any, ...]) -> Any:
    if isinstance(slot[0], Parts):
        return Parts(*map(_join, zip(*slot, strict=True)))
    return None if slot[0] is None else torch.cat(slot)


def static_parts(scheme: Scheme, device: torch.device) -> dict[str, Tensor]:
    """Stored parameters of a static activation: [1], or [rows, 1] for one scale per row."""
    parts = {}
    if scheme.act_scale is not None:
        parts["act_scale"] = stored_scale(scheme.act_scale, device)
    if scheme.act_zero_point is not None and scheme.act is not None:
        dtype = scheme.act.spec.zero_point_dtype
        parts["act_zero_point"] = torch.tensor([scheme.act_zero_point], dtype=dtype, device=device)
    return parts
