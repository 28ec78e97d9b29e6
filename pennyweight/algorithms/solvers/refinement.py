"""Refinement of solved codes: best candidate per row, least-squares scales for fixed codes, coordinate descent.

Matrices [N, K] are transposed here, [K, N], so that access to a column is contiguous. "Row" and "column" are those of
the weight.
"""

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
from .rtn import COLUMNS

_CHUNK = 1 << 24  # elements of a temporary
_COLUMNS = 128  # columns per block of coordinate descent: later blocks are updated by one matrix product


def output_errors(difference: Tensor, hessian: Tensor) -> Tensor:
    """:func:`.rtn.output_error` of a transposed difference [K, N] -> [N]."""
    total = torch.zeros_like(difference[0])
    for begin in range(0, difference.shape[0], COLUMNS):
        here = slice(begin, begin + COLUMNS)
        product = hessian[here, here] @ difference[here]
        product.addmm_(hessian[here, :begin], difference[:begin], alpha=2)
        total += product.mul_(difference[here]).sum(0)
    return total


class BestCandidate:
    """The best candidate: per row if rows do not share scales, else for the whole matrix.

    codes, values [K, N] on ``grid``; error [N]; shape: that of the weight
    """

    def __init__(self, g: QParamGrid, codes: Tensor, values: Tensor, error: Tensor, shape: Size) -> None:
        self.grid, self.codes, self.values, self.error = g, codes, values, error
        self.shape, self.by_row = shape, g.spec.rows_independent(shape)

    def offer(self, g: QParamGrid, codes: Tensor, values: Tensor, error: Tensor) -> Tensor:
        """Keep a candidate where it is better than all before; non-finite errors count as infinite. -> where, [N]"""
        error = torch.where(error.isfinite(), error, torch.inf)
        better = error < self.error if self.by_row else (error.sum() < self.error.sum()).expand(error.shape)
        if better.any():
            if g is not self.grid:
                which = better.unsqueeze(1)
                chosen = select_blocks(which, g.chosen, self.grid.chosen) if self.by_row else g.chosen
                self.grid = make_grid(chosen, g.spec, self.shape)
            self.codes = torch.where(better, codes, self.codes)
            self.values = torch.where(better, values, self.values)
            self.error = torch.where(better, error, self.error)
        return better


def refit_and_descend(best: BestCandidate, w: Tensor, hessian: Tensor, sweeps: int, keep: Tensor | None = None) -> None:
    """``sweeps`` times: refit the scales to the codes, then coordinate descent on the codes. Never worse.

    w       [K, N], the target
    keep    [K, N] elements that may change; None: all
    """
    wanted = hessian @ w if _can_refit(best.grid.spec, best.shape) else None
    for _ in range(sweeps):
        if wanted is None:
            pull = hessian @ (w - best.values)
        else:
            again = refit(best.codes, best.grid, hessian, wanted, best.shape)
            values = again.values(best.codes)
            difference = w - values
            pull = hessian @ difference  # for the error of these values, and for descent from them
            better = best.offer(again, best.codes, values, difference.mul_(pull).sum(0))
            if not better.all():
                pull[:, ~better] = hessian @ (w - best.values)[:, ~better]
        codes, values, change = coordinate_descent(best.codes, best.values, best.grid, hessian, pull, keep)
        best.offer(best.grid, codes, values, best.error + change)


def _can_refit(spec: QuantSpec, shape: Size) -> bool:
    """Not if rows share scales, or if scales are quantized themselves."""
    quantized = isinstance(spec.scale, QuantSpec) or isinstance(spec.offset, QuantSpec)
    return not quantized and spec.scale is not None and spec.rows_independent(shape)


