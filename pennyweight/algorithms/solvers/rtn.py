"""Round-to-nearest (RTN), the baseline of all solvers, and the output error that solvers minimise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...core.numerics import Parts, dequantize, quantize
from ..base import Solution, Solver, Task, register


def output_error(difference: Tensor, hessian: Tensor) -> Tensor:
    """E|d x|^2 = d H d^T of each row: difference [N, K], hessian [G, K, K] -> [N], in float32."""
    rows = difference.unflatten(0, (hessian.shape[0], -1))
    return (torch.matmul(rows, hessian) * rows).sum(-1).flatten()


def total_error(difference: Tensor, hessian: Tensor) -> float:
    """Sum of :func:`output_error` in float64: with nearly collinear inputs the products cancel."""
    rows = difference.unflatten(0, (hessian.shape[0], -1)).double()
    total = 0.0
    for begin in range(0, hessian.shape[-1], 1024):  # no float64 copy of a large Hessian
        columns = slice(begin, begin + 1024)
        total += float((torch.matmul(rows, hessian[:, :, columns].double()) * rows[:, :, columns]).sum())
    return max(0.0, total)


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
