"""What a competitor is, how its result is checked, and how one visit is timed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

ROTATED_BYTES = (
    200_000_000  # six times a last-level cache of 32 MB; much more, and all peers together do not fit 24 GiB
)
WARM_SECONDS = 0.015  # the threads of the process visited before spin for some 8 ms more (libgomp)


@dataclass(frozen=True)
class Run:
    """A competitor bound to one input.

    step      computes with copy i and returns whatever it likes
    steps     step takes 0..steps-1 in turn
    products  linear products in one step: more than one for graphs that hold all copies
    outputs   copies -> their y [M, N], for the gate
    copies    how many copies `outputs` knows; the rows of copy i are those of copy 0 rolled by i*shift
    """

    step: Callable[[int], Any]
    steps: int
    outputs: Callable[[list[int]], list[torch.Tensor]]
    copies: int
    products: int = 1
    shift: int = 0


Bind = Callable[[torch.Tensor], Run]


def always(n: int, k: int, m: int) -> bool | str:
    return True


@dataclass(frozen=True)
class Competitor:
    """One way to compute x [M, K] @ weight [N, K].T.

    bits         of a weight's code; competitors are compared at equal bits
    stored_bits  of a weight with its scales, which is what must be read
    arithmetic   "int8", "bf16" or "fp32": the peak that bounds it
    bound        greatest relative error that is not a fault
    make         (weight bf16 [N, K], copies) -> bind; bind(x bf16 [M, K]) -> Run
    accepts      (N, K, M) -> True, or the sentence that refuses
    alone        compared with bf16 only: no peer has the like
    """

    name: str
    family: str
    bits: int
    stored_bits: float
    arithmetic: str
    bound: float
    make: Callable[[torch.Tensor, int], Bind]
    accepts: Callable[[int, int, int], bool | str] = always
    detail: str = ""
    alone: bool = False

    def stored_bytes(self, n: int, k: int) -> float:
        return n * k * self.stored_bits / 8

    def copies(self, n: int, k: int) -> int:
        """So many that together they fill `ROTATED_BYTES`."""
        return max(1, math.ceil(ROTATED_BYTES / self.stored_bytes(n, k)))


def rolled(t: torch.Tensor, i: int) -> torch.Tensor:
    """Copy i of a tensor whose first axis is N: its rows moved by i, in memory of its own."""
    return t.roll(i, 0).contiguous() if i else t.clone()


def eager(products: Sequence[Callable[[torch.Tensor], torch.Tensor]], dtype: torch.dtype, shift: int = 0) -> Bind:
    """Bind for competitors that are called once for each product: products[i](x) is copy i."""

    def bind(x: torch.Tensor) -> Run:
        x = x.to(dtype).contiguous()
        outputs = lambda some: [products[i](x) for i in some]  # noqa: E731
        return Run(lambda i: products[i](x), len(products), outputs, len(products), 1, shift)

    return bind


def relative_error(y: torch.Tensor, reference: torch.Tensor) -> float:
    """‖y − reference‖ / ‖reference‖, Frobenius; inf where y is not finite or has another shape."""
    if y.shape != reference.shape:
        return math.inf
    error = float((y.double() - reference).norm() / reference.norm())
    return error if math.isfinite(error) else math.inf


def gate(run: Run, rows: list[int], reference: torch.Tensor) -> float:
    """The greater relative error of the first and the last copy, over the rows of the reference (float64)."""
    some, worst = sorted({0, run.copies - 1}), 0.0
    for i, y in zip(some, run.outputs(some), strict=True):
        expected = reference.roll(i * run.shift, 1) if run.shift else reference
        worst = max(worst, relative_error(y[rows], expected))
    return worst


def visit(run: Run, seconds: float, start: int = 0, warm: bool = True) -> tuple[float, int]:
    """(median seconds of one product, steps taken) of a visit: a short warm-up, unless unwanted, then one timed step or
    more."""
    clock, i = time.perf_counter, start
    end = clock() + WARM_SECONDS
    while warm and clock() < end:
        run.step(i % run.steps)
        i += 1
    times, begin = [], clock()
    while True:
        before = clock()
        run.step(i % run.steps)
        after = clock()
        i += 1
        times.append(after - before)
        if after - begin > seconds:
            return median(times) / run.products, i - start
