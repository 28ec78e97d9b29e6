"""Chooses the fastest of several tiles by timing them, for ``pennyweight doctor --tune`` and scripts/gpu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from .timing import DeviceTimer, Timing, distance

HYSTERESIS = 1.02  # a new tile must be 2 % faster than the shipped one, so that tables do not change with the noise
FINALISTS = 3
_LIMIT = 1e-2  # relative distance from the dequantized product
# Bucket of rows -> the rows that are timed; the geometric mean of their times decides
ROWS = {16: (1, 16), 64: (64,), 32: (32,), 256: (256,), 128: (128,), 512: (1024,)}


@dataclass
class Tuned:
    """tile: the chosen one; timing, shipped_us: in microseconds; rough: of each candidate that works.

    dropped   candidates that fail or give wrong values -> the reason
    complete  whether every candidate was timed before time ran out
    """

    tile: Any
    timing: Timing
    shipped_us: float | None
    rough: dict[Any, Timing]
    dropped: dict[Any, str] = field(default_factory=dict)
    complete: bool = True


def fastest(
    candidates: Sequence[Any], shipped: Any, weights: Sequence[Any], inputs: dict[int, Sequence[Tensor]],
    run: Callable[[Tensor, Any, Tensor | None, Any], Tensor], timer: DeviceTimer, left: Callable[[], float],
) -> Tuned:  # fmt: skip
    """The fastest tile, or the shipped one if none is 2 % faster.

    weights  copies of one weight in layout "gpu", together larger than the cache
    inputs   rows -> an input for each copy
    run      (x, weight, bias, tile) -> y
    left     seconds that are left. Raises RuntimeError if no candidate works.
    """
    dropped: dict[Any, str] = {}
    times = partial(_times, weights=weights, inputs=inputs, run=run, timer=timer, left=left, dropped=dropped)
    everyone = list(dict.fromkeys([shipped, *candidates]))
    rough = times(everyone, samples=3, check=True)
    if not rough:
        raise RuntimeError(f"no candidate works: {dropped}" if dropped else "no time was left")
    finalists = sorted(rough, key=lambda tile: rough[tile].us)[:FINALISTS]
    finalists += [shipped] if shipped in rough and shipped not in finalists else []
    final = times(finalists, samples=7, check=False) or rough
    best = min(final, key=lambda tile: final[tile].us)
    if shipped in final and final[shipped].us < HYSTERESIS * final[best].us:
        best = shipped
    complete = len(rough) + len(dropped) >= len(everyone)
    return Tuned(best, final[best], final[shipped].us if shipped in final else None, rough, dropped, complete)


def _times(
    candidates: Sequence[Any], *, weights: Sequence[Any], inputs: dict[int, Sequence[Tensor]], run: Any, timer: Any,
    left: Callable[[], float], dropped: dict[Any, str], samples: int, check: bool,
) -> dict[Any, Timing]:  # fmt: skip
    """Tile -> geometric mean of its microseconds over the rows, with the largest spread; stops when no time is left."""
    out: dict[Any, Timing] = {}
    expected = {m: F.linear(xs[0], weights[0].dequantize()) for m, xs in inputs.items()} if check else {}
    for tile in candidates:
        if left() <= 0:
            break
        try:
            times = []
            for m, xs in inputs.items():
                if check:
                    far = distance(run(xs[0], weights[0], None, tile), expected[m])
                    if not far <= _LIMIT:  # also NaN
                        raise ValueError(f"{m} rows: differs by {far:.2e} from the dequantized product")
                calls = [partial(run, x, w, None, tile) for x, w in zip(xs, weights, strict=True)]
                times.append(timer.time(calls, samples=samples, check=check))
        except Exception as error:  # too much shared memory, wrong values: a result of this candidate
            dropped[tile] = f"{type(error).__name__}: {error}"[:300]
            timer.synchronize()  # raises where the device no longer answers
            continue
        middle = prod(timing.us for timing in times) ** (1 / len(times))
        out[tile] = Timing(middle, max(timing.spread for timing in times), samples, len(weights))
    return out
