"""Codes of 2 to 7 bits in bytes, as torchao's early prototypes packed them: a stream along the last axis, each code's
highest bit first. ``pack_uint3`` of 8 codes A to H gives AAABBBCC, CDDDEEEF, FFGGGHHH.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..qparams import require

_WIDTHS = range(2, 8)


def _unit(bits: int) -> tuple[int, int]:
    """The fewest (codes, bytes) that take the same number of bits."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common


def _down_size(bits: int, size: Sequence[int]) -> tuple[int, ...]:
    codes, held = _unit(bits)
    require(size[-1] % codes == 0, f"{tuple(size)}, last dim not divisible by {codes}")
    return (*size[:-1], size[-1] // codes * held)


def _up_size(bits: int, size: Sequence[int]) -> tuple[int, ...]:
    codes, held = _unit(bits)
    require(size[-1] % held == 0, f"{tuple(size)}, last dim not divisible by {held}")
    return (*size[:-1], size[-1] // held * codes)


def _fields(x: Tensor, width: int) -> Tensor:
    """[.., n] -> [.., n * width] single bits, the highest of each element first."""
    shifts = torch.arange(width - 1, -1, -1, dtype=torch.uint8, device=x.device)
    return ((x.unsqueeze(-1) >> shifts) & 1).flatten(-2)


def _joined(bits: Tensor, width: int) -> Tensor:
    """Inverse of :func:`_fields`."""
    shifts = torch.arange(width - 1, -1, -1, dtype=torch.uint8, device=bits.device)
    return (bits.unflatten(-1, (-1, width)) << shifts).sum(-1, dtype=torch.uint8)


def _pack(bits: int, data: Tensor) -> Tensor:
    _down_size(bits, data.shape)
    return _joined(_fields(data.to(torch.uint8), bits), 8)


def _unpack(bits: int, data: Tensor) -> Tensor:
    _up_size(bits, data.shape)
    return _joined(_fields(data.to(torch.uint8), 8), bits)


def _of(bits: int, fn: Callable[[int, Any], Any], name: str, doc: str) -> Any:
    if name.endswith("size"):

        def call(size: Sequence[int]) -> Any:
            return fn(bits, size)
    else:

        def call(uint8_data: Tensor) -> Any:  # type: ignore[misc]
            return fn(bits, uint8_data)

    call.__name__ = call.__qualname__ = f"{name}_uint{bits}"
    call.__doc__ = doc.format(bits=bits, codes=_unit(bits)[0], held=_unit(bits)[1])
    return call


pack_uint2, pack_uint3, pack_uint4, pack_uint5, pack_uint6, pack_uint7 = (
    _of(b, _pack, "pack", "Codes below 2**{bits}, a multiple of {codes} in the last axis, in {held} bytes each.")
    for b in _WIDTHS
)
unpack_uint2, unpack_uint3, unpack_uint4, unpack_uint5, unpack_uint6, unpack_uint7 = (
    _of(b, _unpack, "unpack", "Codes of {bits} bits: uint8, {codes} from every {held} bytes.") for b in _WIDTHS
)
down_size_uint2, down_size_uint3, down_size_uint4, down_size_uint5, down_size_uint6, down_size_uint7 = (
    _of(b, _down_size, "down_size", "The shape packed. Raises AssertionError unless {codes} divides the last axis.")
    for b in _WIDTHS
)
up_size_uint2, up_size_uint3, up_size_uint4, up_size_uint5, up_size_uint6, up_size_uint7 = (
    _of(b, _up_size, "up_size", "The shape unpacked. Raises AssertionError unless {held} divides the last axis.")
    for b in _WIDTHS
)

__all__ = [
    f"{name}_uint{b}" for name in ("pack", "unpack", "down_size", "up_size") for b in _WIDTHS
]  # fmt: skip
