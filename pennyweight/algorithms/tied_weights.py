"""Weights that a model multiplies and also looks rows up in: an embedding table tied to the output layer.

With D = Wq - W and H = E[x x^T] over the inputs of the products, the loss of the model is to second order

    c_products tr(D H D^T) + c_lookups |D|^2

The input of a lookup is one-hot, so its rows are independent, and the error of a row counts as often as its token
occurs. So does its error in the products, because the second derivative of a cross-entropy by a logit is p (1 - p) of
the token's probability p: one ratio of the two terms serves all rows. It is measured, with round-to-nearest in the
products alone and in the lookups alone:

    ratio = loss(lookups) / loss(products) * tr(D H D^T) / |D|^2

Solvers then get H + ratio I instead of H. The model is not exact (the output error has directions, and rare tokens are
many rows), so the solution for the products alone and round-to-nearest are candidates too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..core.tensor import AffineQuantizedTensor
from ..distributed import all_reduce
from ..planning.plan import PlanRow
from .base import Solver
from .calibration.batches import Batches, held_out
from .calibration.block_order import inference_mode
from .calibration.collect_statistics import CollectedStatistics
from .calibration.float32_products import run_batch
from .calibration.input_hooks import COMPOSITE, LOOKUPS, READERS
from .calibration.loop import HELD_OUT
from .solve import Solved, solve
from .solvers.rtn import Nearest, total_error
from .tuners import losses

RATIO_BATCHES = 8  # at most so many measure the ratio, which is a mean over their tokens
MOMENTS = ("hessian", "second_moment")  # statistics of E[x x^T], to which lookups add


def solve_in_model(
    model: nn.Module, row: PlanRow, solver: Solver | None, seen: CollectedStatistics | None, batches: Sequence[Any],
    device: torch.device | str | None = None,
) -> Solved:  # fmt: skip
    """:func:`.solve.solve`; of a weight that is multiplied and looked up the best of three on held-out data: solved for
    both, solved for its products, rounded to nearest.

    batches     the data of the statistics; an eighth of it is held out of those of the candidates, and the best is then
                solved again with all of it
    Compared is the divergence of the model's outputs (see :mod:`.tuners.losses`) from those with this weight in float,
    all other weights as they are now. The model is not changed. All ranks of torch.distributed get the same weight.
    """
    with_data = seen is not None and seen.looked_up and bool(seen.stats)
    without = solver is not None and not solver.needs and "embedding" in row.ops and len(row.ops) > 1
    if solver is None or type(solver).solve is Nearest.solve or not (with_data or without):
        return solve(row, solver, seen, device)
    data, guard = held_out(Batches(batches), HELD_OUT)
    if not all_reduce.all_true(bool(guard)):
        if without:
            return solve(row, solver, seen, device)
        why = "rounded to nearest: looked up too, and one sample leaves no held-out data"
        return solve(row, Nearest(), None, device)._replace(note=why)
    tensor, nearest = row.tensor, solve(row, Nearest(), None, device)
    assert row.site is not None
    assert tensor is not None
    if seen is not None and with_data:
        ratio = lookup_ratio(model, tensor, nearest.weight, seen.stats, data, transposed=row.site.transposed)
        if not math.isfinite(ratio):
            return nearest._replace(note="rounded to nearest: looked up too, and its products have no effect")
        ratios = {"solved for its products and lookups": ratio, "solved for its products": 0.0}
        candidates = {text: solve(row, solver, add_lookups(seen, r), device) for text, r in ratios.items()}
    else:
        candidates = {"": solve(row, solver, seen, device)}
    rounded, *found = divergences(model, tensor, [Trial(s.weight) for s in (nearest, *candidates.values())], guard)
    least = min(found)
    text = f"held-out divergence {rounded:.3g} (nearest) -> {least:.3g}"
    if least >= rounded:
        return nearest._replace(note=f"rounded to nearest: looked up too, {text}")
    note, solved = [*candidates.items()][found.index(least)]
    if seen is not None and seen.everything is not None:
        del candidates
        solved = solve(row, solver, add_lookups(seen.everything, ratios[note]), device)
    return solved._replace(note="; ".join(filter(None, (solved.note, note, text))))


def add_lookups(seen: CollectedStatistics, ratio: float) -> CollectedStatistics:
    """The statistics with E[x x^T] + ratio I, [G, K, K], or its diagonal, [G, K]."""
    stats = dict(seen.stats)
    for name in MOMENTS:
        if name in stats:
            stats[name] = stats[name].clone()
            (stats[name].diagonal(dim1=-2, dim2=-1) if stats[name].ndim == 3 else stats[name]).add_(ratio)
    return replace(seen, stats=stats)


def lookup_ratio(
    model: nn.Module, tensor: Tensor, rounded: Tensor, stats: Mapping[str, Tensor], batches: Sequence[Any], *,
    original: Tensor | None = None, transposed: bool = False,
) -> float:  # fmt: skip
    """The ratio of the module docstring; inf if the products do not change the outputs, or D is 0.

    tensor      the parameter in the model; rounded: its quantized value; original: its float value, default: itself
    transposed  it is stored [in, out]
    """
    exact = _values(tensor if original is None else original, tensor).float()
    difference = _values(rounded, exact) - exact
    difference = difference.t() if transposed else difference
    if "hessian" in stats:
        output = total_error(difference, stats["hessian"].to(difference.device))
    else:  # uncorrelated inputs; of mean square 1 if that is not known either
        moment = (
            stats["second_moment"][0].to(difference.device)
            if "second_moment" in stats
            else torch.ones_like(difference[0])
        )
        output = float((difference.double().square() * moment).sum())
    trials = [Trial(rounded, lookups=False), Trial(rounded, products=False)]
    spread = batches[:: max(1, len(batches) // RATIO_BATCHES)][:RATIO_BATCHES]
    products, lookups = divergences(model, tensor, trials, spread, original)
    squares = float(difference.double().square().sum())
    return lookups / products * output / squares if products > 0 and squares > 0 else math.inf


class Trial(NamedTuple):
    """A value of a weight, in its products, its lookups, or both; the other ones read the float weight."""

    value: Tensor
    products: bool = True
    lookups: bool = True


def divergences(
    model: nn.Module, tensor: Tensor, trials: Sequence[Trial], batches: Sequence[Any], original: Tensor | None = None
) -> list[float]:
    """For each trial the mean divergence of the model's outputs from those with ``original`` (default: with the
    parameter ``tensor`` itself); inf if it is not finite. The same on all ranks."""
    totals = torch.zeros(len(trials) + 1, dtype=torch.float64, device="cpu")
    exact = _values(tensor if original is None else original, tensor)
    values = [t._replace(value=_values(t.value, tensor)) for t in trials]
    with inference_mode(model):
        measure: losses.Divergence | None = None
        for batch in batches:
            with _Replaced(tensor, exact, exact):
                out = run_batch(model, batch)
            measure = measure or losses.divergence(None, out)
            expected = losses.finite(losses.compared_tensor(out), model, batch)
            for i, t in enumerate(values):
                with _Replaced(tensor, t.value if t.products else exact, t.value if t.lookups else exact):
                    out = run_batch(model, batch)
                totals[i] += float(measure(expected, losses.compared_tensor(out), batch))
            totals[-1] += 1
    *sums, count = all_reduce.reduce_sum(totals).tolist()
    return [total / count if math.isfinite(total) else math.inf for total in sums]


def _values(x: Tensor, like: Tensor) -> Tensor:
    """x, dequantized, of the dtype and device of ``like``."""
    x = x.dequantize() if isinstance(x, AffineQuantizedTensor) else x
    return x.detach().to(device=like.device, dtype=like.dtype)


class _Replaced(TorchFunctionMode):
    """Other values for ``weight``: one in products, one in lookups."""

    def __init__(self, weight: Tensor, product: Tensor, lookup: Tensor) -> None:
        super().__init__()
        self.weight, self.product, self.lookup = weight, product, lookup

    def __torch_function__(self, func: Any, classes: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        value = self.lookup if func in LOOKUPS else self.product if func in READERS else self.weight
        if value is not self.weight:
            args = tuple(value if a is self.weight else a for a in args)
            kwargs = {name: value if a is self.weight else a for name, a in kwargs.items()}
        if func in COMPOSITE:  # it multiplies weights inside
            with self:
                return COMPOSITE[func](*args, **kwargs)
        return func(*args, **kwargs)
