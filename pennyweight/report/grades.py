"""Absolute grades of errors: the thresholds behind the colours and the verdict of a report page.

The KL thresholds follow from Pinsker's inequality: on average at most sqrt(KL / 2) of the probability moves to other
classes, which is 7 %, 16 % and 32 % at 0.01, 0.05 and 0.2 nats. The thresholds of layers are those at which the median
layer has the grade of its model's KL in nine of ten quantizations of all-MiniLM-L6-v2 (docs/report.md has the table).
Errors of layers add up: the output's SQNR is 10 to 14 dB lower than the median layer's there, and its thresholds 10 dB.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .comparison import Comparison

GRADES = ("good", "fine", "watch", "bad")
# A mark beside the colour, so that no meaning depends on colour alone
MARKS = {"good": "", "fine": "", "watch": "▲", "bad": "✕", "": ""}


@dataclass(frozen=True)
class Scale:
    """Thresholds of a metric. bounds: the last value that is still good, fine and watch; beyond is bad."""

    name: str
    unit: str
    bounds: tuple[float, float, float]
    higher_is_better: bool

    def grade(self, value: float | None) -> str:
        """One of GRADES; "" for an unknown value or NaN."""
        if value is None or math.isnan(value):
            return ""
        for name, bound in zip(GRADES, self.bounds, strict=False):
            if value >= bound if self.higher_is_better else value <= bound:
                return name
        return GRADES[-1]

    def ranges(self) -> list[tuple[str, str]]:
        """(grade, its range in words), best first."""
        at_least, below = ("at least", "below") if self.higher_is_better else ("at most", "above")
        out = [(g, f"{at_least} {b:g} {self.unit}") for g, b in zip(GRADES, self.bounds, strict=False)]
        return [*out, (GRADES[-1], f"{below} {self.bounds[-1]:g} {self.unit}")]


LAYER = Scale("SQNR of a layer's output or weight", "dB", (30.0, 25.0, 15.0), True)
OUTPUT = Scale("SQNR of the model's output", "dB", (20.0, 15.0, 5.0), True)
KL = Scale("mean KL of the model's output", "nats", (0.01, 0.05, 0.2), False)


def graded(comparison: Comparison) -> tuple[Scale, float]:
    """The scale and the value that decide the verdict: the KL if the outputs are distributions or embeddings, else the
    SQNR of the output."""
    return (KL, comparison.kl.mean) if comparison.kl is not None else (OUTPUT, comparison.sqnr)


def relative_error_of(decibels: float) -> float:
    """The relative error of an SQNR: 10^(-dB / 20)."""
    return 10.0 ** (-decibels / 20)
