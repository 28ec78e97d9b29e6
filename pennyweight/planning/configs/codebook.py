"""Configs with a codebook that is learned from each weight."""

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
    """Vector quantization: one codebook per weight tensor, one code per ``dim`` neighbours of a row, ``bits`` bits per
    weight.

    bits, dim   a code has bits * dim bits, 8 at most: 2 bits with dim 4, 3 or 4 with dim 2, 1 to 8 with dim 1
    group_size  weights that share a scale; None: a row
    The codebook takes 2 * dim * 2**(bits * dim) bytes per weight tensor. With calibration "kmeans" finds its entries.
    """

    bits: int = 2
    dim: int = 4
    group_size: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.bits * self.dim <= 8:
            raise ValueError(f"CodebookWeightOnlyConfig: bits * dim must be 1 to 8, got {self.bits} * {self.dim}")
        learned(self.bits * self.dim, self.dim)
        if self.group_size is not None:
            PerGroup(self.group_size)
            if self.group_size % self.dim:
                raise ValueError(
                    f"CodebookWeightOnlyConfig: group_size {self.group_size} is not divisible by dim {self.dim}"
                )

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        granularity = PerRow() if self.group_size is None else PerGroup(self.group_size)
        fmt = learned(self.bits * self.dim, self.dim)
        return Scheme(QuantSpec(fmt, site.block(granularity, on_indivisible), site.dtype))
