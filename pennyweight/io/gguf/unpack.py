"""Bit fields of ggml's blocks. A run of ``w`` bytes contains ``len(shifts)`` runs of ``w`` fields, stacked by shift."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fields(raw: Tensor, run: int, shifts: Sequence[int], bits: int) -> Tensor:
    """[B, g * run] bytes as [B, g * len(shifts) * run] fields: for each run of bytes, first all fields at the first
    shift, then all at the next. Returns uint8."""
    below = torch.tensor(shifts, dtype=torch.uint8, device="cpu")[:, None]
    out = (raw.unflatten(1, (raw.shape[1] // run, 1, run)) >> below) & ((1 << bits) - 1)
    return out.flatten(1)


def join(values: Tensor, run: int, shifts: Sequence[int]) -> Tensor:
    """Inverse of :func:`fields`: [B, g * len(shifts) * run] fields as [B, g * run] bytes."""
    n = len(shifts)
    view = values.unflatten(1, (values.shape[1] // (n * run), n, run))
    out = view[:, :, 0] << shifts[0]
    for i in range(1, n):
        out = out | (view[:, :, i] << shifts[i])
    return out.flatten(1)


def numbers(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of each row as numbers of a wider dtype; copied, since data in a file may be unaligned."""
    return raw.clone(memory_format=torch.contiguous_format).view(dtype)


def half(raw: Tensor) -> Tensor:
    """[B, 2 * k] bytes as [B, k] float16."""
    return numbers(raw, torch.float16)


def raw_bytes(x: Tensor) -> Tensor:
    """The bytes of each row of x. Returns uint8."""
    return x.contiguous().view(torch.uint8)


def minus(x: Tensor) -> Tensor:
    """-x of float16 by its sign bit, so that every bit pattern is recovered."""
    return (x.contiguous().view(torch.int16) ^ -0x8000).view(torch.float16)


def cut(raw: Tensor, *sizes: int) -> list[Tensor]:
    """Split a block into the columns of its fields."""
    return list(raw.split(sizes, 1))
