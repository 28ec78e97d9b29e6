"""The numbers of an NF4 weight as torchao chooses them, in the dtype of the weight.

    scaler  absmax of each block of ``block_size`` elements of the flattened weight
    mean    mean of all scalers
    factor  256 / (2 max |scaler - mean|) of each block of ``scaler_block_size`` scalers
    q       round((scaler - mean) * factor), -128 to 127
    code    index of the normal float nearest to element / scaler

The value is nf4[code] * (q / factor + mean). Each operation rounds to the dtype of the weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pennyweight.core.formats import _NF4_DIGITS

from ..qparams import require

__all__ = ["CHUNK_SIZE", "get_block_absmax"]

CHUNK_SIZE = 1024**2  # elements whose distances to the sixteen numbers are in memory at once


def normal_floats(dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """torchao's sixteen normal floats: four decimal digits, rounded to the dtype."""
    return torch.tensor(_NF4_DIGITS, dtype=dtype, device=device)


def get_block_absmax(input_tensor: Tensor, block_size: int) -> Tensor:
    """max |x| of each block of a 1-d tensor. Raises AssertionError for other shapes and partial blocks."""
    _need_blocks(input_tensor, block_size)
    return input_tensor.view(-1, block_size).abs().amax(1)


def _need_blocks(flat: Tensor, block_size: int) -> None:
    require(flat.dim() == 1, f"Input tensor must be flattened, got {list(flat.shape)}")
    require(
        flat.numel() % block_size == 0,
        f"Input tensor must be divisible by block size, got {flat.numel()} and {block_size}",
    )


def double_quantize_scalers(
    input_tensor: Tensor, block_size: int, scaler_block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(q: int8, one per block; factor: one per block of scalers; mean) of a flat weight.

    Raises AssertionError unless there are whole blocks of elements and of scalers.
    """
    _need_blocks(input_tensor, scaler_block_size)
    scalers = get_block_absmax(input_tensor, block_size)
    require(
        scalers.numel() % scaler_block_size == 0,
        f"Number of scalers must be divisible by scaler block size, got {scalers.numel()} and {scaler_block_size}; "
        "pass a scaler_block_size that divides it",
    )
    mean = scalers.mean()
    centred = scalers - mean
    factor = 256 / (2 * get_block_absmax(centred, scaler_block_size))
    # A block of equal scalers has an infinite factor. 0 * inf is no number: its scalers are the mean, q = 0.
    q = (centred.view(-1, scaler_block_size) * factor.unsqueeze(-1)).round().clamp(-128, 127).nan_to_num(0.0)
    return q.flatten().to(torch.int8), factor, mean


def dequantize_scalers(q: Tensor, factor: Tensor, mean: Tensor, scaler_block_size: int, dtype: torch.dtype) -> Tensor:
    """Scalers q / factor + mean in ``dtype``; ``mean``: one number, or one per block of scalers."""
    _need_blocks(q, scaler_block_size)
    ratio = (q.view(-1, scaler_block_size) / factor.unsqueeze(-1)).to(dtype)
    return (ratio + mean.reshape(-1, 1)).flatten()


def nearest(value: Tensor, nf4: Tensor) -> Tensor:
    """Index of the number nearest to each element; of two at the same distance, the lower index."""
    return (value.unsqueeze(-1) - nf4).abs().min(-1).indices


def nearest_codes(flat: Tensor, nf4: Tensor) -> Tensor:
    """:func:`nearest` in uint8. 16-bit values are looked up in a table of all of them."""
    if flat.is_meta:
        return flat.to(torch.uint8)
    if flat.dtype.itemsize == 2 and flat.numel() > 1 << 16:
        patterns = torch.arange(1 << 16, dtype=torch.int32, device=flat.device).to(torch.int16)
        table = nearest(patterns.view(flat.dtype), nf4).to(torch.uint8)
        return table[flat.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF]
    if flat.numel() <= CHUNK_SIZE:
        return nearest(flat, nf4).to(torch.uint8)
    return torch.cat([nearest(chunk, nf4).to(torch.uint8) for chunk in flat.split(CHUNK_SIZE)])


def convert_to_norm_float_weight(input_tensor: Tensor, n_blocks: int, block_size: int, nf4: Tensor) -> Tensor:
    """Codes of a weight, two per byte: uint8 [elements / 2], the first in the high half.

    Blocks of zeros get the code of zero. Raises AssertionError for an odd number of elements and for partial blocks.
    """
    require(input_tensor.numel() % 2 == 0, f"Number of elements must be even, got {input_tensor.numel()}")
    flat = input_tensor.flatten()
    scalers = get_block_absmax(flat, block_size).unsqueeze(-1)
    unit = flat.view(n_blocks, block_size) / torch.where(scalers == 0, torch.ones_like(scalers), scalers)
    return pack_pairs(nearest_codes(unit.flatten(), nf4))


def pack_pairs(codes: Tensor) -> Tensor:
    """Flat codes below 16 -> bytes, the first of two in the high half."""
    return codes[::2] << 4 | codes[1::2]
