"""Weight pruning: by magnitude, by magnitude times input norm (Wanda), or with error compensation (SparseGPT)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..core.formats import INT8
from ..core.model_arguments import check_arguments
from ..core.numerics import decibels
from ..core.spec import QuantSpec
from ..core.tensor import AffineQuantizedTensor, check_finite
from ..planning.config_resolution import Filter, PlanError
from ..planning.configs import SpecConfig
from ..planning.plan import PlanRow, plan
from ..planning.quantize_report import Report, Row
from ..support.arguments import did_you_mean, show
from ..support.errors import ArgumentTypeError
from ..support.progress import Progress, step
from .base import as_matrix
from .calibration.batches import Batches, read
from .calibration.collect_statistics import CollectedStatistics
from .calibration.loop import CalibrationLoop
from .solvers.block_search import by_rows
from .solvers.gptq import COLUMNS_PER_BLOCK, inverse_cholesky
from .solvers.refinement import subtract_outer
from .solvers.rtn import total_error

METHODS = {"magnitude": (), "wanda": ("second_moment",), "sparsegpt": ("hessian",)}


@dataclass(frozen=True)
class SparsityPattern:
    """Keeps ``kept`` of every ``of`` consecutive inputs ("2:4"); if ``of`` is 0, ``share`` of the weights are zero."""

    text: str
    kept: int = 0
    of: int = 0
    share: float = 0.0

    @staticmethod
    def read(pattern: str | float) -> SparsityPattern:
        if isinstance(pattern, str):
            found = re.fullmatch(r"(\d{1,4}):(\d{1,4})", pattern)
            kept, of = map(int, found.groups()) if found else (0, 0)
            if not 0 < kept < of:
                raise PlanError(f"a pattern must be like '2:4' (2 kept of each 4) or a share of zeros, got {pattern!r}")
            return SparsityPattern(pattern, kept, of)
        if isinstance(pattern, bool) or not isinstance(pattern, (int, float)):
            raise ArgumentTypeError(f"pattern must be like '2:4', or a share of zeros such as 0.5, got {show(pattern)}")
        if not 0 < pattern < 1:
            raise PlanError(f"a share of zeros must be between 0 and 1, got {pattern!r}; or use a pattern like '2:4'")
        return SparsityPattern(f"{pattern:.0%} zeros", share=float(pattern))

    def check(self, row: PlanRow) -> None:
        """Raise PlanError if ``of`` does not divide the number of inputs, or for a transposed convolution."""
        assert row.site is not None
        if row.site.op == "transposed_convolution":
            raise PlanError(f"{row.name}: transposed convolutions cannot be sparsified; leave it out with filter_fn")
        width = math.prod(row.shape[1:]) if row.site.op == "convolution" else row.site.shape[-1]
        if self.of and width % self.of:
            raise PlanError(
                f"{row.name}: its {width} inputs are not divisible by {self.of}; leave it out with filter_fn, or "
                f"use a share of zeros such as {1 - self.kept / self.of:g}"
            )

    def keep(self, score: Tensor, zeros: int | None = None) -> Tensor:
        """bool like score [N, K]: True for kept elements, those with higher scores; of equal scores the later ones.

        zeros   for a share: total number of zeros, chosen among all elements. None: the same number in each row
        """
        if self.of:
            runs = score.unflatten(1, (-1, self.of))
            return _all_but_least(runs, self.of - self.kept).flatten(1)
        if zeros is None:
            return _all_but_least(score, round(self.share * score.shape[1]))
        return _all_but_least(score.flatten(), zeros).view(score.shape)


def _all_but_least(score: Tensor, count: int) -> Tensor:
    order = score.argsort(dim=-1, stable=True)
    return torch.ones_like(score, dtype=torch.bool).scatter_(-1, order[..., :count], False)


def prune(x: Tensor, pattern: str | float, unfolded: bool = False) -> Tensor:
    """x [.., K] with the smallest magnitudes of each row set to zero, by a pattern as in :func:`sparsify_`.

    unfolded: x is a convolution's weight, whose rows are its output channels. Raises PlanError if the pattern does not
    divide the rows.
    """
    wanted = SparsityPattern.read(pattern)
    rows = as_matrix(x, unfolded)
    if wanted.of and rows.shape[1] % wanted.of:
        raise PlanError(f"rows of {rows.shape[1]} inputs are not divisible by {wanted.of}; leave the layer out")
    return (rows * wanted.keep(rows.abs())).view(x.shape)


@check_arguments()
def sparsify_(
    model: nn.Module,
    method: str = "wanda",
    pattern: str | float = "2:4",
    calibration: Any = None,
    *,
    filter_fn: Filter | None = None,
    damping: float = 0.01,
    spill: str | Path | None = None,
    progress: Progress = None,
) -> Report:
    """Set a part of the weights to zero, in place, and return a report. The model stays a float model.

    method      "magnitude": the smallest weights; "wanda": the smallest |w_ij| sqrt(E[x_j^2]) of each row (Sun et al.
                2023); "sparsegpt": the smallest w_ij^2 / U_jj^2, with U the Cholesky factor of the inverse Hessian;
                later columns compensate for each error (Frantar and Alistarh 2023). The last two need data
    pattern     "2:4": keep 2 of every 4 inputs of a row; or the fraction of zeros, per row ("sparsegpt": per layer)
    filter_fn   (module, fqn) -> bool; default: linear modules
    calibration, spill, progress    as in :func:`quantize_`; each block sees the outputs of the pruned blocks before it

    A weight that no data reaches is pruned by magnitude, and its report row has a note. Quantize afterwards: symmetric
    schemes keep zeros, and so do the solvers of the GPTQ family. Raises PlanError before it changes the model.
    """
    if method not in METHODS:
        guess = did_you_mean(method, METHODS, 1)
        raise PlanError(f"sparsify_: method must be one of {', '.join(METHODS)}, got {method!r}{guess}")
    wanted, needs = SparsityPattern.read(pattern), METHODS[method]
    if needs and calibration is None:
        raise PlanError(f"sparsify_: {method} needs calibration data; pass calibration=batches, or use 'magnitude'")
    batches = read(calibration, together=True) if needs else Batches()
    if needs and not batches:
        raise PlanError(f"sparsify_: calibration has no batches; {method} needs calibration data")
    rows = plan(model, SpecConfig(QuantSpec(INT8, (-1,))), filter_fn).rows
    todo = {row.name: row for row in rows if row.scheme is not None and row.tensor is not None}
    _check(todo, wanted)
    out = {name: Row(row.name, row.type_name, row.shape, wanted.text, "", row.bytes_before, row.bytes_before, None)
           for name, row in todo.items()}  # fmt: skip
    done = 0

    def finish(name: str, seen: CollectedStatistics) -> None:
        nonlocal done
        out[name].sqnr, out[name].note = _apply(todo[name], method, wanted, seen, damping)
        done += 1
        advance(done, len(todo), name)

    left = dict.fromkeys(todo)
    with step("sparsify_", progress) as advance, torch.no_grad():
        if needs:
            weights = {id(row.tensor): name for name, row in todo.items()}
            for names, seen in CalibrationLoop(model, weights, batches, needs, spill).stages():
                for name in names:
                    del left[name]
                    finish(name, seen.get(name, CollectedStatistics()))
        for name in left:
            finish(name, CollectedStatistics())
    report = [out.get(r.name) or Row(r.name, r.type_name, r.shape, "", "", r.bytes_before, r.bytes_before, None, r.note)
              for r in rows]  # fmt: skip
    return Report(f"{method}, {wanted.text}", report, verb="pruned")


def _check(todo: dict[str, PlanRow], pattern: SparsityPattern) -> None:
    for name, row in todo.items():
        x = row.tensor
        assert x is not None
        if isinstance(x, AffineQuantizedTensor):
            raise PlanError(f"{name} is already quantized ({x.spec}); sparsify_ first, then quantize_")
        if x.is_meta:
            raise PlanError(f"{name} is on the meta device and has no values; load the weights first")
        try:
            check_finite(x.detach(), name)
        except ValueError as error:
            raise PlanError(str(error)) from error
        pattern.check(row)


def _apply(
    row: PlanRow, method: str, pattern: SparsityPattern, seen: CollectedStatistics, damping: float
) -> tuple[float, str]:
    """(SQNR of the weight in dB, note)."""
    assert row.site is not None
    x = row.tensor
    assert x is not None
    flip, unfolded = row.site.transposed, row.site.op == "convolution"
    view = x.detach().transpose(-2, -1) if flip else x.detach()
    w = as_matrix(view, unfolded).float()
    if seen.experts and method != "magnitude":
        pruned = [
            _pruned(one, method, pattern, own, damping)
            for one, own in zip(w.chunk(len(seen.experts)), seen.experts, strict=True)
        ]
        new, lost = torch.cat([part for part, _ in pruned]), sum(text == NO_DATA for _, text in pruned)
        note = f"{lost} of {len(pruned)} experts: {NO_DATA}" if lost else ""
    else:
        new, note = _pruned(w, method, pattern, seen, damping)
    signal, noise = float(w.double().square().sum()), float((new - w).double().square().sum())
    view.copy_(new.view(view.shape))
    return decibels(signal, noise), note


NO_DATA = "pruned by magnitude: no calibration data"


def _pruned(
    w: Tensor, method: str, pattern: SparsityPattern, seen: CollectedStatistics, damping: float
) -> tuple[Tensor, str]:
    """A matrix pruned, and a note."""
    if method == "magnitude" or not seen.stats:
        return w * pattern.keep(w.abs()), "" if method == "magnitude" else NO_DATA
    if method == "wanda":
        return w * pattern.keep(w.abs() * by_rows(seen.stats["second_moment"], len(w)).sqrt()), ""
    return _with_hessian(w, seen.stats["hessian"], pattern, damping)


def _with_hessian(w: Tensor, hessian: Tensor, pattern: SparsityPattern, damping: float) -> tuple[Tensor, str]:
    """(weight, note): SparseGPT, or Wanda's mask if that has a smaller output error."""
    groups = hessian.shape[0]
    rows = w.chunk(groups)
    moment = hessian.diagonal(dim1=1, dim2=2)
    wanda = w * pattern.keep(w.abs() * by_rows(moment, len(w)).sqrt())
    found = torch.cat([sparse_gpt(part, h, pattern, damping) for part, h in zip(rows, hessian, strict=True)])
    error, other = total_error(found - w, hessian), total_error(wanda - w, hessian)
    magnitude = total_error(w * pattern.keep(w.abs()) - w, hessian)
    note = ""
    if other < error:
        found, error, note = wanda, other, "wanda mask used: smaller output error; "
    return found, note + (f"output error {error / magnitude:.3g}x magnitude's" if magnitude > 0 else "no error")


