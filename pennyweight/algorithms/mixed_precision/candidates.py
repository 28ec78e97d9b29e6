"""What a search chooses from: weights with their options, and the data that solves and measures them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ...core.formats import UINT2, UINT3, UINT4, UINT5, UINT6
from ...core.layouts import compact_layout
from ...core.spec import QuantSpec
from ...planning.config_resolution import Filter, PlanError, Skip, read_candidates
from ...planning.configs import AOBaseConfig, SpecConfig
from ...planning.configs.by_name import FASTEST, by_name
from ...planning.engines import FUSED, check_plan, engine_of, fused_groups
from ...planning.plan import Plan, PlanRow, plan
from ...support.arguments import check_number
from ..calibration.batches import read
from ..calibration.block_order import inference_mode
from ..calibration.estimate_cost import room_beside
from ..calibration.float32_products import run_batch
from ..recipe import Recipe
from ..recipe import read as read_recipe
from ..tuners import losses
from .budget import Base, Budget, Limits, Option, Table, check, is_latency, limits, merge, parts, require_scipy
from .latency import CallTimer, LayerTimes, layer_times

ALGORITHM, HELD_OUT = "gptq", 0.25
CANDIDATES: tuple[AOBaseConfig, ...] = tuple(
    SpecConfig(QuantSpec(fmt, (group,), torch.float16, zero_point=fmt))
    for fmt, group in ((UINT2, 64), (UINT3, 128), (UINT4, 128), (UINT5, 128), (UINT6, 128))
)
# Also tried with for_: schemes of engines' files
_ENGINE_CANDIDATES = tuple(by_name(*some) for some in (("w4a16",), ("w4a16", 32), ("q4_0",), ("q8_0",), ("w8a8",)))


@dataclass(frozen=True)
class SearchTask:
    """A search whose arguments have been checked, before a weight is solved.

    model      runs in eval mode and is not changed
    configs    the candidates
    rows       by weight: its row in the plan of each candidate
    plan       with the rows of all candidates
    known      by weight: its options, without losses
    groups     names of the weights that share one choice
    limit      what the budget leaves for the weights; base: the values that it refers to
    batches    of which those of ``solving`` quantize weights, and those of ``measuring`` measure losses
    measure    the divergence, called ``label``
    room       bytes that ``max_memory`` leaves for statistics and hidden states; None: no limit
    how        text of what decides the result beside model, plan and data
    """

    model: nn.Module
    configs: list[AOBaseConfig]
    rows: dict[str, list[PlanRow]]
    plan: Plan
    known: Table
    groups: tuple[tuple[str, ...], ...]
    base: Base
    limit: Limits
    recipe: Recipe
    batches: Sequence[Any]
    solving: list[Any]
    measuring: list[Any]
    measure: losses.Divergence
    label: str
    room: float | None
    how: str


def prepare(
    model: nn.Module, batches: Sequence[Any], budget: Budget, *, metric: str | losses.Divergence | None = None,
    candidates: Sequence[AOBaseConfig | str] | None = None, algorithm: Any = ALGORITHM,
    filter_fn: Filter | None = None, skip: Skip = (), held_out: float = HELD_OUT, example: Any = None,
    clock: CallTimer | None = None, for_: str | None = None, fused: Sequence[Sequence[str]] = (),
    memory: int | None = None, alone: bool = True,
) -> SearchTask:  # fmt: skip
    """The task of :func:`.search.search`, whose arguments these are. Runs the model on one batch, and times its layers
    for a latency budget; solves no weight. Raises PlanError for arguments that do not fit, and for a budget that no
    allocation meets.

    memory  bytes of ``max_memory``. alone: False if ranks share the search
    """
    require_scipy()
    batches = read(batches, "batches", together=True)
    if len(batches) < 2:
        raise PlanError(
            "search needs at least two batches: some to quantize with, some to measure with; batches has "
            f"{len(batches)}"
        )
    recipe, timed = read_recipe(algorithm), any(map(is_latency, parts(budget)))
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
    if timed and clock is None and memory is not None:
        raise PlanError(
            "max_memory is for weights in files, and a call that reads them would be timed with the disk; give a "
            "budget of bits or bytes, or a clock with the times of the machine that will run the model"
        )
    if timed and not alone:
        raise PlanError(
            "ranks=True divides a search among processes, and a budget of time is measured by one process that has the "
            "machine to itself; give a budget of bits or bytes, or leave out ranks"
        )
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
        layer_times(model, batches[-1] if example is None else example, plans, clock or CallTimer()) if timed else None
    )
    base = _base(model, plans[0], took)
    limit = limits(budget, base)
    rows = {name: [row for p in plans for row in p.active if row.name == name] for name in names}
    known, groups = _known(rows, configs, took), _groups(names, for_, fused)
    check(merge(known, groups)[0], limit, base)
    every = replace(plans[0], rows=[row for p in plans for row in p.rows])
    room = None if memory is None else room_beside(plans[0], recipe.solver, memory, most(known))
    label = "loss" if callable(metric) else next(name for name, fn in losses.NAMED.items() if fn is measure)
    return SearchTask(
        model, configs, rows, every, known, groups, base, limit, recipe, batches, solving, measuring, measure, label,
        room, f"{recipe}, {label}, held_out={held_out}",
    )  # fmt: skip


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
    times = dict.fromkeys(rows, [None] * len(configs)) if took is None else took.options
    for name, some in rows.items():
        table[name] = [
            Option(config, scheme_text(row), _nbytes(row), 0.0, seconds, _short(row))
            for row, config, seconds in zip(some, configs, times[name], strict=True)
        ]
        if took is not None:
            table[name].append(Option(None, "as it is", some[0].bytes_before, 0.0, took.floats[name]))
    return table


def most(known: Table) -> int:
    """Bytes of the weight with the most, quantized under all candidates."""
    return max((sum(o.nbytes for o in options if o.config is not None) for options in known.values()), default=0)


def _nbytes(row: PlanRow) -> int:
    assert row.scheme is not None
    assert row.site is not None
    return row.scheme.nbytes(row.site.shape, packed_layout(row))


def scheme_text(row: PlanRow) -> str:
    return "" if row.scheme is None else row.scheme.describe(len(row.shape))


def _short(row: PlanRow) -> str:
    return "" if row.scheme is None else row.scheme.shorten(len(row.shape))


def packed_layout(row: PlanRow) -> str:
    assert row.scheme is not None
    assert row.site is not None
    return compact_layout(row.scheme.weight, row.site.shape)
