"""Selects which weights a sparsity pattern sets to zero: N:M, or a share of all."""

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
    """Keeps ``kept`` of every ``of`` consecutive inputs ("2:4"); if ``of`` is 0, ``share`` of the weights are zero."""

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
                raise PlanError(f"a pattern must be like '2:4' (2 kept of each 4) or a share of zeros, got {pattern!r}")
            return SparsityPattern(pattern, kept, of)
        if isinstance(pattern, bool) or not 0 < pattern < 1:
            raise PlanError(f"a share of zeros must be between 0 and 1, got {pattern!r}; or use a pattern like '2:4'")
        return SparsityPattern(f"{pattern:.0%} zeros", share=float(pattern))

    def check(self, row: PlanRow) -> None:
        """Raise PlanError if ``of`` does not divide the number of inputs."""
        assert row.site is not None
        width = math.prod(row.shape[1:]) if row.site.op == "convolution" else row.site.shape[-1]
        if self.of and width % self.of:
            raise PlanError(
                f"{row.name}: its {width} inputs are not divisible by {self.of}; leave it out with filter_fn, or "
                f"use a share of zeros such as {1 - self.kept / self.of:g}"
            )

    def keep(self, score: Tensor, zeros: int | None = None) -> Tensor:
        """bool like score [N, K]: True for kept elements, those with higher scores; of equal scores the later ones.

        zeros   for a share: total number of zeros, chosen among all elements. None: the same number in each row
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
