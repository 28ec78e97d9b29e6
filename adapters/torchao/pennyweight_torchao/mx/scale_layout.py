"""Order of block scales for tensor cores: cuBLAS's layout of block scaling factors.

Scales [H, W] are padded with zeros to tiles of 128 x 4. A tile is stored as 32 rows of 16: row r holds the scales of
rows r, r + 32, r + 64 and r + 96 of the tile. Tiles follow each other row by row.
"""

from __future__ import annotations

from torch import Tensor

from pennyweight.io.codecs.torchao.mx import from_blocked

from ..tools import ceil_div

__all__ = [
    "ceil_div", "from_blocked", "hp_data_dims_to_swizzled_scale_dims_mx", "hp_data_dims_to_swizzled_scale_dims_nvfp4",
    "to_blocked",
]  # fmt: skip


def to_blocked(input_matrix: Tensor, use_triton_kernel: bool = False) -> Tensor:
    """The scales [H, W] in tensor-core order, flat: 512 numbers for each tile. ``use_triton_kernel`` has no effect."""
    rows, columns = input_matrix.shape
    high, wide = ceil_div(rows, 128), ceil_div(columns, 4)
    padded = input_matrix.new_zeros((high * 128, wide * 4), dtype=input_matrix.dtype)
    padded[:rows, :columns] = input_matrix
    return padded.view(high, 4, 32, wide, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def hp_data_dims_to_swizzled_scale_dims_mx(hp_data_M: int, hp_data_K: int) -> tuple[int, int]:
    """Shape of the swizzled scales of an [M, K] tensor in blocks of 32: a tile covers 128 x 128 elements."""
    return ceil_div(hp_data_M, 128) * 32, ceil_div(hp_data_K, 128) * 16


def hp_data_dims_to_swizzled_scale_dims_nvfp4(hp_data_M: int, hp_data_K: int) -> tuple[int, int]:
    """Shape of the swizzled scales of an [M, K] tensor in blocks of 16: a tile covers 128 x 64 elements."""
    return ceil_div(hp_data_M, 128) * 32, ceil_div(hp_data_K, 64) * 16
