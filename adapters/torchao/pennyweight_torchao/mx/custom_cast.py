"""Packed fp4 of torchao's module ``custom_cast`` (before 0.12), with the even element in the high half of a byte.

``kernels``, its successor, has the order of the newest release: the even element is low.
"""

from __future__ import annotations

from torch import Tensor

from pennyweight.io.codecs.torchao.mx import swap_halves

from . import element_codes

__all__ = ["pack_uint4", "swap_halves", "triton_f4_to_bf16", "triton_f4_to_scaled_bf16", "unpack_uint4"]


def pack_uint4(uint8_data: Tensor) -> Tensor:
    """Two codes in a byte, the even element in the high half."""
    return swap_halves(element_codes.pack_uint4(uint8_data))


def unpack_uint4(uint8_data: Tensor) -> Tensor:
    """Inverse of :func:`pack_uint4`."""
    return element_codes.unpack_uint4(swap_halves(uint8_data))


def triton_f4_to_bf16(x: Tensor) -> Tensor:
    """bfloat16 numbers of packed fp4 codes."""
    return element_codes.triton_f4_to_bf16(swap_halves(x))


def triton_f4_to_scaled_bf16(x: Tensor, s_e8m0: Tensor, mx_block_size: int) -> Tensor:
    """bfloat16 values of packed fp4 codes under the scales of their blocks of ``mx_block_size``."""
    return element_codes.triton_f4_to_scaled_bf16(swap_halves(x), s_e8m0, mx_block_size)
