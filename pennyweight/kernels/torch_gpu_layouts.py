"""Layouts that torch's own GPU kernels read. Packing is a few torch ops, on any device.

"torch_int4_gpu"    tiles of ``aten._weight_int4pack_mm``: [N/8, K/(16 I), 32, I/2] int32, scale and offset
                    [K/g, N, 2]; the arrangement of one lane's operand in mma.m16n8k16 (aten/native/cuda/int4mm.cu)
"torch_blocks_gpu"  codes by rows, two e2m1 to a byte, and block scales in cuBLAS' order of 128 x 4 tiles
                    (cuBLAS manual, "1D block scaling factors layout")
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import blocks
from ..core.formats import E2M1, E4M3, E8M0, INT4
from ..core.layouts import Layout, register_layout, require_fit
from ..core.numerics import Parts
from ..core.packing import pack_bits, unpack_bits
from ..core.spec import MXFP8, NVFP4, TINYGEMM, QuantSpec
from ..core.tensor import AffineQuantizedTensor
from .torch_int4 import fits_int4pack, zero_offsets

# -- int4 --------------------------------------------------------------------------------------------------------------

INT4_ROWS = 8  # rows of a tile
_SHIFTS = (0, 16)  # bits of the code of an even and of an odd column; the four pairs of a word lie 4 bits apart


def inner_tiles(k: int) -> int:
    """k-tiles of 16 columns that one lane reads at once, the most that divide K: 8, 4 or 2; 0 if none does."""
    return next((tiles for tiles in (8, 4, 2) if k % (16 * tiles) == 0), 0)


def _lanes(n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes that split [N, K], and the order of axes that makes them words.

    N: tile, row. K: step, word, k-tile of the word, half (8 columns), pair of columns, parity. A lane is (row, pair).
    """
    inner = inner_tiles(k)
    return (n // INT4_ROWS, INT4_ROWS, k // (16 * inner), inner // 2, 2, 2, 4, 2), (0, 2, 1, 6, 3, 7, 4, 5)


def int4_words(codes: Tensor) -> Tensor:
    """Codes 0..15 [N, K] as ``aten._convert_weight_to_int4pack`` packs them: int32 [N/8, K/(16 I), 32, I/2]."""
    sizes, order = _lanes(*codes.shape)
    lanes = codes.to(torch.int64).reshape(sizes).permute(order).flatten(-3)  # parity, k-tile, half
    word = (lanes << _shifts(codes.device)).sum(-1)
    word = torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)
    return word.flatten(2, 3).contiguous()


def int4_codes(words: Tensor, n: int, k: int) -> Tensor:
    """Inverse of :func:`int4_words`: uint8 [N, K]."""
    sizes, order = _lanes(n, k)
    lanes = (words.unsqueeze(-1) >> _shifts(words.device)) & 15
    split = lanes.to(torch.uint8).reshape([sizes[axis] for axis in order])
    back = [order.index(axis) for axis in range(len(order))]
    return split.permute(back).reshape(n, k)


def _shifts(device: torch.device) -> Tensor:
    return torch.tensor([base + 4 * i for base in _SHIFTS for i in range(4)], dtype=torch.int32, device=device)


def fits_int4(spec: QuantSpec, shape: Sequence[int]) -> bool | str:
    """True, or why ``_weight_int4pack_mm`` cannot read this."""
    verdict = fits_int4pack(spec, shape, INT4_ROWS)
    if verdict is not True:
        return verdict
    if spec.scale is not torch.bfloat16:
        return f"needs bfloat16 scales, the weight has {str(spec.scale).removeprefix('torch.')}"
    k = blocks.padded(spec.block, shape)[1]
    return inner_tiles(k) > 0 or f"needs K to be a multiple of 32, K is {k}"


