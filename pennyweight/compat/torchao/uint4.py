"""Two 4-bit codes per byte along the last axis, the first in the high nibble, as in torchao's UInt4Tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .integer_ranges import require

__all__ = [
    "dequantize_per_tensor_uint4", "down_size", "pack_uint4", "quantize_per_tensor_uint4", "unpack_uint4", "up_size",
]  # fmt: skip


def down_size(size: Sequence[int]) -> tuple[int, ...]:
    """The shape packed. Raises AssertionError where the last axis is odd."""
    require(size[-1] % 2 == 0, f"{tuple(size)} last dim not divisible by two")
    return (*size[:-1], size[-1] // 2)


def up_size(size: Sequence[int]) -> tuple[int, ...]:
    """The shape unpacked."""
    return (*size[:-1], size[-1] * 2)


def pack_uint4(uint8_data: Tensor) -> Tensor:
    """uint8 codes [.., n] below 16 -> bytes [.., n / 2]. Raises AssertionError where n is odd."""
    down_size(uint8_data.shape)
    return uint8_data[..., ::2] << 4 | uint8_data[..., 1::2]


def unpack_uint4(uint8_data: Tensor) -> Tensor:
    """Bytes [.., n] -> uint8 codes [.., 2 n]."""
    return torch.stack([uint8_data >> 4, uint8_data & 15], -1).reshape(up_size(uint8_data.shape))


def quantize_per_tensor_uint4(input: Tensor, scale: float, zero_point: int) -> Tensor:
    """Packed codes clamp(round(x * (1 / scale)) + zero_point, 0, 15)."""
    codes = ((input * (1.0 / scale)).round() + zero_point).clamp(0, 15)
    return pack_uint4(codes.to(torch.uint8))


def dequantize_per_tensor_uint4(input: Tensor, scale: float, zero_point: int) -> Tensor:
    """(code - zero_point) * scale in float32."""
    return (unpack_uint4(input).to(torch.float32) - zero_point) * scale
