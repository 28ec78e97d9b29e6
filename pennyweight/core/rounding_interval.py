"""Initial values of float weights that are trained behind codes chosen by another algorithm."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SHARES = (0.45, 0.3, 0.15, 0.0)


def clamp_to_interval(x: Tensor, value: Tensor, reach: Tensor | float, same: Callable[[Tensor], Tensor]) -> Tensor:
    """Points between ``value`` and x that round to the codes of ``value``, as close to x as possible.

    If x rounds to the chosen code: nine tenths of the way to x. Otherwise a point just inside the rounding interval,
    so that a small step changes the code.

    reach  upper bound of the distance to x if x is outside the interval: the step between neighbouring numbers
    same   points -> bool, whether they round to those codes
    """
    delta = x - value
    clamped = torch.minimum(torch.maximum(delta, -torch.as_tensor(reach)), torch.as_tensor(reach))
    found = value + 0.9 * delta
    for share in SHARES:
        found = torch.where(same(found), found, value + share * clamped)
    return found
