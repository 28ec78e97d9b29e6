"""Memory limits: parsing of sizes, and the memory that a calibration needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ...planning.config_resolution import PlanError
from ...planning.report import nbytes_of, size
from .statistics import Statistic


def parse_bytes(text: str | float) -> int:
    """Bytes of a size such as "4 GB", or of a number. Raises PlanError for anything else."""
    try:
        return nbytes_of(text)
    except ValueError as error:
        raise PlanError(f'a memory limit is a size such as "4 GB", or a number of bytes: {error}') from None


def statistics_bytes(widths: Iterable[tuple[int, int]], statistics: Sequence[Statistic]) -> int:
    """Bytes of the statistics of layers with these input sizes (groups, width)."""
    total = 0
    for groups, width in widths:
        with torch.device("meta"):
            total += sum(int(s.init(groups, width)[0].nbytes) for s in statistics)
    return total


def must_spill(hidden: int, statistics: int, limit: float, block: str) -> bool:
    """Whether hidden states must go to disk so that they and a block's statistics stay within ``limit``. Raises
    PlanError if the statistics alone exceed it."""
    if statistics > limit:
        raise PlanError(
            f"{block}: the statistics of its inputs take {size(statistics)}, max_ram is {size(limit)}; raise max_ram, "
            "or use an algorithm with smaller statistics, such as 'imatrix' or 'nearest'"
        )
    return hidden + statistics > limit
