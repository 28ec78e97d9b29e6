"""search(): which layer gets how many bits, so that the model loses least within a budget."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core.formats import UINT2, UINT3, UINT4, UINT5, UINT6
from ..core.spec import QuantSpec
from ..core.tensor import AffineQuantizedTensor
from ..models.calling import call
from ..models.configs import AOBaseConfig, FqnToConfig, SpecConfig
from ..models.configs.plain_data import config_to_data
from ..models.plan import Plan, PlanRow, plan
from ..models.report import size
from ..models.rules import Filter, PlanError
from . import fidelity, memory
from . import recipe as recipes
from .chain import quiet
from .collect import Collector, Seen
from .quantize import solve_row

CANDIDATES: tuple[AOBaseConfig, ...] = tuple(
    SpecConfig(QuantSpec(fmt, (group,), torch.float16, zero_point=fmt))
    for fmt, group in ((UINT2, 64), (UINT3, 128), (UINT4, 128), (UINT5, 128), (UINT6, 128))
)


@dataclass(frozen=True)
class Option:
    """One config for one weight: its bytes, and what the model loses when this weight alone is quantized so."""

    config: AOBaseConfig
    scheme: str
    nbytes: int
    loss: float


@dataclass(frozen=True)
class Search:
    """What :func:`search` found.

    config      ready for ``quantize_``; a plain FqnToConfig, to be read, saved (:meth:`to_json`) and edited
    predicted   loss of the model under it: the sum of its layers' times ``interaction``
    interaction measured loss by the sum, of the chosen mixture: how far layers' losses are from adding up
    bits        per weight of the quantized layers, metadata included
    table       by parameter: its options
    uniform     (config, bits per weight, sum of losses) of each candidate everywhere
    numel, rest weights that were chosen for; bytes of all else in the model
    """

    config: FqnToConfig
    predicted: float
    interaction: float
    bits: float
    nbytes: int
    chosen: dict[str, int]
    table: dict[str, list[Option]] = field(repr=False)
    uniform: list[tuple[str, float, float]] = field(default_factory=list)
    metric: str = "kl"
    numel: int = 0
    rest: int = 0

    def within(self, budget: str) -> Search:
        """The best mixture within another budget, from the same measurements: nothing is run again. Its ``interaction``
        is that of the first. Raises PlanError as :func:`search` does."""
        chosen = allocate(self.table, _limit(budget, self.numel, self.rest))
        nbytes, total = _totals(self.table, chosen)
        return replace(
            self, config=_config(self.table, chosen), predicted=total * self.interaction, bits=8 * nbytes / self.numel,
            nbytes=nbytes, chosen=chosen,
        )  # fmt: skip

    def to_json(self, indent: int | None = 2) -> str:
        """The config as data (see PennyweightConfig), and the table behind it."""
        table = {
            name: [{"scheme": o.scheme, "nbytes": o.nbytes, "loss": o.loss, "chosen": i == self.chosen[name]}
                   for i, o in enumerate(options)]
            for name, options in self.table.items()
        }  # fmt: skip
        data = {
            "version": 1, "config": config_to_data(self.config), "bits": self.bits, "nbytes": self.nbytes,
            "metric": self.metric, "predicted": self.predicted, "interaction": self.interaction, "table": table,
        }  # fmt: skip
        return json.dumps(data, indent=indent)

    def front(self, points: int = 12) -> list[tuple[float, float]]:
        """(bits per weight, predicted loss) of the best mixtures from the smallest to the largest."""
        least = sum(min(o.nbytes for o in options) for options in self.table.values())
        most = sum(max(o.nbytes for o in options) for options in self.table.values())
        found = []
        for i in range(points):
            limit = least + (most - least) * i / max(1, points - 1)
            chosen = allocate(self.table, limit)
            nbytes, loss = _totals(self.table, chosen)
            found.append((8 * nbytes / self.numel, loss * self.interaction))
        return found

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        told = f"{self.bits:.3f} bits a weight, {size(self.nbytes)}; predicted {self.metric} {self.predicted:.3g}"
        table = Table(title=told, title_justify="left")
        for name in ("parameter", "chosen", "bytes", self.metric, "others"):
            table.add_column(name, justify="right" if name in ("bytes", self.metric) else "left", overflow="fold")
        for name, options in self.table.items():
            one = options[self.chosen[name]]
            rest = ", ".join(f"{o.scheme.split('[')[0]} {o.loss:.2g}" for o in options if o is not one)
            table.add_row(*map(Text, (name, one.scheme, size(one.nbytes), f"{one.loss:.2g}", rest)))
        out = StringIO()
        Console(file=out, width=120).print(table)
        return out.getvalue()


def search(
    model: nn.Module,
    batches: Sequence[Any],
    budget: str,
    *,
    metric: str | fidelity.Divergence | None = None,
    candidates: Sequence[AOBaseConfig] = CANDIDATES,
    algorithm: Any = "gptq",
    filter_fn: Filter | None = None,
    held_out: float = 0.25,
    progress: Callable[[int, int, str], None] | None = None,
) -> Search:
    """The mixture of configs, one for each weight, under which the model loses least within a budget.

    batches     calibration data: a share of ``held_out`` measures, the rest is what weights are solved on
    budget      "4.25 bpw": bits per weight of the quantized layers, scales and all; "600 MB": of the whole model's
                parameters and buffers (kB, MB, GB: powers of 1000)
    metric      "kl" of the logits, "error" of the output, or a function (reference, output, batch) -> number
    candidates  configs to choose from; default: 2 to 6 bits with zero points and float16 scales
    algorithm   a solver for the weights

    Each weight is solved under each candidate on the float model's inputs, and the loss is measured of the model with
    that weight alone replaced. Then scipy's MILP solver (HiGHS) picks one option for each weight:

        minimise sum loss[w, option]  subject to  sum bytes[w, option] <= budget

    The model is not changed; it is run in eval mode. Losses are of small errors, so they nearly add up; by how much
    they do not is measured once on the mixture (``interaction``) and belongs to the prediction. Needs scipy. Memory:
    beside the model the statistics of one block and all solved weights, packed. Raises PlanError for a budget that
    means nothing, or that the smallest candidates do not meet.
    """
    if len(batches) < 2:
        raise PlanError("search needs two batches or more: some to solve with, some to measure with")
    solver = _solver(algorithm)
    aside = max(1, round(held_out * len(batches)))
    solving, measuring = list(batches[:-aside]), list(batches[-aside:])
    with torch.inference_mode(False), torch.no_grad():
        plans = [plan(model, config, filter_fn) for config in candidates]
        names = [row.name for row in plans[0].active]
        if any([row.name for row in p.active] != names for p in plans):
            raise PlanError("search: the candidates apply to different weights; give a filter_fn under which all apply")
        numel, rest = _amounts(model, plans[0])
        limit = _limit(budget, numel, rest)
        with quiet(model):
            example = call(model, measuring[0])
        measure = fidelity.divergence(metric, example)
        rows = {name: [row for p in plans for row in p.active if row.name == name] for name in names}
        solved = _solve(model, rows, solver, solving, progress)
        table = _losses(model, rows, solved, list(candidates), measuring, measure, progress)
        chosen = allocate(table, limit)
        nbytes, total = _totals(table, chosen)
        places = {name: rows[name][0].places for name in names}
        put = {name: solved[name][i] for name, i in chosen.items()}
        expected = fidelity.references(model, measuring)
        whole = _replaced(model, places, put, lambda: fidelity.mean(model, measuring, expected, measure))
    interaction = whole / total if total > 0 else 1.0
    uniform = [
        (rows[names[0]][i].scheme.__str__(), 8 * sum(t[i].nbytes for t in table.values()) / numel,
         sum(t[i].loss for t in table.values()))
        for i in range(len(candidates))
    ]  # fmt: skip
    told = metric if isinstance(metric, str) else "loss" if metric is not None else _named(measure)
    return Search(
        _config(table, chosen), total * interaction, interaction, 8 * nbytes / numel, nbytes, chosen, table, uniform,
        told, numel, rest,
    )  # fmt: skip


def _config(table: dict[str, list[Option]], chosen: dict[str, int]) -> FqnToConfig:
    return FqnToConfig({name: table[name][i].config for name, i in chosen.items()})


def _named(measure: fidelity.Divergence) -> str:
    return next((name for name, fn in fidelity.NAMED.items() if fn is measure), "loss")


def _solver(algorithm: Any) -> Any:
    recipe = recipes.read(algorithm)
    if recipe.rewrites or recipe.tuners:
        raise PlanError(f"search compares weights one by one and takes a solver; got {recipe}. Rewrite the model first")
    return recipe.solver


def _solve(
    model: nn.Module, rows: dict[str, list[PlanRow]], solver: Any, batches: list[Any], progress: Any
) -> dict[str, list[AffineQuantizedTensor]]:
    """Each weight under each candidate, from the float model's inputs."""
    solved: dict[str, list[AffineQuantizedTensor]] = {}

    def solve(name: str, seen: Seen | None) -> None:
        solved[name] = [solve_row(row, solver, seen)[0].to_layout(_packed(row)) for row in rows[name]]
        if progress is not None:
            progress(len(solved), len(rows), f"solving {name}")

    if solver.needs:
        weights = {id(row[0].tensor): name for name, row in rows.items()}
        for names, seen in Collector(model, weights, batches, solver.needs).stages():
            for name in names:
                solve(name, seen.get(name))
    for name in rows.keys() - solved.keys():
        solve(name, Seen())
    return {name: solved[name] for name in rows}


