"""Chooses the fastest of several tiles by timing them, for ``pennyweight doctor --tune`` and scripts/gpu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from .tiles import Tile
from .timing import DeviceTimer, Timing, distance

HYSTERESIS = 1.02  # a new tile must be 2 % faster than the shipped one, so that tables do not change with the noise
FINALISTS = 3
_LIMIT = 1e-2  # relative distance from the dequantized product
# Bucket of rows -> the rows that are timed; the geometric mean of their times decides. The most used first
ROWS = {
    8: (1, 8), 16: (16,), 64: (64,), 256: (256,), 32: (32,), 128: (128,), 512: (512,), 1024: (1024,), 4096: (4096,),
}  # fmt: skip
_DEQUANTIZED_FROM = 256  # rows from which dequantizing the weight once may be faster
Choice = Tile | None  # None: dequantize, and multiply with torch


@dataclass
class Tuned:
    """tile: the chosen one; timing, shipped_us: in microseconds; rough: of each candidate that works.

    dropped   candidates that fail or give wrong values -> the reason
    complete  whether every candidate was timed before time ran out
    """

    tile: Choice
    timing: Timing
    shipped_us: float | None
    rough: dict[Choice, Timing]
    dropped: dict[Choice, str] = field(default_factory=dict)
    complete: bool = True


def choices(candidates: Sequence[Tile], m: int) -> list[Choice]:
    """The candidates for a bucket of rows, and for many rows to dequantize instead."""
    return [*candidates, *([None] if m >= _DEQUANTIZED_FROM else [])]


def fastest(
    candidates: Sequence[Choice], shipped: Choice, products: dict[str, Sequence[tuple[Tensor, Any]]],
    prepare: Callable[[Tensor, Any, Tensor | None, Choice], Callable[[], Tensor]], timer: DeviceTimer,
    left: Callable[[], float],
) -> Tuned:  # fmt: skip
    """The fastest tile, or the shipped one if none is 2 % faster.

    products  name -> pairs of (input, weight in layout "gpu"): copies that together are larger than the cache
    prepare   (x, weight, bias, tile) -> a function that computes y
    left      seconds that are left. Raises RuntimeError if no candidate works.
    """
    dropped: dict[Choice, str] = {}
    everyone = list(dict.fromkeys([shipped, *candidates]))

    def times(which: Sequence[Choice], samples: int, check: bool) -> dict[Choice, Timing]:
        return _times(which, products, prepare, timer, left, dropped, samples, check)

    rough = times(everyone, 3, True)
    if not rough:
        raise RuntimeError(f"no candidate works: {dropped}" if dropped else "no time was left")
    finalists = sorted(rough, key=lambda tile: rough[tile].us)[:FINALISTS]
    finalists += [shipped] if shipped in rough and shipped not in finalists else []
    final = times(finalists, 7, False) or rough
    best = min(final, key=lambda tile: final[tile].us)
    if shipped in final and final[shipped].us < HYSTERESIS * final[best].us:
        best = shipped
    complete = len(rough) + len(dropped) >= len(everyone)
    return Tuned(best, final[best], final[shipped].us if shipped in final else None, rough, dropped, complete)


def _times(
    candidates: Sequence[Choice], products: dict[str, Sequence[tuple[Tensor, Any]]], prepare: Any, timer: DeviceTimer,
    left: Callable[[], float], dropped: dict[Choice, str], samples: int, check: bool,
) -> dict[Choice, Timing]:  # fmt: skip
    """Tile -> geometric mean of its times over the products, with the largest spread; stops when no time is left."""
    out: dict[Choice, Timing] = {}
    expected = (
        {name: F.linear(pairs[0][0], pairs[0][1].dequantize()) for name, pairs in products.items()} if check else {}
    )
    for tile in candidates:
        if left() <= 0:
            break
        try:
            times = []
            for name, pairs in products.items():
                calls = [prepare(x, w, None, tile) for x, w in pairs]
                if check:
                    far = distance(calls[0](), expected[name])
                    if not far <= _LIMIT:  # also NaN
                        raise ValueError(f"{name}: differs by {far:.2e} from the dequantized product")
                times.append(timer.time(calls, samples=samples, check=check))
        except Exception as error:  # too much shared memory, wrong values: a result of this candidate
            dropped[tile] = f"{type(error).__name__}: {error}"[:300]
            timer.synchronize()  # raises where the device no longer answers
            continue
        middle = prod(timing.us for timing in times) ** (1 / len(times))
        out[tile] = Timing(middle, max(timing.spread for timing in times), samples, len(calls))
    return out
