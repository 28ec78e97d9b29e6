"""Granularity and mapping types: which elements share a scale, and how a range maps to codes. Names as in torchao."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..core.model_arguments import CheckedFields
from ..support.arguments import show
from ..support.errors import ArgumentTypeError


class MappingType(Enum):
    """How a range of floats maps to codes. Files name a member by its ``rule``."""

    SYMMETRIC = 1
    SYMMETRIC_NO_CLIPPING_ERR = 2
    ASYMMETRIC = 3

    @property
    def rule(self) -> str:
        """The name in :mod:`pennyweight.core.qparams`: "symmetric", "symmetric_no_clip" or "asymmetric"."""
        return _RULES[self.value - 1]

    @classmethod
    def _missing_(cls, value: object) -> MappingType | None:
        """The member of a rule, which was its value in older releases and is in their pickles."""
        return cls(_RULES.index(value) + 1) if isinstance(value, str) and value in _RULES else None


_RULES = ("symmetric", "symmetric_no_clip", "asymmetric")


@dataclass(frozen=True)
class Granularity(CheckedFields):
    """Base of the granularities."""


@dataclass(frozen=True)
class PerTensor(Granularity):
    """One scale for the tensor."""


@dataclass(frozen=True)
class PerAxis(Granularity):
    """One scale per index of an axis; weights support axis 0, the output channel."""

    axis: int = 0


@dataclass(frozen=True)
class PerRow(Granularity):
    """One scale per output channel of a weight, or per row of an activation."""

    dim: int = -1


@dataclass(frozen=True)
class PerToken(Granularity):
    """One scale per token of an activation: all axes but the last."""


@dataclass(frozen=True)
class PerGroup(Granularity):
    """One scale per ``group_size`` consecutive elements of the contracted axis."""

    group_size: int


@dataclass(frozen=True)
class PerBlock(Granularity):
    """One scale per block, right-aligned to the shape; -1 is a whole axis."""

    block_size: tuple[int, ...]

    def __post_init__(self) -> None:
        sizes = self.block_size
        if not isinstance(sizes, (tuple, list)) or not all(hasattr(type(n), "__index__") for n in sizes):
            raise ArgumentTypeError(f"PerBlock: block_size must be a tuple such as (32, 32), got {show(sizes)}")
        if any(n < 1 and n != -1 for n in sizes):
            raise ValueError(f"PerBlock: each block_size is positive, or -1 for a whole axis, got {tuple(sizes)}")
        object.__setattr__(self, "block_size", tuple(sizes))
