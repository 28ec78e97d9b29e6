"""The parent's side of the workers: one process a family, asked in turn."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

from . import FAMILIES, Family, worker

PATIENCE = 600  # seconds; a worker that answers later is taken for dead


class Failed(Exception):
    """The worker lives and says why it could not."""


class Died(Exception):
    """The worker's process is gone; it was started again, empty."""


class Pool:
    """Workers by family. `missing` says which could not be started, and what to install.

    serve     family -> what its process runs, as serve(connection, family, threads); peers/worker.py by default
    registry  what the families need; those of one layer by default
    """

    def __init__(
        self, families: list[str], threads: int, serve: dict[str, Callable[..., None]] | None = None,
        registry: dict[str, Family] = FAMILIES,
    ) -> None:  # fmt: skip
        # inherited by the workers before their runtimes read it
        os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
        self.threads, self.serve = threads, serve or {}
        self.missing: dict[str, str] = {}
        self.described: dict[str, dict[str, Any]] = {}
        self._workers: dict[str, tuple[Any, Any]] = {}
        for family in families:
            why = registry[family].missing()
            if why is None:
                try:
                    self._start(family)
                except (Failed, Died) as e:
                    why = f"could not be started: {e}"
            if why is not None:
                self.missing[family] = why

    def _start(self, family: str) -> None:
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(
            target=self.serve.get(family, worker.main), args=(there, family, self.threads), daemon=True
        )
        process.start()
        there.close()
        self._workers[family] = (process, here)
        self.described[family] = self._receive(family)

    def _receive(self, family: str) -> Any:
        process, connection = self._workers[family]
        try:
            if not connection.poll(PATIENCE):
                process.kill()
            fine, result = connection.recv()
        except (EOFError, ConnectionError):
            process.join()
            del self._workers[family]
            raise Died(f"the process ended with code {process.exitcode}") from None
        if not fine:
            raise Failed(result)
        return result

    @property
    def families(self) -> list[str]:
        return list(self._workers)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process, _ in self._workers.values()]

    @property
    def competitors(self) -> dict[str, dict[str, Any]]:
        """Name -> fields, of every family."""
        return {
            name: {"family": family, **fields}
            for family, d in self.described.items()
            for name, fields in d["competitors"].items()
        }

    def ask(self, family: str, method: str, *args: Any) -> Any:
        """One question, one answer. Raises Failed with the worker's sentence, or Died."""
        try:
            self._workers[family][1].send((method, *args))
            return self._receive(family)
        except BrokenPipeError:
            raise Died("the process is gone") from None
        except Died:
            self._start(family)
            raise

    def close(self) -> None:
        for process, connection in self._workers.values():
            connection.close()
            process.join(2)
            if process.is_alive():
                process.terminate()
        self._workers.clear()
