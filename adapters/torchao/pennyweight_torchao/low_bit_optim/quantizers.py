"""torchao.optim.quant_utils: lookup tables of optimizer states and quantization with them, as plain functions.

x = qmap[codes] * scale,    scale = max |x| of a block of neighbours in the flattened tensor
"""

from __future__ import annotations

import torch
from torch import Tensor

from pennyweight.core import stochastic_rounding
from pennyweight.distributed.dtensor import local_tensor, wrap_like

__all__ = [
    "_fp32_to_bf16_sr", "create_dynamic_map", "dequant_with_qmap", "quantize_4bit_with_qmap",
    "quantize_8bit_with_qmap", "scale_tensor",
]  # fmt: skip

LEAST_SCALE = 1e-12  # torchao's, so that a block of zeros can be divided by it


def create_dynamic_map(signed: bool = True, max_exponent_bits: int = 7, total_bits: int = 8) -> list[float]:
    """2**total_bits ascending numbers in [-1, 1] or [0, 1], dense near zero (Dettmers 2015, dynamic tree).

    The decades 10**-(max_exponent_bits - 1) to 1 have the midpoints of equal steps over [0.1, 1], twice as many in each
    as in the one below, in float32; 0 and 1 complete the map. Raises ValueError if the numbers of decades and bits do
    not give 2**total_bits numbers.
    """
    spare = total_bits - 1 - max_exponent_bits
    signs = (1, -1) if signed else (1,)
    steps = [(i, 2.0 ** (i + spare + (0 if signed else 1))) for i in range(max_exponent_bits)]
    if 2**spare > 1:
        steps.append((max_exponent_bits - 1, 2**spare - 1))
    numbers = [0.0, 1.0]
    for decade, count in steps:
        edges = torch.linspace(0.1, 1, int(count + 1), dtype=torch.float32, device="cpu")
        means = (edges[:-1] + edges[1:]) / 2
        power = 10 ** (decade - max_exponent_bits + 1)
        numbers += [v for sign in signs for v in (sign * power * means).tolist()]
    if len(numbers) != 2**total_bits:
        kind = "a signed" if signed else "an unsigned"
        raise ValueError(
            f"{kind} map of {max_exponent_bits} exponent bits has {len(numbers)} numbers, not 2**{total_bits}; "
            f"use max_exponent_bits={total_bits - 1}"
        )
    return sorted(numbers)


def scale_tensor(input: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """(input / scale, scale): scale is the absmax of each ``block_size`` neighbours of the flattened tensor, at least
    1e-12. Raises RuntimeError if the number of elements is not a multiple of ``block_size``."""
    groups = input.view(-1, block_size)
    scale = groups.abs().amax(-1).clip(LEAST_SCALE)
    return (groups / scale.view(-1, 1)).view(input.shape), scale


def quantize_8bit_with_qmap(input: Tensor, qmap: Tensor) -> Tensor:
    """uint8 index of the nearest of 256 ascending numbers, the upper one in case of ties. NaN gives 0."""
    return _nearest(input, qmap)


def quantize_4bit_with_qmap(input: Tensor, qmap: Tensor) -> Tensor:
    """uint8 index of the nearest of 16 ascending numbers, the upper one in case of ties. NaN gives 0."""
    return _nearest(input, qmap)


def _nearest(input: Tensor, qmap: Tensor) -> Tensor:
    last = qmap.shape[0] - 1
    found = torch.bucketize(input, qmap, right=True) - 1
    down = torch.where(input.isnan(), 0, found.clamp(0, last))
    up = (down + 1).clip(max=last)
    low, high = qmap[down], qmap[up]
    return torch.where(input - low >= (high - low) * 0.5, up, down).to(torch.uint8)


def dequant_with_qmap(codes: Tensor, qmap: Tensor, scale: Tensor) -> Tensor:
    """qmap[codes] * scale, in the shape of ``codes``. scale: one number per block of the flattened tensor."""
    values = qmap[codes.int()].view(scale.shape[0], -1)
    return (values * scale.view(-1, 1)).view(codes.shape)


def _fp32_to_bf16_sr(_x_f32: Tensor) -> Tensor:
    """float32 stochastically rounded to bfloat16 with torch's random numbers; the mean of the result is x.

    Values that bfloat16 represents do not change; NaN and inf are kept. A DTensor gives a DTensor.
    """
    x = local_tensor(_x_f32)
    words = torch.randint(0, 1 << 16, x.shape, device=x.device, dtype=torch.int32)
    return wrap_like(stochastic_rounding.round_to_bfloat16(x, words), _x_f32)
