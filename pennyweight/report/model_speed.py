"""Speed of whole models on this machine, timed in turns."""

from __future__ import annotations

import platform
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from ..planning.run_batch import run_batch
from .outputs import evaluating

ROUNDS = 5
SECONDS = 0.2  # least time of one model's calls in a round


@dataclass(frozen=True)
class Speed:
    """Times of one call of a model on one batch.

    what     the batch in words; seconds: the median of the rounds
    speed    relative to float: the median over rounds of the ratio of both models' times in the same round
    low, high  the smallest and the largest ratio of a round
    """

    what: str
    seconds: float
    speed: float
    low: float
    high: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def model_speeds(
    models: Sequence[nn.Module], batches: Sequence[tuple[str, Any]], *, rounds: int = ROUNDS,
    notify: Callable[[str], None] = lambda text: None,
) -> list[list[Speed]]:  # fmt: skip
    """[model][batch]: times of each model on each named batch. The first model is the reference (float).

    In each round every model runs in turn, so that load on the machine affects all of them. A first call of each is
    not counted. Raises ValueError for fewer than one round.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1, got {rounds}")
    out: list[list[Speed]] = [[] for _ in models]
    with evaluating(*models):
        for what, batch in batches:
            counts = []
            for model in models:
                run_batch(model, batch)
                counts.append(max(1, round(SECONDS / max(1e-9, _seconds(model, batch, 1)))))
            times: list[list[float]] = [[] for _ in models]
            for turn in range(rounds):
                notify(f"timing {what}, round {turn + 1} of {rounds}")
                for i, model in enumerate(models):
                    times[i].append(_seconds(model, batch, counts[i]))
            for i, seconds in enumerate(times):
                ratios = [a / b for a, b in zip(times[0], seconds, strict=True)]
                out[i].append(
                    Speed(what, statistics.median(seconds), statistics.median(ratios), min(ratios), max(ratios))
                )
    return out


def _seconds(model: nn.Module, batch: Any, count: int) -> float:
    start = perf_counter()
    for _ in range(count):
        run_batch(model, batch)
    return (perf_counter() - start) / count


def timed_batches(batch: Any, causal: bool) -> list[tuple[str, Any]]:
    """What is timed of a batch of tensors [B, ..]: one token (of a generative model) or one sample, and the batch."""
    if not isinstance(batch, Mapping) or not all(isinstance(t, Tensor) and t.ndim for t in batch.values()):
        return [("one batch", batch)]
    rows = len(next(iter(batch.values())))
    one = {name: t[:1] for name, t in batch.items()}
    if causal:
        one = {name: t[:, :1] for name, t in one.items()}
    first = ("one token" if causal else "one sample", one)
    return [first, (f"a batch of {rows}", batch)] if rows > 1 or causal else [first]


def processor() -> str:
    """The processor's name, with its vector instructions and the threads in use."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            found = re.search(r"^model name\s*:\s*(.+)$", file.read(), re.M)
        name = found[1].strip() if found else name
    except OSError:  # not Linux
        pass
    threads = torch.get_num_threads()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()}), {threads} thread{'s' * (threads > 1)}"
