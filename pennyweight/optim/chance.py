"""Rounding by chance, with numbers by counter: those of an element are a function of a key, its index and the step, so
that a resumed run has the same ones, and so have any number of threads.

The mixer "lowbias32" (C. Wellons, hash-prospector, 2018), keyed before each of its products, gives an element two
halves of 16 bits. A step adds itself times the golden ratio to each (Weyl's sequence): over elements the numbers are
uniform, and over the steps of an element they are spread more evenly than chance would have them, so that what is
rounded away comes back sooner. Elements 2**32 apart share their numbers. src/optimizer.h computes the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_ALL = (1 << 64) - 1
_GOLDEN = 0x9E3779B9  # 2**32 times the golden ratio's fraction


def key(*numbers: int) -> tuple[int, int]:
    """Two words of 32 bits from integers (splitmix64's mixer, after each)."""
    x = 0x9E3779B97F4A7C15
    for n in numbers:
        x = (x ^ n) * 0xBF58476D1CE4E5B9 & _ALL
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _ALL
        x ^= x >> 31
    return x & 0xFFFFFFFF, x >> 32


def turn(step: int) -> int:
    """How far a step turns the numbers: a word of 32 bits."""
    return step * _GOLDEN & 0xFFFFFFFF


def words(shape: Sequence[int], key: tuple[int, int], device: torch.device | str = "cpu") -> Tensor:
    """int32 of 32 random bits for each element of a tensor, by its index in row-major order."""
    count = 1
    for n in shape:
        count *= n
    x = torch.arange(count, dtype=torch.int64, device=device).to(torch.int32)
    one, two = (_signed(k) for k in key)
    x = x ^ one
    x = (x ^ _right(x, 16)) * _signed(0x21F0AAAD)
    x = x ^ two
    x = (x ^ _right(x, 15)) * _signed(0xD35A2D97)
    return (x ^ _right(x, 15)).reshape(tuple(shape))


def upper(word: Tensor, turn: int) -> Tensor:
    """16 bits of each word for a step: for states."""
    return _right(word + _signed(turn), 16)


def lower(word: Tensor, turn: int) -> Tensor:
    """16 other bits: for parameters."""
    return _right((word << 16) + _signed(turn), 16)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def _right(x: Tensor, n: int) -> Tensor:
    """x >> n of unsigned words."""
    return (x >> n) & ((1 << (32 - n)) - 1)


def to_bfloat16(x: Tensor, chance: Tensor) -> Tensor:
    """float32 as bfloat16, away from zero with the probability of the part that is cut off: its mean is x.

    chance: 16 bits for each element. What is not finite is rounded to nearest.
    """
    moved = (x.contiguous().view(torch.int32) + chance) & -0x10000
    return torch.where(x.isfinite(), moved.view(torch.float32), x).to(torch.bfloat16)


def upper_bits(x: Tensor, chance: Tensor, shift: int) -> Tensor:
    """Bits of float32 x >> shift, up with the probability of the part that is cut off, to 16 bits. x: not negative."""
    return (x.contiguous().view(torch.int32) + (chance << (shift - 16))) >> shift
