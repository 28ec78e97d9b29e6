"""What the ranks of a distributed calibration tell one another, so that all solve the same problem."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .statistics import State, Statistic


def several() -> bool:
    """Whether torch.distributed runs with more than one rank."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def of_all(mine: Any) -> list[Any]:
    """Everyone's, in the order of ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def merged(statistic: Statistic, state: State | None) -> State | None:
    """One state of what all ranks saw, with the same bits on each; None where no rank saw anything."""
    theirs = [s for s in of_all(None if state is None else (state[0].cpu(), state[1])) if s is not None]
    if not theirs:
        return None
    total: State = theirs[0]
    for one in theirs[1:]:
        total = statistic.merge(total, one)
    return total if state is None else (total[0].to(state[0].device), total[1])


def require_same(what: str, mine: Any) -> None:
    """Raise ValueError on every rank where they differ, before one of them waits for the others."""
    if any(one != mine for one in of_all(mine)):
        raise ValueError(
            f"ranks differ in {what}; give each the same model and config, and a first batch that calls it"
        )
