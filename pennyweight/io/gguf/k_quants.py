"""ggml's super-blocks of 256 elements with quantized scales: [B, bytes of a block] to parts and back.

A K-quant subtracts dmin * m while a spec adds an offset, so the scale of the offset is -dmin (its sign bit flipped).
Sources: ggml-common.h and the dequantizers of the ``gguf`` package, which the tests compare with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.numerics import Parts
from .unpack import cut, fields, half, join, minus, raw_bytes

_NIBBLES = (0, 4)
_PAIRS = (0, 2, 4, 6)
_EIGHT = tuple(range(8))


def q2_k(raw: Tensor) -> Parts:
    scales, qs, d, dmin = cut(raw, 16, 64, 2, 2)
    return Parts(
        fields(qs, 32, _PAIRS, 2), Parts(scales & 15, half(d)), offset=Parts(scales >> 4, minus(half(dmin)))
    )  # fmt: skip


def pack_q2_k(p: Parts) -> Tensor:
    scales = p.scale.codes | (p.offset.codes << 4)
    d, dmin = raw_bytes(p.scale.scale), raw_bytes(minus(p.offset.scale))
    return torch.cat([scales, join(p.codes, 32, _PAIRS), d, dmin], 1)


def q3_k(raw: Tensor) -> Parts:
    hmask, qs, low, high, d = cut(raw, 32, 64, 8, 4, 2)
    codes = fields(qs, 32, _PAIRS, 2) | (fields(hmask, 32, _EIGHT, 1) << 2)
    scales = fields(low, 8, _NIBBLES, 4) | (fields(high, 4, _PAIRS, 2) << 4)
    return Parts(codes.view(torch.int8) - 4, Parts(scales.view(torch.int8) - 32, half(d)))


def pack_q3_k(p: Parts) -> Tensor:
    codes, scales = (p.codes + 4).view(torch.uint8), (p.scale.codes + 32).view(torch.uint8)
    return torch.cat(
        [
            join(codes >> 2, 32, _EIGHT), join(codes & 3, 32, _PAIRS),
            join(scales & 15, 8, _NIBBLES), join(scales >> 4, 4, _PAIRS), raw_bytes(p.scale.scale),
        ], 1,
    )  # fmt: skip


def _six_bits(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and eight 6-bit mins from 12 bytes: first the first four of each, with the upper two bits of
    the last four above them; then the lower four bits of the last four, scales below mins."""
    low = raw[:, :8] & 63
    high = (raw[:, :8] >> 6) << 4
    last = raw[:, 8:]
    scales = torch.cat([low[:, :4], (last & 15) | high[:, :4]], 1)
    return scales, torch.cat([low[:, 4:], (last >> 4) | high[:, 4:]], 1)


def _pack_six_bits(scales: Tensor, mins: Tensor) -> Tensor:
    first = [x[:, :4] | ((x[:, 4:] >> 4) << 6) for x in (scales, mins)]
    return torch.cat([*first, (scales[:, 4:] & 15) | ((mins[:, 4:] & 15) << 4)], 1)


def _with_mins(codes: Tensor, d: Tensor, dmin: Tensor, packed: Tensor) -> Parts:
    scales, mins = _six_bits(packed)
    return Parts(codes, Parts(scales, half(d)), offset=Parts(mins, minus(half(dmin))))


def _head(p: Parts) -> list[Tensor]:
    return [
        raw_bytes(p.scale.scale), raw_bytes(minus(p.offset.scale)), _pack_six_bits(p.scale.codes, p.offset.codes)
    ]  # fmt: skip


def q4_k(raw: Tensor) -> Parts:
    d, dmin, scales, qs = cut(raw, 2, 2, 12, 128)
    return _with_mins(fields(qs, 32, _NIBBLES, 4), d, dmin, scales)


def pack_q4_k(p: Parts) -> Tensor:
    return torch.cat([*_head(p), join(p.codes, 32, _NIBBLES)], 1)


def q5_k(raw: Tensor) -> Parts:
    d, dmin, scales, qh, qs = cut(raw, 2, 2, 12, 32, 128)
    return _with_mins(fields(qs, 32, _NIBBLES, 4) | (fields(qh, 32, _EIGHT, 1) << 4), d, dmin, scales)


def pack_q5_k(p: Parts) -> Tensor:
    return torch.cat([*_head(p), join(p.codes >> 4, 32, _EIGHT), join(p.codes & 15, 32, _NIBBLES)], 1)


def q6_k(raw: Tensor) -> Parts:
    ql, qh, scales, d = cut(raw, 128, 64, 16, 2)
    codes = fields(ql, 64, _NIBBLES, 4) | (fields(qh, 32, _PAIRS, 2) << 4)
    return Parts(codes.view(torch.int8) - 32, Parts(scales.contiguous().view(torch.int8), half(d)))


def pack_q6_k(p: Parts) -> Tensor:
    codes = (p.codes + 32).view(torch.uint8)
    scales = [raw_bytes(p.scale.codes), raw_bytes(p.scale.scale)]
    return torch.cat([join(codes & 15, 64, _NIBBLES), join(codes >> 4, 32, _PAIRS), *scales], 1)


def iq4_xs(raw: Tensor) -> Parts:
    d, high, low, qs = cut(raw, 2, 2, 4, 128)
    scales = fields(low, 1, _NIBBLES, 4) | (fields(high, 1, _PAIRS, 2) << 4)
    return Parts(fields(qs, 16, _NIBBLES, 4), Parts(scales.view(torch.int8) - 32, half(d)))


def pack_iq4_xs(p: Parts) -> Tensor:
    scales = (p.scale.codes + 32).view(torch.uint8)
    high, low = join(scales >> 4, 1, _PAIRS), join(scales & 15, 1, _NIBBLES)
    return torch.cat([raw_bytes(p.scale.scale), high, low, join(p.codes, 16, _NIBBLES)], 1)
