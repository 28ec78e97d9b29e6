"""What a measurement ran on."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimddp", "i8mm", "bf16")


def describe(threads: int) -> dict[str, Any]:
    """Processor, instruction sets that matter here, caches, memory, threads, date."""
    info = _read("/proc/cpuinfo")
    flags = set((re.search(r"^(?:flags|Features)\s*:(.*)", info, re.M) or ["", ""])[1].split())
    field = {
        k: (re.search(rf"^{k}\s*:\s*(.*)", info, re.M) or ["", ""])[1] for k in ("model name", "cpu family", "model")
    }
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        kind = _read(index / "type")
        caches[f"L{_read(index / 'level')}{'i' if kind == 'Instruction' else ''}"] = _read(index / "size")
    memory = re.search(r"^MemTotal:\s*(\d+)", _read("/proc/meminfo"), re.M)
    return {
        "cpu": field["model name"] or platform.processor() or platform.machine(),
        "cpu_family_model": f"{field['cpu family']}/{field['model']}",
        "isa": [f for f in FLAGS if f in flags],
        "caches": caches,
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory[1]) / 2**20) if memory else None,
        "threads": threads,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
    }


def command(script: str) -> str:
    """The command line of this process, files by their names."""
    return shlex.join(["python", script, *(Path(a).name if os.sep in a else a for a in sys.argv[1:])])


def cores() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Others:
    """How much of the processor other processes took, and other guests of the host, since the last time asked."""

    def __init__(self, pids: list[int]) -> None:
        self.pids, self.at = [os.getpid(), *pids], time.perf_counter()
        self.seconds = self._seconds()

    def share(self) -> float:
        """0 to 1, of all cores; 0 where /proc does not tell."""
        now, seconds = time.perf_counter(), self._seconds()
        took, wall = seconds - self.seconds, (now - self.at) * (os.cpu_count() or 1)
        self.at, self.seconds = now, seconds
        return max(0.0, took / wall) if wall else 0.0

    def _seconds(self) -> float:
        total = _read("/proc/stat").split("\n")[0].split()[1:9]  # user nice system idle iowait irq softirq steal
        if len(total) < 8:
            return 0.0
        busy = sum(int(t) for i, t in enumerate(total) if i not in (3, 4))
        for pid in self.pids:
            fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
            busy -= sum(map(int, fields[11:13]))  # utime, stime
        return busy / os.sysconf("SC_CLK_TCK")


REALTIME = "PENNYWEIGHT_BENCH_REALTIME"  # set: visits take precedence over all other processes; needs root, and Linux


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """All threads of this process, those that start meanwhile too, run before those of other processes, if the
    environment has `REALTIME`. Linux leaves the others 5 % of the time.

    A thread that waits at a barrier gives way, and would come back milliseconds later under any niceness.
    """
    if not os.environ.get(REALTIME):
        yield
        return
    _schedule(os.SCHED_RR, 10)
    try:
        yield
    finally:
        _schedule(os.SCHED_OTHER, 0)


def _schedule(policy: int, priority: int) -> None:
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # it ended
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def versions() -> dict[str, str]:
    """Versions of the packages that take part, those that are installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("torch", "transformers", "torchao", "llama-cpp-python", "gguf"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
