"""Amounts of memory: what people write, and what a calibration is going to hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from ..models.report import size
from ..models.rules import PlanError
from .statistics import Statistic

_AMOUNT = re.compile(r"\s*([0-9]+\.?[0-9]*)\s*([kMG]?)B\s*")
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}


def amount(text: str | int | float) -> float:
    """Bytes from "4 GB" (powers of 1000) or a number of bytes. Raises PlanError for anything else."""
    if isinstance(text, (int, float)) and not isinstance(text, bool) and text > 0:
        return float(text)
    match = _AMOUNT.fullmatch(text) if isinstance(text, str) else None
    if match is None or not float(match[1]) > 0:
        raise PlanError(f'an amount of memory is "4 GB" or a number of bytes, got {text!r}')
    return float(match[1]) * _UNITS[match[2]]


def statistics_bytes(widths: Iterable[tuple[int, int]], statistics: Sequence[Statistic]) -> int:
    """Bytes of the statistics of layers with those (groups, width) of inputs."""
    total = 0
    for groups, width in widths:
        with torch.device("meta"):
            total += sum(int(s.init(groups, width)[0].nbytes) for s in statistics)
    return total


def must_spill(hidden: int, statistics: int, limit: float, block: str) -> bool:
    """Whether hidden states have to go to disk, so that they and a block's statistics keep within ``limit``. Raises
    PlanError where the statistics alone do not."""
    if statistics > limit:
        raise PlanError(
            f"{block}: the statistics of its inputs take {size(statistics)}, max_ram is {size(limit)}; raise it, "
            "or take an algorithm that needs less of them, such as 'imatrix' or 'nearest'"
        )
    return hidden + statistics > limit
