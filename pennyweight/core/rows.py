"""Whether rows of a tensor can be quantized independently."""

from __future__ import annotations

from collections.abc import Sequence

from . import blocks
from .spec import QuantSpec


def rows_independent(spec: QuantSpec, shape: Sequence[int]) -> bool:
    """Whether x[a:b] can be quantized on its own: rows share no part, at any nesting depth."""
    if spec.format.kind == "learned":  # all rows share the table
        return False
    inner = blocks.counts(spec.block, shape)
    nested = [k for k in (spec.scale, spec.offset) if isinstance(k, QuantSpec)]
    return blocks.resolve(spec.block, shape)[0] == 1 and all(rows_independent(k, inner) for k in nested)
