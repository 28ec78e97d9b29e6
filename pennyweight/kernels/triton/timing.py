"""Times of device calls: graphs over copies of the inputs that no cache can hold, replayed between two events.

Never touches clocks. Data are random. Outputs are poisoned with NaN before the replay whose results are compared.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from . import workspace

Call = Callable[[], Any]
CACHES = 2.5  # the copies together, in sizes of the L2
_GRAPH_US = 1500.0  # work in a graph: the gap between two replays is some microseconds
_NODES = 512  # calls in a graph: each takes some tens of microseconds to capture
_COPIES = 256
_FAR = 2e-2  # relative distance of the graph's output from the eager one, which may sum in another order


class WrongResult(AssertionError):
    """A call that is timed returns something else in a graph, or leaves a part of its output unwritten."""


@dataclass(frozen=True)
class Timing:
    """us: median time of a call; spread: (slowest - fastest) / median of the samples."""

    us: float
    spread: float
    samples: int
    copies: int

    def values(self) -> dict[str, Any]:
        spread = round(self.spread, 4)
        return {"us": round(self.us, 3), "spread": spread, "samples": self.samples, "copies": self.copies}


def summary(samples: Sequence[float], copies: int = 1) -> Timing:
    middle = median(samples)
    return Timing(middle, (max(samples) - min(samples)) / middle if middle else 0.0, len(samples), copies)


class DeviceTimer:
    """Times calls on one CUDA device."""

    def __init__(self, device: str = "cuda") -> None:
        self.device = torch.device(device)
        card = torch.cuda.get_device_properties(self.device)
        self.l2, self._memory = int(card.L2_cache_size), int(card.total_memory)
        self._stream = torch.cuda.Stream(self.device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def release(self) -> None:
        torch.cuda.empty_cache()

    def copies(self, nbytes: int) -> int:
        """How many copies of inputs of that many bytes make a cache useless."""
        return min(_COPIES, max(2, math.ceil(CACHES * self.l2 / max(nbytes, 1))))

    def time(self, calls: Sequence[Call], samples: int = 7, sample_us: float = 3000.0, check: bool = True) -> Timing:
        """The time of one call, in the mean over ``calls``, which do the same with different copies."""
        with torch.no_grad(), workspace.temporary_locks(self.device):
            eager = self._warm_up(calls)
            graph, outputs = self._capture(calls, 1)
            try:
                once = self._replay(graph, 1) / len(calls)  # first replay: uploads the graph
                once = self._replay(graph, 1) / len(calls)
                if check:
                    self._compare(graph, outputs, eager)
                passes = min(math.ceil(_GRAPH_US / max(once * len(calls), 0.1)), max(1, _NODES // len(calls)))
                if passes > 1:
                    del graph, outputs
                    graph, outputs = self._capture(calls, passes)
                    self._replay(graph, 1)
                per = passes * len(calls)
                replays = max(1, round(sample_us / max(once * per, 0.1)))
                return summary([self._replay(graph, replays) / (replays * per) for _ in range(samples)], len(calls))
            finally:
                del graph, outputs
                if torch.cuda.memory_reserved(self.device) > self._memory // 2:
                    self.release()  # each graph had a pool of its own

    def launch(self, call: Call, count: int = 200) -> float:
        """Microseconds of the host per eager call; the device may still be busy."""
        with torch.no_grad():
            for _ in range(5):
                call()
            rounds = []
            for _ in range(5):
                self.synchronize()
                start = time.perf_counter()
                for _ in range(count):
                    call()
                rounds.append((time.perf_counter() - start) / count * 1e6)
            self.synchronize()
        return median(rounds)

    def events(self, call: Call, samples: int = 7, count: int = 5) -> Timing:
        """Without a graph, for calls that are long relative to a launch."""
        with torch.no_grad():
            for _ in range(2):
                call()
            self.synchronize()
            return summary([self._between(lambda: [call() for _ in range(count)]) / count for _ in range(samples)])

    def _warm_up(self, calls: Sequence[Call]) -> tuple[Any, Any]:
        """Compile and load everything on the stream that captures. Returns the first and the last output."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            calls[0]()
            out = [call() for call in (calls[0], calls[-1])]
        self._stream.synchronize()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        return out[0], out[1]

    def _capture(self, calls: Sequence[Call], passes: int) -> tuple[Any, tuple[Any, Any]]:
        """A graph of all calls. torch.cuda.graph would collect garbage and empty the cache each time: 0.1 s."""
        graph = torch.cuda.CUDAGraph()
        first = last = None
        self.synchronize()
        collecting = gc.isenabled()
        gc.disable()  # a graph that is freed during a capture invalidates it
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for number in range(passes):
                    for i, call in enumerate(calls):
                        out = call()
                        if number == 0 and i == 0:
                            first = out
                        if number == 0 and i == len(calls) - 1:
                            last = out
            except BaseException:
                with suppress(RuntimeError):  # the capture is invalid: a consequence of what is raised
                    graph.capture_end()
                raise
            else:
                graph.capture_end()
            finally:
                if collecting:
                    gc.enable()
        self.synchronize()
        return graph, (first, last)

    def _compare(self, graph: Any, outputs: tuple[Any, Any], eager: tuple[Any, Any]) -> None:
        for out in outputs:
            if isinstance(out, Tensor) and out.is_floating_point():
                out.fill_(math.nan)
        self._replay(graph, 1)
        for out, expected in zip(outputs, eager, strict=True):
            if not isinstance(out, Tensor):
                continue
            far = distance(out, expected)
            if not far <= _FAR:  # also NaN
                raise WrongResult(f"the output of a graph differs from the eager one by {far:.2e}")

    def _replay(self, graph: Any, count: int) -> float:
        return self._between(lambda: [graph.replay() for _ in range(count)])

    def _between(self, work: Callable[[], Any]) -> float:
        """Microseconds between two events around the work."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.synchronize()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3


def distance(y: Tensor, expected: Tensor) -> float:
    """|y - expected| / |expected|."""
    wide = torch.float64 if expected.numel() < 1 << 22 else torch.float32
    a, b = y.to(wide), expected.to(wide)
    return float((a - b).norm() / b.norm().clamp_min(1e-30))
