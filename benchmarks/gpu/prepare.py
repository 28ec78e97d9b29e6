"""Compiles kernels ahead into Triton's cache folder, without a device or beside one that measures.

jobs.py lists what to compile, and aot_compile.py compiles it. The files have the names that
a launch on the device looks up, if its Triton is the same release: keys hash Triton's own files.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from queue import Empty
from typing import Any

from .results import write_json

_SAVE_SECONDS = 1.0


def prepare(target: str, jobs: int = 0, out: Path | None = None, budget: float = 600.0) -> int:
    """Compile every job of a target. Returns 0 if all compiled. ``out``: folder for compile.json."""
    end = time.time() + budget
    try:
        from .jobs import jobs as jobs_of

        listed = jobs_of(target)
        names = [job.name for job in listed]
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        _write(out, {"list": found}, 0.0, "the kernels cannot be listed")
        print(f"compile: {found['error']}", flush=True)
        return 1
    begin, before = time.time(), _cubins()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # ends the processes below too
    processes = jobs or max(1, (os.cpu_count() or 1) - 2)
    cases = _compile(target, listed, min(processes, len(names) or 1), end, out, begin)
    new = len(_cubins() - before)
    missing = len(names) - len(cases)
    note = f"{new} files new, {len(cases) - new if len(cases) > new else 0} from the cache, {processes} processes"
    note += f"; {missing} not compiled in time" if missing else ""
    _write(out, cases, time.time() - begin, note)
    failed = [f"{name}: {case['error']}" for name, case in cases.items() if "error" in case]
    print(f"compile: {len(cases)} of {len(names)} kernels for {target} in {time.time() - begin:.1f} s; {note}")
    print("\n".join(failed[:20]), flush=True)
    return 1 if failed or missing else 0


def _compile(
    target: str, listed: Sequence[Any], processes: int, end: float, out: Path | None, begin: float
) -> dict[str, dict[str, Any]]:
    """Fork processes that take every n-th job. A process that crashes loses its remaining jobs only."""
    fork = multiprocessing.get_context("fork")
    done: Any = fork.Queue()
    shares = [listed[i::processes] for i in range(processes)]
    workers = [fork.Process(target=_worker, args=(target, share, done), daemon=True) for share in shares]
    for worker in workers:
        worker.start()
    cases: dict[str, dict[str, Any]] = {}
    saved = time.time()
    while len(cases) < len(listed) and time.time() < end:
        try:
            name, values = done.get(timeout=0.2)
            cases[name] = values
        except Empty:
            if not any(worker.is_alive() for worker in workers):
                break
        if time.time() - saved > _SAVE_SECONDS:
            saved = time.time()
            _write(out, cases, saved - begin, "not finished")
    for worker in workers:
        if worker.is_alive() and len(cases) < len(listed):
            worker.terminate()
        worker.join(timeout=5)
    return cases


def _worker(target: str, jobs: Sequence[Any], done: Any) -> None:
    for job in jobs:
        start = time.time()
        try:
            job.compile(target)
            values: dict[str, Any] = {}
        except Exception as error:
            values = {"error": f"{type(error).__name__}: {error}"[:2000], "traceback": traceback.format_exc()[-4000:]}
        done.put((job.name, {**values, "seconds": round(time.time() - start, 3)}))
    done.close()
    done.join_thread()


def _cubins() -> set[str]:
    folder = Path(os.environ.get("TRITON_CACHE_DIR", ""))
    ends = ("cubin", "hsaco")
    return (
        {path.name + path.parent.name for end in ends for path in folder.glob(f"*/*.{end}")} if folder.name else set()
    )


def _write(out: Path | None, cases: dict[str, Any], seconds: float, note: str) -> None:
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        write_json(out / "compile.json", {"cases": cases, "seconds": round(seconds, 2), "note": note})
