"""Half-quadratic quantization (HQQ): zero points that minimise an outlier-robust norm. Needs no data."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core import blocks
from ...core.numerics import quantize, store_qparams
from ...core.qparams import Params
from ..base import Solution, Solver, Task, register
from .block_search import BlockSearch, solve_in_chunks
from .rtn import Nearest

UNMOVED = (
    "rounded to nearest: no integer zero point of this scheme can be improved, because it shifts the grid by whole "
    "steps; use 'mse', calibration data, or a scheme with an offset"
)


@register("hqq")
@dataclass(frozen=True)
class HQQ(Solver):
    """Optimizes the zero point or offset of each block to minimise sum |Wq - W|^norm (Badri and Shaji 2023).

    Half-quadratic splitting: with e the outlier part of the error, in units of the step,

        e <- shrink(W - Wq),  shrink(x) = sign(x) max(0, |x| - |x|^(norm-1) / beta)
        zero <- mean(codes - (W - e) / s)

    and beta is multiplied by ``growth`` in each step. Scales are fixed. Each block keeps its best step, so it is never
    worse than round-to-nearest in this norm. An integer zero point is rounded in each step and gains almost nothing: a
    grid shifted by whole steps has the same values except at its ends. If no zero point changes, and for schemes
    without zero point and offset, the weight is rounded to nearest with a note.
    """

    norm: float = 0.7
    beta: float = 10.0
    growth: float = 1.01
    steps: int = 20

    def __post_init__(self) -> None:
        if not 0 < self.norm <= 2:
            raise ValueError(f"hqq: norm must be above 0 and at most 2, got {self.norm}")
        if not (self.beta > 0 and self.growth >= 1 and self.steps >= 1):
            raise ValueError("hqq: beta must be positive, growth at least 1, steps at least 1")

    def solve(self, task: Task) -> Solution:
        spec = task.spec
        if not spec.zero_point and spec.offset is None:
            note = "rounded to nearest: hqq optimizes zero points or offsets, and this scheme has none"
            return Nearest().solve(task)._replace(note=note)
        found = solve_in_chunks(task, self._solve)
        if spec.offset is None and not found.note:
            zero, nearest = found.parts.zero_point, quantize(task.weight, spec, task.rule, task.eps).zero_point
            if isinstance(zero, Tensor) and isinstance(nearest, Tensor) and torch.equal(zero, nearest):
                return found._replace(note=UNMOVED)
        return found

    def _solve(self, task: Task, rows: slice) -> Solution:
        spec = task.spec
        found = BlockSearch(task, lambda d: d.abs().pow(self.norm))
        params, beta, inner = found.first, self.beta, blocks.inner_axes(2)
        for _ in range(self.steps):
            codes, seen = found.codes(params)
            assert seen.scale is not None
            scale = blocks.expand(seen.scale).float()
            step = torch.where(scale == 0, torch.inf, scale)
            units = spec.format.decode(codes, torch.float32) - spec.mid
            zero = _zero(seen)
            error = found.view / step - (units - zero)
            outlying = error.sign() * (error.abs() - error.abs().pow(self.norm - 1) / beta).clamp(min=0)
            zero = ((units - found.view / step + outlying) * found.counts).sum(inner)
            params = self._with(task, params, zero / found.counts.sum(inner).clamp(min=1))
            found.offer(params)
            beta *= self.growth
        return found.finish()

    def _with(self, task: Task, params: Params, zero: Tensor) -> Params:
        """``params`` with new zero points [N / b0, K / b1], given in units of the step."""
        if params.zero_point is not None:
            f = task.spec.format
            return params._replace(zero_point=zero.round().clamp(f.lo, f.hi))
        seen = store_qparams(params, task.spec)[1]
        assert seen.scale is not None
        offset = -zero * seen.scale.float()
        kind = task.spec.offset
        if getattr(kind, "one_sided", False):  # offsets that must not be positive
            offset = offset.clamp(max=0)
        assert params.offset is not None
        return params._replace(offset=torch.where(offset.isfinite(), offset, params.offset.float()))


def _zero(seen: Params) -> Tensor | float:
    """Zero point in units of the step."""
    if seen.zero_point is not None:
        return blocks.expand(seen.zero_point).float()
    assert seen.offset is not None
    assert seen.scale is not None
    scale = blocks.expand(seen.scale).float()
    return -blocks.expand(seen.offset).float() / torch.where(scale == 0, torch.inf, scale)
