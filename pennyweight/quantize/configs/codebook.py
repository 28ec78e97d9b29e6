"""Configs whose numbers are learned from each weight."""

from __future__ import annotations

from dataclasses import dataclass

from ...core.formats import learned
from ...core.spec import QuantSpec
from ..granularity import PerGroup, PerRow
from ..parameters import Site
from ..scheme import Scheme
from .base import AOBaseConfig


@dataclass(frozen=True)
class CodebookWeightOnlyConfig(AOBaseConfig):
    """Codes into a table that each weight has of its own, one for ``dim`` neighbours of a row: ``bits`` bits a weight.

    bits, dim   a code has bits * dim bits, 8 at most: 2 bits of 4 neighbours, 3 or 4 of 2, 1 to 8 of 1
    group_size  weights that share a scale; None: a row
    The table takes 2 * dim * 2**(bits * dim) bytes a weight. With calibration its numbers are found by "kmeans".
    """

    bits: int = 2
    dim: int = 4
    group_size: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.bits * self.dim <= 8:
            raise ValueError(
                f"CodebookWeightOnlyConfig: a code of bits * dim bits has 1 to 8, got {self.bits} * {self.dim}"
            )
        learned(self.bits * self.dim, self.dim)
        if self.group_size is not None:
            PerGroup(self.group_size)
            if self.group_size % self.dim:
                raise ValueError(
                    f"CodebookWeightOnlyConfig: groups of {self.group_size} are not whole runs of {self.dim}"
                )

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        granularity = PerRow() if self.group_size is None else PerGroup(self.group_size)
        fmt = learned(self.bits * self.dim, self.dim)
        return Scheme(QuantSpec(fmt, site.block(granularity, on_indivisible), site.dtype))
