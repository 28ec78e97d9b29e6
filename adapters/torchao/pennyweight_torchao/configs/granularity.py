"""Granularities of float8 inference: one for activations, one for weights."""

from __future__ import annotations

from collections.abc import Sequence

from pennyweight.planning.granularity import Granularity, PerBlock, PerRow, PerTensor

__all__ = ["_granularity_is_a_1_128_w_128_128", "_normalize_granularity"]

BLOCKS = (PerBlock((1, 128)), PerBlock((128, 128)))  # of activations and weights of block-scaled checkpoints


def _granularity_is_a_1_128_w_128_128(granularity: Sequence[Granularity]) -> bool:
    """Whether activations have a scale per 1 x 128 and weights one per 128 x 128."""
    return tuple(granularity) == BLOCKS


def _normalize_granularity(
    granularity: Granularity | Sequence[Granularity] | None,
) -> tuple[Granularity, Granularity]:
    """(activation, weight) of one granularity, or of a tuple or list of two; None is PerTensor.

    Raises ValueError unless both are per tensor, both per row, or 1 x 128 for activations with 128 x 128 for weights.
    """
    if granularity is None:
        return PerTensor(), PerTensor()
    if not isinstance(granularity, (PerTensor, PerRow, tuple, list)):
        raise ValueError(f"Invalid granularity specification: {granularity}, only PerTensor or PerRow are supported.")
    both = tuple(granularity) if isinstance(granularity, (tuple, list)) else (granularity, granularity)
    if len(both) != 2:
        raise ValueError(f"granularity needs two values, for activations and weights, got {list(both)}")
    kinds = {type(g) for g in both}
    if kinds not in ({PerTensor}, {PerRow}) and both != BLOCKS:
        raise ValueError(f"Unsupported granularity types: {both}; use PerTensor() or PerRow() for both")
    return both
