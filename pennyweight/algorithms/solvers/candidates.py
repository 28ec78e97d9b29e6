"""Selection of the best of several solutions of one matrix, and its refinement."""

from __future__ import annotations

import torch
from torch import Size, Tensor

from .gptq_core import coordinate_descent
from .qparam_grid import QParamGrid, make_grid, select_blocks
from .rtn import output_error
from .scale_refit import refit


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
