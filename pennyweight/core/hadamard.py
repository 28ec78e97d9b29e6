"""Sylvester's Hadamard matrices, and the rotation of blocks of channels by them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .tracing import plain_tensors


def sylvester(n: int, device: Any = "cpu") -> Tensor:
    """int64 [n, n] of +1 and -1 for a power of two n, symmetric, H H = n I: H[i, j] = -1 where i and j have an odd
    number of one bits in common."""
    i = torch.arange(n, device=device, dtype=torch.int64)
    ones = i.unsqueeze(0) & i.unsqueeze(1)
    for shift in (16, 8, 4, 2, 1):
        ones = ones ^ (ones >> shift)
    return 1 - 2 * (ones & 1)


def rotate_blocks(x: Tensor, n: int) -> Tensor:
    """x [.., D] -> the same shape and dtype: each n neighbours of the last axis times H(n) / sqrt(n), in float32
    (float64 for float64).

    n is a power of two that divides D. Its own inverse, up to rounding.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    matrix = (_normed if torch.compiler.is_compiling() else _cached)(n, wide.dtype).to(wide.device)
    return (wide.unflatten(-1, (-1, n)) @ matrix).flatten(-2).to(x.dtype)


def _normed(n: int, dtype: torch.dtype) -> Tensor:
    return (sylvester(n).double() / n**0.5).to(dtype)


@lru_cache(maxsize=16)
def _cached(n: int, dtype: torch.dtype) -> Tensor:
    with plain_tensors():
        return _normed(n, dtype)
