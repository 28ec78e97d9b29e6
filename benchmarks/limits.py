"""What this machine can do at most, measured beside the competitors and in the same rounds.

read  bytes per second from memory, all threads; int8, bf16, fp32  operations per second of the widest
instruction there is, two for each product and its addition. The probe is native (kernels/cpu/src/bandwidth_probe.h);
without the native library only `read` is known, by torch's own sum, which may not reach the limit.

    python benchmarks/limits.py [--threads 2]
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LIMITS = {"read": 0, "int8": 1, "bf16": 2, "fp32": 3}
BUFFER_BYTES = 640_000_000  # some caches are larger than the machine says: over 160 MB twice the true rate was seen
UNITS = {"read": "GB/s", "int8": "GOP/s", "bf16": "GFLOP/s", "fp32": "GFLOP/s"}


def native_probe() -> Any:
    """probe(what, buffer, bytes or rounds, threads) -> bytes or operations done; None without the native library."""
    from pennyweight.kernels.cpu import library
    from pennyweight.kernels.native import convert as native_convert

    return native_convert.probe if library.available() is True else None


class Limits:
    """Rates of this machine, by the native probe."""

    def __init__(self, threads: int) -> None:
        self.threads, self.probe = threads, native_probe()
        self.buffer = torch.ones(BUFFER_BYTES // 4, dtype=torch.float32)

    def rate(self, name: str, seconds: float) -> float | None:
        """Best rate of one visit; None where it cannot be known."""
        if self.probe is None:
            return BUFFER_BYTES / self._least(self.buffer.sum, seconds) if name == "read" else None
        what = LIMITS[name]
        if name == "read":
            call = lambda: self.probe(what, self.buffer, BUFFER_BYTES, self.threads)  # noqa: E731
        else:
            call = lambda: self.probe(what, None, 1_000_000, self.threads)  # noqa: E731
        done = call()
        return done / self._least(call, seconds) if done else None

    @staticmethod
    def _least(call: Any, seconds: float) -> float:
        call()
        least, end = float("inf"), time.perf_counter() + seconds
        while True:
            before = time.perf_counter()
            call()
            after = time.perf_counter()
            least = min(least, after - before)
            if after > end:
                return least


# A family without competitors: see peers/worker.py.


def versions() -> dict[str, str]:
    return {}


def competitors(threads: int) -> list[Any]:
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    limits = Limits(options.threads)
    for name in LIMITS:
        rates = [limits.rate(name, 0.1) for _ in range(5)]
        best = max((r for r in rates if r), default=None)
        print(f"{name:<5}", "unknown" if best is None else f"{best / 1e9:8.1f} {UNITS[name]}")


if __name__ == "__main__":
    main()
