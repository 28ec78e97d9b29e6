"""Helpers of torchao's bit packing and of its scaled float8 products."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

__all__ = ["abs_lsh", "abs_rsh", "preprocess_scale"]

Bits = TypeVar("Bits", int, Tensor)


def abs_lsh(data: Bits, shift: int) -> Bits:
    """data << shift; to the right if the shift is negative."""
    return data << shift if shift >= 0 else data >> -shift


def abs_rsh(data: Bits, shift: int) -> Bits:
    """data >> shift; to the left if the shift is negative."""
    return abs_lsh(data, -shift)


def preprocess_scale(input_scale: Tensor, input_shape: tuple[int, ...]) -> Tensor:
    """The scale of a float8 input with two axes: [1, 1], or one row per row of the flattened input."""
    if input_scale.numel() == 1:
        return input_scale.reshape(1, 1)
    return input_scale.unsqueeze(-1).flatten(0, max(0, input_scale.dim() - 1))
