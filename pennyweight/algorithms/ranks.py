"""Statistics of all ranks as one: each rank has run its own share of the calibration data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .statistics import STATISTICS, State

States = dict[tuple[str, str], State]  # by (statistic, weight)


def several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def merge(states: States, tokens: dict[str, int]) -> tuple[States, dict[str, int]]:
    """Everyone's states and token counts, merged in the order of ranks, so that all ranks have the same bits."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = {key: (tuple(total.shape), count) for key, (total, count) in states.items()}
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (mine, tokens))
    merged: States = {}
    for key in sorted({key for theirs, _ in everyone for key in theirs}):
        for r, (theirs, _) in enumerate(everyone):
            if key not in theirs:  # a weight that saw no data there, such as an expert
                continue
            shape, count = theirs[key]
            total = states[key][0].contiguous().clone() if r == rank else torch.empty(shape)
            dist.broadcast(total, src=r)
            merged[key] = STATISTICS[key[0]].merge(merged[key], (total, count)) if key in merged else (total, count)
    counts = {name: sum(theirs.get(name, 0) for _, theirs in everyone) for name in tokens}
    return merged, counts
