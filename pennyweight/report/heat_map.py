"""The heat map of a report page: the error of layers by kind and depth, on an absolute scale."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from .comparison import Layer
from .grades import LAYER, MARKS


def place_of(name: str) -> tuple[str, int] | None:
    """(kind, depth) of a layer: its name without its first number, and that number; None without a number."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if at is None:
        return None
    kind = ".".join(parts[at + 1 :]).removesuffix(".weight")
    return kind or ".".join(parts[:at]), int(parts[at])


def heat_map(layers: Sequence[Layer]) -> dict[str, Any] | None:
    """Rows of cells for the template; None for fewer than two depths."""
    found: dict[str, dict[int, Layer]] = {}
    for w in layers:
        where = place_of(w.name)
        if w.quantized and where is not None and not math.isnan(w.worst):
            found.setdefault(where[0], {}).setdefault(where[1], w)
    depths = sorted({d for row in found.values() for d in row})
    if len(depths) < 2:
        return None
    measured = any(w.layer_sqnr is not None for row in found.values() for w in row.values())
    rows = []
    for kind in sorted(found, key=lambda k: _order(k, found[k])):
        cells: list[dict[str, Any] | None] = []
        for d in depths:
            here = found[kind].get(d)
            cells.append(None if here is None else {"depth": d, "name": here.name, **graded_cell(here.worst)})
        rows.append({"kind": kind, "cells": cells})
    what = "SQNR of each layer's output, with the float model's input," if measured else "SQNR of each weight"
    return {"depths": depths, "rows": rows, "what": what}


def graded_cell(value: float | None) -> dict[str, str]:
    """Text, grade and mark of an SQNR."""
    grade = LAYER.grade(value)
    text = "–" if value is None or math.isnan(value) else "exact" if value == math.inf else f"{value:.1f}"
    return {"text": text, "grade": grade, "mark": MARKS[grade]}


def counts(layers: Sequence[Layer]) -> list[tuple[str, int]]:
    """(grade, number of quantized layers with it), of the grades that occur."""
    grades = [LAYER.grade(w.worst) for w in layers if w.quantized]
    return [(g, grades.count(g)) for g in MARKS if g and g in grades]


def _order(kind: str, row: Mapping[int, Layer]) -> tuple[bool, str]:
    """Attention layers first, as in the model."""
    return not re.search(r"att", kind), kind
