"""Intervals by resampling sequences, not positions: positions of a sequence are not independent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pennyweight.report.metrics import bootstrap

RESAMPLES = 4000


class Interval(NamedTuple):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def mean(values: Sequence[float]) -> Interval:
    """Mean of one value a sequence."""
    x = torch.tensor(values, dtype=torch.float64)
    return Interval(float(x.mean()), *bootstrap(x, resamples=RESAMPLES))


def ratio(values: Sequence[float], reference: Sequence[float]) -> Interval:
    """mean(values) / mean(reference) of the same sequences, which are drawn together.

    Raises ValueError where they are not as many, or where the reference is zero.
    """
    if len(values) != len(reference):
        raise ValueError(f"{len(values)} sequences cannot be paired with {len(reference)}")
    x, y = (torch.tensor(v, dtype=torch.float64) for v in (values, reference))
    if not float(y.mean()) > 0:
        raise ValueError("the reference is exact; a ratio to it says nothing")
    return Interval(float(x.mean() / y.mean()), *bootstrap(x, y, resamples=RESAMPLES))
