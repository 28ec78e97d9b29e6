"""search(): mixed-precision search, a config per weight that minimises the loss of the model within a budget."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...core.formats import UINT2, UINT3, UINT4, UINT5, UINT6
from ...core.layouts import compact_layout
from ...core.model_arguments import check_arguments
from ...core.spec import QuantSpec
from ...core.tensor import AffineQuantizedTensor
from ...planning.config_resolution import Filter, PlanError, Skip, read_candidates
from ...planning.configs import AOBaseConfig, SpecConfig
from ...planning.configs.by_name import FASTEST, by_name
from ...planning.engines import FUSED, check_plan, engine_of, fused_groups
from ...planning.plan import Plan, PlanRow, plan
from ...support.arguments import check_folder, check_number
from ...support.progress import Callback, Progress, step
from .. import recipe as recipes
from ..calibration.batches import read
from ..calibration.block_order import inference_mode
from ..calibration.disk_offload import offload_to, offloaded
from ..calibration.estimate_cost import room_beside
from ..calibration.float32_products import run_batch
from ..calibration.loop import parse_bytes
from ..solve import stages
from ..tied_weights import solve_in_model
from ..tuners import losses
from .budget import (
    Base,
    Budget,
    Option,
    Table,
    allocate,
    check,
    is_latency,
    limits,
    merge,
    parts,
    require_scipy,
    totals,
)  # fmt: skip
from .latency import CallTimer, LayerTimes, layer_times
from .measurements import LOSSES, WEIGHTS, Measurements, SearchJournal
from .search_result import Search, config_of, whole_seconds
from .sensitivity import Sensitivities, Trials

__all__ = ["CANDIDATES", "CallTimer", "Option", "Search", "allocate", "search"]

_LOG = logging.getLogger(__name__)
CANDIDATES: tuple[AOBaseConfig, ...] = tuple(
    SpecConfig(QuantSpec(fmt, (group,), torch.float16, zero_point=fmt))
    for fmt, group in ((UINT2, 64), (UINT3, 128), (UINT4, 128), (UINT5, 128), (UINT6, 128))
)
# Also tried with for_: schemes of engines' files
_ENGINE_CANDIDATES = tuple(by_name(*some) for some in (("w4a16",), ("w4a16", 32), ("q4_0",), ("q8_0",), ("w8a8",)))


@check_arguments()
def search(
    model: nn.Module,
    batches: Sequence[Any],
    budget: Budget,
    *,
    metric: str | losses.Divergence | None = None,
    candidates: Sequence[AOBaseConfig | str] | None = None,
    algorithm: Any = "gptq",
    filter_fn: Filter | None = None,
    skip: Skip = (),
    held_out: float = 0.25,
    example: Any = None,
    clock: CallTimer | None = None,
    progress: Progress = None,
    for_: str | None = None,
    fused: Sequence[Sequence[str]] = (),
    resume: str | Path | None = None,
    max_memory: str | int | None = None,
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
    require_scipy()
    batches = read(batches, "batches", together=True)
    if len(batches) < 2:
        raise PlanError(
            "search needs at least two batches: some to quantize with, some to measure with; batches has "
            f"{len(batches)}"
        )
    recipe, timed = recipes.read(algorithm), any(map(is_latency, parts(budget)))
    if recipe.rewrites or recipe.tuners:
        raise PlanError(
            f"search quantizes weights one by one and accepts only a solver; got {recipe}. Apply rewrites first"
        )
    default = (*CANDIDATES, *FASTEST) if timed else CANDIDATES
    if for_ is not None and candidates is None:
        default = (*default, *_ENGINE_CANDIDATES)
    configs = read_candidates(candidates, default)
    check_number("held_out", held_out, 0, below=1)
    solving, measuring = losses.split_batches(batches, held_out)
    check_folder("resume", resume, create=True)
    memory = None if max_memory is None else parse_bytes(max_memory, "max_memory")
    if timed and clock is None and memory is not None:
        raise PlanError(
            "max_memory is for weights in files, and a call that reads them would be timed with the disk; give a "
            "budget of bits or bytes, or a clock with the times of the machine that will run the model"
        )
    if callable(metric) and resume is not None:
        raise PlanError("resume needs a metric with a name: a function cannot be compared with that of the first run")
    with (
        step("search", progress) as advance, torch.inference_mode(False), torch.no_grad(),
        _folder(resume, memory) as folder, offload_to(folder),
    ):  # fmt: skip
        plans = [plan(model, config, filter_fn, skip=skip) for config in configs]
        if for_ is not None:
            plans, configs = _readable(plans, configs, for_, candidates is None)
        names = [row.name for row in plans[0].active]
        if any([row.name for row in p.active] != names for p in plans):
            raise PlanError(
                "search: the candidates apply to different weights; pass a filter_fn that selects weights to which all "
                "apply"
            )
        with inference_mode(model):
            first = run_batch(model, measuring[0])
        measure = losses.divergence(metric, first)
        took = (
            layer_times(model, batches[-1] if example is None else example, plans, clock or CallTimer())
            if timed
            else None
        )
        base = _base(model, plans[0], took)
        limit = limits(budget, base)
        rows = {name: [row for p in plans for row in p.active if row.name == name] for name in names}
        groups = _groups(names, for_, fused)
        check(merge(_known(rows, configs, took), groups)[0], limit, base)
        every = replace(plans[0], rows=[row for p in plans for row in p.rows])
        room = None if memory is None else room_beside(plans[0], recipe.solver, memory, _most(rows))
        label = "loss" if callable(metric) else next(name for name, fn in losses.NAMED.items() if fn is measure)
        how = f"{recipe}, {label}, held_out={held_out}"
        kept = Measurements(None if resume is None else SearchJournal(resume, model, every, how, batches))
        _solve(model, rows, recipe.solver, solving, kept, folder, room, advance)
        sensitivities = Sensitivities(model, measuring, measure, folder, room)
        _measure(sensitivities, rows, kept, advance)
        table = _complete(_known(rows, configs, took), kept)
        chosen = allocate(table, limit, groups)
        nbytes, total, seconds = totals(table, chosen)
        solved = {name: kept.get(WEIGHTS, name)[i] for name, i in chosen.items() if i < len(configs)}
        put = {name: _runnable(rows[name][chosen[name]], w) for name, w in solved.items()}
        whole = sensitivities.whole({name: rows[name][0].places for name in put}, put)
    interaction = whole / total if total > 0 else 1.0
    uniform = [
        (_text(rows[names[0]][i]), 8 * sum(t[i].nbytes for t in table.values()) / base.numel,
         sum(t[i].loss for t in table.values()))
        for i in range(len(configs))
    ]  # fmt: skip
    _LOG.info("search: %d weights, %.3f bits per weight", len(names), 8 * nbytes / base.numel)
    return Search(
        config_of(table, chosen), total * interaction, interaction, 8 * nbytes / base.numel, nbytes, chosen, table,
        uniform, label, base, whole_seconds(base, seconds), groups,
    )  # fmt: skip


@contextmanager
def _folder(resume: str | Path | None, memory: int | None) -> Iterator[Path | None]:
    """For what is kept in files; None: all is in memory."""
    if resume is None and memory is not None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        if resume is not None:
            os.makedirs(resume, exist_ok=True)
        yield None if resume is None else Path(resume)


def _readable(
    plans: list[Plan], configs: list[AOBaseConfig], engine: str, default: bool
) -> tuple[list[Plan], list[AOBaseConfig]]:
    """The candidates that an engine reads, all in one file format. Raises PlanError for one of the caller's that it
    does not read."""
    kept: list[tuple[Plan, AOBaseConfig]] = []
    for plan_, config in zip(plans, configs, strict=True):
        try:
            check_plan(plan_.rows, engine)
        except PlanError:
            if not default:
                raise
            continue
        if config not in [c for _, c in kept]:
            kept.append((plan_, config))
    if not kept:
        raise PlanError(_reason(plans, engine))
    return [p for p, _ in kept], [c for _, c in kept]


def _reason(plans: list[Plan], engine: str) -> str:
    """Why an engine reads none of the candidates: the reason of the last."""
    try:
        return check_plan(plans[-1].rows, engine)
    except PlanError as error:
        return f"{engine} reads none of the candidates: {error}"


def _groups(names: Sequence[str], engine: str | None, fused: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """The groups of parameters that share one choice."""
    if isinstance(fused, str) or any(isinstance(some, str) for some in fused):
        raise PlanError(f"fused must list groups of names such as [('q_proj', 'k_proj', 'v_proj')], got {fused!r}")
    fuses = engine is not None and engine_of(engine).fuses
    table = {**(FUSED if fuses else {}), **{"+".join(some): tuple(some) for some in fused}}
    by_module = {name.rpartition(".")[0]: name for name in names}
    found = fused_groups(by_module, table, experts=fuses)
    last = {name.rpartition(".")[2] for name in by_module}
    unknown = [word for some in fused for word in some if word not in last]
    if unknown:
        raise PlanError(f"fused: no searched layer is named {unknown[0]!r}; known: {', '.join(sorted(last))}")
    return tuple(tuple(by_module[m] for m in some) for some in found.values())


def _base(model: nn.Module, whole: Plan, took: LayerTimes | None) -> Base:
    weights = [row for row in whole.active if row.tensor is not None]
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    rest = sum(int(t.nbytes) for t in tensors.values()) - sum(row.bytes_before for row in weights)
    numel = sum(row.tensor.numel() for row in weights if row.tensor is not None)
    return Base(numel, rest) if took is None else Base(numel, rest, took.whole, took.rest)


def _known(rows: dict[str, list[PlanRow]], configs: list[AOBaseConfig], took: LayerTimes | None) -> Table:
    """The options of each weight with everything known before solving; with timings the last option keeps the weight in
    float."""
    table: Table = {}
    for name, some in rows.items():
        table[name] = [
            Option(config, _text(row), _nbytes(row), 0.0, None if took is None else took.options[name][i], _short(row))
            for i, (row, config) in enumerate(zip(some, configs, strict=True))
        ]
        if took is not None:
            table[name].append(Option(None, "as it is", some[0].bytes_before, 0.0, took.floats[name]))
    return table


def _complete(known: Table, kept: Measurements) -> Table:
    """The options with what was solved and measured; the float option has no loss."""
    table: Table = {}
    for name, options in known.items():
        found = zip(options, kept.get(WEIGHTS, name), kept.get(LOSSES, name), strict=False)
        table[name] = [replace(option, nbytes=w.nbytes, loss=loss) for option, w, loss in found]
        table[name] += options[len(table[name]) :]
    return table


def _most(rows: dict[str, list[PlanRow]]) -> int:
    """Bytes of the weight with the most, under all candidates."""
    return max((sum(map(_nbytes, some)) for some in rows.values()), default=0)


def _nbytes(row: PlanRow) -> int:
    assert row.scheme is not None
    assert row.site is not None
    return row.scheme.nbytes(row.site.shape, _packed(row))


def _solve(
    model: nn.Module, rows: dict[str, list[PlanRow]], solver: Any, batches: list[Any], kept: Measurements,
    folder: Path | None, room: float | None, advance: Callback,
) -> None:  # fmt: skip
    """Quantize each weight under each candidate, with the float model's inputs."""
    weights, known = {name: options[0] for name, options in rows.items()}, kept.names(WEIGHTS)
    done = 0
    for names, seen in stages(model, weights, solver, batches, spill=folder, known=known, max_ram=room, optional=False):
        for name in names:
            if name not in known:
                found = [solve_in_model(model, row, solver, seen.get(name), batches).weight for row in rows[name]]
                kept.put(WEIGHTS, name, [w.to_layout(_packed(row)) for w, row in zip(found, rows[name], strict=True)])
            done += 1
            advance(done, len(rows), f"solving {name}")
        del seen  # before those of the next block are collected


