"""Stochastic rounding with a counter-based generator: random bits are a function of a key, the element index and the
step, so they do not depend on the number of threads and a resumed run draws the same bits.

The mixer "lowbias32" (C. Wellons, hash-prospector, 2018), keyed before each multiplication, gives each element two
16-bit halves. Each step adds its number times the golden ratio to both (Weyl sequence). The bits are uniform over
elements. Over the steps of one element they are spread more evenly than independent draws, so rounding errors cancel
sooner. Elements 2**32 apart share their bits. src/optimizer.h computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .formats import Format

_ALL = (1 << 64) - 1
_GOLDEN = 0x9E3779B9  # 2**32 times the golden ratio's fraction


def make_key(*numbers: int) -> tuple[int, int]:
    """Two words of 32 bits from integers (splitmix64's mixer, after each)."""
    x = 0x9E3779B97F4A7C15
    for n in numbers:
        x = (x ^ n) * 0xBF58476D1CE4E5B9 & _ALL
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _ALL
        x ^= x >> 31
    return x & 0xFFFFFFFF, x >> 32


def step_mask(step: int) -> int:
    """The increment that a step adds to the random words, modulo 2**32."""
    return step * _GOLDEN & 0xFFFFFFFF


def random_bits(shape: Sequence[int], key: tuple[int | Tensor, int], device: torch.device | str = "cpu") -> Tensor:
    """int32 with 32 random bits for each element of a tensor, from its row-major index.

    The first word of the key may be a 0-d int32 tensor, as returned by :func:`content_key`.
    """
    count = 1
    for n in shape:
        count *= n
    x = torch.arange(count, dtype=torch.int64, device=device).to(torch.int32)
    one, two = (k if isinstance(k, Tensor) else as_int32(k) for k in key)
    x = x ^ one
    x = (x ^ _right(x, 16)) * as_int32(0x21F0AAAD)
    x = x ^ two
    x = (x ^ _right(x, 15)) * as_int32(0xD35A2D97)
    return (x ^ _right(x, 15)).reshape(tuple(shape))


def high_bits(word: Tensor, offset: int) -> Tensor:
    """The high 16 bits of each word at a step; used for optimizer states. offset: from :func:`step_mask`."""
    return _right(word + as_int32(offset), 16)


def low_bits(word: Tensor, offset: int) -> Tensor:
    """The low 16 bits of each word at a step; used for parameters."""
    return _right((word << 16) + as_int32(offset), 16)


def content_key(x: Tensor) -> Tensor:
    """0-d int32 checksum of all bits of x, independent of the order of addition."""
    bits = x.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])
    total = bits.sum(dtype=torch.int64)
    return (total ^ total >> 32).to(torch.int32)


def encode_stochastic(unit: Tensor, f: Format, word: Tensor) -> Tensor:
    """Stochastically rounded codes of x / scale: the probability of rounding up makes the mean equal x / scale, to
    2**-16 of a step. Values outside the format saturate. word: int32 with 32 random bits per element.

    Raises ValueError for a learned format.
    """
    if f.kind == "learned":
        raise ValueError(f"{f}: stochastic rounding needs a fixed format, and the numbers of this one are learned")
    unit = unit if unit.dtype is torch.float64 else unit.float()
    rand = _right(word, 8).to(unit.dtype) * 2.0**-24
    if f.kind == "int":
        return (unit + rand).floor().clamp(f.lo, f.hi).to(f.code_dtype)
    return _encode_float(unit, f, rand) if f.kind == "float" else _encode_table(unit, f, rand)


def as_int32(word: int) -> int:
    """The int32 of the same 32 bits."""
    return word - (1 << 32) if word >> 31 else word


def _right(x: Tensor, n: int) -> Tensor:
    """x >> n, as unsigned words."""
    return (x >> n) & ((1 << (32 - n)) - 1)


def round_to_bfloat16(x: Tensor, rand: Tensor) -> Tensor:
    """Stochastically round float32 to bfloat16; the mean of the result is x.

    rand: 16 random bits per element. NaN and inf are rounded to nearest.
    """
    rounded = (x.contiguous().view(torch.int32) + rand) & -0x10000
    return torch.where(x.isfinite(), rounded.view(torch.float32), x).to(torch.bfloat16)


def round_high_bits(x: Tensor, rand: Tensor, shift: int) -> Tensor:
    """Bits of float32 x >> shift, rounded stochastically with 16-bit resolution. x: not negative."""
    return (x.contiguous().view(torch.int32) + (rand << (shift - 16))) >> shift


def _encode_float(unit: Tensor, f: Format, rand: Tensor) -> Tensor:
    """For float formats, whose step is a power of two: that of the octave, or of the smallest normal octave."""
    if not (f.native_float or f.values):
        raise ValueError(f"{f} supports round-to-nearest only")
    x = unit.float().clamp(f.lo, f.hi)
    mantissa, least = _steps(f)
    octave = ((x.contiguous().view(torch.int32) >> 23) & 255).clamp(min=127 + least)  # as float32 has it
    step = ((octave - mantissa) << 23).view(torch.float32)
    magnitude = (x.abs() / step + rand).floor() * step
    return f.encode(torch.copysign(magnitude, x))


def _steps(f: Format) -> tuple[int, int]:
    """(mantissa bits, exponent of the smallest normal octave)."""
    if f.native_float:
        info = torch.finfo(f.code_dtype)
        return round(-math.log2(info.eps)), round(math.log2(info.smallest_normal))
    mantissa = round(math.log2(sum(1 <= v < 2 for v in f.values)))
    return mantissa, round(math.log2(min(v for v in f.values if v > 0))) + mantissa


def _encode_table(unit: Tensor, f: Format, rand: Tensor) -> Tensor:
    """For table formats: finds the neighbours by binary search."""
    values = torch.tensor(f.values, dtype=torch.float32, device=unit.device)
    x = unit.float().clamp(f.lo, f.hi).contiguous()
    above = torch.searchsorted(values, x).clamp(1, len(f.values) - 1)
    low, high = values[above - 1], values[above]
    up = (x - low) > rand * (high - low)
    return torch.where(up, above, above - 1).to(f.code_dtype)
