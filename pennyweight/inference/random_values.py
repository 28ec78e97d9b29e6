"""Reproducible random tensors on the CPU, independent of torch's generator and defaults."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Random:
    """Draws float32 tensors."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator("cpu").manual_seed(seed)

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Mean 0, variance 1."""
        return torch.randn(tuple(shape), generator=self.generator, dtype=torch.float32, device="cpu")

    def uniform(self, shape: Sequence[int]) -> Tensor:
        """From 0 to 1."""
        return torch.rand(tuple(shape), generator=self.generator, dtype=torch.float32, device="cpu")

    def integers(self, low: int, high: int, shape: Sequence[int]) -> Tensor:
        """From low to high - 1."""
        return torch.randint(low, high, tuple(shape), generator=self.generator, dtype=torch.int64, device="cpu")


def zeros(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(tuple(shape), dtype=dtype, device="cpu")
