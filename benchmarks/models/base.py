"""What a way to run a model is, what it is asked to do, and how one visit is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from benchmarks.peers.base import WARM_SECONDS
from benchmarks.peers.worker import SLOW_SECONDS

TASKS = ("forward", "prompt", "decode", "generate", "first token", "file to file")


@dataclass(frozen=True)
class Case:
    """One row of the table: a model and what it does.

    task     forward       one call; `tokens` of a text, 0 for images and sound
             prompt        logits after a prompt of `tokens`
             decode        one token more for each sequence, after a prompt of `tokens`
             generate      `GENERATED` tokens after such a prompt, through the library's own function for users
             first token   load from the quantized file, logits after one token
             file to file  from the float file to the quantized one
    batch    sequences or images
    cache    "plain" or "int8": keys and values
    """

    name: str
    model: str
    task: str = "forward"
    batch: int = 1
    tokens: int = 0
    cache: str = "plain"


class Bound(Protocol):
    """A loaded model with the input of a case."""

    def output(self) -> Tensor:
        """What is compared with float, as float32."""

    def step(self) -> None:
        """What is timed."""


@dataclass
class Loaded:
    """A model ready to run.

    bind    case -> Bound
    nbytes  of its file or parts; 0 where not known
    detail  what became of it, where that is not always the same
    """

    bind: Callable[[Case], Bound]
    nbytes: int = 0
    detail: str = ""


def any_case(case: Case) -> bool | str:
    return True


@dataclass(frozen=True)
class Way:
    """One way to run some of the models.

    bits         of a weight of a linear layer or convolution; ways are compared at equal bits
    stored_bits  of such a weight, scales included: what must be read
    arithmetic   "int8", "bf16" or "fp32": the peak that bounds its products
    bound        greatest error that is not a fault
    models       their names
    load         (folder of the model's files, threads) -> Loaded
    accepts      case -> True, or the sentence that refuses
    """

    name: str
    family: str
    bits: int
    stored_bits: float
    arithmetic: str
    bound: float
    models: tuple[str, ...]
    load: Callable[[Path, int], Loaded]
    accepts: Callable[[Case], bool | str] = any_case


def mean_error(y: Tensor, reference: Tensor) -> float:
    """mean |y − reference| / mean |reference|; inf where y is not finite or has another shape."""
    if y.shape != reference.shape:
        return float("inf")
    error = float((y.double() - reference.double()).abs().mean() / reference.double().abs().mean())
    return error if error == error else float("inf")  # noqa: PLR0124


MOST_STEPS = 16  # of a visit: a decoding model's context grows by one token with each


def visit(step: Callable[[], Any], seconds: float, warm: bool) -> float:
    """Median seconds of a step. `warm` runs untimed steps first: the threads of the process visited before spin for
    some milliseconds more."""
    clock = time.perf_counter
    if warm:
        end = clock() + WARM_SECONDS
        while clock() < end:
            step()
    times: list[float] = []
    while not times or (sum(times) < seconds and len(times) < MOST_STEPS):
        before = clock()
        step()
        times.append(clock() - before)
    return median(times)


@dataclass
class Timer:
    """Visits to one bound case; slow steps need no warm-up, the disturbance is lost in them."""

    bound: Bound
    took: float = field(default=0.0)

    def visit(self, seconds: float) -> float:
        self.took = visit(self.bound.step, seconds, self.took < SLOW_SECONDS)
        return self.took


@dataclass(frozen=True)
class Call:
    """A case whose step is one call, without a state."""

    run: Callable[[], Any]
    read: Callable[[Any], Tensor]

    def output(self) -> Tensor:
        return self.read(self.run())

    def step(self) -> None:
        self.run()


class Inputs:
    """Inputs of a model, by case, and for calibration; written once, read by every way."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "inputs.pt"

    def write(self, by_case: dict[str, tuple[Tensor, ...]], calibration: list[tuple[Tensor, ...]]) -> None:
        torch.save({"cases": by_case, "calibration": calibration}, self.path)

    def of(self, case: Case) -> tuple[Tensor, ...]:
        return torch.load(self.path)["cases"][case.name]

    @property
    def calibration(self) -> list[tuple[Tensor, ...]]:
        return torch.load(self.path)["calibration"]
