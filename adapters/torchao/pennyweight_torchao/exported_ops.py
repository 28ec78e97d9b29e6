"""Layers as torchao's operators in exported graphs, which ExecuTorch's lowering recognizes by name and arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from pennyweight.core.tracing import in_memory


def is_exported(weight: Tensor) -> bool:
    """Whether a forward pass over this buffer is recorded for a graph that is kept: an export, or another trace than
    that of torch.compile."""
    return torch.compiler.is_exporting() or (not torch.compiler.is_compiling() and not in_memory(weight))


def fake_quantized_tokens(x: Tensor) -> Tensor:
    """x through int8 with one scale per token, asymmetric, and back, in its dtype."""
    ops, block, f32 = torch.ops.torchao, [1] * (x.dim() - 1) + [x.shape[-1]], torch.float32
    scale, zero = ops.choose_qparams_affine(
        x, "ASYMMETRIC", block, torch.int8, -128, 127, torch.finfo(f32).eps, f32, f32
    )
    codes = ops.quantize_affine(x, block, scale, zero, torch.int8, -128, 127)
    return ops.dequantize_affine(codes, block, scale, zero, torch.int8, -128, 127, x.dtype)


def int4_values(codes: Tensor, scale: Tensor, zero_point: Tensor, group_size: int, dtype: torch.dtype) -> Tensor:
    """Values of int4 codes [N, K] in groups."""
    return torch.ops.torchao.dequantize_affine(
        codes, [1, group_size], scale, zero_point, torch.int8, -8, 7, dtype
    )  # fmt: skip
