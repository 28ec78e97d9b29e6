"""Quantizers: a tensor -> its nearest values q and the set Q of all values that q may have.

``dim`` None: one set for the tensor, Q [n]. ``dim`` -1: one set per row of a matrix, Q [rows, n].
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

__all__ = ["AsymUnifQuantizer", "MaxUnifQuantizer", "Quantizer", "TernaryUnifQuantizer", "UnifQuantizer", "get_q_max"]


class Quantizer(ABC):
    """Interface of quantizers. center: subtract the mean before quantizing and add it to the result."""

    def __init__(self, center: bool = False) -> None:
        self.center = center

    @abstractmethod
    def get_quant_size(self, b: int) -> int:
        """Number of values with ``b`` bits; b = 0 is ternary."""

    @abstractmethod
    def quantize(self, p: Tensor, b: int, dim: int | None = None) -> tuple[Tensor, Tensor]:
        """(q like p, Q ascending). p is not changed."""

    @staticmethod
    def remove_mean(p: Tensor, dim: int | None = None) -> tuple[Tensor, Tensor]:
        """(p - mean, mean); the mean of each row with ``dim`` -1, else of the tensor."""
        mean = p.mean(dim=dim, keepdim=dim is not None)
        return p - mean, mean

    def _centered(self, p: Tensor, dim: int | None) -> tuple[Tensor, Tensor | None]:
        """A copy to work on, and the mean that was subtracted."""
        return self.remove_mean(p.detach(), dim) if self.center else (p.detach().clone(), None)


def get_q_max(q: Tensor, b: int, dim: int | None = None, scale_method: str = "mean") -> Tensor:
    """Largest value of the grid: "mean": min(b mean|q|, max|q|); "max": max|q|. Raises ValueError for another method.

    dim -1 gives one per row, [rows, 1]; None a scalar.
    """
    if scale_method not in ("mean", "max"):
        raise ValueError(f"scale_method must be 'mean' or 'max', got {scale_method!r}")
    size = q.abs()
    most = size.amax() if dim is None else size.amax(dim, keepdim=True)
    if scale_method == "max":
        return most
    return torch.minimum(b * size.mean(dim=dim, keepdim=dim is not None), most)


def _spread(numbers: Tensor, scale: Tensor, dim: int | None) -> Tensor:
    """numbers [n] times each scale: [n] or [rows, n]."""
    return numbers * scale if dim is None else numbers.unsqueeze(0) * scale


def _not_ternary(b: int) -> None:
    if b <= 0:
        raise ValueError(f"b must be at least 1, got {b}; b = 0 (ternary) needs TernaryUnifQuantizer or LSBQuantizer")


class UnifQuantizer(Quantizer):
    """Evenly spaced values, symmetric about zero (or the mean):

        q = s (round(p / s - zero_point) + zero_point),  s = q_max / (2^(b-1) - int_shift),  |p| clamped to q_max

    scale_method  q_max as in :func:`get_q_max`
    int_shift     0.5: 2^b values (b = 2: -1.5, -0.5, 0.5, 1.5 times s); 1: 2^b - 1 values with zero
    zero_point    offset of the values from integers, in steps
    """

    def __init__(
        self, center: bool = False, scale_method: str = "mean", int_shift: float = 0.5, zero_point: float = 0.5
    ) -> None:
        if scale_method not in ("max", "mean"):
            raise ValueError(f"{type(self).__name__}: scale_method must be 'mean' or 'max', got {scale_method!r}")
        super().__init__(center=center)
        self.scale_method, self.int_shift, self.zero_point = scale_method, int_shift, zero_point

    def get_quant_size(self, b: int) -> int:
        """Numbers between -(2^(b-1) - int_shift) and its negative, in steps of one."""
        return math.floor(2**b - 2 * self.int_shift) + 1

    def quantize(self, p: Tensor, b: int, dim: int | None = None) -> tuple[Tensor, Tensor]:
        _not_ternary(b)
        q, mean = self._centered(p, dim)
        q_max = get_q_max(q, b, dim, self.scale_method).clamp_(min=torch.finfo(q.dtype).tiny)
        most = 2 ** (b - 1) - self.int_shift
        s = q_max / most
        q = torch.minimum(torch.maximum(q, -q_max), q_max)
        q = q.div_(s).sub_(self.zero_point).round_().add_(self.zero_point).mul_(s)
        values = _spread(torch.arange(-most, most + 1e-5, dtype=p.dtype, device=p.device), s, dim)
        return (q, values) if mean is None else (q + mean, values + mean)


class MaxUnifQuantizer(UnifQuantizer):
    """:class:`UnifQuantizer` with 2^b - 1 values that include zero, scaled to max|p|."""

    def __init__(
        self, center: bool = False, scale_method: str = "max", int_shift: float = 1.0, zero_point: float = 0.0
    ) -> None:
        super().__init__(center, scale_method, int_shift, zero_point)


class AsymUnifQuantizer(Quantizer):
    """q = s round(p / s), s = (max - min) / (2^b - 1); Q = s {-2^(b-1), .., 2^(b-1) - 1}.

    As in torchao, q itself is not limited to Q where the values of p are not centred; with ``center`` they nearly are.
    """

    def get_quant_size(self, b: int) -> int:
        """2^b."""
        return 2**b

    def quantize(self, p: Tensor, b: int, dim: int | None = None) -> tuple[Tensor, Tensor]:
        _not_ternary(b)
        q, mean = self._centered(p, dim)
        low, high = (q.min(), q.max()) if dim is None else (q.amin(dim, keepdim=True), q.amax(dim, keepdim=True))
        half = 2 ** (b - 1)
        s = ((high - low) / (2 * half - 1)).clamp_(min=torch.finfo(q.dtype).tiny)
        zero_point = (low / s).round_()
        q = q.div_(s).round_().sub_(zero_point).add_(zero_point).mul_(s)
        values = _spread(torch.arange(-half, half, dtype=p.dtype, device=p.device), s, dim)
        return (q, values) if mean is None else (q + mean, values + mean)


class TernaryUnifQuantizer(Quantizer):
    """Values -s, 0, s with s = max|p| / 1.5; ``b`` must be 0."""

    def get_quant_size(self, b: int) -> int:
        """3."""
        return 3

    def quantize(self, p: Tensor, b: int, dim: int | None = None) -> tuple[Tensor, Tensor]:
        if b != 0:
            raise ValueError(f"TernaryUnifQuantizer: quant_bits must be 0 (ternary), got {b}; or use UnifQuantizer")
        q, mean = self._centered(p, dim)
        s = get_q_max(q, b, dim, "max").clamp_(min=torch.finfo(q.dtype).tiny) / 1.5
        q = q.div_(s).round_().clamp_(-1, 1).mul_(s)
        values = _spread(torch.tensor([-1, 0, 1], dtype=p.dtype, device=p.device), s, dim)
        return (q, values) if mean is None else (q + mean, values + mean)
