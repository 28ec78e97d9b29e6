"""torchao._executorch_ops: torch's decomposed quantization operators, which ExecuTorch looks for in graphs.

Each function calls the operator of its name in ``torch.ops.quantized_decomposed``, with all arguments.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

__all__ = [
    "_quantized_decomposed_choose_qparams_per_token_asymmetric_wrapper",
    "_quantized_decomposed_dequantize_per_channel_group_wrapper", "_quantized_decomposed_dequantize_per_token_wrapper",
    "_quantized_decomposed_quantize_per_channel_group_wrapper", "_quantized_decomposed_quantize_per_token_wrapper",
]  # fmt: skip


def _operator(name: str) -> Any:
    if not hasattr(torch.ops.quantized_decomposed, name):  # torch defines them when this module is imported
        importlib.import_module("torch.ao.quantization.fx._decomposed")
    return getattr(torch.ops.quantized_decomposed, name)


def _quantized_decomposed_quantize_per_channel_group_wrapper(*args: Any, **kwargs: Any) -> Any:
    """(input, scales, zero_points, quant_min, quant_max, dtype, group_size) -> codes."""
    return _operator("quantize_per_channel_group")(*args, **kwargs)


def _quantized_decomposed_dequantize_per_channel_group_wrapper(*args: Any, **kwargs: Any) -> Any:
    """(codes, scales, zero_points, quant_min, quant_max, dtype, group_size, output_dtype) -> values."""
    return _operator("dequantize_per_channel_group")(*args, **kwargs)


def _quantized_decomposed_choose_qparams_per_token_asymmetric_wrapper(*args: Any, **kwargs: Any) -> Any:
    """(input, dtype) -> (scales, zero points), one of each per token."""
    return _operator("choose_qparams_per_token_asymmetric")(*args, **kwargs)


def _quantized_decomposed_quantize_per_token_wrapper(*args: Any, **kwargs: Any) -> Any:
    """(input, scales, zero_points, quant_min, quant_max, dtype) -> codes."""
    return _operator("quantize_per_token")(*args, **kwargs)


def _quantized_decomposed_dequantize_per_token_wrapper(*args: Any, **kwargs: Any) -> Any:
    """(codes, scales, zero_points, quant_min, quant_max, dtype, output_dtype) -> values."""
    return _operator("dequantize_per_token")(*args, **kwargs)
