"""Bit streams: codes of 1 to 8 bits packed along the last axis, least significant bits first.

Code i of a row occupies bits [i*b, (i+1)*b) of the row's stream; a row ends on a whole byte, unused bits are zero.
For 4 bits the even code is the low nibble.

The last axis of a convolution is short: one code of a 1x1 kernel would take a whole byte. Its codes are packed flat, as
one row for each entry of the first axis, see :func:`flat_rows`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes [.., n] below 2**bits -> uint8 bytes [.., ceil(n * bits / 8)]. A single number [] stays a byte."""
    if bits == 8 or codes.ndim == 0:
        return codes
    return _regroup(codes, bits, 8)[..., : stream_shape(codes.shape, bits)[-1]].contiguous()


def stream_shape(shape: Sequence[int], bits: int) -> tuple[int, ...]:
    """Shape of the bytes that codes of that shape are packed into."""
    return (*shape[:-1], -(-shape[-1] * bits // 8)) if shape else ()


def flat_rows(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape with all axes but the first in the last one, [O, C, H, W] -> [O, 1, 1, C*H*W], so that one bit stream
    holds all codes of an entry of the first axis, and the number of axes stays."""
    return (shape[0], *(1 for _ in shape[2:]), math.prod(shape[1:])) if len(shape) > 2 else tuple(shape)


def saved_by_flat_rows(shape: Sequence[int], bits: int) -> bool:
    """Whether codes of that shape take at least 1/64 less memory in one stream per entry of the first axis. With less
    to gain, rows of the last axis stay readable one by one (experts)."""
    rows, flat = (math.prod(stream_shape(s, bits)) for s in (shape, flat_rows(shape)))
    return bits < 8 and rows - flat >= rows / 64 > 0


def unpack_bits(stream: Tensor, bits: int, n: int) -> Tensor:
    """Inverse of :func:`pack_bits`: uint8 codes [.., n]."""
    if bits == 8 or stream.ndim == 0:
        return stream
    return _regroup(stream, 8, bits)[..., :n].contiguous()


def _regroup(words: Tensor, old: int, new: int) -> Tensor:
    """Convert a stream of ``old``-bit words to ``new``-bit words, one word per byte, zero-padded to whole groups.

    Uses bytes throughout, because wider integers would take 8 times the memory of the codes.
    """
    period = math.lcm(old, new)  # bits after which the word boundaries of both widths coincide
    groups = F.pad(words, (0, -words.shape[-1] % (period // old)))
    groups = groups.unflatten(-1, (groups.shape[-1] * old // period, period // old))
    out = []
    for start in range(0, period, new):
        word = torch.zeros_like(groups[..., 0])
        for i in range(start // old, -(-(start + new) // old)):
            shift = i * old - start  # within a byte: bits shifted out belong to the neighbouring words
            word |= groups[..., i] << shift if shift >= 0 else groups[..., i] >> -shift
        out.append(word & ((1 << new) - 1))
    return torch.stack(out, -1).flatten(-2)