def _pack_int4(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """codes: words; scale: [K/g, N, 2] (scale, offset); offset: None."""
    require_fit("torch_int4_gpu", fits_int4(spec, shape), spec, shape)
    offset = torch.zeros_like(parts.scale) if parts.offset is None else parts.offset
    both = torch.stack([parts.scale, offset], -1).transpose(0, 1).contiguous()
    codes = parts.codes.to(torch.int16) + 8 if spec.format is INT4 else parts.codes
    return parts._replace(codes=int4_words(codes), scale=both, offset=None)


def _unpack_int4(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    codes = int4_codes(parts.codes, *blocks.padded(spec.block, shape))
    if spec.format is INT4:
        codes = codes.to(torch.int8) - 8
    both = parts.scale.transpose(0, 1)
    offset = None if spec.offset is None else both[..., 1].contiguous()
    return parts._replace(codes=codes, scale=both[..., 0].contiguous(), offset=offset)


_INT4_EXAMPLES = (
    (TINYGEMM, (16, 256)),
    (QuantSpec(INT4, (32,), scale=torch.bfloat16), (24, 100)),  # padded to 128
    (QuantSpec(INT4, (32,), scale=torch.bfloat16), (8, 96)),  # two k-tiles at once
    (QuantSpec(INT4, (64,), scale=torch.bfloat16), (8, 64)),
)
INT4_TILES = register_layout(
    Layout("torch_int4_gpu", _pack_int4, _unpack_int4, ("cuda",), _INT4_EXAMPLES, zero_offsets)
)


# -- block scales ------------------------------------------------------------------------------------------------------


def tiled_scales(scales: Tensor) -> Tensor:
    """Bytes [rows, blocks] in cuBLAS' order: 128 x 4 tiles by rows; in a tile row 32 i + j is at 16 j + 4 i. Padded
    with zeros to whole tiles; flat."""
    rows, columns = scales.shape
    padded = F.pad(scales, (0, -columns % 4, 0, -rows % 128))
    tiles = padded.reshape(-(-rows // 128), 4, 32, -(-columns // 4), 4)  # tile, i, j, tile, column
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def untiled_scales(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of :func:`tiled_scales`."""
    tiles = flat.reshape(-(-rows // 128), -(-columns // 4), 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-(-rows // 128) * 128, -(-columns // 4) * 4)[:rows, :columns].contiguous()


def is_mx(spec: QuantSpec) -> bool:
    """e4m3 in blocks of 32 under powers of two."""
    return spec.format is E4M3 and _in_blocks(spec, 32, E8M0)


def is_nvfp4(spec: QuantSpec) -> bool:
    """e2m1 in blocks of 16 under e4m3 scales, these under one float32 or none."""
    if spec.format is not E2M1 or not _in_blocks(spec, 16, E4M3):
        return False
    scale = spec.scale
    return isinstance(scale, QuantSpec) and (scale.scale is None or (scale.scale is torch.float32 and not scale.block))


def _in_blocks(spec: QuantSpec, size: int, scale: Any) -> bool:
    if spec.zero_point or spec.offset is not None or spec.mid or not isinstance(spec.scale, QuantSpec):
        return False
    block = spec.block or (0,)
    return spec.scale.format is scale and block[-1] == size and set(block[:-1]) <= {1}


def fits_blocks(spec: QuantSpec, shape: Sequence[int]) -> bool | str:
    """True, or why the layout cannot hold this."""
    if not (is_mx(spec) or is_nvfp4(spec)):
        return "needs e4m3 in blocks of 32 under powers of two (MX), or e2m1 in blocks of 16 under e4m3 (NVFP4)"
    if len(shape) != 2:
        return "needs a 2-d weight"
    return shape[-1] % 32 == 0 or f"needs K to be a multiple of 32, K is {shape[-1]}"


def block_codes(codes: Tensor, spec: QuantSpec) -> Tensor:
    """Codes [rows, K] as they are multiplied: float8, or uint8 [rows, K/2] with an even column in the low bits."""
    return pack_bits(spec.format.to_unsigned(codes), 4) if spec.format is E2M1 else codes.contiguous()


def _scale_parts(scale: Any) -> Parts:
    return scale.parts if isinstance(scale, AffineQuantizedTensor) else scale


def _pack_blocks(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    require_fit("torch_blocks_gpu", fits_blocks(spec, shape), spec, shape)
    scale = _scale_parts(parts.scale)
    tiles = tiled_scales(scale.codes.view(torch.uint8)).view(scale.codes.dtype)
    return parts._replace(codes=block_codes(parts.codes, spec), scale=scale._replace(codes=tiles))


def _unpack_blocks(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    scale, (rows, k) = _scale_parts(parts.scale), shape
    own = untiled_scales(scale.codes.view(torch.uint8), rows, blocks.counts(spec.block, shape)[-1])
    codes = parts.codes
    if spec.format is E2M1:
        codes = spec.format.from_unsigned(unpack_bits(codes, 4, k))
    return parts._replace(codes=codes, scale=scale._replace(codes=own.view(scale.codes.dtype)))


def _tile_padding(spec: QuantSpec, shape: Sequence[int]) -> int:
    """Bytes of the padding of scales to whole tiles."""
    rows, columns = shape[0], blocks.counts(spec.block, shape)[-1]
    return -(-rows // 128) * 128 * (-(-columns // 4) * 4) - rows * columns


_BLOCK_EXAMPLES = ((MXFP8, (16, 64)), (MXFP8, (130, 160)), (NVFP4, (16, 64)), (NVFP4, (130, 160)))
BLOCK_TILES = register_layout(
    Layout("torch_blocks_gpu", _pack_blocks, _unpack_blocks, ("cuda",), _BLOCK_EXAMPLES, _tile_padding)
)
