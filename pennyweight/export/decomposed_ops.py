"""The operators of converted graphs: ``torch.ops.quantized_decomposed``, which inductor and ExecuTorch look for.

torch registers them in ``torch.ao.quantization.fx._decomposed``. inductor imports that file for its own lowerings, so
it stays where the rest of ``torch.ao.quantization`` is deprecated.
"""

from __future__ import annotations

import torch
import torch.ao.quantization.fx._decomposed  # registers the operators
from torch.fx import Node

_OPS = torch.ops.quantized_decomposed
QUANTIZE_TENSOR, QUANTIZE_CHANNEL = _OPS.quantize_per_tensor.default, _OPS.quantize_per_channel.default
DEQUANTIZE_TENSOR, DEQUANTIZE_CHANNEL = _OPS.dequantize_per_tensor.default, _OPS.dequantize_per_channel.default
QUANTIZE_DYNAMIC, DEQUANTIZE_DYNAMIC = _OPS.quantize_per_tensor.tensor, _OPS.dequantize_per_tensor.tensor
CONVERT = _OPS.convert_element_type.no_fuse
CHOOSE = {
    torch.per_tensor_affine: _OPS.choose_qparams.tensor,
    torch.per_tensor_symmetric: _OPS.choose_qparams_symmetric.tensor,
}
QUANTIZE = (QUANTIZE_TENSOR, QUANTIZE_DYNAMIC, QUANTIZE_CHANNEL)
DEQUANTIZE = (DEQUANTIZE_TENSOR, DEQUANTIZE_DYNAMIC, DEQUANTIZE_CHANNEL)

_ATEN = torch.ops.aten
BATCH_NORMS = (
    _ATEN.batch_norm.default, _ATEN._native_batch_norm_legit.default, _ATEN.cudnn_batch_norm.default,
    _ATEN.miopen_batch_norm.default,
)  # fmt: skip
FROZEN_BATCH_NORM = _ATEN._native_batch_norm_legit_no_training.default
CONVOLUTIONS = (
    _ATEN.conv1d.default, _ATEN.conv1d.padding, _ATEN.conv2d.default, _ATEN.conv2d.padding, _ATEN.conv3d.default,
    _ATEN.conv3d.padding,
)  # fmt: skip
TRANSPOSED = (
    _ATEN.conv_transpose1d, _ATEN.conv_transpose1d.default, _ATEN.conv_transpose2d, _ATEN.conv_transpose2d.input,
    _ATEN.conv_transpose3d, _ATEN.conv_transpose3d.input,
)  # fmt: skip
SIZES = (_ATEN.sym_size, _ATEN.sym_size.default, _ATEN.sym_size.int, _ATEN.sym_numel, _ATEN.sym_numel.default)


def calls(node: object, *targets: object) -> bool:
    """Is it a node that calls one of these operators?"""
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def is_conv(n: object) -> bool:
    return calls(n, *CONVOLUTIONS)


def is_conv_transpose(n: object) -> bool:
    return calls(n, *TRANSPOSED)


def is_batch_norm(n: object) -> bool:
    return calls(n, *BATCH_NORMS, FROZEN_BATCH_NORM)


def is_size(n: Node) -> bool:
    """Does it read a size of its input?"""
    return n.target in SIZES


def data_users(node: Node) -> list[Node]:
    """Users other than those that read a size."""
    return [user for user in node.users if not is_size(user)]
