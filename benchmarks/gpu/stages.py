"""The stages as data, and how one runs: case by case, each recorded, until the stage's deadline."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from .results import Results

CRASHED = 75  # exit code of a worker whose CUDA context no longer works
CASE_SECONDS = 45.0  # a case that takes longer hangs
_TRACEBACK = 4000  # characters of a traceback that are kept


@dataclass(frozen=True)
class Case:
    """One thing to find out. ``run`` returns its values; {"error": ...} counts as failed. ``limit``: seconds."""

    name: str
    run: Callable[[], dict[str, Any]]
    limit: float = CASE_SECONDS


@dataclass(frozen=True)
class Stage:
    """Cases in the order of their importance: time may end."""

    name: str
    cases: Callable[[Context], Iterable[Case]]


@dataclass
class Context:
    """What the cases of a stage are given.

    device    "cuda", or "cpu" in a dry run
    timer     timing.DeviceTimer, or dry.FakeTimer
    kernels   the modules tiles, self_test and weight_only of pennyweight.kernels.triton, or dry's in their place
    shrink    sizes are divided by it in a dry run
    deadline  time.time() at which the running stage ends
    """

    results: Results
    device: str
    timer: Any
    kernels: SimpleNamespace
    dry: bool = False
    shrink: int = 1
    deadline: float = float("inf")
    kept: dict[str, Any] = field(default_factory=dict)

    def left(self) -> float:
        return self.deadline - time.time()

    def size(self, n: int) -> int:
        return max(64, n // self.shrink)


# Name -> seconds of a budget of 480, the start and the report aside. Data, so that the parent needs no torch
SHARES = {"facts": 35, "compile": 15, "conformance": 140, "tune": 120, "bench": 50, "model": 75, "ncu": 45}
NAMES = tuple(SHARES)
SECONDS = 480.0


def stages() -> tuple[Stage, ...]:
    from . import bench, conformance, facts, model, ncu, tune

    made: dict[str, Callable[[Context], Iterable[Case]]] = {
        "facts": facts.cases,
        "compile": lambda ctx: (),  # prepare.py: other processes, beside facts and conformance
        "conformance": conformance.cases,
        "tune": tune.cases,
        "bench": bench.cases,
        "model": model.cases,
        "ncu": ncu.cases,
    }
    return tuple(Stage(name, made[name]) for name in NAMES)


def run_stage(stage: Stage, ctx: Context, deadline: float) -> None:
    """Run the cases that are not recorded yet. Exceptions are recorded; a lost CUDA context ends the process."""
    ctx.deadline = deadline
    found = ctx.results.stage(stage.name)
    found["status"] = "running"
    start, before = time.time(), found["seconds"]
    try:
        for case in stage.cases(ctx):
            if case.name in found["cases"]:
                continue
            if ctx.left() <= 0:
                found["status"] = "out of time"
                found["note"] = f"stopped before {case.name!r}"
                break
            ctx.results.begin(stage.name, case.name, case.limit)
            began = time.time()
            values, lost = _run(case, ctx)
            values["seconds"] = round(time.time() - began, 3)
            found["seconds"] = round(before + time.time() - start, 3)
            ctx.results.record(stage.name, case.name, values)
            if "error" in values:
                print(f"{stage.name}: {case.name}: {values['error'].splitlines()[0][:300]}", flush=True)
            if lost:
                ctx.results.save()
                os._exit(CRASHED)
        else:
            failed = sum("error" in values for values in found["cases"].values())
            found["status"] = "failed" if failed else "done"
            found["note"] = f"{failed} of {len(found['cases'])} cases failed" if failed else ""
    except Exception as error:  # listing the cases failed; the next stage may still work
        found["status"], found["note"] = "failed", f"{type(error).__name__}: {error}"
        found["traceback"] = traceback.format_exc()[-_TRACEBACK:]
        print(f"{stage.name}: {found['note'][:300]}", flush=True)
    found["seconds"] = round(before + time.time() - start, 3)
    ctx.kept.clear()
    ctx.results.save()
    cases = found["cases"]
    print(f"{stage.name}: {found['status']}, {len(cases)} cases, {found['seconds']:.1f} s {found['note']}", flush=True)


def _run(case: Case, ctx: Context) -> tuple[dict[str, Any], bool]:
    """(values, whether the device no longer answers)."""
    try:
        values = case.run()
        ctx.timer.synchronize()
        return values, False
    except Exception as error:  # any failure is a result
        values = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()[-_TRACEBACK:]}
    ctx.kept.clear()
    try:
        ctx.timer.synchronize()
        ctx.timer.release()
    except Exception as error:
        values["lost"] = f"{type(error).__name__}: {error}"
        return values, True
    return values, False
