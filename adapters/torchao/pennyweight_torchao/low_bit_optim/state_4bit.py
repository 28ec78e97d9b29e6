"""torchao.optim.subclass_4bit: states of 4 bits, a dynamic map for the first moment and a linear one for the second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from pennyweight.core.formats import DYNAMIC4, LINEAR4, NF4, UFLOAT4, Format
from pennyweight.core.tensor import AffineQuantizedTensor as QT

from .state_view import OptimState, format_of

__all__ = ["OptimState4bit", "get_qmap_signed", "get_qmap_unsigned"]


def get_qmap_signed() -> tuple[float, ...]:
    """The 16 numbers of a first moment."""
    return DYNAMIC4.values


def get_qmap_unsigned() -> tuple[float, ...]:
    """The 16 numbers of a second moment: 1/16 to 1, without zero (Li, Chen and Zhu 2023)."""
    return LINEAR4.values


class OptimState4bit(OptimState):
    """4-bit state. codes: uint8 with two codes per byte, the first one high, flattened; scale: one float32 per block of
    the flattened state."""

    FORMATS: ClassVar = frozenset((DYNAMIC4, LINEAR4, NF4, UFLOAT4))
    optional_tensor_attribute_names: ClassVar[list[str]] = ["shape", "dtype"]

    @classmethod
    def build(
        cls, codes: Tensor, scale: Tensor, qmap: Tensor, signed: bool, shape: Sequence[int] | int,
        dtype: torch.dtype | None = None,
    ) -> QT:  # fmt: skip
        """Raises ValueError for another map than :func:`get_qmap_signed` or :func:`get_qmap_unsigned`, or ours."""
        shape = _sizes(shape)
        assert codes.dtype is torch.uint8, f"OptimState4bit: codes must be uint8, got {codes.dtype}"
        assert codes.shape == (math.prod(shape) // 2,), (
            f"OptimState4bit: codes of {list(shape)} must be {math.prod(shape) // 2} bytes, got {list(codes.shape)}"
        )
        fmt = format_of(qmap, (DYNAMIC4, NF4) if signed else (LINEAR4, UFLOAT4), cls.__name__)
        return cls._packed(torch.stack([codes >> 4, codes & 15], -1).view(shape), scale, fmt, dtype)

    @classmethod
    def _packed(cls, codes: Tensor, scale: Tensor, fmt: Format, dtype: torch.dtype | None) -> QT:
        plain = cls.make(codes, scale, fmt, codes.shape, dtype, "plain")
        return plain.to_layout("bits")

    @classmethod
    def restore(cls, state: dict[str, Any], shell: Tensor) -> QT:
        return super().restore({**state, "shape": state["_shape"]}, shell)

    @classmethod
    def zeros(
        cls, shape: Sequence[int] | int, signed: bool = True, block_size: int = 128,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> QT:  # fmt: skip
        """A state whose scales are zero."""
        shape = _sizes(shape)
        codes = torch.zeros(shape, dtype=torch.uint8, device=device)
        scale = torch.zeros(codes.numel() // block_size, dtype=torch.float32, device=device)
        return cls._packed(codes, scale, DYNAMIC4 if signed else LINEAR4, dtype)

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        """torchao's members of a state."""
        codes = w.codes.flatten()
        return {**OptimState.take(w), "codes": codes[::2] << 4 | codes[1::2], "shape": tuple(w.shape)}


def _sizes(shape: Sequence[int] | int) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)
