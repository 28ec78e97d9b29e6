"""Commands under torchrun: one run over several processes, of which rank 0 prints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


def world() -> int:
    """Number of processes started by torchrun; 1 without it."""
    try:
        return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    except ValueError:
        raise ValueError(f"WORLD_SIZE={os.environ['WORLD_SIZE']!r} is not a number; start with torchrun") from None


def is_first_rank() -> bool:
    """Whether this process is rank 0, which prints."""
    return world() == 1 or os.environ["RANK"] == "0"


@contextmanager
def over_ranks() -> Iterator[None]:
    """The process group of all torchrun processes; does nothing without torchrun."""
    if world() == 1:
        yield
        return
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        raise ValueError("this torch has no gloo backend, which several processes need; start without torchrun")
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()