def _measure(
    sensitivities: Sensitivities, rows: dict[str, list[PlanRow]], kept: Measurements, advance: Callback
) -> None:
    """Measure the loss of the model with one weight replaced, for each weight and each option."""

    def value(row: PlanRow, w: AffineQuantizedTensor) -> Callable[[], Tensor]:
        return w.dequantize if _weight_only(row) else lambda: w.to_layout(row.layout)

    known = kept.names(LOSSES)
    trials = {
        name: Trials(some[0].places, list(map(value, some, kept.get(WEIGHTS, name))))
        for name, some in rows.items() if name not in known
    }  # fmt: skip
    for done, (name, found) in enumerate(sensitivities.each(trials), len(known) + 1):
        kept.put(LOSSES, name, [max(loss, 0.0) for loss in found])
        advance(done, len(rows), f"measuring {name}")


def _text(row: PlanRow) -> str:
    return "" if row.scheme is None else row.scheme.describe(len(row.shape))


def _short(row: PlanRow) -> str:
    return "" if row.scheme is None else row.scheme.shorten(len(row.shape))


def _packed(row: PlanRow) -> str:
    assert row.scheme is not None
    assert row.site is not None
    return compact_layout(row.scheme.weight, row.site.shape)


def _runnable(row: PlanRow, w: AffineQuantizedTensor) -> AffineQuantizedTensor:
    """The weight itself, dequantized when called; in its kernel's layout if activations are quantized too."""
    return w if _weight_only(row) else offloaded(w.to_layout(row.layout))  # type: ignore[return-value]


def _weight_only(row: PlanRow) -> bool:
    return row.scheme is not None and row.scheme.act is None
