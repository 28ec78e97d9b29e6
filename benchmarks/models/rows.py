"""From visits to figures: pure functions on the data that `python -m benchmarks.models --json` writes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from benchmarks.arithmetic import steady

from .costs import limit_seconds
from .llama import GENERATED


@dataclass(frozen=True)
class Row:
    """One way in one case; seconds None where there is none, and `note` says why.

    rate      tokens, images or sentences per second
    x_float   speed relative to the reference: torch's float32, the language model's bf16
    x_peer    relative to the fastest peer at the same bits; above 1 is faster
    fraction  time at the limit / time; `limit` is "read", "files" or the arithmetic that binds
    """

    name: str
    bits: int
    ours: bool
    seconds: float | None = None
    rate: float | None = None
    x_float: float | None = None
    x_peer: float | None = None
    fraction: float | None = None
    limit: str = ""
    error: float | None = None
    nbytes: int = 0
    note: str = ""


def units(case: dict[str, Any]) -> int:
    """What a step yields: tokens of a prompt, of decoding or generated sequences, texts, images; else 1."""
    return case["batch"] * {"prompt": case["tokens"], "generate": GENERATED}.get(case["task"], 1)


def is_ours(name: str) -> bool:
    return name.startswith("pennyweight")


def rows_of(case: dict[str, Any], competitors: dict[str, dict[str, Any]]) -> list[Row]:
    """All rows of a case: floats first, then by bits, fastest first."""
    limits = {name: steady(rates, largest=True) for name, rates in case["limits"].items()}
    seconds = {name: steady(r["visits"]) for name, r in case["results"].items() if r.get("visits")}
    fields = {c["name"]: c for c in competitors.values() if c["model"] == case["model"]}
    fastest: dict[int, float] = {}
    for name, s in seconds.items():
        if not is_ours(name):
            fastest[fields[name]["bits"]] = min(s, fastest.get(fields[name]["bits"], math.inf))
    base = next((seconds.get(n) for n in ("torch fp32", "torch bf16") if n in fields), None)
    rows = []
    for name, r in case["results"].items():
        c, s = fields[name], seconds.get(name)
        if s is None:
            note = "RED: error above its bound" if r.get("red") else r.get("failed") or r.get("refused") or "no visit"
            rows.append(Row(name, c["bits"], is_ours(name), error=r.get("error"), note=note))
            continue
        least = limit_seconds(case["cost"], c["stored_bits"], c["arithmetic"], limits)
        if r.get("floor") is not None:
            least = r["floor"], "files"
        rows.append(
            Row(
                name, c["bits"], is_ours(name), s, units(case) / s, base and base / s,
                fastest[c["bits"]] / s if c["bits"] in fastest else None,
                least[0] / s if least else None, least[1] if least else "", r["error"], r["nbytes"], r["detail"],
            )
        )  # fmt: skip
    return sorted(rows, key=lambda r: (-r.bits, r.seconds or math.inf))


AS_ACCURATE = 1.1  # an error up to this multiple of the peer's counts as the same


@dataclass(frozen=True)
class Verdict:
    """Our way at some bits beside the fastest peer at these.

    Ours is the fastest of those that are as accurate as the peer; if none is, the fastest.
    """

    case: str
    bits: int
    ours: Row
    peer: Row | None

    @property
    def ratio(self) -> float | None:
        return self.ours.x_peer


def verdicts(case: dict[str, Any], competitors: dict[str, dict[str, Any]]) -> list[Verdict]:
    """One for each number of bits at which we have a time."""
    timed = [r for r in rows_of(case, competitors) if r.seconds is not None]
    found = []
    for bits in sorted({r.bits for r in timed if r.ours}):
        peer = min((r for r in timed if not r.ours and r.bits == bits), key=lambda r: r.seconds or 0.0, default=None)
        most = math.inf if peer is None or peer.error is None else AS_ACCURATE * peer.error
        own = [r for r in timed if r.ours and r.bits == bits]
        ours = min([r for r in own if (r.error or 0.0) <= most] or own, key=lambda r: r.seconds or 0.0)
        found.append(Verdict(case["name"], bits, ours, peer))
    return found
