"""Solvers "mse" (clipping) and "imatrix", which search the quantization parameters of each block by weight error, and
their shared search, which "hqq" uses too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import blocks
from ...core.numerics import Parts, dequantize, encode, quantize, store_qparams, stored_value
from ...core.qparams import Params, choose, default_rule
from ...core.qparams_search import select_blocks, squared_errors
from ..base import Solution, Solver, Task, register
from .kquant_search import search_kquant, stack_rows
from .qparam_grid import grid_candidates, range_shares
from .rtn import Nearest

_CHUNK = 1 << 23  # elements per chunk: the search needs about six arrays of that size

# Map the block's largest element below the largest value: in e2m1 to 4 instead of 6 (Cook et al. 2025, "Four over
# six"); 2.0 is one step of power-of-two scales
STRETCHES = (1.125, 1.25, 1.5, 2.0)


Cost = Callable[[Tensor], Tensor]  # of differences, element by element


class BlockSearch:
    """Keeps the parameters with the lowest cost for each block; starts with those of the scheme.

    task    its weight is [N, K]; its spec has a scale
    cost    elementwise cost of the differences, such as ``torch.square``
    weight  [K] or [N, K], weight of each element's cost; None: equal weights
    """

    def __init__(self, task: Task, cost: Cost = torch.square, weight: Tensor | None = None) -> None:
        self.task, self.cost, self.spec = task, cost, task.spec
        n, k = task.weight.shape
        self.weight = (
            torch.ones(n, k, device=task.weight.device, dtype=torch.float32) if weight is None else weight.expand(n, k)
        )
        padded = blocks.pad(task.weight, self.spec.block)
        self.shape = blocks.counts(self.spec.block, padded.shape)
        self.view = blocks.split(padded, self.shape)
        added = (0, padded.shape[1] - k, 0, padded.shape[0] - n)
        self.counts = blocks.split(F.pad(self.weight, added), self.shape)  # padding has weight 0
        _, self.first = next(grid_candidates(task, ("scheme",), None))
        self.best, self.least = self.first, self._costs(self.first)

    def codes(self, params: Params) -> tuple[Tensor, Params]:
        """Codes of the blocks, rounded to nearest under the parameters, and the parameters as stored."""
        seen = store_qparams(params, self.spec)[1]
        return encode(self.view, self.spec, seen), seen

    def _costs(self, params: Params) -> Tensor:
        if self.cost is torch.square:
            return squared_errors(self.view, self.spec, store_qparams(params, self.spec)[1], self.counts)
        codes, seen = self.codes(params)
        found = self.cost(stored_value(codes, self.spec, seen) - self.view) * self.counts
        return found.sum(blocks.inner_axes(2))

    def offer(self, params: Params) -> None:
        found = self._costs(params)
        better = found < self.least  # False for NaN
        self.least = torch.where(better, found, self.least)
        self.best = select_blocks(better, params, self.best)

    def fitted(self) -> Params:
        """Weighted least-squares scales (and offsets) for the codes of the best parameters, for each block.

            sum_j h_j u_j (s u_j + o - w_j) = 0  and  sum_j h_j (s u_j + o - w_j) = 0,  u = codes - mid - zero point

        Blocks without a positive solution keep their scale.
        """
        codes, seen = self.codes(self.best)
        u = self.spec.format.decode(codes, torch.float32) - self.spec.mid
        if seen.zero_point is not None:
            u = u - blocks.expand(seen.zero_point).float()
        inner, h = blocks.inner_axes(2), self.counts
        hu, uw, uu = (h * u).sum(inner), (h * u * self.view).sum(inner), (h * u * u).sum(inner)
        if self.best.offset is None:
            scale, offset = uw / uu, None
        else:
            total, hw = h.sum(inner), (h * self.view).sum(inner)
            below = total * uu - hu * hu
            scale = (total * uw - hu * hw) / below
            offset = (hw - scale * hu) / total
            offset = torch.where(offset.isfinite(), offset, self.best.offset.float())
        assert self.best.scale is not None
        good = scale.isfinite() & (scale > 0)
        return Params(
            torch.where(good, scale, self.best.scale.float()),
            self.best.zero_point,
            None if offset is None or self.best.offset is None else torch.where(good, offset, self.best.offset.float()),
        )

    def row_costs(self, values: Tensor) -> Tensor:
        """Cost of each row for the dequantized values [N, K]."""
        return (self.cost(values - self.task.weight) * self.weight).sum(1)

    def finish(self, *others: Parts, note: str = "") -> Solution:
        """The best solution, never worse than round-to-nearest. Blocks of scales that are quantized together
        affect each other; therefore rows (or the whole) are compared again as stored.

        others: further candidate parts of the whole weight, used if better.
        """
        shape, weight = self.task.weight.shape, self.task.weight
        by_row = self.spec.rows_independent(shape)
        chosen = self.first
        parts = quantize(weight, self.spec, params=chosen)
        least = self.row_costs(dequantize(parts, self.spec, shape))
        found = quantize(weight, self.spec, params=self.best)
        costs = self.row_costs(dequantize(found, self.spec, shape))
        for these, cost in [(found, costs), *((p, self.row_costs(dequantize(p, self.spec, shape))) for p in others)]:
            if by_row:
                better = cost < least
                parts, least = _rows(better, these, parts), torch.where(better, cost, least)
            elif cost.sum() < least.sum():
                parts, least = these, cost
        return Solution(parts, note=note)


def solve_in_chunks(task: Task, solve: Callable[[Task, slice], Solution]) -> Solution:
    """Call solve(task of some rows, their slice) chunk by chunk if rows are independent; else once for all rows."""
    n, k = task.weight.shape
    step = max(1, _CHUNK // max(1, k))
    if n <= step or not task.spec.rows_independent(task.weight.shape):
        return solve(task, slice(0, n))
    runs = [slice(start, min(start + step, n)) for start in range(0, n, step)]
    found = [solve(replace(task, weight=task.weight[rows]), rows) for rows in runs]
    return Solution(stack_rows([s.parts for s in found]), note=next((s.note for s in found if s.note), ""))


def _rows(which: Tensor, a: Parts, b: Parts) -> Parts:
    """Rows of a where ``which``, else of b; rows must not share parts."""

    def join(x: object, y: object) -> object:
        if isinstance(x, Parts) and isinstance(y, Parts):
            return _rows(which, x, y)
        if not isinstance(x, Tensor) or not isinstance(y, Tensor):
            return None
        if x.dtype.is_floating_point and x.dtype.itemsize == 1:  # torch.where does not support float8
            return torch.where(which.unsqueeze(1), x.view(torch.uint8), y.view(torch.uint8)).view(x.dtype)
        return torch.where(which.unsqueeze(1), x, y)

    return Parts(*(join(x, y) for x, y in zip(a, b, strict=True)))


# -- solvers -----------------------------------------------------------------------------------------------------------


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
        for params in range_shares(found.view, task.spec, task.rule, task.eps):
            found.offer(params)
        for params in _wider(task):
            found.offer(params)
        for _ in range(self.fits):
            found.offer(found.fitted())
        return found.finish(*search_kquant(task.weight, task.spec, weight))


def by_rows(moment: Tensor, rows: int) -> Tensor:
    """Expand [G, K] to [rows, K]: the rows form G equal groups."""
    if moment.shape[0] == 1:
        return moment.expand(rows, -1)
    return moment.repeat_interleave(rows // moment.shape[0], 0)
