"""``pennyweight doctor --bench``: times quantized matrix products against float on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

SIZE = 1024
ROWS = (1, 128)
NAMES = ("int8-dynamic", "int8", "int4")
_ROUNDS = 9  # alternating, so that a busy moment affects both sides
_SECONDS = 0.005  # per sample: long relative to the clock's resolution
_NOISE = 2.0  # slowest over fastest sample of one side; near 1.1 on an idle machine


@dataclass(frozen=True)
class Timing:
    """One product [rows, 1024] @ [1024, 1024]: microseconds quantized and float, medians of alternating samples."""

    config: str
    dtype: str
    rows: int
    kernel: str
    microseconds: float
    float_microseconds: float
    noisy: bool  # the samples disagree: the machine was busy and the ratio is unreliable

    def __str__(self) -> str:
        ratio = self.float_microseconds / self.microseconds
        verdict = f"{ratio:.2f}x faster" if ratio >= 1 else f"{1 / ratio:.2f}x slower"
        verdict += ", but the machine is busy: measure again" if self.noisy else ""
        return (
            f"{self.config:<13}{self.rows:>4} row{'s' if self.rows > 1 else ' '} {self.dtype:<9}"
            f"{self.microseconds:>9.1f} us, float {self.float_microseconds:>9.1f} us: {verdict} ({self.kernel})"
        )


def measure() -> list[Timing]:
    """Time each config against a float product of the same dtype."""
    import torch
    from torch import nn

    from ..kernels import select
    from ..kernels.table import case_of
    from ..quantize import quantize_
    from .aliases import build

    out = []
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(SIZE, SIZE, bias=False, dtype=dtype).requires_grad_(False)
        for name in NAMES:
            quantized = nn.Linear(SIZE, SIZE, bias=False, dtype=dtype)
            quantized.weight.data.copy_(layer.weight)
            quantize_(quantized, build(name))
            weight: Any = quantized.weight
            for rows in ROWS:
                x = torch.randn(rows, SIZE, dtype=dtype)
                with torch.no_grad():
                    ours, theirs, noisy = _alternate(partial(quantized, x), partial(layer, x))
                kernel = select("linear", case_of(weight, dtype)).name
                short = str(dtype).removeprefix("torch.")
                out.append(Timing(name, short, rows, kernel, ours * 1e6, theirs * 1e6, noisy))
    return out


def _alternate(a: Callable[[], Any], b: Callable[[], Any]) -> tuple[float, float, bool]:
    """Median seconds per call of each, and whether the samples of either disagree."""
    counts = [max(1, int(_SECONDS / max(_time(f, 3), 1e-9))) for f in (a, b)]
    samples = [(_time(a, counts[0]), _time(b, counts[1])) for _ in range(_ROUNDS)]
    ours, theirs = (sorted(side) for side in zip(*samples, strict=True))
    return median(ours), median(theirs), any(side[-1] > _NOISE * side[0] for side in (ours, theirs))


def _time(f: Callable[[], Any], count: int) -> float:
    f()
    start = perf_counter()
    for _ in range(count):
        f()
    return (perf_counter() - start) / count
