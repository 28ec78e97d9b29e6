"""The measurement itself: shapes, rows, rounds; results as plain data."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.arithmetic import steady
from benchmarks.limits import LIMITS
from benchmarks.machine import Others
from benchmarks.peers.pool import Died, Failed, Pool

GATE_ROWS = (*range(8), 15, 40, 63, 200, 511)  # those below M are compared with float64

FULL = 0.93  # of the best peak seen so far: less is not the whole processor
CALM = 0.05  # share of the processor that other processes may take in a round


@dataclass
class Plan:
    """What to measure.

    extra_rounds  at most so many more where neighbours took part of the processor
    cell_seconds  a competitor that has used so much of a cell is visited no more
    only          parts of competitors' names; none: all
    say           told each finished cell (or None) and a sentence
    """

    shapes: list[tuple[int, int]]
    rows: list[int]
    rounds: int = 5
    visit_ms: float = 40
    extra_rounds: int = 3
    cell_seconds: float = 1.2
    only: list[str] = field(default_factory=list)
    say: Callable[[dict[str, Any] | None, str], None] = lambda cell, text: None


def write_case(path: Path, n: int, k: int, m: int) -> None:
    """Weight N(0, 0.02), input N(0, 1), both bfloat16, and some rows of their product in float64."""
    g = torch.Generator().manual_seed(n * 100_003 + k)
    weight = torch.randn(n, k, generator=g).mul_(0.02).bfloat16()
    x = torch.randn(m, k, generator=g).bfloat16()
    rows = [r for r in GATE_ROWS if r < m]
    some = x[rows].double()
    reference = torch.cat([some @ part.double().t() for part in weight.split(2048)], 1)
    torch.save({"weight": weight, "x": x, "rows": rows, "reference": reference}, path)


class Measurement:
    """All cells of a plan. A family that dies is started again, without the competitor that killed it."""

    def __init__(self, pool: Pool, plan: Plan) -> None:
        self.pool, self.plan = pool, plan
        self.family = {name: fields["family"] for name, fields in pool.competitors.items()}
        self.peaks: dict[str, float] = {}
        self.names = [n for n in self.family if not plan.only or any(o in n for o in plan.only)]

    def cells(self) -> Iterator[dict[str, Any]]:
        """Measure; each cell when it is finished."""
        with tempfile.TemporaryDirectory() as folder:
            for n, k in self.plan.shapes:
                path = Path(folder) / "case.pt"
                write_case(path, n, k, max(self.plan.rows))
                self._build(str(path), n, k)
                for m in self.plan.rows:
                    yield self._cell(n, k, m)
                path.unlink()

    def _build(self, path: str, n: int, k: int) -> None:
        begin = time.perf_counter()
        self.path, self.notes, self.built, self.bound = path, {}, [], {}
        for family in {self.family[name]: None for name in self.names}:
            self.pool.ask(family, "load", path)
        for name in self.names:
            if any(self.pool.ask(self.family[name], "accepts", name, m) is True for m in self.plan.rows):
                self._try(name, "build")
                if name not in self.notes:
                    self.built.append(name)
        self.plan.say(None, f"{n}x{k}: {len(self.built)} competitors built in {time.perf_counter() - begin:.0f} s")

    def _try(self, name: str, method: str, *args: Any) -> Any:
        """Ask; a failure becomes the competitor's note for this shape."""
        try:
            return self.pool.ask(self.family[name], method, name, *args)
        except Failed as e:
            self.notes[name] = str(e)
        except Died as e:
            self.notes[name] = f"{method}: {e}"
            self._revive(self.family[name])
        return None

    def _revive(self, family: str) -> None:
        """Build again what a dead process held, and bind what was bound. One that dies again is left out."""
        try:
            self.pool.ask(family, "load", self.path)
        except Died as e:
            self.notes |= {name: f"load: {e}" for name in self.built if self.family[name] == family}
            return
        for name in self.built:
            if self.family[name] == family and name not in self.notes:
                self._try(name, "build")
                if name in self.bound and name not in self.notes:
                    self._try(name, "check", self.bound[name])

    def _check(self, m: int) -> dict[str, dict[str, Any]]:
        """Through the gate: results with an error, or the sentence that says why not."""
        results: dict[str, dict[str, Any]] = {}
        self.bound: dict[str, int] = {}
        for name in self.names:
            verdict = self.pool.ask(self.family[name], "accepts", name, m)
            if verdict is not True:
                results[name] = {"refused": str(verdict)}
                continue
            error = None if name in self.notes else self._try(name, "check", m)
            if error is None:
                results[name] = {"failed": self.notes[name]}
                continue
            self.bound[name] = m
            results[name] = {"error": error}
            if error > self.pool.competitors[name]["bound"]:
                results[name]["red"] = True
        return results

    def _limits(self) -> dict[str, float]:
        """One visit to each limit."""
        rates = {}
        for limit in LIMITS if "limits" in self.pool.families else ():
            rate = self.pool.ask("limits", "limit", limit, self.plan.visit_ms / 1000)
            if rate is not None:
                rates[limit] = rate
        return rates

    def _round(
        self, turn: int, green: list[str], visits: dict[str, list[float]], used: dict[str, float],
        limits: dict[str, list[float]],
    ) -> None:  # fmt: skip
        """One visit to each limit and to each competitor that is not used up."""
        for limit, rate in self._limits().items():
            limits.setdefault(limit, []).append(rate)
        at = turn * len(green) // max(1, self.plan.rounds) % max(1, len(green))  # each round starts elsewhere
        for name in green[at:] + green[:at]:
            if name in self.notes or used[name] > self.plan.cell_seconds:
                continue
            before = time.perf_counter()
            got = self._try(name, "visit", self.plan.visit_ms / 1000)
            used[name] += time.perf_counter() - before
            if got is not None:
                visits[name].append(got[0])

    def _quiet(self, others: list[float], limits: dict[str, list[float]]) -> bool:
        """Whether enough rounds had the machine to themselves."""
        calm = sum(share < CALM for share in others)
        return self._full(limits) and calm >= min(3, self.plan.rounds)

    def _full(self, limits: dict[str, list[float]]) -> bool:
        """Whether the processor gave what it gave in the best cell so far."""
        full = True
        for name in ("int8", "bf16", "fp32"):
            if name in limits:
                rate = steady(limits[name], largest=True)
                self.peaks[name] = max(rate, self.peaks.get(name, 0.0))
                full &= rate > FULL * self.peaks[name]
        return full

    def _cell(self, n: int, k: int, m: int) -> dict[str, Any]:
        begin = time.perf_counter()
        results = self._check(m)
        green = [name for name, r in results.items() if "error" in r and not r.get("red")]
        visits: dict[str, list[float]] = {name: [] for name in green}
        used = dict.fromkeys(green, 0.0)
        limits: dict[str, list[float]] = {}
        others: list[float] = []
        clock = Others(self.pool.pids)
        for turn in range(self.plan.rounds + self.plan.extra_rounds):
            if turn >= self.plan.rounds and self._quiet(others, limits):
                break
            self._round(turn, green, visits, used, limits)
            others.append(clock.share())
        for name, times in visits.items():
            if name in self.notes:
                results[name] = {"failed": self.notes[name]}
            else:
                results[name]["visits"] = times
        quiet = self._quiet(others, limits)
        cell = {"n": n, "k": k, "m": m, "quiet": quiet, "others": others, "limits": limits, "results": results}
        self.plan.say(cell, f"{len(green)} competitors in {time.perf_counter() - begin:.0f} s")
        return cell
