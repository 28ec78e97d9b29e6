"""Codes of 1 to 7 bits in shards of 4, 2 and 1 bits, as in torchao's UintxTensor.

A shard of e bits splits the packed axis into 8 / e consecutive chunks and stores chunk j at bit e * j of its bytes.
The lowest bits of the codes are the first shard.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .integer_ranges import require

__all__ = ["maskbits", "numbits", "pack", "pack_cpu", "shifts", "unpack", "unpack_cpu"]

numbits = {bits: tuple(e for e in (4, 2, 1) if bits & e) for bits in range(1, 8)}  # width of each shard
shifts = {bits: tuple(sum(widths[:i]) for i in range(len(widths))) for bits, widths in numbits.items()}
maskbits = {
    bits: tuple(((1 << e) - 1) << s for e, s in zip(widths, shifts[bits], strict=True))
    for bits, widths in numbits.items()
}


def pack(data: Tensor, elem_size: int, dim: int = -1) -> tuple[Tensor, ...]:
    """Shards of codes below 2**elem_size. data: uint8, a multiple of 8 long along ``dim``; elem_size: 1 to 7.

    Raises AssertionError for another dtype or length and KeyError for another element size.
    """
    require(data.shape[dim] % 8 == 0, f"pack dimension size ({data.shape[dim]}) is not divisible by 8")
    require(data.dtype == torch.uint8, f"data must be uint8, got {data.dtype}")
    shards = []
    for e, shift in zip(numbits[elem_size], shifts[elem_size], strict=True):
        bits = (data >> shift) & ((1 << e) - 1)
        shard = torch.zeros_like(bits.narrow(dim, 0, data.shape[dim] * e // 8))
        for j, chunk in enumerate(bits.chunk(8 // e, dim)):
            shard |= chunk << (e * j)
        shards.append(shard)
    return tuple(shards)


def unpack(data: Sequence[Tensor], elem_size: int, dim: int = 0) -> Tensor:
    """Codes of :func:`pack`'s shards: uint8. Note the default ``dim``, which is not pack's."""
    require(
        len(data) == len(numbits[elem_size]),
        f"{elem_size}-bit codes have {len(numbits[elem_size])} shards, got {len(data)}",
    )
    codes: Tensor | None = None
    for shard, e, shift in zip(data, numbits[elem_size], shifts[elem_size], strict=True):
        bits = torch.cat([(shard >> (e * j)) & ((1 << e) - 1) for j in range(8 // e)], dim) << shift
        codes = bits if codes is None else codes | bits
    assert codes is not None
    return codes


def pack_cpu(data: Tensor, elem_size: int, dim: int = -1) -> list[Tensor]:
    """:func:`pack`, as a list."""
    return list(pack(data, elem_size, dim))


def unpack_cpu(data: Sequence[Tensor], elem_size: int, dim: int = -1) -> Tensor:
    """:func:`unpack`, along the last axis by default."""
    return unpack(data, elem_size, dim)
