"""Floats of 3 to 7 bits in the order of NVIDIA's tensor cores (FP6-LLM, Xia et al. 2024), packed and unpacked in torch.

A code [M, N] of ``nbits`` bits is cut into fields of 1, 2 and 4 bits (those that ``nbits`` consists of, in that order),
the highest bits first. The packed weight [M, N / 8 * nbits] holds all fields of the first width, then the next ones.
A thread of a warp of 32 reads words of 32 bits: the elements of a tile of 64 by 16 in the order of :func:`_by_thread`,
and those of a word in the order of :func:`_in_word`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....core.tensor import PlainView
from ..format_primitives import _f32_to_floatx_unpacked, _floatx_unpacked_to_f32, _greatest
from ..qparams import require
from ..v0_8_layouts import AQTTensorImpl, FloatxTensorCoreLayout, Pieces, small_float_bits

__all__ = [
    "FloatxTensorCoreAQTTensorImpl", "from_scaled_tc_floatx", "pack_tc_floatx", "to_scaled_tc_floatx",
    "unpack_tc_floatx",
]  # fmt: skip

_THREADS, _TILE = 32, 64
# A row is a tile, a quarter of it, a half of that, one of eight; a column is a block of 16, a half of it, a pair, one.
_ROW, _COLUMN = (4, 2, 8), (2, 4, 2)
_TO_THREADS = (3, 6, 0, 4, 1, 5, 2, 7)  # thread (row of eight, pair), then the tiles, and what one thread has of a tile


def _widths(nbits: int) -> list[tuple[int, int]]:
    """(width, position of its lowest bit) of each field."""
    require(1 <= nbits <= 7, f"floatx codes have 1 to 7 bits, got {nbits}")
    found, left = [], nbits
    for width in (1, 2, 4):
        if nbits & width:
            left -= width
            found.append((width, left))
    return found


def _in_word(width: int) -> list[int]:
    """Elements of a word in the order of its fields, the highest first."""
    return [i for start in (1, 3, 0, 2) for i in range(start, 32 // width, 4)]


def _by_thread(codes: Tensor) -> Tensor:
    """Codes [M, N] as [32 threads, elements]."""
    rows, columns = codes.shape
    tiles = codes.reshape(rows // _TILE, *_ROW, columns // 16, *_COLUMN)
    return tiles.permute(_TO_THREADS).reshape(_THREADS, -1)


def _from_threads(codes: Tensor, rows: int) -> Tensor:
    """Inverse of :func:`_by_thread`."""
    columns = codes.numel() // rows
    shape = (rows // _TILE, *_ROW, columns // 16, *_COLUMN)
    tiles = codes.reshape([shape[axis] for axis in _TO_THREADS])
    return tiles.permute([_TO_THREADS.index(axis) for axis in range(len(shape))]).reshape(rows, columns)


def _shifts(width: int, device: torch.device) -> Tensor:
    """Position of each field of a byte, the first highest."""
    return torch.arange(8 - width, -1, -width, dtype=torch.uint8, device=device)


def pack_tc_floatx(tensor: Tensor, nbits: int) -> Tensor:
    """Codes uint8 [M, N] -> uint8 [M, N / 8 * nbits]. Raises AssertionError unless M and N are multiples of 64."""
    require(tensor.ndim == 2 and tensor.dtype == torch.uint8, f"codes must be uint8 [M, N], got {tensor.dtype}")
    require(not any(n % 64 for n in tensor.shape), f"tensor cores take multiples of 64, got {list(tensor.shape)}")
    threads = _by_thread(tensor)
    out = []
    for width, low in _widths(nbits):
        fields = (threads >> low) & ((1 << width) - 1)
        words = fields.reshape(_THREADS, -1, 32 // width)[..., _in_word(width)]
        pieces = words.reshape(*words.shape[:2], 4, 8 // width) << _shifts(width, tensor.device)
        packed = pieces.sum(-1, dtype=torch.uint8).flip(-1)  # the fields do not overlap; words are little-endian
        out.append(packed.transpose(0, 1).flatten())
    return torch.cat(out).view(tensor.shape[0], -1)


def unpack_tc_floatx(tensor: Tensor, nbits: int) -> Tensor:
    """Inverse of :func:`pack_tc_floatx`."""
    require(tensor.ndim == 2 and tensor.dtype == torch.uint8, f"packed codes must be uint8, got {tensor.dtype}")
    rows, flat, start = tensor.shape[0], tensor.flatten(), 0
    require(
        not rows % 64 and not flat.numel() * 8 // nbits // rows % 64,
        f"packed codes of {nbits} bits are multiples of 64 by 64, got {list(tensor.shape)}",
    )
    codes: Tensor | None = None
    for width, low in _widths(nbits):
        size = flat.numel() // nbits * width
        packed = flat[start : start + size].view(-1, _THREADS, 4).transpose(0, 1).flip(-1)
        start += size
        fields = (packed.unsqueeze(-1) >> _shifts(width, tensor.device)) & ((1 << width) - 1)
        words = fields.reshape(_THREADS, -1, 32 // width)
        order = torch.tensor(_in_word(width), dtype=torch.int64, device=tensor.device).argsort()
        found = words[..., order].reshape(_THREADS, -1) << low
        codes = found if codes is None else codes | found
    assert codes is not None
    return _from_threads(codes, rows)


def to_scaled_tc_floatx(tensor: Tensor, ebits: int, mbits: int) -> tuple[Tensor, Tensor]:
    """(packed codes of x / scale, scale [M] in the dtype of x), scale = max|row| / greatest number in float32."""
    x = tensor.float()
    scale = x.abs().amax(1).clamp(min=1e-12) / _greatest(ebits, mbits)
    codes = _f32_to_floatx_unpacked(x / scale.view(-1, 1), ebits, mbits)
    return pack_tc_floatx(codes, 1 + ebits + mbits), scale.to(tensor.dtype)


def from_scaled_tc_floatx(tensor: Tensor, ebits: int, mbits: int, scale: Tensor | None = None) -> Tensor:
    """float32 numbers of packed codes, times the scale of their row."""
    x = _floatx_unpacked_to_f32(unpack_tc_floatx(tensor, 1 + ebits + mbits), ebits, mbits)
    return x if scale is None else x * scale.float().view(-1, 1)


class FloatxTensorCoreAQTTensorImpl(AQTTensorImpl):
    """packed_floatx_data, scale. ``FloatxTensorCoreAQTTensorImpl(packed_floatx_data, scale, _layout)`` unpacks."""

    layouts = (FloatxTensorCoreLayout,)

    @classmethod
    def build(cls, packed_floatx_data: Tensor, scale: Tensor, _layout: Any) -> Pieces:  # type: ignore[override]
        return Pieces(unpack_tc_floatx(packed_floatx_data, 1 + _layout.ebits + _layout.mbits), scale, None, _layout)

    @classmethod
    def from_plain(  # type: ignore[override]
        cls, unpacked_floatx_data: Tensor, scale: Tensor, zero_point: Tensor | None, _layout: Any
    ) -> Pieces:
        return Pieces(unpacked_floatx_data, scale, None, _layout)


def _packed(view: Any) -> Tensor:
    w = view._tensor
    if small_float_bits(w.spec.format) is None:
        raise AttributeError(f"packed_floatx_data: codes of floats of at most 6 bits, this weight is {w.spec}")
    return pack_tc_floatx(view.int_data, w.spec.format.bits)


PlainView.packed_floatx_data = property(_packed, doc="The codes in the order of tensor cores.")  # type: ignore[attr-defined]
