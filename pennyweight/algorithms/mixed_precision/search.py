"""search(): mixed-precision search, a config per weight that minimises the loss of the model within a budget."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.model_arguments import check_arguments
from ...core.tensor import AffineQuantizedTensor
from ...distributed import all_reduce
from ...distributed.rank_group import RankGroup
from ...planning.config_resolution import Filter, PlanError, Skip
from ...planning.configs import AOBaseConfig
from ...planning.plan import PlanRow
from ...support.arguments import check_folder
from ...support.progress import Callback, Progress, step
from ..calibration.disk_offload import offload_to, offloaded
from ..calibration.journal import remove_unfinished
from ..calibration.loop import SharedWork, parse_bytes
from ..solve import stages
from ..tied_weights import solve_in_model
from ..tuners import losses
from .budget import Budget, Option, Table, allocate, totals
from .candidates import ALGORITHM, CANDIDATES, HELD_OUT, SearchTask, packed_layout, prepare, scheme_text
from .latency import CallTimer
from .measurements import LOSSES, WEIGHTS, Measurements, SearchJournal
from .search_result import Search, config_of, whole_seconds
from .sensitivity import Sensitivities, Trials

__all__ = ["CANDIDATES", "CallTimer", "Option", "Search", "allocate", "search"]

_LOG = logging.getLogger(__name__)


@check_arguments()
def search(
    model: nn.Module,
    batches: Sequence[Any],
    budget: Budget,
    *,
    metric: str | losses.Divergence | None = None,
    candidates: Sequence[AOBaseConfig | str] | None = None,
    algorithm: Any = ALGORITHM,
    filter_fn: Filter | None = None,
    skip: Skip = (),
    held_out: float = HELD_OUT,
    example: Any = None,
    clock: CallTimer | None = None,
    progress: Progress = None,
    for_: str | None = None,
    fused: Sequence[Sequence[str]] = (),
    resume: str | Path | None = None,
    max_memory: str | int | None = None,
    ranks: bool = False,
) -> Search:
    """Find a config for each weight that minimises the loss of the model within a budget.

    batches     calibration data: the fraction ``held_out`` measures losses, the rest is used to quantize the weights
    budget      one budget, or a list that must all be met:
                "4.25 bpw"      bits per weight of the quantized layers, including scales
                "600 MB"        size of the whole model's parameters and buffers (kB, MB, GB: powers of 1000)
                "1.3x latency"  a model call at least 1.3 times as fast as in float, on this machine
                "20 ms"         maximum time of that call (s, ms, us)
    metric      "kl" of the logits, "error" of the output, or a function (reference, output, batch) -> number
    candidates  configs to choose from; default: 2 to 6 bits with zero points and float16 scales, and with a latency
                budget also those of :func:`recommend`
    algorithm   a solver for the weights
    filter_fn, skip   as for ``quantize_``
    example     inputs of the timed call, in the form of a batch: a single token, or a whole prompt. Default: the last
                of ``batches``
    clock       timing functions; default: measure on this machine
    for_        an inference engine as for ``quantize_``: only schemes that it reads, and one choice for the parts of
                each layer that it fuses. Default candidates are then those of its configs that it reads
    progress    a bar after two seconds by default; False: none; or a function, called with (done, total, name)
    fused       layers that share one choice, by the last part of their names: [("q_proj", "k_proj", "v_proj")]
    resume      folder to save each solved weight and measured loss; a second run with the same model, data and options,
                but any budget, continues from there. Raises if one of them differs
    max_memory  "6 GB": limit of the arrays of the search, for a model whose weights are mapped by ``load``. Solved
                weights, hidden states and outputs are then in files: in ``resume``, or in a temporary folder. Raises if
                a weight or the statistics of a block need more, and for a latency budget without a clock
    ranks       share the search: every rank of torch.distributed calls this with the same model, data and options, and
                with ``resume``, a folder that all see. Each solves some weights and measures some losses; all return
                the result of one process. An error of one rank is raised on all, as a CheckpointError that names the
                rank; a second run continues, with any number of ranks. Raises for a latency budget

    Each weight is quantized under each candidate with the float model's inputs, and the loss of the model with only
    that weight replaced is measured. Then scipy's MILP solver (HiGHS) selects one option per weight:

        minimise sum loss[w, option]  subject to  sum bytes[w, option] <= budget
                                                  rest + sum seconds[w, option] <= budget

    With a latency budget each linear layer is timed under each candidate and in float, at the row counts of the example
    call; keeping a weight in float is then also an option. "rest" is the time of the float model's call outside these
    layers; it is constant.

    The model is not changed; it runs in eval mode. Losses of small errors are nearly additive; the deviation is
    measured once for the chosen allocation (``interaction``) and included in the prediction. Needs scipy. Memory: the
    model, the statistics of one block, and all quantized weights, packed, unless ``resume`` or ``max_memory`` is given.
    Raises PlanError for an invalid budget or one that no allocation meets; size and time are checked before any weight
    is quantized.

    >>> import torch, pennyweight as pw
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    >>> batches = [torch.randn(32, 64) for _ in range(4)]
    >>> configs = [pw.UIntXWeightOnlyConfig(bits, 32) for bits in (torch.uint2, torch.uint4)]
    >>> found = pw.search(model, batches, "4 bpw", candidates=configs)
    >>> report = pw.quantize_(model, found.config)
    >>> len(report.quantized)
    2
    """
    check_folder("resume", resume, create=True)
    memory = None if max_memory is None else parse_bytes(max_memory, "max_memory")
    if callable(metric) and resume is not None:
        raise PlanError("resume needs a metric with a name: a function cannot be compared with that of the first run")
    if ranks and resume is None:
        raise PlanError(
            "ranks=True needs resume=folder, which all ranks see: they read each other's solved weights and hidden "
            "states there"
        )
    team = RankGroup("" if resume is None else str(resume), ranks)
    with (
        step("search", progress if team.rank == 0 else False) as advance, torch.inference_mode(False), torch.no_grad(),
        team.share_errors(), all_reduce.same_data() if ranks else nullcontext(),
    ):  # fmt: skip
        task = prepare(
            model, batches, budget, metric=metric, candidates=candidates, algorithm=algorithm, filter_fn=filter_fn,
            skip=skip, held_out=held_out, example=example, clock=clock, for_=for_, fused=fused, memory=memory,
            alone=not ranks,
        )  # fmt: skip
        with _folder(resume, memory, team) as folder, offload_to(folder):
            key = model, task.plan, task.how, task.batches
            kept = Measurements(None if resume is None else SearchJournal(resume, *key, team=team))
            _solve(task, kept, folder, team, advance)
            sensitivities = Sensitivities(model, task.measuring, task.measure, folder, task.room, team)
            _measure(task, sensitivities, kept, advance)
            table = _complete(task, kept)
            chosen = team.first(lambda: allocate(table, task.limit, task.groups))
            whole = team.first(partial(_together, task, sensitivities, kept, chosen))
    nbytes, total, seconds = totals(table, chosen)
    interaction, base = whole / total if total > 0 else 1.0, task.base
    first = next(iter(task.rows.values()), [])
    uniform = [
        (scheme_text(first[i]), 8 * sum(t[i].nbytes for t in table.values()) / base.numel,
         sum(t[i].loss for t in table.values()))
        for i in range(len(task.configs))
    ]  # fmt: skip
    _LOG.info("search: %d weights, %.3f bits per weight", len(table), 8 * nbytes / base.numel)
    return Search(
        config_of(table, chosen), total * interaction, interaction, 8 * nbytes / base.numel, nbytes, chosen, table,
        uniform, task.label, base, whole_seconds(base, seconds), task.groups,
    )  # fmt: skip


@contextmanager
def _folder(resume: str | Path | None, memory: int | None, team: RankGroup) -> Iterator[Path | None]:
    """For what is kept in files; None: all is in memory."""
    if resume is not None:
        team.first(lambda: (os.makedirs(resume, exist_ok=True), remove_unfinished(Path(resume))))
        yield Path(resume)
    elif memory is not None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        yield None


def _solve(task: SearchTask, kept: Measurements, folder: Path | None, team: RankGroup, advance: Callback) -> None:
    """Quantize each weight under each candidate, with the float model's inputs."""
    model, rows, solver, batches = task.model, task.rows, task.recipe.solver, task.solving
    weights, known = {name: options[0] for name, options in rows.items()}, kept.names(WEIGHTS)
    share = SharedWork.of(team, list(weights.values()))
    done = 0
    for names, seen in stages(
        model, weights, solver, batches, spill=folder, known=known, max_ram=task.room, optional=False, share=share
    ):
        own = share.weights([name for name in names if name not in known])
        for name in sorted(names, key=lambda n: n not in own):
            if name in own:
                found = [solve_in_model(model, row, solver, seen.get(name), batches).weight for row in rows[name]]
                put = [w.to_layout(packed_layout(row)) for w, row in zip(found, rows[name], strict=True)]
                kept.put(WEIGHTS, name, put)
            done += 1
            advance(done, len(rows), f"solving {name}")
        kept.flush()
        del seen  # before those of the next block are collected


