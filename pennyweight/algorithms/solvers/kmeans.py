"""Learned codebooks: the table and codes of a weight by k-means, error compensation and least squares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ...core import blocks, codebook
from ...core.numerics import Parts, dequantize, quantize, store_qparams
from ...core.qparams import Params, choose
from ...core.spec import QuantSpec
from ..base import Solution, Solver, Task, register
from .gptq import COLUMNS_PER_BLOCK, inverse_cholesky
from .rtn import Nearest, nearest_parts, total_error

_STEPS = 12  # of conjugate gradients: later steps change less than float16 resolves


@register("kmeans")
@dataclass(frozen=True)
class KMeans(Solver):
    """A codebook for each weight of a learned format, and codes into it.

        minimise tr((Wq - W) H (Wq - W)^T),  Wq[n, d i + j] = table[codes[n, i], j] * scale

    damping     of H, as in "gptq"
    rounds      of k-means; each element is weighted by diag(H) and the square of its scale
    sweeps      afterwards, of coordinate descent on the codes and least squares on the table
    feedback    False: use only diag(H), which needs no K^2 memory and no N K^2 time (the imatrix of llama.cpp)

    Codes are chosen ``dim`` columns at a time, in the metric of the error that later columns cannot compensate; later
    columns are then updated. Cost: O(N K (K + 2^bits) + K^3) per layer, N K^2 more for each of a dozen steps of each
    sweep. On the calibration inputs the output error is never larger than with the table of plain k-means. Formats with
    fixed values are rounded to nearest.
    """

    learns: ClassVar = True

    damping: float = 0.01
    rounds: int = 20
    sweeps: int = 2
    feedback: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.damping <= 1:
            raise ValueError(f"kmeans: damping must be between 0 and 1, got {self.damping}")
        if self.rounds < 1 or self.sweeps < 0:
            raise ValueError(f"kmeans: rounds must be positive and sweeps not negative: {self.rounds}, {self.sweeps}")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("hessian",) if self.feedback else ("second_moment",)

    def solve(self, task: Task) -> Solution:
        if task.spec.format.kind != "learned":
            note = f"rounded to nearest: {task.spec.format} has fixed values"
            return Nearest().solve(task)._replace(note=note)
        if 0 in task.weight.shape:
            return Nearest().solve(task)
        hessian = task.stats["hessian"] if self.feedback else None
        diagonal = task.stats["second_moment"] if hessian is None else hessian.diagonal(dim1=-2, dim2=-1)
        plain, values = nearest_parts(task)
        cost = _cost(task, hessian, diagonal)
        nearest = cost(values)
        if not bool((diagonal > 0).any()):
            return Solution(plain, nearest, nearest, "rounded to nearest: inputs are all zero")
        problem, note = Problem(task, diagonal), ""
        problem.cluster(self.rounds)
        found = [(nearest, plain), (cost(problem.values()), problem.parts())]
        if hessian is not None:
            note = problem.feed_back(hessian, self.damping)
            problem.fit_table(hessian)
            found.append((cost(problem.values()), problem.parts()))
            for _ in range(self.sweeps):
                problem.descend(hessian)
                problem.fit_table(hessian)
                found.append((cost(problem.values()), problem.parts()))
        error, parts = min(found, key=lambda pair: pair[0])
        return Solution(parts, *((error, nearest) if hessian is not None else (None, None)), note=note)


def learner(solver: Solver, spec: QuantSpec, stats: Mapping[str, Tensor]) -> Solver:
    """The solver itself, or for a learned format one that learns from the available statistics. Round-to-nearest of a
    learned format is k-means of the weight alone."""
    if spec.format.kind != "learned" or solver.learns:
        return solver
    if "hessian" in stats:
        return KMeans()
    return KMeans(feedback=False) if "second_moment" in stats else Nearest()


def _cost(task: Task, hessian: Tensor | None, diagonal: Tensor) -> Callable[[Tensor], float]:
    """The solver's objective as a function of the dequantized weight."""

    def output(values: Tensor) -> float:
        assert hessian is not None
        return total_error(values - task.weight, hessian)

    def weighted(values: Tensor) -> float:
        rows = (values - task.weight).double().square().unflatten(0, (diagonal.shape[0], -1))
        return float((rows * diagonal.unsqueeze(1)).sum())

    return weighted if hessian is None else output


