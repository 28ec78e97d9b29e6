"""A process that holds one family: runtimes with thread pools of their own never share one.

The parent asks, the worker answers (ok, result) or (not ok, sentence). Only one worker computes at a time.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks import machine

from . import FAMILIES
from .base import Bind, Competitor, Run, gate, visit

SLOW_SECONDS = 0.1  # a step that takes so long needs no warm-up: the disturbance it avoids is lost in it


class Worker:
    """Answers to the parent's questions; state is one shape and one number of rows."""

    def __init__(self, family: str, threads: int) -> None:
        self.module = FAMILIES[family].load()
        self.competitors: dict[str, Competitor] = {c.name: c for c in self.module.competitors(threads)}
        self.binds: dict[str, Bind] = {}
        self.runs: dict[str, Run] = {}
        self.next: dict[str, int] = {}
        self.took: dict[str, float] = {}
        self.case: dict[str, Any] = {}
        self.limits = self.module.Limits(threads) if family == "limits" else None

    def describe(self) -> dict[str, Any]:
        """Versions, and the fields of each competitor."""
        fields = ("bits", "stored_bits", "arithmetic", "bound", "detail", "alone")
        table = {name: {f: getattr(c, f) for f in fields} for name, c in self.competitors.items()}
        return {"versions": self.module.versions(), "competitors": table}

    def load(self, path: str) -> None:
        """Take up a shape: drop the one before."""
        self.binds, self.runs = {}, {}
        gc.collect()
        self.case = torch.load(path, mmap=True)

    def accepts(self, name: str, m: int) -> bool | str:
        return self.competitors[name].accepts(*self.case["weight"].shape, m)

    def build(self, name: str) -> float:
        """Quantize and copy; seconds."""
        begin = time.perf_counter()
        c, weight = self.competitors[name], self.case["weight"]
        self.binds[name] = c.make(weight, c.copies(*weight.shape))
        gc.collect()
        return time.perf_counter() - begin

    def check(self, name: str, m: int) -> float:
        """Bind to M rows; the relative error."""
        self.runs.pop(name, None)
        run = self.binds[name](self.case["x"][:m])
        rows = [r for r in self.case["rows"] if r < m]
        error = gate(run, rows, self.case["reference"][: len(rows)])
        self.runs[name], self.next[name] = run, 0
        self.took.pop(name, None)
        return error

    def visit(self, name: str, seconds: float) -> tuple[float, int]:
        run = self.runs[name]
        with machine.undisturbed():
            took, steps = visit(run, seconds, self.next[name], warm=self.took.get(name, 0) < SLOW_SECONDS)
        self.next[name] += steps
        self.took[name] = took * run.products
        return took, steps

    def limit(self, name: str, seconds: float) -> float | None:
        """One visit to a limit of the machine."""
        with machine.undisturbed():
            return self.limits.rate(name, seconds)


def serve(connection: Connection, make: Callable[[], Any]) -> None:
    """Answer questions with the methods of what `make` gives, until the parent hangs up."""
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as silent, contextlib.suppress(EOFError, KeyboardInterrupt):
        if not os.environ.get("PENNYWEIGHT_BENCH_VERBOSE"):
            os.dup2(silent.fileno(), 1)
            os.dup2(silent.fileno(), 2)
        try:
            worker = make()
            connection.send((True, worker.describe()))
        except Exception as e:
            connection.send((False, _sentence(e)))
            return
        while True:
            method, *args = connection.recv()
            try:
                answer = (True, getattr(worker, method)(*args))
            except Exception as e:
                answer = (False, _sentence(e))
            connection.send(answer)


def _sentence(e: Exception) -> str:
    return f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"


def main(connection: Connection, family: str, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    serve(connection, lambda: Worker(family, threads))