def refit(codes: Tensor, g: QParamGrid, hessian: Tensor, pull: Tensor, shape: Size) -> QParamGrid:
    """The grid whose scales (and offsets) minimise tr(D H D^T) for the given codes: for each row with blocks B_i of
    inputs and u = codes - zero point,

        (B_i u) H (B_j u)^T s_j = (B_i u) H w^T

    codes [K, N]; hessian [K, K]; pull = H w [K, N]. Scales whose sign would change, and rows with a singular system,
    keep their values.
    """
    spec, (n, k) = g.spec, shape
    chosen = g.chosen
    assert chosen.scale is not None
    size = blocks.resolve(spec.block, shape)[1]
    groups = chosen.scale.shape[1]
    units = spec.format.decode(codes, torch.float32) - spec.mid
    if g.stored.zero_point is not None:
        units -= g.stored.zero_point.float().index_select(0, g.group)
    scale, offset = chosen.scale.clone(), None if chosen.offset is None else chosen.offset.clone()
    width = groups if offset is None else 2 * groups
    step = max(1, _CHUNK // max(1, k, width**2))
    for begin in range(0, n, step):
        rows = slice(begin, min(begin + step, n))
        system, wanted = normal_equations(units[:, rows], hessian, pull[:, rows], size, offsets=offset is not None)
        system.diagonal(dim1=1, dim2=2).add_(1e-6 * system.diagonal(dim1=1, dim2=2).mean(1, keepdim=True) + 1e-30)
        found, info = torch.linalg.solve_ex(system, wanted)
        new = found[:, :groups]
        good = (info == 0).unsqueeze(1) & found.isfinite().all(1, keepdim=True) & (new * scale[rows] > 0)
        scale[rows] = torch.where(good, new.to(scale.dtype), scale[rows])
        if offset is not None:
            offset[rows] = torch.where(good, found[:, groups:].to(offset.dtype), offset[rows])
    return make_grid(Params(scale, chosen.zero_point, offset), spec, shape)


def normal_equations(
    units: Tensor, hessian: Tensor, pull: Tensor, size: int, *, offsets: bool
) -> tuple[Tensor, Tensor]:
    """The system and right side of :func:`refit` for rows of units [K, n] and pull [K, n]: [n, G, G] and [n, G] for the
    scales of G groups of ``size`` inputs; with offsets, whose units are 1, twice as wide.

    A group of inputs is zero outside of itself, so that all products together take n K^2 operations.
    """
    k, n = units.shape
    groups = -(-k // size)
    width = 2 * groups if offsets else groups

    def sums(x: Tensor) -> Tensor:
        """By groups, of rows of which the last is that of the last input."""
        rest = -len(x) % size
        return (F.pad(x, (0, 0, 0, rest)) if rest else x).unflatten(0, (-1, size)).sum(1)

    system = torch.empty(width, width, n, device=units.device, dtype=torch.float32)
    of_groups = sums(hessian) if offsets else None  # [G, K]
    for g in range(groups):
        here = slice(g * size, (g + 1) * size)
        after = slice(g * size, k)  # the rest by symmetry
        system[g, g:groups] = sums((hessian[after, here] @ units[here]).mul_(units[after]))
        if of_groups is not None:
            system[groups:, g] = of_groups[:, here] @ units[here]
            system[groups:, groups + g] = of_groups[:, here].sum(1, keepdim=True)
    i, j = torch.tril_indices(groups, groups, -1, device=units.device)
    system[i, j] = system[j, i]
    system[:groups, groups:] = system[groups:, :groups].transpose(0, 1)
    wanted = sums(pull * units)
    return system.permute(2, 0, 1), (torch.cat([wanted, sums(pull)]) if offsets else wanted).t()


def subtract_outer(x: Tensor, column: Tensor, row: Tensor) -> None:
    """x -= column row^T in place. Not by ``addr_``, which rounds once or twice by processor and by position, so that
    codes would depend on both."""
    x.sub_(column.unsqueeze(1) * row)


def coordinate_descent(
    codes: Tensor, values: Tensor, grid: QParamGrid, hessian: Tensor, pull: Tensor, keep: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """One sweep of coordinate descent on tr(D H D^T): each column in turn is rounded to its optimum given all others.
    The objective never increases. Behdin et al. 2023 (QuantEase).

    codes, values, pull = H (w - values)    [K, N]; pull is working memory
    keep                                    as in :func:`.gptq.quantize_columns`

    Returns codes, values, and by how much the objective of each row has changed, [N]: a block B whose values move by m
    under the pull p that the blocks before it have left changes it by m (H_BB m - 2 p).
    """
    codes, v = codes.clone(), values.clone()
    k, n = v.shape
    change = torch.zeros(n, device=v.device, dtype=torch.float32)
    for begin in range(0, k, _COLUMNS):
        end = min(begin + _COLUMNS, k)
        here, keep_here = slice(begin, end), None if keep is None else keep[begin:end].float().contiguous()
        own = hessian[here, here].contiguous()
        moved = torch.zeros(end - begin, n, device=v.device, dtype=torch.float32)
        terms = grid.terms(begin, end) if v.is_cpu and usable() is True else None
        if terms is not None:
            job = (keep_here, *terms[:6]), terms[6:10], codes[here], v[here], moved
            gptq_block(pull[here], own, *job, threads_for(moved.numel()), descent=True, table=terms.table)
        else:
            _descend(pull[here].clone(), own, grid.rounder(begin, end), keep_here, codes[here], v[here], moved)
        pull[end:].addmm_(hessian[end:, here], moved, alpha=-1)
        change += pull[here].addmm_(own, moved, beta=-2).mul_(moved).sum(0)
    return codes, v, change


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
