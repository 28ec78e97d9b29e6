"""Solvers that search the range of each block, by weight error alone or weighted by the input magnitudes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core import blocks
from ...core.qparams import Params, choose, default_rule
from ..base import Solution, Solver, Task, register
from .block_search import BlockSearch, solve_in_chunks
from .kquant_search import search_kquant as search_superblocks
from .qparam_grid import grid_candidates, range_shares
from .rtn import Nearest

# Map the block's largest element below the largest value: in e2m1 to 4 instead of 6 (Cook et al. 2025, "Four over
# six"); 2.0 is one step of power-of-two scales
STRETCHES = (1.125, 1.25, 1.5, 2.0)


def _wider(task: Task) -> Iterator[Params]:
    """Ranges wider than the block's own, for formats with unevenly spaced values."""
    if task.spec.format.kind == "int" or task.spec.offset is not None:
        return
    w = blocks.pad(task.weight, task.spec.block)
    for stretch in STRETCHES:
        yield choose(w * stretch, task.spec, task.rule or default_rule(task.spec), task.eps)


@register("mse")
@dataclass(frozen=True)
class MSE(Solver):
    """Clips each block's range to the fraction 1, 0.99 .. 0.5 with the smallest squared weight error; needs no data.

    For formats with unevenly spaced values (e2m1, nf4) it also tries ranges wider than the block. Never worse than
    round-to-nearest in squared weight error. Cost: about 50 times that of rounding.
    """

    def solve(self, task: Task) -> Solution:
        if task.spec.scale is None:
            return Nearest().solve(task)
        return solve_in_chunks(task, self._solve)

    def _solve(self, task: Task, rows: slice) -> Solution:
        found = BlockSearch(task)
        for _, params in grid_candidates(task, ("mse",), None):
            found.offer(params)
        for params in _wider(task):
            found.offer(params)
        return found.finish()


@register("imatrix")
@dataclass(frozen=True)
class Importance(Solver):
    """Scales (and offsets) that minimise sum_j E[x_j^2] (Wq_ij - W_ij)^2 in each block: llama.cpp's importance matrix.

    Tries the fractions 1, 0.98 .. 0.5 of the range, then least squares for the codes of the best, ``fits`` times. For
    ggml's K-quants and IQ4 types also the search of the GGUF writer. Rows are never worse than round-to-nearest in this
    objective, which is the output error for uncorrelated inputs. Cost: about 30 times that of rounding.
    """

    fits: int = 3

    @property
    def needs(self) -> tuple[str, ...]:
        return ("second_moment",)

    def solve(self, task: Task) -> Solution:
        if task.spec.scale is None:
            return Nearest().solve(task)
        moment = task.stats["second_moment"]
        if not bool(moment.any()):
            return Nearest().solve(task)._replace(note="rounded to nearest: inputs are all zero")
        weight = by_rows(moment, task.weight.shape[0])
        return solve_in_chunks(task, lambda part, rows: self._solve(part, weight[rows]))

    def _solve(self, task: Task, weight: Tensor) -> Solution:
        found = BlockSearch(task, torch.square, weight)
        for params in range_shares(blocks.pad(task.weight, task.spec.block), task.spec, task.rule, task.eps):
            found.offer(params)
        for params in _wider(task):
            found.offer(params)
        for _ in range(self.fits):
            found.offer(found.fitted())
        others = search_superblocks(task.weight, task.spec, weight)
        return found.finish(*others)


def by_rows(moment: Tensor, rows: int) -> Tensor:
    """Expand [G, K] to [rows, K]: the rows form G equal groups."""
    if moment.shape[0] == 1:
        return moment.expand(rows, -1)
    return moment.repeat_interleave(rows // moment.shape[0], 0)
