"""torchao.kernel.blockwise_quantization and the reference casts of blockwise_fp8_training: plain functions on tensors.

torchao runs the former as Triton kernels; the same formulas are computed here on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ....core import blocks
from ....core.formats import E4M3, Format
from ....core.numerics import Parts, dequantize, quantize
from ....core.qparams import Params, choose
from ....core.spec import QuantSpec
from ....training.low_precision.gemm_table import QuantizedOperand, case_of, select
from ..class_view import FLOAT8
from ..float8_training.functions import amax_to_scale, to_fp8_saturated

__all__ = [
    "blockwise_fp8_gemm", "fp8_blockwise_act_quant", "fp8_blockwise_weight_dequant", "fp8_blockwise_weight_quant",
    "torch_blockwise_scale_act_quant_lhs", "torch_blockwise_scale_act_quant_rhs", "torch_blockwise_scale_weight_quant",
]  # fmt: skip


def _format(dtype: torch.dtype) -> Format:
    assert dtype in FLOAT8, f"dtype must be torch.float8_e4m3fn or torch.float8_e5m2, got {dtype}"
    return FLOAT8[dtype]


def _quantize(x: Tensor, block: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes and scale = absmax / 448 of each block, also for e5m2."""
    for size, b in zip(x.shape[-len(block) :], block, strict=True):
        assert size % b == 0, f"sizes {list(x.shape)} must be divisible by block_size {b}"
    spec = QuantSpec(_format(dtype), block)
    parts = quantize(x.float(), spec, params=Params(choose(x.float(), spec.with_(format=E4M3)).scale))
    assert isinstance(parts.scale, Tensor)
    return parts.codes, parts.scale


def fp8_blockwise_act_quant(
    x: Tensor, block_size: int = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """(float8 codes [.., K], scales [.., K / block_size]): x = codes * scale, scale = absmax / 448. Raises
    AssertionError if the last size is not a multiple of the block's."""
    return _quantize(x, (block_size,), dtype)


def fp8_blockwise_weight_quant(
    x: Tensor, block_size: int = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """(float8 codes [N, K], scales [N / block_size, K / block_size]) of square blocks: x = codes * scale. Raises
    AssertionError for other than matrices of whole blocks."""
    assert x.dim() == 2, f"Input tensor must have 2 dimensions, got {list(x.shape)}"
    return _quantize(x, (block_size, block_size), dtype)


def _spec(codes: Tensor, block: tuple[int, ...]) -> QuantSpec:
    return QuantSpec(_format(codes.dtype), block)


def _whole(codes: Tensor, block: tuple[int, ...]) -> Tensor:
    """Codes padded to whole blocks with zeros, whose float8 code is 0."""
    return blocks.pad(codes.view(torch.uint8), block).view(codes.dtype)


def fp8_blockwise_weight_dequant(x: Tensor, s: Tensor, block_size: int = 128) -> Tensor:
    """codes [N, K] * the scale of their square block, in torch's default dtype. The last blocks may be incomplete."""
    assert x.dim() == s.dim() == 2, f"Input tensors must have 2 dimensions, got {list(x.shape)} and {list(s.shape)}"
    block = (block_size, block_size)
    return dequantize(Parts(_whole(x, block), s), _spec(x, block), tuple(x.shape), torch.get_default_dtype())


def blockwise_fp8_gemm(a: Tensor, a_s: Tensor, b: Tensor, b_s: Tensor, block_size: int = 128) -> Tensor:
    """bfloat16 a [.., K] · b [N, K]ᵀ of float8 codes; scales a_s [.., K / block_size] and b_s [N / block_size,
    K / block_size], rounded up. Sums in float32."""
    line, square = (block_size,), (block_size, block_size)
    rows = a.reshape(-1, a.shape[-1])
    one = QuantizedOperand(Parts(_whole(rows, line), a_s.reshape(rows.shape[0], -1)), _spec(a, line), tuple(rows.shape))  # type: ignore[arg-type]
    two = QuantizedOperand(Parts(_whole(b, square), b_s), _spec(b, square), tuple(b.shape))  # type: ignore[arg-type]
    y = select(case_of(one, two, torch.bfloat16)).run(one, two, torch.bfloat16)
    return y.to(torch.bfloat16).reshape(*a.shape[:-1], b.shape[0])


# -- reference casts of training ---------------------------------------------------------------------------------------


def _cast(x: Tensor, axes: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes, what multiplies them): the reciprocal of 448 / absmax in float32."""
    scale = amax_to_scale(x.abs().amax(axes, keepdim=True), dtype)
    return to_fp8_saturated(x.float() * scale, dtype), 1.0 / scale


def torch_blockwise_scale_act_quant_lhs(
    x: Tensor, tile_size: int = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """(codes [M, K], scales [M, K / tile_size] in column-major memory): one scale for ``tile_size`` neighbours of a
    row."""
    assert x.is_contiguous(), "input tensor must be contiguous"
    codes, scale = _cast(x.reshape(-1, tile_size), (1,), dtype)
    return codes.reshape(x.shape), scale.reshape(x.shape[0], -1).t().contiguous().t()


def torch_blockwise_scale_act_quant_rhs(
    x: Tensor, block_size: int = 128, dtype: torch.dtype = torch.float8_e4m3fn, eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """(codes [M, K] in column-major memory, scales [M / block_size, K]): one scale for ``block_size`` neighbours of a
    column. eps: accepted; the least absmax is 1e-12."""
    assert x.is_contiguous(), "Input tensor must be contiguous"
    assert x.shape[0] % block_size == 0, f"{x.shape[0]} rows must be divisible by block_size {block_size}"
    codes, scale = _cast(x.view(-1, block_size, x.shape[1]), (1,), dtype)
    return codes.view(x.shape).t().contiguous().t(), scale.squeeze(1)


def torch_blockwise_scale_weight_quant(
    x: Tensor, tile_size: int = 128, dtype: torch.dtype = torch.float8_e4m3fn
) -> tuple[Tensor, Tensor]:
    """(codes [N, K], scales [N / tile_size, K / tile_size]): one scale for each square of ``tile_size``."""
    assert x.dim() == 2, f"input shape must be 2D, got {list(x.shape)}"
    assert x.is_contiguous(), "input tensor must be contiguous"
    tiles = x.view(x.shape[0] // tile_size, tile_size, -1, tile_size)
    codes, scale = _cast(tiles, (1, 3), dtype)
    return codes.reshape(x.shape), scale[:, 0, :, 0]
