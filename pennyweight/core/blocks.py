"""Block arithmetic: which elements share a scale.

A block is right-aligned to the shape: missing leading axes have block 1, -1 is the whole axis, ``None`` the whole
tensor. A block larger than its axis is the whole axis. If a block does not divide an axis, codes are padded to whole
blocks; scale, zero_point and offset have one entry per block on every axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..support.arguments import show
from ..support.errors import ArgumentTypeError

Block = tuple[int, ...] | None


def normalize(block: Sequence[int] | None) -> Block:
    """Canonical form of a block: without leading ones, so that equivalent blocks compare equal."""
    if block is None:
        return None
    if not isinstance(block, Sequence) or not all(hasattr(type(b), "__index__") for b in block):
        raise ArgumentTypeError(f"block must be a tuple of sizes such as (32,) or (-1,), got {show(block)}")
    sizes = tuple(int(b) for b in block)
    if not sizes or any(b == 0 or b < -1 for b in sizes):
        raise ValueError(f"block {tuple(block)}: each entry is a positive size or -1 for the whole axis")
    while len(sizes) > 1 and sizes[0] == 1:
        sizes = sizes[1:]
    return sizes


def resolve(block: Block, shape: Sequence[int]) -> tuple[int, ...]:
    """Block size on each axis of ``shape``. Raises ValueError if the block has more axes than the shape."""
    if block is None:
        return tuple(max(1, n) for n in shape)
    if len(block) > len(shape):
        raise ValueError(f"block {block} has {len(block)} axes but the tensor of shape {tuple(shape)} has {len(shape)}")
    full = (1,) * (len(shape) - len(block)) + block
    return tuple(max(1, n) if b == -1 else min(b, max(1, n)) for b, n in zip(full, shape, strict=True))


def counts(block: Block, shape: Sequence[int]) -> tuple[int, ...]:
    """Number of blocks on each axis: the shape of scale, zero_point and offset."""
    return tuple(-(-n // b) for n, b in zip(shape, resolve(block, shape), strict=True))


def padded(block: Block, shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of the codes: ``shape`` rounded up to whole blocks."""
    return tuple(c * b for c, b in zip(counts(block, shape), resolve(block, shape), strict=True))


def pad(x: Tensor, block: Block) -> Tensor:
    """x with each axis rounded up to whole blocks, repeating its last entry, so that no block's range changes."""
    for axis, (n, m) in enumerate(zip(x.shape, padded(block, x.shape), strict=True)):
        if m != n:
            x = torch.cat([x, x.narrow(axis, n - 1, 1).expand(*x.shape[:axis], m - n, *x.shape[axis + 1 :])], axis)
    return x


def split(x: Tensor, part_shape: Sequence[int]) -> Tensor:
    """View [n0, n1, ..] as [g0, n0/g0, g1, n1/g1, ..], g = ``part_shape``; any strides."""
    for axis in reversed(range(x.ndim)):
        x = x.unflatten(axis, (part_shape[axis], x.shape[axis] // max(1, part_shape[axis])))
    return x


def expand(part: Tensor) -> Tensor:
    """A part [g0, g1, ..] as [g0, 1, g1, 1, ..], so that it broadcasts against :func:`split`."""
    for axis in reversed(range(part.ndim)):
        part = part.unsqueeze(axis + 1)
    return part


def inner_axes(rank: int) -> tuple[int, ...]:
    """Axes of a :func:`split` tensor that lie inside a block."""
    return tuple(range(1, 2 * rank, 2))
