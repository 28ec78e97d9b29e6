"""Statistics of layer inputs: each statistic is four pure functions.

    state = init(groups, width); state = update(state, x); state = merge(a, b); tensor = finish(state)

x is float32 [groups, tokens, width]: one group for a linear layer, one per group for a grouped convolution. ``merge``
combines the states of the ranks of a distributed calibration. The order of batches only affects rounding. A ``paired``
statistic also gets the inputs of the float model at the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

State = tuple[Tensor, int]  # (sum or maximum, tokens seen)


@dataclass(frozen=True)
class Statistic:
    """See the module docstring. ``update(state, x)``, or ``update(state, x, x_float)`` if paired.

    mean    the state is a sum over tokens, and the result its mean
    """

    name: str
    init: Callable[[int, int], State]
    update: Callable[..., State]
    merge: Callable[[State, State], State]
    finish: Callable[[State], Tensor]
    paired: bool = False
    mean: bool = False


STATISTICS: dict[str, Statistic] = {}


def register_statistic(statistic: Statistic) -> Statistic:
    """Register a statistic under its name. Raises ValueError if the name is taken."""
    if statistic.name in STATISTICS:
        raise ValueError(f"statistic {statistic.name!r} is already registered")
    STATISTICS[statistic.name] = statistic
    return statistic


def collect(name: str, batches: Any) -> Tensor:
    """Compute one statistic of inputs [.., width], all of the same width. Raises ValueError for NaN or inf."""
    it = STATISTICS[name]
    state = None
    for i, x in enumerate(batches):
        if not bool(x.isfinite().all()):
            bad = int((~x.isfinite()).sum())
            raise ValueError(f"{name}: batch {i} {tuple(x.shape)} has {bad} NaN or infinite values")
        x = x.reshape(1, -1, x.shape[-1]).float()
        state = it.update(it.init(1, x.shape[-1]) if state is None else state, x)
    if state is None:
        raise ValueError("no batches")
    return it.finish(state)[0]


def _sum(a: State, b: State) -> State:
    return a[0] + b[0], a[1] + b[1]


def _mean(state: State) -> Tensor:
    return state[0] / max(1, state[1])


def _row(groups: int, width: int) -> State:
    return torch.zeros(groups, width, dtype=torch.float32, device="cpu"), 0


def _square(groups: int, width: int) -> State:
    return torch.zeros(groups, width, width, dtype=torch.float32, device="cpu"), 0


COLUMNS = 512  # of a matrix of products that are added at once


def _add_products(total: Tensor, x: Tensor) -> Tensor:
    """total += x^T x of x [G, tokens, K], on and above the diagonal of blocks of columns: half the work."""
    for begin in range(0, x.shape[2], COLUMNS):
        rows = slice(begin, begin + COLUMNS)
        total[:, rows, begin:].baddbmm_(x[:, :, rows].mT, x[:, :, begin:])
    return total


def _mirrored(total: Tensor) -> Tensor:
    """What :func:`_add_products` left out, by symmetry."""
    for begin in range(COLUMNS, total.shape[2], COLUMNS):
        rows = slice(begin, begin + COLUMNS)
        total[:, rows, :begin] = total[:, :begin, rows].mT
    return total


# float32 sums: the matrix of a layer with 11008 inputs already takes 0.5 GB
HESSIAN = register_statistic(
    Statistic(
        "hessian",  # E[x x^T]: Hessian of the squared output error with respect to the weight
        _square,
        lambda s, x: (_add_products(s[0], x), s[1] + x.shape[1]),
        _sum,
        lambda s: _mirrored(_mean(s)),
        mean=True,
    )
)
DRIFT = register_statistic(
    Statistic(
        "drift",  # E[(x_float - x) x^T]: error of the inputs that the layer should compensate
        _square,
        lambda s, x, x_float: (s[0].baddbmm_((x_float - x).mT, x), s[1] + x.shape[1]),
        _sum,
        _mean,
        paired=True,
        mean=True,
    )
)
SECOND_MOMENT = register_statistic(
    Statistic("second_moment", _row, lambda s, x: (s[0] + x.square().sum(1), s[1] + x.shape[1]), _sum, _mean, mean=True)
)
ABSMEAN = register_statistic(
    Statistic("absmean", _row, lambda s, x: (s[0] + x.abs().sum(1), s[1] + x.shape[1]), _sum, _mean, mean=True)
)
ABSMAX = register_statistic(
    Statistic(
        "absmax",
        _row,
        lambda s, x: (torch.maximum(s[0], x.abs().amax(1)) if x.shape[1] else s[0], s[1] + x.shape[1]),
        lambda a, b: (torch.maximum(a[0], b[0]), a[1] + b[1]),
        lambda s: s[0],
    )
)


def _bounds(groups: int, width: int) -> State:
    return torch.tensor([[torch.inf], [-torch.inf]], dtype=torch.float32, device="cpu").expand(
        groups, 2, width
    ).clone(), 0


def _join_bounds(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([torch.minimum(a[:, 0], b[:, 0]), torch.maximum(a[:, 1], b[:, 1])], 1)


def _see_bounds(s: State, x: Tensor) -> State:
    if not x.shape[1]:
        return s
    return _join_bounds(s[0], torch.stack([x.amin(1), x.amax(1)], 1)), s[1] + x.shape[1]


MINMAX = register_statistic(
    Statistic(
        "minmax",  # minimum and maximum of each input channel: [G, 2, K]
        _bounds,
        _see_bounds,
        lambda a, b: (_join_bounds(a[0], b[0]), a[1] + b[1]),
        lambda s: s[0],
    )
)

# Half of the bins are for negative values. The range is a power of two above every magnitude, so at least a quarter of
# the bins are in use, and the bins of a wider range are unions of whole bins of a narrower one.
BINS = 1 << 14
_HEAD = 3  # exponent of the range, minimum, maximum
_LEAST = -140.0  # exponent of the initial range: the smallest float32 magnitude is 2**-149


def _no_bins(groups: int, width: int) -> State:
    state = torch.zeros(groups, _HEAD + BINS, dtype=torch.float64, device="cpu")
    state[:, :_HEAD] = torch.tensor([_LEAST, torch.inf, -torch.inf], dtype=torch.float64, device="cpu")
    return state, 0


def _widen(counts: Tensor, times: int) -> Tensor:
    """Counts [BINS] in bins of 2**times the width: adjacent pairs are summed, centred on zero."""
    for _ in range(min(times, BINS.bit_length())):
        pairs = counts.view(-1, 2).sum(1)
        counts = torch.zeros_like(counts)
        counts[BINS // 4 : 3 * BINS // 4] = pairs
    return counts


def _add_bins(a: Tensor, b: Tensor) -> Tensor:
    """Merge the state rows of two groups."""
    exponent = max(float(a[0]), float(b[0]))
    counts = sum(_widen(s[_HEAD:], int(exponent - float(s[0]))) for s in (a, b))
    assert isinstance(counts, Tensor)
    head = torch.stack([a[0].new_tensor(exponent), torch.minimum(a[1], b[1]), torch.maximum(a[2], b[2])])
    return torch.cat([head, counts])


def _see_bins(s: State, x: Tensor) -> State:
    if not x.shape[1]:
        return s
    rows = []
    for state, values in zip(s[0], x, strict=True):
        values = values.flatten().double()
        least, greatest = values.min(), values.max()
        reach = max(-float(least), float(greatest))
        exponent = max(float(math.frexp(reach)[1]), _LEAST) if reach > 0 else _LEAST
        at = (values * (BINS // 2) / 2.0**exponent).floor().long() + BINS // 2
        counts = torch.bincount(at, minlength=BINS).double()
        head = torch.stack([values.new_tensor(exponent), least, greatest])
        rows.append(_add_bins(state, torch.cat([head, counts])))
    return torch.stack(rows), s[1] + x.shape[1]


def _join_bins(a: State, b: State) -> State:
    return torch.stack([_add_bins(x, y) for x, y in zip(a[0], b[0], strict=True)]), a[1] + b[1]


HISTOGRAM = register_statistic(Statistic("histogram", _no_bins, _see_bins, _join_bins, lambda s: s[0]))


class Bins(NamedTuple):
    """A finished histogram: minimum, maximum, bin centres, counts per bin and bin width. All exact in float64, except
    for the position of a value within its bin."""

    least: float
    greatest: float
    middles: Tensor
    counts: Tensor
    width: float


def bins(histogram: Tensor) -> Bins:
    """Bins of a :data:`HISTOGRAM` result [G, ..], all groups merged; empty bins at the ends are dropped."""
    total = histogram[0]
    for row in histogram[1:]:
        total = _add_bins(total, row)
    width = 2.0 ** float(total[0]) / (BINS // 2)
    seen = total[_HEAD:].nonzero().flatten()
    if not len(seen):
        raise ValueError("the histogram is empty: no value was observed")
    inside = slice(int(seen[0]), int(seen[-1]) + 1)
    middles = (torch.arange(BINS, dtype=torch.float64, device="cpu") - BINS // 2 + 0.5) * width
    return Bins(float(total[1]), float(total[2]), middles[inside], total[_HEAD:][inside], width)
