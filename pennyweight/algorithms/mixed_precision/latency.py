"""Latency of a model call, and of each linear layer in it, in float and under each of several plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...planning.layer_timing import (
    COUNTS,
    Call,
    Calls,
    TimeLayer,
    calls_of_weight,
    layer_calls,
    least_seconds,
    measure_,
    wait_for,
)
from ...planning.plan import Plan, PlanRow
from ...planning.run_batch import run_batch
from ..calibration.block_order import inference_mode
from ..solve import solve

SECONDS = 0.5  # time limit for timing the whole model, before the layers and again after each plan


def time_call(run: Call, device: torch.device) -> float:
    """Seconds per call on this machine."""
    return least_seconds([run], SECONDS, wait_for(device))[0]


@dataclass(frozen=True)
class CallTimer:
    """Timing functions; default: measure on this machine. Replace them for another machine or a latency model.

    call    (run, device) -> seconds of one ``run()``
    layer   (row of the plan, quantized weight, row counts, bytes of copies) -> a Latency per row count; None:
            :func:`pennyweight.planning.layer_timing.time_layer`
    """

    call: Callable[[Call, torch.device], float] = time_call
    layer: TimeLayer | None = None


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one model call.

    whole    the float model
    rest     the part of ``whole`` outside the timed layers
    floats   by weight: its layers in float
    options  by weight: its layers under each plan, in order
    """

    whole: float
    rest: float
    floats: dict[str, float]
    options: dict[str, list[float]]


def time_plan(plan: Plan, seen: Calls, timed: TimeLayer | None = None) -> Iterator[tuple[PlanRow, float, float]]:
    """Each active row of a plan, and the microseconds of its calls in float and quantized, at the sizes of the input
    ``seen`` most often (see :func:`~pennyweight.planning.layer_timing.layer_calls`); 0 for what is not timed."""
    measure_(
        plan,
        lambda row: [m for m, _ in calls_of_weight(row, seen).most_common(COUNTS)],
        lambda row: solve(row).weight,
        timed,
    )
    for row in plan.active:
        counts = calls_of_weight(row, seen)
        floating = sum(counts[t.size] * t.float_us for t in row.latency)
        yield row, floating, sum(counts[t.size] * t.quantized_us for t in row.latency)


def layer_times(model: nn.Module, example: Any, plans: Sequence[Plan], clock: CallTimer) -> LayerTimes:
    """Times of the float model on ``example``, and of its linear layers under each plan at the row counts that occur
    there.

    Each layer is timed next to its float version. The result is the ratio of the two, multiplied by the minimum float
    time, so that background load during one plan does not favour another. The whole call is timed between the plans,
    and its minimum is used. Everything else, including layers that are not called, counts as "rest".
    """
    with inference_mode(model):
        seen, _ = layer_calls(model, lambda: run_batch(model, example))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def time_whole() -> float:
        with inference_mode(model):
            return clock.call(lambda: run_batch(model, example), device)

    whole = time_whole()
    floats: dict[str, float] = {}
    ratios: dict[str, list[float]] = {}
    for one in plans:
        for row, took, quantized in time_plan(one, seen, clock.layer):
            floats[row.name] = min(floats.get(row.name, took / 1e6), took / 1e6)
            ratios.setdefault(row.name, []).append(quantized / took if took else 0.0)
        whole = min(whole, time_whole())
    layers = sum(floats.values())
    options = {name: [floats[name] * r for r in some] for name, some in ratios.items()}
    return LayerTimes(max(whole, layers), max(whole - layers, 0.0), floats, options)
