"""What is learned about a layer's inputs: each statistic is four pure functions.

    state = init(groups, width); state = update(state, x); state = merge(a, b); tensor = finish(state)

x is float32 [groups, tokens, width]: the inputs of a linear layer have one group, those of a grouped convolution one
for each. ``merge`` is what ranks of a distributed calibration do with theirs; the order of batches does not matter but
for rounding. A ``paired`` statistic is also given the inputs that the float model has at the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

State = tuple[Tensor, int]  # (sum or maximum, tokens seen)


@dataclass(frozen=True)
class Statistic:
    """See the module. ``update(state, x)``, or ``update(state, x, x_float)`` where paired."""

    name: str
    init: Callable[[int, int], State]
    update: Callable[..., State]
    merge: Callable[[State, State], State]
    finish: Callable[[State], Tensor]
    paired: bool = False


STATISTICS: dict[str, Statistic] = {}


def register_statistic(statistic: Statistic) -> Statistic:
    """Make it known by its name. Raises ValueError for a name in use."""
    if statistic.name in STATISTICS:
        raise ValueError(f"statistic {statistic.name!r} is registered already")
    STATISTICS[statistic.name] = statistic
    return statistic


def collect(name: str, batches: Any) -> Tensor:
    """A statistic of inputs [.., width], all of one width; for trying one by hand."""
    it = STATISTICS[name]
    state = None
    for x in batches:
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
    return torch.zeros(groups, width), 0


def _square(groups: int, width: int) -> State:
    return torch.zeros(groups, width, width), 0


# float32 sums: a layer of 11008 inputs has a matrix of 0.5 GB already
HESSIAN = register_statistic(
    Statistic(
        "hessian",  # E[x x^T]: the curvature of the squared error of the layer's output in its weight
        _square,
        lambda s, x: (s[0].baddbmm_(x.mT, x), s[1] + x.shape[1]),
        _sum,
        _mean,
    )
)
CROSS = register_statistic(
    Statistic(
        "cross",  # E[x_float x^T]: with the Hessian, what the layer should do for inputs that are wrong already
        _square,
        lambda s, x, x_float: (s[0].baddbmm_(x_float.mT, x), s[1] + x.shape[1]),
        _sum,
        _mean,
        paired=True,
    )
)
SECOND_MOMENT = register_statistic(
    Statistic("second_moment", _row, lambda s, x: (s[0] + x.square().sum(1), s[1] + x.shape[1]), _sum, _mean)
)
ABSMEAN = register_statistic(
    Statistic("absmean", _row, lambda s, x: (s[0] + x.abs().sum(1), s[1] + x.shape[1]), _sum, _mean)
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
