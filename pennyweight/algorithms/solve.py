"""solve(): quantizes one planned weight with a solver; stages(): the order in which a model's weights are solved."""

from __future__ import annotations

import math
from collections import Counter
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
from .base import ALGORITHMS, Solution, Solver, Task, as_matrix, flat_spec, one_of_stack, unflatten
from .calibration.collect_statistics import BlockStatistics, CollectedStatistics
from .calibration.disk_offload import trim_heap
from .calibration.loop import CalibrationLoop, SharedWork
from .solvers.block_search import CHUNK
from .solvers.kmeans import learner
from .solvers.kquant_search import stack_rows
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
    if op == "bmm" and x.ndim == 3 and scheme.weight.rows_independent(x.shape):
        return _solve_experts(x, scheme, name, layout, solver, seen, note)
    if seen.experts:
        return Solved(
            *quantize_weight(x, scheme, name, layout), note="rounded to nearest: its scales or its table span experts"
        )
    unfolded = op == "convolution"
    spec, lost = flat_spec(scheme.weight, x.shape, unfolded), sorted(set(solver.needs) - seen.stats.keys())
    if spec is None or lost:
        why = f"missing statistics: {', '.join(lost)}" if seen.stats else NO_DATA
        why = "its blocks are not contiguous along one axis" if spec is None else why
        return Solved(*quantize_weight(x, scheme, name, layout), note=f"rounded to nearest: {why}")
    matrix = as_matrix(x, unfolded).float()
    task = Task(name, matrix, spec, scheme.rule, scheme.eps, seen.stats, seen.tokens, unfolded)
    solution, signal, noise = _solution(solver, task)
    parts = unflatten(solution.parts, scheme.weight, x.shape)._replace(**static_parts(scheme, x.device))
    w = AffineQuantizedTensor(parts, scheme.weight.with_(layout="plain"), x.shape, x.dtype, scheme.act)
    gain = solution.error / solution.nearest if solution.error is not None and solution.nearest else None
    return Solved(w.to_layout(layout), decibels(signal, noise), gain, "; ".join(filter(None, (note, solution.note))))


def _solve_experts(
    x: Tensor, scheme: Scheme, name: str, layout: str, solver: Solver, seen: CollectedStatistics, note: str
) -> Solved:
    """A stack [experts, out, in], one matrix after another: each has inputs of its own, and few or no tokens may have
    reached it. Errors count by tokens."""
    spec, found, notes = one_of_stack(scheme.weight), [], Counter()  # type: ignore[var-annotated]
    signal = noise = error = nearest = 0.0
    for e, matrix in enumerate(x):
        if seen.experts:
            own = seen.experts[e]
        else:
            own = CollectedStatistics({key: value[e : e + 1] for key, value in seen.stats.items()}, seen.tokens)
        with_data = own.stats.keys() >= set(solver.needs)
        task = Task(f"{name}[{e}]", matrix.float().contiguous(), spec, scheme.rule, scheme.eps, own.stats, own.tokens)
        solution, power, lost = _solution(solver if with_data else Nearest(), task)
        signal, noise = signal + power, noise + lost
        if solution.error is not None and solution.nearest is not None:
            error, nearest = error + own.tokens * solution.error, nearest + own.tokens * solution.nearest
        notes[(solution.note or own.note) if with_data else f"rounded to nearest: {NO_DATA}"] += 1
        found.append(solution.parts.map(lambda p: p.unsqueeze(0)))
        del own
    parts = stack_rows(found)._replace(**static_parts(scheme, x.device))
    w = AffineQuantizedTensor(parts, scheme.weight.with_(layout="plain"), x.shape, x.dtype, scheme.act)
    some = [text if n == len(x) else f"{n} of {len(x)} experts: {text}" for text, n in notes.most_common() if text]
    gain = error / nearest if nearest else None
    return Solved(w.to_layout(layout), decibels(signal, noise), gain, "; ".join(filter(None, (note, *some))))


def _solution(solver: Solver, task: Task) -> tuple[Solution, float, float]:
    """The solver's solution, and the sums of the squares of the weight and of what it loses. Round-to-nearest if its
    linear algebra fails or it is not finite."""
    try:
        solution = solver.solve(task)
        signal, noise = _signal_and_noise(solution.parts, task)
        if math.isfinite(noise):
            return solution, signal, noise
        why = "the solution is not finite"
    except torch.linalg.LinAlgError as error:
        why = str(error).splitlines()[0]
    finally:
        trim_heap()  # else a run with weights in files grows beyond its limit
    solution = Nearest().solve(task)._replace(note=f"rounded to nearest: {why}")
    return solution, *_signal_and_noise(solution.parts, task)


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
) -> Iterator[tuple[list[str], BlockStatistics]]:  # fmt: skip
    """(names, statistics by name) of the weights to solve next: block by block in call order if the solver needs data,
    with the statistics of one block in memory. All must be solved before the next are drawn, because the next blocks
    see the outputs of the quantized ones. Weights that the model does not call come last, without statistics.

    If ``seen.several``, no weight may be replaced before all are solved and ``seen.close()`` was called.

    known: names whose statistics are not needed. spill, max_ram: as for ``quantize_``, in bytes. optional: also collect
    the statistics that the solver only wants: they compare the inputs with those of the float model. share: as in
    :class:`~.calibration.loop.CalibrationLoop`; then there are statistics of this rank's weights only.
    """
    left, none = dict.fromkeys(weights), BlockStatistics((), lambda some: {})
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
            yield group, none
            group, count = [], 0
    if group:
        yield group, none
