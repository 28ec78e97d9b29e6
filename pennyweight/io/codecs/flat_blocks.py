"""Flat runs: blocks of other libraries that cover consecutive elements, regardless of rows."""

from __future__ import annotations

import math

from torch import Tensor

from ...core import blocks


def run_block(shape: tuple[int, ...], size: int) -> tuple[blocks.Block, bool]:
    """Our block for a run of ``size`` elements of a row-major tensor, and True.

    If runs do not align with rows: the gcd of both, where several blocks share a scale, and False.
    """
    row, count = shape[-1], math.prod(shape)
    if count <= size:
        return None, True
    if row % size == 0:
        return (size,), True
    if size % row == 0 and (math.prod(shape[:-2]) == 1 or shape[-2] % (size // row) == 0):
        return (size // row, row), True
    return (math.gcd(size, row),), False


def spread_runs(part: Tensor, size: int, block: blocks.Block, shape: tuple[int, ...]) -> Tensor:
    """A part with one number per run [runs], in our shape: reshaped, or repeated over the blocks of a run."""
    part_shape = blocks.counts(block, shape)
    count = math.prod(part_shape)
    if count != len(part):
        part = part.repeat_interleave(size // blocks.resolve(block, shape)[-1])[:count]
    return part.reshape(part_shape).contiguous()
