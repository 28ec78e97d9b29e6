"""Numbers that all ranks of torch.distributed must agree on; each has run its own share of the calibration data.

Every rank must call these in the same order, whatever its data showed it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import several


def largest(x: Tensor) -> Tensor:
    """The largest of all ranks, entry by entry; x itself where there is one rank."""
    if several():
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def total(x: Tensor) -> Tensor:
    """The sum over all ranks, in the same bits on each; x itself where there is one rank."""
    if several():
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.SUM)
        dist.broadcast(x, src=0)
    return x


def largest_number(x: float) -> float:
    return float(largest(torch.tensor(x, dtype=torch.float64))) if several() else x


def first(batch: Any) -> Any:
    """Rank 0's batch, for what is tried on one batch: all ranks then find the same."""
    if not several():
        return batch
    box = [batch]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def shape(n: int) -> int:
    """The largest n of all ranks."""
    return round(largest_number(float(n)))


def names(known: list[str], mine: list[str]) -> list[str]:
    """``mine`` of all ranks: rank 0's order, then what only others have, in the order of ``known``."""
    if not several():
        return mine
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    rest = {name for theirs in everyone for name in theirs}.difference(everyone[0])
    return [*everyone[0], *(name for name in known if name in rest)]
