"""The result of recommend(): the candidates that were tried, and which one to use."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..planning.configs import AOBaseConfig
from ..planning.quantize_report import NOISE, relative_speed, size
from ..support.tables import FLAG, REAL, TEXT, WHOLE, html_table, to_frame

if TYPE_CHECKING:
    from pandas import DataFrame

# The float model is timed with each candidate; if its times differ by more than this ratio, the machine was busy.
BUSY = 1.5


@dataclass
class Candidate:
    """One config, tried on the whole model. config None: the unchanged model.

    nbytes         of parameters and buffers
    error          ||y - y_float|| / ||y_float|| over all floating-point outputs for the example; None: not tried
    seconds        minimum time of one call; float_seconds: that of the unchanged model in the same rounds;
                   None: not timed, because it is outside the bounds
    why            the reason if it is outside the bounds or could not be tried
    fused          blocks that run as one native call, if ``fuse`` was given
    fused_nets     convolution nets, or parts of one, whose convolutions run as chains, if ``fuse`` was given
    unfused        why others do not
    """

    name: str
    config: AOBaseConfig | None
    nbytes: int
    error: float | None = None
    seconds: float | None = None
    float_seconds: float | None = None
    why: str = ""
    fused: int = 0
    unfused: str = ""
    fused_nets: int = 0

    @property
    def fits(self) -> bool:
        return not self.why

    @property
    def note(self) -> str:
        counts = ((self.fused, "block"), (self.fused_nets, "net"))
        fused = [f"{counted(n, kind)} fused" for n, kind in counts if n]
        return self.why or "; ".join([*fused, *filter(None, (self.unfused,))])

    @property
    def speed(self) -> float | None:
        """Relative to the unchanged model: above 1 is faster."""
        return self.float_seconds / self.seconds if self.seconds and self.float_seconds else None

    @property
    def sqnr(self) -> float | None:
        """Of the outputs, in dB."""
        if self.error is None:
            return None
        return -20 * math.log10(self.error) if self.error else math.inf


@dataclass(repr=False)
class Recommendation:
    """The result of :func:`recommend`; print() shows a table. Pass ``config`` to ``quantize_``.

    chosen      None if no candidate is within the bounds
    candidates  all that were tried, the unchanged model first
    verdict     one sentence
    """

    chosen: Candidate | None
    candidates: list[Candidate] = field(default_factory=list)
    verdict: str = ""
    threads: int = 0

    @property
    def config(self) -> AOBaseConfig | None:
        """For ``quantize_``; None: leave the model unchanged, or nothing fits, see ``verdict``."""
        return None if self.chosen is None else self.chosen.config

    def to_dict(self) -> dict[str, Any]:
        rows = []
        for c in self.candidates:
            row = {**asdict(replace(c, config=None)), "config": None if c.config is None else str(c.config)}
            rows.append({k: "inf" if v == math.inf else v for k, v in row.items()})  # JSON has no infinity
        chosen = None if self.chosen is None else self.chosen.name
        return {"version": 1, "chosen": chosen, "verdict": self.verdict, "threads": self.threads, "candidates": rows}

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def to_pandas(self) -> DataFrame:
        """A data frame with a row for each candidate: bytes, error, SQNR in dB, seconds of a call, speed relative to
        float, whether it is within the bounds and whether it is the recommended one. Raises ImportError without
        pandas."""
        types = {
            "name": TEXT, "recommended": FLAG, "fits": FLAG, "bytes": WHOLE, "error": REAL, "sqnr_db": REAL,
            "seconds": REAL, "speed": REAL, "note": TEXT,
        }  # fmt: skip
        rows = [
            {"name": c.name, "recommended": c is self.chosen, "fits": c.fits, "bytes": c.nbytes, "error": c.error,
             "sqnr_db": c.sqnr, "seconds": c.seconds, "speed": c.speed, "note": c.note}
            for c in self.candidates
        ]  # fmt: skip
        return to_frame(types, rows, verdict=self.verdict, threads=self.threads)

    def __repr__(self) -> str:
        return f"<Recommendation: {self.verdict}; {len(self.candidates)} candidates>"

    def _repr_html_(self) -> str:
        columns, rows = self._cells()
        best_row = next((i for i, c in enumerate(self.candidates) if c is self.chosen), None)
        return html_table(columns, rows, title=self._title(), notes=(self.verdict,), right=_RIGHT, bold=best_row)

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        columns, rows = self._cells()
        table = Table(title=self._title(), title_justify="left", caption=Text(self.verdict), caption_justify="left")
        for name in columns:
            table.add_column(name, justify="right" if name in _RIGHT else "left", overflow="fold")
        for row in rows:
            table.add_row(*map(Text, row))
        out = StringIO()
        Console(file=out, width=120).print(table)
        return out.getvalue()

    def _title(self) -> str:
        return f"the whole model, {self.threads} thread{'s' * (self.threads > 1)}"

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for c in self.candidates:
            error, sqnr = ("", "") if c.error is None else (f"{c.error:.2g}", f"{c.sqnr:.1f}")
            time = "" if c.seconds is None else f"{c.seconds * 1e3:.3g}"
            speed = "" if c.speed is None or c.config is None else relative_speed(c.speed)
            rows.append(["→" if c is self.chosen else "", c.name, size(c.nbytes), error, sqnr, time, speed, c.note])
        return ["", "candidate", "bytes", "error", "SQNR dB", "ms a call", "speed", "note"], rows


_RIGHT = ("bytes", "error", "SQNR dB", "ms a call", "speed")


def best(candidates: Sequence[Candidate]) -> Candidate | None:
    """The most accurate candidate within the bounds and within 5 % of the fastest. None if none fits."""
    fitting = [c for c in candidates if c.fits]
    fastest = max((c.speed or 0 for c in fitting), default=0)
    near = [c for c in fitting if (c.speed or 0) * NOISE >= fastest]
    return min(near, key=lambda c: c.error or 0, default=None)


def verdict(
    chosen: Candidate | None, found: Sequence[Candidate], max_bytes: int | None, max_error: float | None
) -> str:
    """The recommendation in one sentence, with a warning if the machine was busy."""
    if chosen is None:
        bounds = {"max_bytes": max_bytes, "max_error": max_error}
        asked = " and ".join(f"{name}={value}" for name, value in bounds.items() if value is not None)
        near = min(found, key=lambda c: _overshoot(c, max_bytes, max_error))
        return f"nothing fits {asked}; nearest is {near.name}: {near.nbytes} bytes, error {near.error:.2g}"
    times = [c.float_seconds for c in found if c.float_seconds is not None]
    if chosen.config is None:
        text = f"leave the model as it is: nothing else that fits is more than {NOISE - 1:.0%} faster here"
    else:
        sizes = f"{size(next(c for c in found if c.config is None).nbytes)} -> {size(chosen.nbytes)}"
        loss = f"error {chosen.error:.2g} ({chosen.sqnr:.1f} dB)"
        text = f"{chosen.name}: {relative_speed(chosen.speed or 1.0)}, {sizes}, {loss}"
    if max(times) > BUSY * min(times):
        low, high = (f"{1e3 * t:.3g}" for t in (min(times), max(times)))
        text += f". The machine was busy (the same model took {low} ms, then {high} ms): measure again"
    return text


def _overshoot(c: Candidate, max_bytes: int | None, max_error: float | None) -> float:
    """The larger of size and error, relative to their bounds."""
    if c.error is None:
        return math.inf
    return max(c.nbytes / max_bytes if max_bytes else 0.0, c.error / max_error if max_error else 0.0)


def counted(n: int, kind: str) -> str:
    """ "1 block", "3 blocks"."""
    return f"{n} {kind}{'s' * (n > 1)}"