def _packed(row: PlanRow) -> str:
    assert row.scheme is not None
    return "bits" if row.scheme.weight.format.bits < 8 else "plain"


def _losses(
    model: nn.Module, rows: dict[str, list[PlanRow]], solved: dict[str, list[AffineQuantizedTensor]],
    configs: list[AOBaseConfig], batches: list[Any], measure: fidelity.Divergence, progress: Any,
) -> dict[str, list[Option]]:  # fmt: skip
    """Loss of the model with one weight replaced, for each and each option."""
    expected = fidelity.references(model, batches)
    table: dict[str, list[Option]] = {}
    for name, options in rows.items():
        table[name] = []
        for row, w, config in zip(options, solved[name], configs, strict=True):
            x = w.dequantize() if row.scheme is not None and row.scheme.act is None else w
            loss = _replaced(
                model, {name: row.places}, {name: x}, lambda: fidelity.mean(model, batches, expected, measure)
            )
            table[name].append(Option(config, str(row.scheme), w.nbytes, max(loss, 0.0)))
        if progress is not None:
            progress(len(table), len(rows), f"measuring {name}")
    return table


def _replaced(model: nn.Module, places: dict[str, Any], weights: dict[str, Tensor], run: Callable[[], float]) -> float:
    """run() with some weights in the model's places, which get theirs back."""
    before = {name: places[name][0].get() for name in weights}
    try:
        for name, w in weights.items():
            for place in places[name]:
                place.set(nn.Parameter(w, requires_grad=False))
        return run()
    finally:
        for name, w in before.items():
            for place in places[name]:
                place.set(w)


