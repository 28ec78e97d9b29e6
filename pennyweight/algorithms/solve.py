"""solve(): quantizes one planned weight with a solver; stages(): the order in which a model's weights are solved."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.numerics import Parts, decibels, dequantize
from ..core.tensor import AffineQuantizedTensor, check_finite
from ..distributed.dtensor import full_tensor
from ..planning.plan import PlanRow
from ..planning.scheme import Scheme
from .base import ALGORITHMS, Solution, Solver, Task, as_matrix, flat_spec, unflatten
from .calibration.loop import CalibrationLoop, CollectedStatistics, SharedWork
from .solvers.block_search import CHUNK
from .solvers.kmeans import learner
from .solvers.rtn import Nearest, quantize_weight, static_parts
from .sparsify import prune

AT_ONCE = 1 << 26  # weights without statistics that are solved before the caller may store them
NO_DATA = "no calibration data"


class Solved(NamedTuple):
    """A quantized weight, in its kernel's layout and logical order.

    sqnr   of the weight, in dB
    error  output error on the calibration data divided by that of round-to-nearest; None without data
    note   for the report
    """

    weight: AffineQuantizedTensor
    sqnr: float
    error: float | None = None
    note: str = ""


def solve(
    row: PlanRow, solver: Solver | None = None, seen: CollectedStatistics | None = None,
    device: torch.device | str | None = None,
) -> Solved:  # fmt: skip
    """Quantize one planned weight with a solver, on ``device``; see :func:`solve_weight`."""
    assert row.scheme is not None
    assert row.site is not None
    assert row.tensor is not None
    flip = row.site.transposed
    x = full_tensor(row.tensor.detach())
    if isinstance(x, AffineQuantizedTensor):
        x = x.dequantize()
    x = x if device is None else x.to(device)
    x = x.transpose(-2, -1) if flip else x
    solved = solve_weight(x, row.scheme, row.name, row.layout, row.site.op, solver, seen)
    return solved._replace(weight=solved.weight.transpose(-2, -1)) if flip else solved  # type: ignore[arg-type]


def solve_weight(
    x: Tensor, scheme: Scheme, name: str, layout: str = "plain", op: str = "linear", solver: Solver | None = None,
    seen: CollectedStatistics | None = None,
) -> Solved:  # fmt: skip
    """Quantize a weight [.., contracted] with a solver; default: that of the scheme, which is round-to-nearest if it
    names none. Round-to-nearest also replaces a solver that cannot be applied, with the reason in the note. A scheme
    with ``sparsity`` has the weight pruned first; its SQNR counts that.

    op    the kernel-table op that reads it
    seen  the statistics of its inputs
    Raises ValueError for NaN or inf.
    """
    if scheme.sparsity:
        check_finite(x, name)
        pruned, dense = prune(x, scheme.sparsity, op == "convolution"), replace(scheme, sparsity="")
        solved = solve_weight(pruned, dense, name, layout, op, solver, seen)
        lost = solved.weight.dequantize().double() - x.double()
        return solved._replace(sqnr=decibels(float(x.double().square().sum()), float(lost.square().sum())))
    asked: Any = solver or (ALGORITHMS[scheme.solver]() if scheme.solver else Nearest())
    seen = seen or CollectedStatistics()
    solver = learner(asked, scheme.weight, seen.stats)
    note = "" if solver is asked else f"solved by {solver.name}: learned format"
    if type(solver).solve is Nearest.solve:  # needs no matrix; a subclass with another solve gets one
        return Solved(*quantize_weight(x, scheme, name, layout), note=note)
    unfolded = op == "convolution"
    spec, lost = flat_spec(scheme.weight, x.shape, unfolded), sorted(set(solver.needs) - seen.stats.keys())
    if spec is None or lost:
        why = f"missing statistics: {', '.join(lost)}" if seen.stats else NO_DATA
        why = "its blocks are not contiguous along one axis" if spec is None else why
        return Solved(*quantize_weight(x, scheme, name, layout), note=f"rounded to nearest: {why}")
    matrix = as_matrix(x, unfolded).float()
    solution, sqnr = _solution(solver, Task(name, matrix, spec, scheme.rule, scheme.eps, seen.stats, seen.tokens))
    parts = unflatten(solution.parts, scheme.weight, x.shape)._replace(**static_parts(scheme, x.device))
    w = AffineQuantizedTensor(parts, scheme.weight.with_(layout="plain"), x.shape, x.dtype, scheme.act)
    gain = solution.error / solution.nearest if solution.error is not None and solution.nearest else None
    return Solved(w.to_layout(layout), sqnr, gain, "; ".join(filter(None, (note, solution.note))))


def _solution(solver: Solver, task: Task) -> tuple[Solution, float]:
    """The solver's solution and its SQNR in dB. Round-to-nearest if its linear algebra fails or it is not finite."""
    try:
        solution = solver.solve(task)
        signal, noise = _signal_and_noise(solution.parts, task)
        if math.isfinite(noise):
            return solution, decibels(signal, noise)
        why = "the solution is not finite"
    except torch.linalg.LinAlgError as error:
        why = str(error).splitlines()[0]
    solution = Nearest().solve(task)._replace(note=f"rounded to nearest: {why}")
    return solution, decibels(*_signal_and_noise(solution.parts, task))


def _signal_and_noise(parts: Parts, task: Task) -> tuple[float, float]:
    """Sums of the squares of a weight and of what it loses, in float64; some rows at a time if they share no part."""
    (n, k), signal, noise = task.weight.shape, 0.0, 0.0
    step = max(1, CHUNK // max(1, k)) if task.spec.rows_independent(task.weight.shape) else max(1, n)
    for begin in range(0, n, step):
        rows = slice(begin, begin + step)
        w = task.weight[rows].double()
        values = dequantize(parts if step >= n else parts.map(lambda p, rows=rows: p[rows]), task.spec, w.shape)
        signal += float(w.square().sum())
        noise += float((values - w).square().sum())
    return signal, noise


def stages(
    model: nn.Module, weights: Mapping[str, PlanRow], solver: Solver, batches: Sequence[Any], *,
    spill: str | Path | None = None, known: frozenset[str] = frozenset(), max_ram: float | None = None,
    optional: bool = True, share: SharedWork | None = None,
) -> Iterator[tuple[list[str], Mapping[str, CollectedStatistics]]]:  # fmt: skip
    """(names, statistics by name) of the weights to solve next: block by block in call order if the solver needs data,
    with the statistics of one block in memory. All must be solved before the next are drawn, because the next blocks
    see the outputs of the quantized ones. Weights that the model does not call come last, without statistics.

    known: names whose statistics are not needed. spill, max_ram: as for ``quantize_``, in bytes. optional: also collect
    the statistics that the solver only wants: they compare the inputs with those of the float model. share: as in
    :class:`~.calibration.loop.CalibrationLoop`; then there are statistics of this rank's weights only.
    """
    left = dict.fromkeys(weights)
    if solver.needs:
        tensors = {id(row.tensor): name for name, row in weights.items()}
        wanted = (*solver.needs, *solver.wants) if optional else solver.needs
        loop = CalibrationLoop(model, tensors, list(batches), wanted, spill, known, max_ram, share)
        for names, seen in loop.stages():
            for name in names:
                left.pop(name)
            yield list(names), seen
            del seen  # before those of the next block are collected
    group, count = [], 0
    for name in left:
        group.append(name)
        count += math.prod(weights[name].shape)
        if count >= AT_ONCE:
            yield group, {}
            group, count = [], 0
    if group:
        yield group, {}
