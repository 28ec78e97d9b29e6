"""Refinement of solved codes: best candidate per row, least-squares scales for fixed codes, coordinate descent."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Size, Tensor

from ...core import blocks
from ...core.qparams import Params
from ...core.qparams_search import select_blocks
from ...core.spec import QuantSpec
from ...kernels.cpu.library import usable
from ...kernels.cpu.matrix_view import threads_for
from ...kernels.native.convert import gptq_block
from .qparam_grid import QParamGrid, Rounder, make_grid
from .rtn import output_error

_CHUNK = 1 << 24  # elements of a temporary
_COLUMNS = 128  # columns per block of coordinate descent: later blocks are updated by one matrix product


class BestCandidate:
    """The best candidate: per row if rows do not share scales, else for the whole matrix.

    codes, values [N, K] on ``grid``; error [N]
    """

    def __init__(self, g: QParamGrid, codes: Tensor, values: Tensor, error: Tensor, shape: Size) -> None:
        self.grid, self.codes, self.values, self.error = g, codes, values, error
        self.shape, self.by_row = shape, g.spec.rows_independent(shape)

    def offer(self, g: QParamGrid, codes: Tensor, values: Tensor, error: Tensor) -> None:
        """Keep a candidate if it is better than all before; non-finite errors count as infinite."""
        error = torch.where(error.isfinite(), error, torch.inf)
        better = error < self.error if self.by_row else (error.sum() < self.error.sum()).expand(error.shape)
        if not better.any():
            return
        which = better.unsqueeze(1)
        if g is not self.grid:
            chosen = select_blocks(which, g.chosen, self.grid.chosen) if self.by_row else g.chosen
            self.grid = make_grid(chosen, g.spec, self.shape)
        self.codes = torch.where(which, codes, self.codes)
        self.values = torch.where(which, values, self.values)
        self.error = torch.where(better, error, self.error)


def refit_and_descend(
    best: BestCandidate, target: Tensor, hessian: Tensor, sweeps: int, scales: bool = True, keep: Tensor | None = None
) -> None:
    """``sweeps`` times: refit the scales to the codes, then coordinate descent on the codes. Never worse.

    scales  whether scales may change
    keep    [N, K] elements that may change; None: all
    """
    h = hessian.unsqueeze(0)
    for _ in range(sweeps):
        again = refit(target, best.codes, best.grid, hessian) if scales else None
        if again is not None:
            values = again.values(best.codes)
            best.offer(again, best.codes, values, output_error(values - target, h))
        codes, values = coordinate_descent(target, best.codes, best.values, best.grid, hessian, keep)
        best.offer(best.grid, codes, values, output_error(values - target, h))


def refit(target: Tensor, codes: Tensor, g: QParamGrid, hessian: Tensor) -> QParamGrid | None:
    """The grid whose scales (and offsets) minimise tr(D H D^T) for the given codes: for each row with blocks B_i of
    inputs and u = codes - zero point,

        (B_i u) H (B_j u)^T s_j = (B_i u) H w^T

    target, codes [N, K]; hessian [K, K]. None if rows share scales, or if scales are quantized themselves. Scales whose
    sign would change, and rows with a singular system, keep their values.
    """
    spec, (n, k) = g.spec, target.shape
    if isinstance(spec.scale, QuantSpec) or isinstance(spec.offset, QuantSpec) or spec.scale is None:
        return None
    if not spec.rows_independent(target.shape):
        return None
    chosen = g.chosen
    assert chosen.scale is not None
    size = blocks.resolve(spec.block, target.shape)[1]
    groups = chosen.scale.shape[1]
    units = spec.format.decode(codes, torch.float32) - spec.mid
    if g.columns.zero_point is not None:
        units = units - g.columns.zero_point.t().float()
    scale, offset = chosen.scale.clone(), None if chosen.offset is None else chosen.offset.clone()
    pull = target @ hessian
    width = groups if offset is None else 2 * groups
    step = max(1, _CHUNK // max(1, k, width**2))
    for begin in range(0, n, step):
        rows = slice(begin, min(begin + step, n))
        system, wanted = normal_equations(units[rows], hessian, pull[rows], size, offsets=offset is not None)
        system.diagonal(dim1=1, dim2=2).add_(1e-6 * system.diagonal(dim1=1, dim2=2).mean(1, keepdim=True) + 1e-30)
        found, info = torch.linalg.solve_ex(system, wanted)
        new = found[:, :groups]
        good = (info == 0).unsqueeze(1) & found.isfinite().all(1, keepdim=True) & (new * scale[rows] > 0)
        scale[rows] = torch.where(good, new.to(scale.dtype), scale[rows])
        if offset is not None:
            offset[rows] = torch.where(good, found[:, groups:].to(offset.dtype), offset[rows])
    return make_grid(Params(scale, chosen.zero_point, offset), spec, target.shape)


def normal_equations(
    units: Tensor, hessian: Tensor, pull: Tensor, size: int, *, offsets: bool
) -> tuple[Tensor, Tensor]:
    """The system and right side of :func:`refit` for rows of units [n, K] and pull [n, K]: [n, G, G] and [n, G] for the
    scales of G groups of ``size`` inputs; with offsets, whose units are 1, twice as wide.

    A group of inputs is zero outside of itself, so that all products together take n K^2 operations.
    """
    n, k = units.shape
    groups = -(-k // size)
    width = 2 * groups if offsets else groups

    def sums(x: Tensor, start: int) -> Tensor:
        """By groups, of the columns from ``start`` on."""
        rest = groups * size - k
        return (F.pad(x, (0, rest)) if rest else x).unflatten(1, (-1, size)).sum(2)

    system = torch.empty(n, width, width, device=units.device, dtype=torch.float32)
    for g in range(groups):
        start = g * size
        inside = hessian[start : start + size, start:]  # the rest by symmetry
        product = units[:, start : start + size] @ inside
        system[:, g, g:groups] = sums(product * units[:, start:], start)
        if offsets:
            column = inside.sum(0, keepdim=True)
            system[:, g, groups + g :] = sums(product, start)
            system[:, groups + g, g:groups] = sums(column * units[:, start:], start)
            system[:, groups + g, groups + g :] = sums(column, start)
    i, j = torch.tril_indices(groups, groups, -1, device=units.device)
    for a in range(0, width, groups):
        for b in range(0, width, groups):
            system[:, a + i, b + j] = system[:, b + j, a + i]
    wanted = sums(pull * units, 0)
    return system, torch.cat([wanted, sums(pull, 0)], 1) if offsets else wanted


def subtract_outer(x: Tensor, column: Tensor, row: Tensor) -> None:
    """x -= column row^T in place. Not by ``addr_``, which rounds once or twice by processor and by position, so that
    codes would depend on both."""
    x.sub_(column.unsqueeze(1) * row)


def coordinate_descent(
    weight: Tensor, codes: Tensor, values: Tensor, grid: QParamGrid, hessian: Tensor, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One sweep of coordinate descent on tr(D H D^T): each column in turn is rounded to its optimum given all others.
    The objective never increases. Behdin et al. 2023 (QuantEase). keep: as in
    :func:`.gptq.quantize_columns`.
    """
    w = weight.t()
    v, codes = (x.t().clone(memory_format=torch.contiguous_format) for x in (values, codes))  # also of one row
    k = w.shape[0]
    pull = hessian @ (w - v)  # [K, N]: minus half the gradient
    kept = None if keep is None else keep.t()
    for begin in range(0, k, _COLUMNS):
        end = min(begin + _COLUMNS, k)
        here, keep_here = slice(begin, end), None if kept is None else kept[begin:end].float().contiguous()
        moved = torch.zeros(end - begin, w.shape[1], device=w.device, dtype=torch.float32)
        terms = grid.terms(begin, end) if w.is_cpu and usable() is True else None
        if terms is not None:
            lower, threads = hessian[here, here].contiguous(), threads_for(moved.numel())
            job = (keep_here, *terms[:6]), terms[6:], codes[here], v[here], moved
            gptq_block(pull[here], lower, *job, threads, descent=True)
        else:
            _descend(pull[here], hessian[here, here], grid.rounder(begin, end), keep_here, codes[here], v[here], moved)
        pull[end:].addmm_(hessian[end:, here], moved, alpha=-1)
    return codes.t().contiguous(), v.t().contiguous()


def _descend(
    pull: Tensor, hessian: Tensor, nearest: Rounder, keep: Tensor | None, codes: Tensor, values: Tensor, moved: Tensor
) -> None:
    """A block of columns, [k, N]; ``pull`` is working memory, the last three are written. Native code has the bits of
    this loop."""
    for j, h in enumerate(hessian.diagonal().tolist()):
        if not h > 0:
            continue
        wanted = values[j] + pull[j] / h
        codes[j], new = nearest(j, wanted if keep is None else wanted * keep[j])
        moved[j] = new - values[j]
        values[j] = new
        subtract_outer(pull[j + 1 :], hessian[j + 1 :, j], moved[j])
