"""Our granularities and mapping types that have torchao's names."""

from ...planning.granularity import Granularity, MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken

__all__ = ["Granularity", "MappingType", "PerAxis", "PerBlock", "PerGroup", "PerRow", "PerTensor", "PerToken"]