class Problem:
    """One weight and its current solution.

    target  [N, K'] target of table * scale: the weight minus its offsets, K' padded to whole blocks and codes
    scale   [N, K'] as stored; table [E, d], float32 values representable in float16; codes [N, K' / d], int64
    counts  [N, K'] weight of each squared error; 0 for padding
    """

    def __init__(self, task: Task, diagonal: Tensor) -> None:
        self.task, self.spec, self.dim = task, task.spec, task.spec.format.dim
        assert task.spec.table_shape is not None
        self.n, self.k = task.weight.shape
        self.entries = task.spec.table_shape[0]
        self.wide = blocks.pad(task.weight, task.spec.block)
        self.short = -self.wide.shape[1] % self.dim
        counts = diagonal.repeat_interleave(self.n // diagonal.shape[0], 0).float()
        self.counts = torch.nn.functional.pad(counts, (0, self._columns(self.wide).shape[1] - self.k))
        self._take(choose(self.wide, task.spec, task.rule, task.eps))
        self.table = torch.zeros(task.spec.table_shape, device=task.weight.device, dtype=torch.float32)
        self.codes = torch.zeros((self.n, self.target.shape[1] // self.dim), dtype=torch.int64, device=self.wide.device)

    def _columns(self, x: Tensor) -> Tensor:
        """[N', n] in whole blocks as [N, K'], padded by repeating the last column."""
        return codebook.vectors(x[: self.n], self.dim).flatten(1)

    def _take(self, params: Params) -> None:
        """Set scales and offsets, rounded as stored."""
        self.params, seen = params, store_qparams(params._replace(table=None), self.spec)[1]

        def expand(part: Tensor | None, default: float) -> Tensor:
            if part is None:
                return torch.full_like(self.counts, default)
            view = blocks.split(torch.ones_like(self.wide), part.shape) * blocks.expand(part.float())
            return self._columns(view.reshape(self.wide.shape))

        self.scale = expand(seen.scale, 1.0)
        self.target = self._columns(self.wide) - expand(seen.offset, 0.0)
        self.safe = torch.where(self.scale == 0, torch.inf, self.scale)

    def quantized(self) -> Tensor:
        """[N, K'] table * scale."""
        return self.table[self.codes].flatten(1) * self.scale

    def parts(self) -> Parts:
        """Plain parts; padding rows are rounded to nearest."""
        parts = quantize(self.task.weight, self.spec, params=self.params._replace(table=self.table))
        parts.codes[: self.n] = self.codes.to(torch.uint8)
        return parts

    def values(self) -> Tensor:
        return dequantize(self.parts(), self.spec, self.task.weight.shape)

    def _put(self, table: Tensor) -> None:
        self.table = codebook.stored(table).float()

    # -- k-means -----------------------------------------------------------------------------------------------------

    def cluster(self, rounds: int) -> None:
        """Table and codes that minimise the sum of counts (table * scale - target)^2; scales are refitted twice."""
        shape = (-1, self.dim)
        for again in range(3):
            x = (self.target / self.safe).reshape(shape)
            weight = (self.counts * self.scale.square()).reshape(shape)
            top = weight.amax()
            weight = weight / top if float(top) > 0 else torch.ones_like(weight)
            if not again:
                some = weight.sum(1) > 0  # exclude padding
                self._put(codebook.fit(x[some], self.entries, weight[some], rounds))
            codes = codebook.nearest(x, self.table, weight).long()
            self._put(codebook.means(x, codes, self.table, weight))
            self.codes = codebook.nearest(x, self.table, weight).long().view(self.codes.shape)
            if again < 2 and self.params.scale is not None and self.params.offset is None:
                self._refit()

    def _refit(self) -> None:
        """Weighted least-squares scale of each block; blocks without a valid solution keep theirs."""
        assert self.params.scale is not None
        t = self.table[self.codes].flatten(1)
        sums = [self._per_block(self.counts * t * other) for other in (self.target, t)]
        scale = sums[0] / sums[1]
        good = scale.isfinite() & (scale > 0)
        self._take(self.params._replace(scale=torch.where(good, scale, self.params.scale.float())))

    def _per_block(self, x: Tensor) -> Tensor:
        """Sums of [N, K'] over the blocks."""
        full = torch.zeros(self.wide.shape, device=x.device, dtype=torch.float32)
        full[: self.n] = x[:, : self.wide.shape[1]]
        return blocks.split(full, blocks.counts(self.spec.block, self.wide.shape)).sum(blocks.inner_axes(2))

    # -- second order ------------------------------------------------------------------------------------------------

    def _runs(self, hessian: Tensor) -> list[tuple[slice, Tensor]]:
        """Groups of rows with the same inputs, and their H [K', K'], padded to whole codes."""
        size, more = self.n // hessian.shape[0], self.target.shape[1] - self.k
        wide = torch.nn.functional.pad(hessian, (0, more, 0, more)).float()
        return [(slice(g * size, (g + 1) * size), h) for g, h in enumerate(wide)]

    def feed_back(self, hessian: Tensor, damping: float) -> str:
        """Choose codes one after another, each compensating for the errors of those before. Returns a note."""
        note = ""
        for rows, h in self._runs(hessian):
            # columns of a code stay together; columns with the highest error cost come first
            order = h.diagonal().view(-1, self.dim).sum(1).argsort(descending=True, stable=True)
            columns = (
                order.unsqueeze(1) * self.dim + torch.arange(self.dim, device=order.device, dtype=torch.int64)
            ).flatten()
            f = inverse_cholesky(h[columns][:, columns], damping, False)
            if f is None:
                note = "no feedback: the Hessian is not positive definite at any damping"
                continue
            if f.damping != damping:
                note = f"damping raised to {f.damping:g}"
            codes = self._quantize_columns(self.target[rows][:, columns], self.safe[rows][:, columns], f.upper)
            self.codes[rows] = codes[:, order.argsort()]
        return note

    def _quantize_columns(self, w: Tensor, safe: Tensor, upper: Tensor) -> Tensor:
        """As :func:`.gptq.quantize_columns`, ``dim`` columns at a time. H^-1 = U^T U: after compensation by later
        columns an error e of columns J costs |e U_JJ^-1|^2; e U_JJ^-1 U_J. is subtracted from the later columns."""
        w, d = w.clone(), self.dim
        scale = torch.where(safe.isinf(), 0.0, safe)
        codes = torch.empty((w.shape[0], w.shape[1] // d), dtype=torch.int64, device=w.device)
        for begin in range(0, w.shape[1], COLUMNS_PER_BLOCK):
            end = min(begin + COLUMNS_PER_BLOCK, w.shape[1])
            errors = torch.empty((w.shape[0], end - begin), device=w.device, dtype=torch.float32)
            for j in range(begin, end, d):
                here = slice(j, j + d)
                metric = torch.linalg.inv(upper[here, here])
                code = codebook.nearest((w[:, here] / safe[:, here]) @ metric, self.table @ metric).long()
                left = (w[:, here] - self.table[code] * scale[:, here]) @ metric
                codes[:, j // d], errors[:, j - begin : j - begin + d] = code, left
                w[:, j + d : end].addmm_(left, upper[here, j + d : end], alpha=-1)
            w[:, end:].addmm_(errors, upper[begin:end, end:], alpha=-1)
        return codes

    def descend(self, hessian: Tensor) -> None:
        """One sweep of coordinate descent: each code in turn becomes the best given all others."""
        d, q = self.dim, self.quantized()
        for rows, h in self._runs(hessian):
            pull = (self.target[rows] - q[rows]) @ h  # minus half the gradient
            small = 1e-6 * float(h.diagonal().mean())
            for begin in range(0, h.shape[0], COLUMNS_PER_BLOCK):
                end = min(begin + COLUMNS_PER_BLOCK, h.shape[0])
                moved, near = torch.zeros_like(pull[:, begin:end]), pull[:, begin:end].clone()
                for j in range(begin, end, d):
                    here, at = slice(j, j + d), slice(j - begin, j - begin + d)
                    own = h[here, here] + small * torch.eye(d, device=h.device, dtype=torch.float32)
                    lower, info = torch.linalg.cholesky_ex(own)
                    if info or not small > 0:
                        continue
                    wanted = q[rows][:, here] + torch.cholesky_solve(near[:, at].t(), lower).t()
                    code = codebook.nearest((wanted / self.safe[rows][:, here]) @ lower, self.table @ lower).long()
                    step = self.table[code] * self.scale[rows][:, here] - q[rows][:, here]
                    gain = 2 * (step * near[:, at]).sum(1) - ((step @ h[here, here]) * step).sum(1)
                    better = gain > 0
                    step = step * better.unsqueeze(1)
                    self.codes[rows, j // d] = torch.where(better, code, self.codes[rows, j // d])
                    moved[:, at] = step
                    near.addmm_(step, h[here, begin:end], alpha=-1)
                pull.addmm_(moved, h[begin:end], alpha=-1)

    def fit_table(self, hessian: Tensor) -> None:
        """Least-squares table for the codes, by conjugate gradients from the current table."""
        flat, runs = self.codes.flatten(), self._runs(hessian)

        def gathered(difference: Tensor) -> Tensor:
            """Gradient with respect to the table for a matrix of errors [N, K']."""
            pulled = torch.empty_like(difference)
            for rows, h in runs:
                pulled[rows] = difference[rows] @ h
            total = torch.zeros(self.table.shape, dtype=torch.float64, device=flat.device)
            return total.index_add_(0, flat, (pulled * self.scale).reshape(-1, self.dim).double())

        def expand(table: Tensor) -> Tensor:
            return table.float()[self.codes].flatten(1) * self.scale

        table = self.table.double()
        residual = -gathered(self.quantized() - self.target)
        direction, square = residual, float(residual.square().sum())
        first = square
        for _ in range(_STEPS):
            if not square > 1e-12 * first or not first > 0:
                break
            size = float(direction.abs().max())  # normalize: gradients may have any magnitude
            image = gathered(expand(direction / size)) * size
            curved = float((direction * image).sum())
            if not curved > 0:
                break
            table = table + square / curved * direction
            residual = residual - square / curved * image
            square, before = float(residual.square().sum()), square
            direction = residual + square / before * direction
        if bool(table.isfinite().all()):
            self._put(table.float())
