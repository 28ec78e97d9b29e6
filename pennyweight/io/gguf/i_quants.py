"""ggml's I-quants of 1 to 3 bits, read-only: an index selects 4 or 8 values at once from a codebook.

For every codebook, each element is one of a few values (6 or 16) times a scale that is exact in float32, so the
parts are those of a table format with float32 scales: the same values, in 3 or 4 bits per element. The codebooks come
from the ``gguf`` package. Source of the layouts: its dequantizers, which the tests compare with.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ...core.formats import IQ2, IQ3_S, IQ3_XXS, Format
from ...core.numerics import Parts
from .unpack import cut, fields, half, numbers

_EIGHT = tuple(range(8))
_NIBBLES = (0, 4)


@cache
def codebook(name: str) -> Tensor:
    """[entries, 4 or 8] values of a type's codebook. float32. Raises ImportError if gguf is not installed."""
    try:
        from gguf import quants
    except ImportError as e:
        raise ImportError(f"{name} needs the codebooks of the gguf package: pip install gguf") from e
    kind = getattr(quants, name)  # a name from the table in blocks.py, never from a file
    kind.init_grid()
    return torch.from_numpy(kind.grid[0, 0].copy())


@cache
def _positions(name: str, f: Format) -> Tensor:
    """The codebook as indices into the magnitudes of a format that has each value and its negative."""
    half_of = torch.tensor(f.values[len(f.values) // 2 :], dtype=torch.float32, device="cpu")
    return torch.searchsorted(half_of, codebook(name)).to(torch.uint8)


def _signed(name: str, f: Format, index: Tensor, negative: Tensor) -> Tensor:
    """Codes [B, k * width] of codebook entries [B, k] with a sign per element, 1 if negative."""
    n = len(f.values) // 2
    place = _positions(name, f)[index.long()].flatten(1)
    return torch.where(negative == 1, n - 1 - place, n + place)


def _words(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Little-endian unsigned integers of 2 or 4 bytes, as int64."""
    signed = numbers(raw, dtype).long()
    return signed & ((1 << 8 * dtype.itemsize) - 1)


def _even_signs(seven: Tensor) -> Tensor:
    """Eight signs from seven bits: the last makes the number of set bits even. [B, k] to [B, 8 * k]."""
    parity = seven
    for shift in (4, 2, 1):
        parity = parity ^ (parity >> shift)
    return fields((seven | ((parity & 1) << 7)).to(torch.uint8), 1, _EIGHT, 1)


def _bit_fields(words: Tensor, shifts: tuple[int, ...], bits: int) -> Tensor:
    """[B, k] words as [B, k * len(shifts)] fields."""
    return ((words[:, :, None] >> torch.tensor(shifts, device="cpu")) & ((1 << bits) - 1)).flatten(1)


def _scale(d: Tensor, steps: Tensor, factor: float) -> Tensor:
    """d * (steps + 1/2) * factor: exact, since d has 11 bits and steps at most 4."""
    return half(d).float() * (steps + 0.5) * factor


def iq2_xxs(raw: Tensor) -> Parts:
    d, qs = cut(raw, 2, 64)
    index = qs.unflatten(1, (8, 8))[:, :, :4].flatten(1)
    word = _words(qs, torch.int32)[:, 1::2]
    codes = _signed("IQ2_XXS", IQ2, index, _even_signs(_bit_fields(word, (0, 7, 14, 21), 7)))
    return Parts(codes, _scale(d, word >> 28, 0.25))


def iq2_xs(raw: Tensor) -> Parts:
    d, qs, scales = cut(raw, 2, 64, 8)
    word = _words(qs, torch.int16)
    codes = _signed("IQ2_XS", IQ2, word & 511, _even_signs(word >> 9))
    return Parts(codes, _scale(d, fields(scales, 1, _NIBBLES, 4), 0.25))


def iq2_s(raw: Tensor) -> Parts:
    d, qs, signs, qh, scales = cut(raw, 2, 32, 32, 8, 8)
    index = qs.long() | (fields(qh, 1, (0, 2, 4, 6), 2).long() << 8)
    codes = _signed("IQ2_S", IQ2, index, fields(signs, 1, _EIGHT, 1))
    return Parts(codes, _scale(d, fields(scales, 1, _NIBBLES, 4), 0.25))


def iq3_xxs(raw: Tensor) -> Parts:
    d, qs, scales = cut(raw, 2, 64, 32)
    word = _words(scales, torch.int32)
    codes = _signed("IQ3_XXS", IQ3_XXS, qs, _even_signs(_bit_fields(word, (0, 7, 14, 21), 7)))
    return Parts(codes, _scale(d, word >> 28, 0.5))


def iq3_s(raw: Tensor) -> Parts:
    d, qs, qh, signs, scales = cut(raw, 2, 64, 8, 32, 4)
    index = qs.long() | (fields(qh, 1, _EIGHT, 1).long() << 8)
    codes = _signed("IQ3_S", IQ3_S, index, fields(signs, 1, _EIGHT, 1))
    return Parts(codes, _scale(d, fields(scales, 1, _NIBBLES, 4), 2.0))


def _shifted(index: Tensor, up: Tensor) -> Tensor:
    """Codes of -1, 0, 1 plus 1/8 if ``up`` is 1, else minus 1/8; ``up`` is per entry."""
    digits = codebook("IQ1_S").to(torch.int8)[index]
    return (2 * (digits + 1) + up[:, :, None]).to(torch.uint8).flatten(1)


def iq1_s(raw: Tensor) -> Parts:
    d, qs, qh = cut(raw, 2, 32, 16)
    word = _words(qh, torch.int16)
    index = qs.long() | (_bit_fields(word, (0, 3, 6, 9), 3) << 8)
    up = 1 - (word >> 15)
    return Parts(_shifted(index, up.repeat_interleave(4, 1)), _scale(d, (word >> 12) & 7, 2.0))


def iq1_m(raw: Tensor) -> Parts:
    """The float16 is in the upper four bits of four words, the first word lowest."""
    qs, qh, scales = cut(raw, 32, 16, 8)
    word = _words(scales, torch.int16)
    bits = ((word >> 12) << torch.tensor([0, 4, 8, 12], device="cpu")).sum(1, keepdim=True)
    d = bits.to(torch.int16).view(torch.uint8)
    index = qs.long() | (fields(qh, 1, _NIBBLES, 3).long() << 8)
    up = 1 - (fields(qh, 1, _NIBBLES, 4) >> 3).to(torch.int64)
    return Parts(_shifted(index, up), _scale(d, _bit_fields(word, (0, 3, 6, 9), 3), 2.0))
