"""From visits to figures: pure functions on the data that `linear.py --json` writes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from benchmarks.peers import BASELINE


def steady(visits: list[float], largest: bool = False) -> float:
    """The second best of three visits or more, else the best: one lucky visit, or half of them disturbed by
    neighbours, do not move it."""
    return sorted(visits, reverse=largest)[1 if len(visits) > 2 else 0]


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


@dataclass(frozen=True)
class Row:
    """One competitor in one cell; seconds None where there is none, and `note` says why.

    x_bf16, x_peer  speed relative to bf16 F.linear and to the fastest peer at the same bits; above 1 is faster
    x_alike         to the fastest of these that treats its input alike: as int8, or not
    fraction        time at the limit / time; `limit` is "read" or the arithmetic that binds
    """

    name: str
    family: str
    bits: int
    seconds: float | None
    x_bf16: float | None = None
    x_peer: float | None = None
    x_alike: float | None = None
    fraction: float | None = None
    limit: str = ""
    error: float | None = None
    note: str = ""


def limit_seconds(
    n: int, k: int, m: int, stored_bits: float, arithmetic: str, limits: dict[str, float]
) -> tuple[float, str] | None:
    """The least time there can be, and what binds: reading the weight once, or its arithmetic at the measured peak.

    Where a machine has no bf16 products their peak is that of float32. None where a limit was not measured.
    """
    peak = limits.get(arithmetic) or (limits.get("fp32") if arithmetic == "bf16" else None)
    if "read" not in limits or (peak is None and m > 1):
        return None
    read = n * k * stored_bits / 8 / limits["read"]
    compute = 2 * m * n * k / peak if peak else 0.0
    return max((read, "read"), (compute, arithmetic))


def rows_of(cell: dict[str, Any], competitors: dict[str, dict[str, Any]]) -> list[Row]:
    """All rows of a cell, floats first, then by bits, fastest first."""
    n, k, m = cell["n"], cell["k"], cell["m"]
    limits = {name: steady(rates, largest=True) for name, rates in cell["limits"].items()}
    seconds = {name: steady(r["visits"]) for name, r in cell["results"].items() if r.get("visits")}
    fastest: dict[int, float] = {}
    alike: dict[tuple[int, bool], float] = {}
    for name, s in seconds.items():
        c = competitors[name]
        if c["family"] != "pennyweight" and not c["alone"]:
            fastest[c["bits"]] = min(s, fastest.get(c["bits"], math.inf))
            alike[_kind(c)] = min(s, alike.get(_kind(c), math.inf))
    rows = []
    for name, r in cell["results"].items():
        c, s = competitors[name], seconds.get(name)
        if s is None:
            note = "RED: error above its bound" if r.get("red") else r.get("failed") or r.get("refused") or "no visit"
            rows.append(Row(name, c["family"], c["bits"], None, error=r.get("error"), note=note))
            continue
        least = limit_seconds(n, k, m, c["stored_bits"], c["arithmetic"], limits)
        rows.append(
            Row(
                name, c["family"], c["bits"], s,
                seconds[BASELINE] / s if BASELINE in seconds else None,
                fastest[c["bits"]] / s if c["bits"] in fastest and not c["alone"] else None,
                alike[_kind(c)] / s if _kind(c) in alike and not c["alone"] else None,
                least[0] / s if least else None, least[1] if least else "", r["error"],
            )
        )  # fmt: skip
    return sorted(rows, key=lambda r: (-r.bits, r.seconds or math.inf))


def _kind(c: dict[str, Any]) -> tuple[int, bool]:
    return c["bits"], c["arithmetic"] == "int8"


@dataclass(frozen=True)
class Summary:
    """One of our configs over all cells. Lists are (value, (n, k, m)), the least first."""

    name: str
    peer: list[tuple[float, tuple[int, int, int]]]
    alike: list[tuple[float, tuple[int, int, int]]]
    bf16: list[tuple[float, tuple[int, int, int]]]
    one_row: list[tuple[float, tuple[int, int, int]]]
    many_rows: list[tuple[float, tuple[int, int, int]]]


def summarize(data: dict[str, Any]) -> list[Summary]:
    """A summary of each config of pennyweight; fractions at one row, and at 64 rows or more."""
    table: dict[str, Summary] = {}
    for cell in data["cells"]:
        at = (cell["n"], cell["k"], cell["m"])
        for r in rows_of(cell, data["competitors"]):
            if r.family != "pennyweight":
                continue
            s = table.setdefault(r.name, Summary(r.name, [], [], [], [], []))
            for column, value in ((s.peer, r.x_peer), (s.alike, r.x_alike), (s.bf16, r.x_bf16)):
                if value is not None:
                    column.append((value, at))
            if r.fraction is not None and (at[2] == 1 or at[2] >= 64):
                (s.one_row if at[2] == 1 else s.many_rows).append((r.fraction, at))
    for s in table.values():
        for column in (s.peer, s.alike, s.bf16, s.one_row, s.many_rows):
            column.sort()
    return [table[name] for name in data["competitors"] if name in table]