def allocate(table: dict[str, list[Option]], limit: float) -> dict[str, int]:
    """The option of each weight that minimises the sum of losses within ``limit`` bytes; PlanError where none does."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    sizes = [o.nbytes for options in table.values() for o in options]
    losses = np.array([o.loss for options in table.values() for o in options])
    least = sum(min(o.nbytes for o in options) for options in table.values())
    if least > limit:
        raise PlanError(f"the budget leaves {size(max(limit, 0))} for these weights; the candidates need {size(least)}")
    one_each = np.zeros((len(table), len(sizes)))
    at = 0
    for i, options in enumerate(table.values()):
        one_each[i, at : at + len(options)] = 1
        at += len(options)
    scale = losses.max() or 1.0  # HiGHS's tolerances are absolute
    found = milp(
        losses / scale,
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(np.array([sizes]) / limit, ub=1.0)],
        integrality=np.ones(len(sizes)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-4},
    )
    if found.x is None:
        raise RuntimeError(f"the allocation could not be solved: {found.message}")
    chosen, at = {}, 0
    for name, options in table.items():
        chosen[name] = int(np.argmax(found.x[at : at + len(options)]))
        at += len(options)
    return chosen


def _totals(table: dict[str, list[Option]], chosen: dict[str, int]) -> tuple[int, float]:
    picked = [table[name][i] for name, i in chosen.items()]
    return sum(o.nbytes for o in picked), sum(o.loss for o in picked)


_BITS = re.compile(r"\s*([0-9]+\.?[0-9]*)\s*bpw\s*")


def _amounts(model: nn.Module, whole: Plan) -> tuple[int, int]:
    """Weights that are chosen for, and bytes of all else."""
    weights = [row for row in whole.active if row.tensor is not None]
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    rest = sum(int(t.nbytes) for t in tensors.values()) - sum(row.bytes_before for row in weights)
    return sum(row.tensor.numel() for row in weights if row.tensor is not None), rest


def _limit(budget: str, numel: int, rest: int) -> float:
    """Bytes that the budget leaves for the weights that are chosen for."""
    bits = _BITS.fullmatch(budget) if isinstance(budget, str) else None
    if bits is not None:
        return float(bits[1]) * numel / 8
    if not (isinstance(budget, str) and budget.rstrip().endswith("B")):
        raise PlanError(f'budget is "4.25 bpw" or "600 MB", got {budget!r}')
    return memory.amount(budget) - rest
