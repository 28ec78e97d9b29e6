"""Shared core of the GPTQ family: rounding a matrix with error compensation between its columns.

All minimise tr(D H D^T), D = Wq - W: the squared error of the layer's output over the calibration inputs, H = E[x x^T].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .qparam_grid import QParamGrid

# Columns per block: errors propagate within a block column by column, to the rest by one product (GPTQ's lazy batches)
WIDTH = 128


class CholeskyFactor(NamedTuple):
    """upper: U of H^-1 = U^T U, H damped and its columns in ``order``; damping: share of the mean diagonal added."""

    upper: Tensor
    order: Tensor
    damping: float


def inverse_cholesky(hessian: Tensor, damping: float, activation_order: bool) -> CholeskyFactor | None:
    """Factor the inverse of a Hessian [K, K]. Damping grows tenfold, up to the mean diagonal, until the matrix is
    positive definite; None if it never is.

    In float64 up to 8192 inputs: float32 is too inaccurate if channels differ by orders of magnitude.
    """
    k = hessian.shape[0]
    diagonal = hessian.diagonal()
    mean = float(diagonal.double().mean())
    if not 0 < mean < float("inf"):
        return None
    order = (
        torch.argsort(diagonal, descending=True, stable=True)
        if activation_order
        else torch.arange(k, device=hessian.device, dtype=torch.int64)
    )
    dtype = torch.float64 if k <= 8192 else torch.float32
    while damping <= 1.0:
        # These matrices dominate the memory of a layer, so each is released as soon as possible
        h = hessian[order].index_select(1, order).to(dtype)
        h.diagonal().add_(damping * mean)
        h, info = torch.linalg.cholesky_ex(h)
        if not info:
            h = torch.cholesky_inverse(h)
            h, info = torch.linalg.cholesky_ex(h, upper=True)
            if not info and bool(h.isfinite().all()):
                return CholeskyFactor(h.float(), order, damping)
        damping = max(10 * damping, 1e-4)
    return None


def quantize_columns(
    weight: Tensor, grid: QParamGrid, f: CholeskyFactor, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(codes, values) [N, K]: round each column to nearest, then update the later columns to compensate for its error.
    Frantar et al. 2022 (GPTQ); with fixed grids this is Babai's nearest plane algorithm.

    keep    bool [N, K]: all other elements become the representable value nearest to zero
    """
    order, upper = f.order, f.upper
    kept = None if keep is None else keep.t()[order].contiguous()
    w = weight.t()[order].contiguous()
    ordered = grid._replace(columns=type(grid.columns)(*(None if p is None else p[order] for p in grid.columns)))
    k = w.shape[0]
    codes = torch.empty(w.shape, dtype=grid.spec.format.code_dtype, device=w.device)
    values = torch.empty_like(w)
    for begin in range(0, k, WIDTH):
        end = min(begin + WIDTH, k)
        block, errors = w[begin:end], torch.empty(end - begin, w.shape[1], device=w.device, dtype=torch.float32)
        inner = upper[begin:end, begin:end]
        for j in range(end - begin):
            wanted = block[j : j + 1]
            c, v = ordered.nearest(wanted if kept is None else wanted * kept[begin + j], begin + j)
            codes[begin + j], values[begin + j] = c[0], v[0]
            errors[j] = (block[j] - v[0]) / inner[j, j]
            if j + 1 < end - begin:
                block[j + 1 :].addr_(inner[j, j + 1 :], errors[j], alpha=-1)
        if end < k:
            w[end:].addmm_(upper[begin:end, end:].t(), errors, alpha=-1)
    back = torch.argsort(order)
    return codes[back].t().contiguous(), values[back].t().contiguous()


def coordinate_descent(
    weight: Tensor, codes: Tensor, values: Tensor, grid: QParamGrid, hessian: Tensor, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One sweep of coordinate descent on tr(D H D^T): each column in turn is rounded to its optimum given all others.
    The objective never increases. Behdin et al. 2023 (QuantEase). keep: as in :func:`quantize_columns`.
    """
    w, v = weight.t(), values.t().contiguous()
    codes = codes.t().contiguous()
    k = w.shape[0]
    diagonal = hessian.diagonal()
    pull = hessian @ (w - v)  # [K, N]: minus half the gradient
    for begin in range(0, k, WIDTH):
        end = min(begin + WIDTH, k)
        moved = torch.zeros(end - begin, w.shape[1], device=w.device, dtype=torch.float32)
        here = pull[begin:end].clone()
        for j in range(end - begin):
            h = diagonal[begin + j]
            if not h > 0:
                continue
            wanted = v[begin + j] + here[j] / h
            wanted = wanted if keep is None else wanted * keep[:, begin + j]
            c, new = grid.nearest(wanted.unsqueeze(0), begin + j)
            moved[j] = new[0] - v[begin + j]
            v[begin + j], codes[begin + j] = new[0], c[0]
            here.addr_(hessian[begin:end, begin + j], moved[j], alpha=-1)
        pull.addmm_(hessian[:, begin:end], moved, alpha=-1)
    return codes.t().contiguous(), v.t().contiguous()
