"""Stage "ncu": what the hardware counters say of a few kernels. Skipped with a line where ncu is missing or fails."""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

from .results import ROOT, environment
from .stages import Case, Context

# (scheme, rows, n, k)
TARGETS = (
    ("int4", 1, 8192, 8192), ("int4", 64, 8192, 8192), ("int8", 1, 8192, 8192), ("float8-dynamic", 4096, 4096, 4096),
)  # fmt: skip
METRICS = {
    "gpu__time_duration.sum": "time",
    "dram__bytes_read.sum": "bytes read",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram %",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm %",
    "smsp__issue_active.avg.pct_of_peak_sustained_active": "issue %",
    "smsp__inst_executed.sum": "instructions",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "warps %",
    "launch__registers_per_thread": "registers",
    **{
        f"smsp__average_warps_issue_stalled_{why}_per_issue_active.ratio": f"stalled: {why}"
        for why in (
            "long_scoreboard",
            "short_scoreboard",
            "barrier",
            "gmma",
            "math_pipe_throttle",
            "mio_throttle",
            "wait",
        )
    },
}
_SECONDS = 40


def cases(ctx: Context) -> Iterator[Case]:
    if ctx.dry:
        yield Case("skipped", lambda: {"note": "a dry run has no counters"})
        return
    if shutil.which("ncu") is None:
        yield Case("skipped", lambda: {"note": "ncu is not installed"})
        return
    ctx.timer.release()
    for scheme, m, n, k in TARGETS:
        yield Case(f"{scheme} m{m} {n}x{k}", partial(profile, scheme, m, n, k), _SECONDS + 10)


def profile(scheme: str, m: int, n: int, k: int) -> dict[str, Any]:
    """Counters of each kernel that one product launches. What ncu cannot do is a note, and no failure of a kernel."""
    command = [
        "ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv", "--print-units", "base",
        "--metrics", ",".join(METRICS), sys.executable, "-m", "benchmarks.gpu.ncu", scheme, str(m), str(n), str(k),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return {"note": f"ncu took more than {_SECONDS} s"}
    kernels = parse(done.stdout)
    if not kernels:
        return {"note": f"ncu ended with {done.returncode}: {(done.stdout + done.stderr)[-600:]}"}
    return {"kernels": kernels}


def parse(text: str) -> list[dict[str, Any]]:
    """Kernels in the order of their launches, from ncu's CSV among other output."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    found: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(lines[start:]):
        name = METRICS.get(row.get("Metric Name") or "")
        if name is None:
            continue
        kernel = found.setdefault(row["ID"], {"name": row["Kernel Name"][:80]})
        try:
            kernel[name] = float(row["Metric Value"].replace(",", ""))
        except ValueError:  # "n/a"
            kernel[name] = row["Metric Value"]
    return list(found.values())


def one_product(scheme: str, m: int, n: int, k: int) -> None:
    """What ncu watches: the fourth of four products, with a cold cache."""
    from types import SimpleNamespace

    import torch
    from torch.nn import functional as F

    from . import weights

    ctx: Any = SimpleNamespace(device="cuda", kept={}, dry=False)
    weight = weights.quantized(ctx, scheme, n, k)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for _ in range(3):
            F.linear(x, weight)
        torch.empty(1 << 28, dtype=torch.uint8, device="cuda").random_()  # evicts the weight
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        F.linear(x, weight)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


if __name__ == "__main__":
    one_product(sys.argv[1], *map(int, sys.argv[2:5]))
