"""Where a float may start that is to be trained behind a code which something else has chosen."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

SHARES = (0.45, 0.3, 0.15, 0.0)


def clamp_to_interval(x: Tensor, value: Tensor, reach: Tensor | float, same: Callable[[Tensor], Tensor]) -> Tensor:
    """Points on the way from ``value`` to x that have the codes of ``value``, as near to x as may be.

    Nine tenths of the way where the code allows it (its nearest number is the one chosen). What was rounded away from
    its nearest number stops short of the border of its cell, so that a small step carries it over.

    reach  what the way is taken to be at most, where x lies outside the cell: the distance between neighbouring numbers
    same   points -> bool, whether they have those codes
    """
    way = x - value
    near = torch.minimum(torch.maximum(way, -torch.as_tensor(reach)), torch.as_tensor(reach))
    found = value + 0.9 * way
    for share in SHARES:
        found = torch.where(same(found), found, value + share * near)
    return found
