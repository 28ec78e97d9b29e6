"""GPTQ with fixed quantization grids, and extensions that improve accuracy at the same number of bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.numerics import Parts, dequantize
from ..base import Solution, Solver, Task, register
from .candidates import BestCandidate, refit_and_descend
from .gptq_core import CholeskyFactor, inverse_cholesky, quantize_columns
from .qparam_grid import SHRINKS, grid_candidates, make_grid
from .rtn import Nearest, nearest_parts, output_error, total_error

LEAST, MOST = 0.01, 0.3  # damping by the number of tokens
AUTO = ("scheme", *SHRINKS[1:], "extreme", "mse", "weighted")


@register("gptq")
@dataclass(frozen=True)
class GPTQ(Solver):
    """Second-order rounding: later columns compensate for the rounding error of each column (Frantar et al. 2022).

        minimise tr((Wq - W) H (Wq - W)^T),  H = E[x x^T] + damping mean(diag H) I

    damping     grows tenfold, per layer, until H is positive definite. None: inputs / (2 tokens), at least 0.01 and at
                most 0.3, because statistics of few tokens do not generalize (docs/log.md). With fewer tokens than
                inputs this value is the minimum, also if damping is given
    activation_order    quantize columns with the largest inputs first; grids are fixed beforehand, so files need no
                permutation
    grids       candidate range rules of blocks; each row uses the one with the smallest output error.
                "scheme": the config's own rule; "mse"; "weighted"; a fraction of the range such as 0.9
    asymmetric  0 to 1: how far the target moves towards the float model's output at the same token, to compensate for
                errors of earlier layers (Li et al. 2025, GPTAQ; here in closed form:
                W + asymmetric W E[(x_float - x) x^T] H^-1). Without float inputs the target is the layer's own output
    sweeps      number of sweeps of scale refitting and coordinate descent afterwards; each row keeps the better result
    keep_zeros  weights that are exactly 0 (see :func:`sparsify_`) do not compensate for errors; they become the
                representable value nearest to 0

    Cost: O(N K^2 + K^3) per layer, N K^2 more for each further grid. On the calibration inputs no row's output is
    further from its target (the weight's own output if asymmetric is 0) than with round-to-nearest.
    """

    damping: float | None = 0.01
    activation_order: bool = True
    grids: tuple[str | float, ...] = ("scheme",)
    asymmetric: float = 0.0
    sweeps: int = 0
    keep_zeros: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "grids", (self.grids,) if isinstance(self.grids, str) else tuple(self.grids))
        if not self.grids:
            raise ValueError("gptq: grids must name at least one grid, such as ('scheme',)")
        if self.damping is not None and not 0 <= self.damping <= 1:
            raise ValueError(f"gptq: damping must be between 0 and 1, got {self.damping}")
        if not 0 <= self.asymmetric <= 1:
            raise ValueError(f"gptq: asymmetric must be between 0 and 1, got {self.asymmetric}")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("hessian",)

    @property
    def wants(self) -> tuple[str, ...]:
        return ("drift",) if self.asymmetric else ()

    def damping_of(self, inputs: int, tokens: int) -> float:
        """The initial damping. With fewer tokens than inputs, H is singular: errors in unseen directions seem to cost
        nothing, and the given damping may be too small."""
        suited = min(max(LEAST, inputs / max(1, 2 * tokens)), MOST)
        if self.damping is None:
            return suited
        return max(self.damping, suited) if 0 < tokens < inputs else self.damping

    def solve(self, task: Task) -> Solution:
        hessians, drifts = task.stats["hessian"], task.stats.get("drift") if self.asymmetric else None
        if hessians.shape[0] == 1:
            return self._solve(task, hessians[0], None if drifts is None else drifts[0])
        if not task.spec.rows_independent(task.weight.shape):
            return Nearest().solve(task)._replace(note="rounded to nearest: blocks span groups of the convolution")
        # A grouped convolution: each group of outputs has its own inputs
        solved = []
        for g, rows in enumerate(task.weight.chunk(hessians.shape[0])):
            part = Task(task.name, rows, task.spec, task.rule, task.eps, tokens=task.tokens)
            solved.append(self._solve(part, hessians[g], None if drifts is None else drifts[g]))
        parts = Parts(*(None if p[0] is None else torch.cat(p) for p in zip(*(s.parts for s in solved), strict=True)))
        note = next((s.note for s in solved if s.note), "")
        return Solution(parts, sum(s.error or 0.0 for s in solved), sum(s.nearest or 0.0 for s in solved), note)

    def _solve(self, task: Task, hessian: Tensor, drift: Tensor | None) -> Solution:
        h = hessian.unsqueeze(0)
        parts, values = nearest_parts(task)
        nearest = total_error(values - task.weight, h)
        damping = self.damping_of(hessian.shape[0], task.tokens)
        f = inverse_cholesky(hessian, damping, self.activation_order)
        if f is None:
            why = "inputs are all zero" if not hessian.any() else "the Hessian is not positive definite at any damping"
            return Solution(parts, nearest, nearest, f"rounded to nearest: {why}")
        target = task.weight if drift is None else asymmetric_target(task.weight, drift, f, self.asymmetric)
        keep = task.weight != 0 if self.keep_zeros else None
        keep = None if keep is None or bool(keep.all()) else keep
        n, k = task.weight.shape
        first = make_grid(next(grid_candidates(task, ("scheme",), None))[1], task.spec, task.weight.shape)
        damped = hessian.clone()  # candidates are compared under damping, which generalizes better with few tokens
        damped.diagonal().add_(f.damping * hessian.diagonal().mean())
        d = damped.unsqueeze(0)
        best = BestCandidate(first, parts.codes[:n, :k], values, output_error(values - target, d), task.weight.shape)
        for _, params in grid_candidates(task, self.grids, hessian.diagonal()):
            g = make_grid(params, task.spec, task.weight.shape)
            codes, made = quantize_columns(target, g, f, keep)
            best.offer(g, codes, made, output_error(made - target, d))
        refit_and_descend(best, target, damped, self.sweeps, keep=keep)
        found = best
        best = BestCandidate(first, parts.codes[:n, :k], values, output_error(values - target, h), task.weight.shape)
        best.offer(found.grid, found.codes, found.values, output_error(found.values - target, h))
        asked = damping if self.damping is None else self.damping
        note = "" if f.damping == asked else f"damping raised to {f.damping:g}"
        if self.asymmetric and drift is None and self.name == GPTAQ.name:  # "auto" uses drift only if available
            note = "; ".join(filter(None, (note, "target is its own output: no float inputs")))
        solved = best.grid.parts(task.weight, best.codes)
        error = total_error(dequantize(solved, task.spec, task.weight.shape) - task.weight, h)
        return Solution(solved, error, nearest, note)


def asymmetric_target(weight: Tensor, drift: Tensor, f: CholeskyFactor, share: float) -> Tensor:
    """W + share W E[(x_float - x) x^T] H^-1, with the damped H. At share 1 and without damping this is the
    least-squares fit to W x_float on the calibration inputs."""
    back = torch.argsort(f.order)
    upper = f.upper.double()
    inverse = (upper.t() @ upper)[back][:, back]
    return (weight.double() + share * weight.double() @ drift.double() @ inverse).float()


@register("auto")
@dataclass(frozen=True)
class Auto(GPTQ):
    """GPTQ with all grids and refinement: each row of each layer uses the range rule with the smallest output error on
    the calibration inputs, because no fixed rule is best on all models. It compensates for half of the errors of
    earlier layers (docs/algorithms/auto.md)."""

    damping: float | None = None
    grids: tuple[str | float, ...] = AUTO
    asymmetric: float = 0.5
    sweeps: int = 2


@register("gptaq")
@dataclass(frozen=True)
class GPTAQ(GPTQ):
    """GPTQ whose target is the float model's output, on the inputs from the quantized layers before it."""

    asymmetric: float = 0.5
