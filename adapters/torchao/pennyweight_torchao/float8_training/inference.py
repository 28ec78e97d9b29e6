"""torchao.float8.inference: products of float8 matrices whose scales multiply, and checks of granularities."""

from __future__ import annotations

from typing import Any

from pennyweight.planning.granularity import PerBlock, PerRow, PerTensor

__all__ = ["_normalize_granularity"]


# -- granularity -------------------------------------------------------------------------------------------------------


def _normalize_granularity(granularity: Any) -> tuple[Any, Any]:
    """(granularity of the activation, of the weight): per tensor by default. Both per tensor, both per row, or blocks
    of 1 by 128 and of 128 by 128. Raises ValueError for another pair."""
    if granularity is None:
        return PerTensor(), PerTensor()
    if isinstance(granularity, (PerTensor, PerRow)):
        return granularity, granularity
    if not isinstance(granularity, (tuple, list)) or len(granularity) != 2:
        raise ValueError(f"Invalid granularity specification: {granularity}.")
    one, two = granularity
    same = any(isinstance(one, kind) and isinstance(two, kind) for kind in (PerTensor, PerRow))
    if not same and (one, two) != (PerBlock((1, 128)), PerBlock((128, 128))):
        raise ValueError(f"Unsupported granularity types: {granularity}.")
    return one, two