def sparse_gpt(w: Tensor, hessian: Tensor, pattern: SparsityPattern, damping: float = 0.01) -> Tensor:
    """w [N, K] pruned to the pattern, column by column; the error of each column is propagated to the later ones. By
    magnitude if the Hessian [K, K] is all zero."""
    f = inverse_cholesky(hessian, damping, False)
    if f is None:
        return w * pattern.keep(w.abs())
    n, k = w.shape
    upper, diagonal = f.upper, f.upper.diagonal()
    w = w.t().contiguous()
    width = COLUMNS_PER_BLOCK if not pattern.of else max(1, COLUMNS_PER_BLOCK // pattern.of) * pattern.of
    for begin in range(0, k, width):
        end = min(begin + width, k)
        block, errors, inner = (
            w[begin:end],
            torch.zeros(end - begin, n, device=w.device, dtype=torch.float32),
            upper[begin:end, begin:end],
        )
        keep = torch.ones(end - begin, n, dtype=torch.bool, device=w.device)
        if not pattern.of:
            zeros = round(pattern.share * end * n) - round(pattern.share * begin * n)  # the exact count over the layer
            keep = pattern.keep((block / diagonal[begin:end, None]).square().t(), zeros).t()
        for j in range(end - begin):
            if pattern.of and j % pattern.of == 0:  # earlier errors are already applied here
                run = slice(j, j + pattern.of)
                score = block[run] / diagonal[begin + j : begin + j + pattern.of, None]
                keep[run] = pattern.keep(score.square().t()).t()
            errors[j] = torch.where(keep[j], 0, block[j] / inner[j, j])
            block[j] = torch.where(keep[j], block[j], 0)
            subtract_outer(block[j + 1 :], inner[j, j + 1 :], errors[j])
        if end < k:
            w[end:].addmm_(upper[begin:end, end:].t(), errors, alpha=-1)
    return w.t().contiguous()
