"""What a measurement ran on."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import re
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


def cores() -> int:
    """Processors this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
