"""What a search will take: seconds, memory and disk, from a measurement of seconds before it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...planning.configs import AOBaseConfig
from ...planning.quantize_report import duration, size
from ..calibration.block_order import inference_mode
from ..calibration.estimate_cost import (
    PROCESSES,
    CalibrationCost,
    estimate_cost,
    extent,
    seconds_of,
    solving_bytes,
)
from ..calibration.loop import parse_bytes
from .budget import Budget, totals
from .candidates import SearchTask, most, prepare
from .sensitivity import Sensitivities

WHOLE_RUNS = 3  # on the data that measures: for the outputs of the float model, for its hidden states, of the mixture


@dataclass(frozen=True)
class SearchCost:
    """Seconds of one process, and bytes.

    weights, candidates   numbers
    calibration   of quantizing all weights under all candidates
    trials        runs of the model with one weight replaced, counted by batches
    alone         how many of these start at the block of the weight; the others run the whole model
    measuring     all trials; ranks share them
    whole         runs of the whole model on the data that measures; every rank does them
    largest       bytes of the largest weight while it is quantized under all candidates
    solved        bytes of all weights under all candidates
    """

    weights: int
    candidates: int
    calibration: CalibrationCost
    trials: int
    alone: int
    measuring: float
    whole: float
    largest: int
    solved: int

    def seconds(self, processes: int = 1) -> float:
        """In all, on so many equal machines that share the search."""
        return self.calibration.seconds(processes) + self.measuring / processes + self.whole

    def notes(self, in_files: bool) -> list[str]:
        """Two lines for a report. in_files: weights, hidden states and results are in files, and processes can share
        the search."""
        kinds = {"from the block of the weight on": self.alone, "of the whole model": self.trials - self.alone}
        runs = " and ".join(f"{count:,} {kind}" for kind, count in kinds.items() if count)
        text = f"search, {self.weights} weights under {self.candidates} candidates: about {duration(self.seconds())} ("
        text += f"quantizing {duration(self.calibration.seconds())}; trial runs, {runs}, by the time of one: "
        text += f"{duration(self.measuring + self.whole)})"
        if in_files:
            text += "".join(f"; {n} processes {duration(self.seconds(n))}" for n in PROCESSES)
        states, solved = f"{size(self.calibration.hidden_bytes)} of hidden states", f"{size(self.solved)} of weights"
        need = self.largest + self.calibration.statistics_bytes
        if in_files:
            memory = f"memory of the search: about {size(need)} beside mapped files, and what max_memory leaves for "
            memory += f"hidden states of trials; disk until the end: {states}, {solved}"
        else:
            need += self.solved + self.calibration.hidden_bytes
            memory = f"memory of the search beside the model: about {size(need)}, with {states} and {solved}"
        return [text, memory]


def estimate_search_cost(
    model: nn.Module, batches: Sequence[Any], budget: Budget, max_memory: str | int | None = None, **how: Any
) -> tuple[SearchCost, AOBaseConfig, str]:
    """What :func:`.search.search` with these arguments will take; and the candidate that a plan can show in place of
    the mixture, with a note about it: the largest that keeps the budget on all weights, or the smallest if none does.

    how  as for :func:`.candidates.prepare`. Raises what a search raises before it solves a weight
    """
    memory = None if max_memory is None else parse_bytes(max_memory, "max_memory")
    with torch.inference_mode(False), torch.no_grad():
        task = prepare(model, batches, budget, memory=memory, **how)
        cost = _cost(task)
    uniform = [totals(task.known, dict.fromkeys(task.known, i)) for i in range(len(task.configs))]
    order = sorted(range(len(uniform)), key=lambda i: uniform[i][0])
    fits = [i for i in order if uniform[i][0] <= task.limit.nbytes and (uniform[i][2] or 0.0) <= task.limit.seconds]
    shown = (fits or order[:1])[-1]
    which = "largest candidate within the budget" if fits else "smallest candidate"
    text = next((options[shown].short for options in task.known.values()), "")
    note = f"nothing was searched: this plan has {text} for each weight, the {which}; the search chooses for each"
    return cost, task.configs[shown], note


def _cost(task: SearchTask) -> SearchCost:
    model, first, names = task.model, task.measuring[0], list(task.rows)
    options = len(task.configs)
    one = Sensitivities(model, [first], task.measure)
    several = sum(map(extent, task.measuring)) / max(1, extent(first))  # all batches, in units of the first
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    run = seconds_of(lambda: one.whole({}, {}), device)
    took: dict[str, float] = {}
    with inference_mode(model):
        for segment, chain in one.chains({name: some[0].places for name, some in task.rows.items()}):
            for sites, seconds in zip(segment.sites, chain.seconds(), strict=True):
                took |= dict.fromkeys(sites, seconds)
    measuring = options * several * sum(took.get(name, run) for name in names)
    trials = options * len(task.measuring)
    solved = sum(o.nbytes for some in task.known.values() for o in some if o.config is not None)
    return SearchCost(
        len(names), options, estimate_cost(model, task.plan, task.recipe, task.solving, False, task.room),
        trials * len(names), trials * len(took), measuring, WHOLE_RUNS * several * run,
        solving_bytes(task.plan, task.recipe.solver) + most(task.known), solved,
    )  # fmt: skip
