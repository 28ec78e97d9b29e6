"""What a way to run the model is, and what is timed of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol

HIDDEN, LAYERS, FFN, HEADS, KV_HEADS, VOCAB = 2048, 16, 5632, 32, 8, 32000
PROMPT, DECODED = 128, 16  # tokens
DECODE_SECONDS = 1.5  # a slower way decodes fewer tokens a visit, at least one


def tokens(n: int) -> list[int]:
    """The same token numbers for all, spread over the vocabulary."""
    return [(7919 * i + 13) % VOCAB for i in range(n)]


def linear_elements() -> tuple[int, int]:
    """Weights of linear layers: in the blocks, and in the head."""
    kv = HIDDEN * KV_HEADS // HEADS
    return LAYERS * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * kv + 3 * HIDDEN * FFN), HIDDEN * VOCAB


class Model(Protocol):
    """A loaded model with one sequence."""

    def prompt(self, numbers: list[int]) -> Any:
        """Start anew with these tokens; logits after the last, [vocab]."""

    def step(self, number: int) -> Any:
        """One more token; logits after it."""


@dataclass
class Loaded:
    """A model, the bytes of its files or parts, and what it cost: seconds by name."""

    model: Model
    nbytes: int
    costs: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Way:
    """One way to run the model.

    stored_bits  of a weight of a linear layer, scales included
    arithmetic   "int8", "bf16" or "fp32": the peak that bounds the prompt
    bound        greatest relative error of the logits, against bf16, that is not a fault
    load         (folder of the bf16 model, threads) -> Loaded
    """

    name: str
    family: str
    bits: int
    stored_bits: float
    arithmetic: str
    bound: float
    load: Callable[[Path, int], Loaded]


def visit(model: Model) -> tuple[float, float]:
    """(seconds of a prompt, median seconds of a token after it)."""
    clock, numbers = time.perf_counter, tokens(PROMPT + DECODED)
    model.prompt(numbers[:PROMPT])  # the threads of the process visited before come to rest
    begin = clock()
    model.prompt(numbers[:PROMPT])
    prompt = clock() - begin
    times: list[float] = []
    for number in numbers[PROMPT:]:
        before = clock()
        model.step(number)
        times.append(clock() - before)
        if sum(times) > DECODE_SECONDS:
            break
    return prompt, median(times)


def read_and_write(source: list[Path], nbytes: int, scratch: Path) -> dict[str, float]:
    """Seconds to read files whole, and to write so many bytes: what no way of quantizing files can beat."""
    begin, buffer = time.perf_counter(), bytearray(1 << 24)
    for path in source:
        with path.open("rb", buffering=0) as f:
            while f.readinto(buffer):
                pass
    read = time.perf_counter() - begin
    begin = time.perf_counter()
    with scratch.open("wb", buffering=0) as f:
        for at in range(0, nbytes, len(buffer)):
            f.write(memoryview(buffer)[: min(len(buffer), nbytes - at)])
    write = time.perf_counter() - begin
    scratch.unlink()
    return {"read": read, "write": write}
