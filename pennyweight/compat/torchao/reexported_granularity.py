"""Ours under the names that are torchao's too: granularities and mapping types."""

from ...quantize.granularity import Granularity, MappingType, PerAxis, PerBlock, PerGroup, PerRow, PerTensor, PerToken

__all__ = ["Granularity", "MappingType", "PerAxis", "PerBlock", "PerGroup", "PerRow", "PerTensor", "PerToken"]
