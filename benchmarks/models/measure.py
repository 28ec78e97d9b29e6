"""The measurement: model by model, case by case, round after round; results as plain data."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.limits import LIMITS
from benchmarks.machine import Others
from benchmarks.peers.pool import Died, Failed, Pool

from .base import Case, mean_error

CALM = 0.05  # share of the processor that other processes may take in a round


@dataclass
class Plan:
    """What to measure.

    visit_ms      of a visit; a step that takes longer is timed once
    case_seconds  a way that has used so much of a case is visited no more, after `least` rounds
    extra_rounds  at most so many more where other processes took part of the processor
    folder        for the models' files, some 8 GB; a temporary one by default
    """

    cases: list[Case]
    rounds: int = 7
    visit_ms: float = 200
    case_seconds: float = 40
    least: int = 3
    extra_rounds: int = 3
    folder: Path | None = None
    say: Callable[[dict[str, Any] | None, str], None] = lambda row, text: None


class Measurement:
    """All cases of a plan. A family whose process dies is started again, without the way that ended it."""

    def __init__(self, pool: Pool, plan: Plan) -> None:
        self.pool, self.plan = pool, plan
        self.fields = pool.competitors

    def rows(self) -> Iterator[dict[str, Any]]:
        """Measure; each case when it is finished."""
        for model in dict.fromkeys(c.model for c in self.plan.cases):
            cases = [c for c in self.plan.cases if c.model == model]
            with tempfile.TemporaryDirectory(dir=self.plan.folder) as folder:
                self.folder = folder
                self.plan.say(None, f"{model}: writing its files")
                costs = self.pool.ask("torch", "write", model, folder, cases)
                self.failed: dict[str, str] = {}
                self.built: dict[str, dict[str, Any]] = {}
                for way in [k for k, f in self.fields.items() if f["model"] == model]:
                    if any(self._accepts(way, c) is True for c in cases):
                        self._build(way)
                        self.plan.say(None, f"{way}: {self.failed.get(way, 'built')}")
                for case in cases:
                    yield self._case(case, costs[case.name])
                for family in {self.fields[way]["family"] for way in [*self.built, *self.failed]} | {"torch"}:
                    self.pool.ask(family, "drop")

    def _accepts(self, way: str, case: Case) -> bool | str:
        return self.pool.ask(self.fields[way]["family"], "accepts", way, case)

    def _ask(self, way: str, method: str, *args: Any) -> Any:
        """Ask; a failure becomes the way's note for this model."""
        family = self.fields[way]["family"]
        try:
            return self.pool.ask(family, method, way, *args)
        except Failed as e:
            self.failed[way] = f"{method}: {e}"
        except Died as e:
            self.failed[way] = f"{method}: {e}"
            for other in [w for w in self.built if self.fields[w]["family"] == family and w not in self.failed]:
                self._build(other)
                if other in self.bound and other not in self.failed:
                    self._ask(other, "check", self.case)
        return None

    def _build(self, way: str) -> None:
        self.bound: dict[str, float | None] = {}
        got = self._ask(way, "build", self.folder)
        if got is not None:
            self.built[way] = got

    def _case(self, case: Case, cost: dict[str, float]) -> dict[str, Any]:
        self.case, self.bound = case, {}
        before = dict(self.failed)
        results = self._check(case)
        visits: dict[str, list[float]] = {way: [] for way in self.bound}
        limits, others = self._rounds(visits)
        for way, times in visits.items():
            name = self.fields[way]["name"]
            if way in self.failed:
                results[name] = {"failed": self.failed[way]}
            else:
                results[name]["visits"] = times
                self._ask(way, "unbind")
        # A case that a way cannot do is not the next one's fault
        self.failed = {w: why for w, why in self.failed.items() if w in before or w not in self.built}
        row = {**asdict(case), "cost": cost, "limits": limits, "others": others,
               "results": results}  # fmt: skip
        self.plan.say(row, f"{case.name}: done")
        return row

    def _check(self, case: Case) -> dict[str, dict[str, Any]]:
        """Errors against the float model, or the sentence that says why there is none."""
        reference = torch.from_numpy(self.pool.ask("torch", "reference", case, self.folder))
        results: dict[str, dict[str, Any]] = {}
        for way, fields in self.fields.items():
            if fields["model"] != case.model:
                continue
            name = fields["name"]
            verdict = self._accepts(way, case)
            if verdict is not True:
                results[name] = {"refused": verdict}
                continue
            got = None if way in self.failed else self._ask(way, "check", case)
            if got is None:
                results[name] = {"failed": self.failed[way]}
                continue
            y, floor = got
            error = mean_error(torch.from_numpy(y), reference)
            results[name] = {"error": error, "floor": floor, **self.built[way]}
            if error > fields["bound"]:
                results[name]["red"] = True
            else:
                self.bound[way] = floor
        return results

    def _rounds(self, visits: dict[str, list[float]]) -> tuple[dict[str, list[float]], list[float]]:
        """Every limit and every way in turn, round after round; each round starts with another way."""
        limits: dict[str, list[float]] = {}
        others: list[float] = []
        used = dict.fromkeys(visits, 0.0)
        ways, clock = list(visits), Others(self.pool.pids)
        for turn in range(self.plan.rounds + self.plan.extra_rounds):
            calm = sum(share < CALM for share in others)
            if turn >= self.plan.rounds and calm >= min(self.plan.least, self.plan.rounds):
                break
            for limit in LIMITS if "limits" in self.pool.families else ():
                rate = self.pool.ask("limits", "limit", limit, 0.05)
                if rate is not None:
                    limits.setdefault(limit, []).append(rate)
            at = turn % max(1, len(ways))
            for way in ways[at:] + ways[:at]:
                if way in self.failed or (used[way] > self.plan.case_seconds and turn >= self.plan.least):
                    continue
                took = self._ask(way, "visit", self.plan.visit_ms / 1000)
                if took is not None:
                    visits[way].append(took)
                    used[way] += max(took, self.plan.visit_ms / 1000)
            others.append(clock.share())
        return limits, others