def _measure(task: SearchTask, sensitivities: Sensitivities, kept: Measurements, advance: Callback) -> None:
    """Measure the loss of the model with one weight replaced, for each weight and each option."""

    def value(row: PlanRow, w: AffineQuantizedTensor) -> Callable[[], Tensor]:
        return w.dequantize if _weight_only(row) else lambda: w.to_layout(row.layout)

    known = kept.names(LOSSES)
    trials = {
        name: Trials(some[0].places, list(map(value, some, kept.get(WEIGHTS, name))))
        for name, some in task.rows.items() if name not in known
    }  # fmt: skip
    for done, (name, found) in enumerate(sensitivities.each(trials), len(known) + 1):
        if sensitivities.team.rank == 0:  # all ranks have the losses of all
            kept.put(LOSSES, name, [max(loss, 0.0) for loss in found])
        kept.flush()
        advance(done, len(task.rows), f"measuring {name}")


def _complete(task: SearchTask, kept: Measurements) -> Table:
    """The options with what was solved and measured; the float option has no loss."""
    table: Table = {}
    for name, options in task.known.items():
        found = zip(options, kept.get(WEIGHTS, name), kept.get(LOSSES, name), strict=False)
        table[name] = [replace(option, nbytes=w.nbytes, loss=loss) for option, w, loss in found]
        table[name] += options[len(table[name]) :]
    return table


def _together(task: SearchTask, sensitivities: Sensitivities, kept: Measurements, chosen: dict[str, int]) -> float:
    """The loss of the model with all chosen options."""
    solved = {name: kept.get(WEIGHTS, name)[i] for name, i in chosen.items() if i < len(task.configs)}
    put = {name: _runnable(task.rows[name][chosen[name]], w) for name, w in solved.items()}
    return sensitivities.whole({name: task.rows[name][0].places for name in put}, put)


def _runnable(row: PlanRow, w: AffineQuantizedTensor) -> AffineQuantizedTensor:
    """The weight itself, dequantized when called; in its kernel's layout if activations are quantized too."""
    return w if _weight_only(row) else offloaded(w.to_layout(row.layout))  # type: ignore[return-value]


def _weight_only(row: PlanRow) -> bool:
    return row.scheme is not None and row.scheme.act is None
