"""Coordinates ranks that write one checkpoint: every step runs on all ranks, and an error on one fails all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from .errors import CheckpointError


class RankGroup:
    """The ranks of torch.distributed, or just this process."""

    def __init__(self, folder: str, together: bool) -> None:
        if together and not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "ranks=True needs torch.distributed: start the program with torchrun and call init_process_group"
            )
        self.folder = folder
        self.size = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0

    def step(self, work: Callable[[], Any]) -> list[Any]:
        """Run ``work`` on each rank; returns the results of all ranks.

        Raises this rank's own error, or a CheckpointError that names the rank that failed or is gone. No rank waits for
        a stopped one.
        """
        if self.size == 1:
            return [work()]
        mine: tuple[Any, str | None] = (None, None)
        failed: BaseException | None = None
        try:
            mine = (work(), None)
        except Exception as error:
            failed, mine = error, (None, f"{type(error).__name__}: {error}")
        theirs: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(theirs, mine)
        except RuntimeError as error:
            if failed is not None:
                raise failed from None
            raise CheckpointError(
                self.folder, None,
                f"rank {self.rank} lost another rank ({str(error).splitlines()[0][:120]}); no index was written, "
                "completed shards stay; rerun the same command to resume",
            ) from error  # fmt: skip
        if failed is not None:
            raise failed
        for rank, (_, error_) in enumerate(theirs):
            if error_ is not None:
                raise CheckpointError(self.folder, None, f"rank {rank} failed: {error_}")
        return [value for value, _ in theirs]

    def first(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on rank 0 only; returns its result on every rank."""
        return self.step(lambda: work() if self.rank == 0 else None)[0]

    def same(self, what: str, mine: str) -> None:
        """Raise CheckpointError on every rank if a value differs between ranks."""
        if any(theirs != mine for theirs in self.step(lambda: mine)):
            raise CheckpointError(
                self.folder,
                None,
                f"ranks differ in {what}; use the same source, config and release on all ranks, and a shared disk",
            )
