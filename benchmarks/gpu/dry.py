"""A device that is not there: invented times, and modules in place of the kernels. ``--dry`` runs the stages with them.

The code of the harness runs as on a device: deadlines, partial files, the report. Results are marked "dry".
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from pennyweight.kernels.triton import tiles
from pennyweight.kernels.triton.timing import Call, Timing, summary
from pennyweight.kernels.triton.weight_only import static_of

# For tests: "crash:CASE" ends the process in a conformance case, "hang:CASE" stops there, other text fails it
TROUBLE = "PENNYWEIGHT_GPU_DRY"
SHRINK = 64  # sizes of matrices are divided by it


class FakeTimer:
    """As timing.DeviceTimer. Every call runs once on the CPU; its time comes from its name."""

    l2 = 1 << 15

    def synchronize(self) -> None:
        pass

    def release(self) -> None:
        pass

    def copies(self, nbytes: int) -> int:
        return 2

    def time(self, calls: Sequence[Call], samples: int = 7, sample_us: float = 0.0, check: bool = True) -> Timing:
        calls[0]()
        us = _invented(repr(getattr(calls[0], "args", "")[1:]))
        return summary([us * (1 + 0.002 * i) for i in range(samples)], len(calls))

    def launch(self, call: Call, count: int = 200) -> float:
        call()
        return 10.0

    def events(self, call: Call, samples: int = 7, count: int = 5) -> Timing:
        call()
        return summary([10.0] * samples)


def _invented(text: str) -> float:
    """10 to 42 microseconds, the same for the same text."""
    return 10.0 + hashlib.sha256(text.encode()).digest()[0] / 8


class _WeightOnly:
    """The real data about kernels, and torch's products in their place."""

    static_of = staticmethod(static_of)

    @staticmethod
    def prepared(x: Tensor, w: Any, bias: Tensor | None, tile: Any) -> Call:
        if tile is not None and tile.stages == 6:
            raise ValueError("a dry run drops this candidate")
        return partial(F.linear, x, w.dequantize(), bias)


class _SelfTest:
    @staticmethod
    def cases(full: bool) -> list[Any]:
        return [SimpleNamespace(name=f"case {i}") for i in range(6 if full else 2)]

    @staticmethod
    def run(case: Any, device: Any) -> str | None:
        what, _, name = os.environ.get(TROUBLE, "").partition(":")
        if name == case.name:
            if what == "crash":
                os._exit(9)
            if what == "hang":
                time.sleep(3600)
            return what or None
        return None


KERNELS = SimpleNamespace(tiles=tiles, weight_only=_WeightOnly, self_test=_SelfTest)


def compiled() -> dict[str, dict[str, Any]]:
    """What stage "compile" would have found."""
    return {f"kernel {number}": {"seconds": 0.5} for number in range(3)}
