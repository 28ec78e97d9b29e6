"""Ranks of torch.distributed that share a job whose files they all see: an error of one stops all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ..support.errors import CheckpointError

SECONDS = 1.0


class _Process(NamedTuple):
    """machine: one whose process numbers are comparable. started: numbers are used again."""

    machine: tuple[str, str]
    number: str
    started: str


@cache
def _machine() -> tuple[str, str]:
    return Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")


def _process(number: str) -> _Process | None:
    """A process of this machine by its number, or "self"; None if it has ended, or on systems without /proc."""
    try:
        stat = Path(f"/proc/{number}/stat").read_text()
        fields = stat.rpartition(")")[2].split()
        ended = fields[0] in ("Z", "X")  # its parent has not asked for its status yet
        return None if ended else _Process(_machine(), stat.partition(" ")[0], fields[19])
    except OSError:
        return None


class RankGroup:
    """The ranks of torch.distributed, or just this process.

    folder    of the files of the job, for errors
    together  False: just this process. Raises ValueError if there are no ranks
    """

    def __init__(self, folder: str = "", together: bool = False) -> None:
        if together and not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "ranks=True needs torch.distributed: start the program with torchrun and call init_process_group"
            )
        self.folder, self.stopped = folder, False
        self.size = dist.get_world_size() if together else 1
        self.rank = dist.get_rank() if together else 0
        self.processes: list[_Process | None] = []  # of the ranks, as of the last step

    def step(self, work: Callable[[], Any]) -> list[Any]:
        """Run ``work`` on each rank; returns the results of all ranks.

        Raises this rank's own error, or a CheckpointError that names the rank that failed or is gone. No rank waits for
        a stopped one: afterwards ``stopped`` is true, and there must be no further step.
        """
        if self.size == 1:
            return [work()]
        self.stopped = True  # unless all succeed
        result: tuple[Any, str | None] = (None, None)
        failed: BaseException | None = None
        try:
            result = (work(), None)
        except Exception as error:
            failed, result = error, (None, f"{type(error).__name__}: {error}")
        results: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(results, (*result, _process("self")))
        except RuntimeError as error:
            if failed is not None:
                raise failed from None
            raise CheckpointError(
                self.folder, None,
                f"rank {self.rank} lost {self._lost()} ({str(error).splitlines()[0][:120]}); nothing was put in "
                "place, finished files stay; rerun the same command to resume",
            ) from error  # fmt: skip
        if failed is not None:
            raise failed
        for rank, (_, error_, _) in enumerate(results):
            if error_ is not None:
                raise CheckpointError(self.folder, None, f"rank {rank} failed: {error_}")
        self.stopped, self.processes = False, [process for *_, process in results]
        return [value for value, *_ in results]

    def _lost(self) -> str:
        """The ranks on this machine that have ended, after at most SECONDS: the connection ends before the process."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            known = [(rank, process) for rank, process in enumerate(self.processes) if process is not None]
            here = [(rank, process) for rank, process in known if process.machine == _machine()]
            gone = [str(rank) for rank, process in here if _process(process.number) != process]
            if gone:
                return f"rank {', '.join(gone)}"
            time.sleep(0.01)
        return "another rank"

    def first(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on rank 0 only; returns its result on every rank."""
        return self.step(lambda: work() if self.rank == 0 else None)[0]

    @contextmanager
    def share_errors(self) -> Iterator[None]:
        """Tell the other ranks of an error outside of a step, which they wait in. Reraises it."""
        try:
            yield
        except Exception as error:
            if self.size > 1 and not self.stopped:
                failed = error

                def fail() -> None:
                    raise failed

                self.step(fail)
            raise

    def same(self, what: str, own: str) -> None:
        """Raise CheckpointError on every rank if a value differs between ranks."""
        if any(other != own for other in self.step(lambda: own)):
            raise CheckpointError(
                self.folder,
                None,
                f"ranks differ in {what}; use the same source, config and release on all ranks, and a shared disk",
            )
