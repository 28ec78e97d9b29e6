"""Collectives on plain tensors and objects, so that all ranks of a calibration or a layer use the same numbers.

Every rank must call these in the same order, whatever its share of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

State = tuple[Tensor, int]  # of a statistic


class Statistic(Protocol):
    """What is used of a calibration statistic."""

    @property
    def merge(self) -> Callable[[State, State], State]: ...


_SAME_DATA: ContextVar[bool] = ContextVar("all ranks have the same data", default=False)


@contextmanager
def same_data() -> Iterator[None]:
    """Inside, this rank works alone: every rank has the whole data, so nothing is reduced."""
    token = _SAME_DATA.set(True)
    try:
        yield
    finally:
        _SAME_DATA.reset(token)


def is_distributed() -> bool:
    """Whether torch.distributed runs with more than one rank, each with its own data."""
    return not _SAME_DATA.get() and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def gather_objects(own: Any) -> list[Any]:
    """The objects of all ranks, in rank order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def merge_states(statistic: Statistic, state: State | None) -> State | None:
    """The merged statistic of all ranks, bit-identical on each; None if no rank has data."""
    gathered = [s for s in gather_objects(None if state is None else (state[0].cpu(), state[1])) if s is not None]
    if not gathered:
        return None
    total: State = gathered[0]
    for one in gathered[1:]:
        total = statistic.merge(total, one)
    return total if state is None else (total[0].to(state[0].device), total[1])


def require_same(what: str, own: Any) -> None:
    """Raise ValueError on every rank if the values differ, so that no rank waits forever for the others."""
    if any(one != own for one in gather_objects(own)):
        raise ValueError(
            f"ranks differ in {what}; use the same model and config on each rank, and a first batch that reaches it"
        )


def reduce_max(x: Tensor) -> Tensor:
    """Elementwise maximum over all ranks; x itself with one rank."""
    if is_distributed():
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def reduce_sum(x: Tensor) -> Tensor:
    """Sum over all ranks, bit-identical on each; x itself with one rank."""
    if is_distributed():
        x = x.clone()
        dist.all_reduce(x, dist.ReduceOp.SUM)
        dist.broadcast(x, src=0)
    return x


def max_number(x: float) -> float:
    return float(reduce_max(torch.tensor(x, dtype=torch.float64, device="cpu"))) if is_distributed() else x


def all_true(own: bool) -> bool:
    """Whether ``own`` is true on every rank."""
    return all(gather_objects(own)) if is_distributed() else own


def broadcast_batch(batch: Any) -> Any:
    """Rank 0's batch, for trials on a single batch, so that all ranks get the same result."""
    if not is_distributed():
        return batch
    box = [batch]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def max_shape(n: int) -> int:
    """The largest n over all ranks."""
    return round(max_number(float(n)))


def union_names(known: list[str], own: list[str]) -> list[str]:
    """Union of ``own`` over all ranks: rank 0's order, then names that only other ranks have, in ``known`` order."""
    if not is_distributed():
        return own
    everyone = gather_objects(own)
    rest = {name for names in everyone for name in names}.difference(everyone[0])
    return [*everyone[0], *(name for name in known if name in rest)]


def reduce_over_groups(t: Tensor, op: str, groups: Sequence[str]) -> Tensor:
    """Reduce a tensor with op "sum" or "max" over each of the process groups, given by name, in order."""
    for name in groups:
        t = torch.ops._c10d_functional.all_reduce.default(t, op, name)
        t = torch.ops._c10d_functional.wait_tensor.default(t)
    return t
