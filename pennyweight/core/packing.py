"""Bit streams: codes of 1 to 8 bits packed along the last axis, least significant bits first.

Code i of a row occupies bits [i*b, (i+1)*b) of the row's stream; a row ends on a whole byte, unused bits are zero.
For 4 bits the even code is the low nibble.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [.., n] below 2**bits -> uint8 bytes [.., ceil(n * bits / 8)]."""
    if bits == 8:
        return codes
    n = codes.shape[-1]
    groups = F.pad(codes, (0, -n % 8)).unflatten(-1, (-1, 8)).to(torch.int64)  # 8 codes make ``bits`` bytes
    word = groups[..., 0].clone()
    for i in range(1, 8):
        word |= groups[..., i] << (bits * i)
    stream = torch.stack([(word >> (8 * i)) & 255 for i in range(bits)], -1).to(torch.uint8)
    return stream.flatten(-2)[..., : -(-n * bits // 8)].contiguous()


def unpack_bits(stream: Tensor, bits: int, n: int) -> Tensor:
    """Inverse of :func:`pack_bits`: uint8 codes [.., n]."""
    if bits == 8:
        return stream
    groups = F.pad(stream, (0, -stream.shape[-1] % bits)).unflatten(-1, (-1, bits)).to(torch.int64)
    word = groups[..., 0].clone()
    for i in range(1, bits):
        word |= groups[..., i] << (8 * i)
    codes = torch.stack([(word >> (bits * i)) & ((1 << bits) - 1) for i in range(8)], -1).to(torch.uint8)
    return codes.flatten(-2)[..., :n].contiguous()
