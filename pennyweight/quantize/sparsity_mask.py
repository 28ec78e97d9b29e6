"""Which weights are zero: N of every M inputs, or a share."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from .config_resolution import PlanError
from .plan import PlanRow


@dataclass(frozen=True)
class SparsityPattern:
    """kept of every ``of`` inputs in a row ("2:4"); or a share of zeros, where ``of`` is 0."""

    text: str
    kept: int = 0
    of: int = 0
    share: float = 0.0

    @staticmethod
    def read(pattern: str | float) -> SparsityPattern:
        if isinstance(pattern, str):
            found = re.fullmatch(r"(\d{1,4}):(\d{1,4})", pattern)
            kept, of = map(int, found.groups()) if found else (0, 0)
            if not 0 < kept < of:
                raise PlanError(f"a pattern is such as '2:4' (2 kept of each 4) or a share, got {pattern!r}")
            return SparsityPattern(pattern, kept, of)
        if isinstance(pattern, bool) or not 0 < pattern < 1:
            raise PlanError(f"a share of zeros is between 0 and 1, got {pattern!r}; or '2:4'")
        return SparsityPattern(f"{pattern:.0%} zeros", share=float(pattern))

    def check(self, row: PlanRow) -> None:
        """Raise PlanError where the inputs of a weight are no whole runs."""
        assert row.site is not None
        width = math.prod(row.shape[1:]) if row.site.op == "convolution" else row.site.shape[-1]
        if self.of and width % self.of:
            raise PlanError(
                f"{row.name}: its {width} inputs are no whole runs of {self.of}; leave it out with filter_fn, or "
                f"take a share such as {1 - self.kept / self.of:g}"
            )

    def keep(self, score: Tensor, zeros: int | None = None) -> Tensor:
        """bool like score [N, K]: which elements are kept, those of higher scores; the later of equal ones.

        zeros   of the whole, for a share: chosen among all elements. None: each row has the same
        """
        if self.of:
            runs = score.unflatten(1, (-1, self.of))
            return _all_but_least(runs, self.of - self.kept).flatten(1)
        if zeros is None:
            return _all_but_least(score, round(self.share * score.shape[1]))
        return _all_but_least(score.flatten(), zeros).view(score.shape)


def _all_but_least(score: Tensor, count: int) -> Tensor:
    order = score.argsort(dim=-1, stable=True)
    return torch.ones_like(score, dtype=torch.bool).scatter_(-1, order[..., :count], False)
