"""torchao.optim.subclass_8bit: states of 8 bits with a dynamic map."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from pennyweight.core.formats import DYNAMIC8, DYNAMIC8_FLOAT32, UDYNAMIC8, UFLOAT8
from pennyweight.core.tensor import AffineQuantizedTensor as QT

from .state_view import OptimState, format_of

__all__ = ["OptimState8bit", "get_qmap_signed", "get_qmap_unsigned"]


def get_qmap_signed() -> tuple[float, ...]:
    """The 256 numbers of a first moment (Dettmers 2015, dynamic tree)."""
    return DYNAMIC8_FLOAT32.values


def get_qmap_unsigned() -> tuple[float, ...]:
    """The 256 numbers of a second moment."""
    return UDYNAMIC8.values


class OptimState8bit(OptimState):
    """8-bit state. codes: uint8, of the shape of the state; scale: one float32 per block of the flattened state."""

    FORMATS: ClassVar = frozenset((DYNAMIC8_FLOAT32, DYNAMIC8, UDYNAMIC8, UFLOAT8))

    @classmethod
    def build(cls, codes: Tensor, scale: Tensor, qmap: Tensor, signed: bool, dtype: torch.dtype | None = None) -> QT:
        """Raises ValueError for another map than :func:`get_qmap_signed` or :func:`get_qmap_unsigned`, or ours."""
        assert codes.dtype is torch.uint8, f"OptimState8bit: codes must be uint8, got {codes.dtype}"
        known = (DYNAMIC8_FLOAT32, DYNAMIC8) if signed else (UDYNAMIC8, UFLOAT8)
        return cls.make(codes, scale, format_of(qmap, known, cls.__name__), codes.shape, dtype, "plain")

    @classmethod
    def zeros(
        cls, shape: torch.Size | tuple[int, ...] | int, signed: bool = True, block_size: int = 256,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> QT:  # fmt: skip
        """A state whose scales are zero."""
        codes = torch.zeros(shape, dtype=torch.uint8, device=device)
        scale = torch.zeros(codes.numel() // block_size, dtype=torch.float32, device=device)
        fmt = DYNAMIC8_FLOAT32 if signed else UDYNAMIC8
        return cls.make(codes, scale, fmt, codes.shape, dtype, "plain")
