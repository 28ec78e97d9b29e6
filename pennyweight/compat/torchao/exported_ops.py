"""torchao's ops in exported graphs, which ExecuTorch's lowering recognizes by name and arguments.

``torchao::choose_qparams_affine``, ``torchao::quantize_affine`` and ``torchao::dequantize_affine``, with torchao's
schemas. They are defined when the first layer that exports to them is made, unless torchao itself has defined them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...core.tracing import in_memory
from .enums import MappingType
from .primitives import choose_qparams_affine, dequantize_affine, quantize_affine

_BOUNDS = "Scalar? quant_min=None, Scalar? quant_max=None"
_SCHEMAS = {
    "choose_qparams_affine": (
        "(Tensor? input, str mapping_type, SymInt[] block_size, ScalarType target_dtype, "
        f"{_BOUNDS}, float? eps=None, ScalarType? scale_dtype=None, ScalarType? zero_point_dtype=None, "
        "bool keepdim=False) -> (Tensor, Tensor)"
    ),
    "quantize_affine": (
        "(Tensor input, SymInt[] block_size, Tensor scale, Tensor? zero_point, ScalarType output_dtype, "
        f"{_BOUNDS}) -> Tensor"
    ),
    "dequantize_affine": (
        "(Tensor input, SymInt[] block_size, Tensor scale, Tensor? zero_point, ScalarType input_dtype, "
        f"{_BOUNDS}, ScalarType output_dtype=6) -> Tensor"
    ),
}


def _choose(input: Tensor, mapping_type: str, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    return choose_qparams_affine(input, MappingType[mapping_type], *args, **kwargs)


def _dequantize(
    input: Tensor, block_size: list[int], scale: Tensor, zero_point: Tensor | None, input_dtype: torch.dtype,
    quant_min: float | None = None, quant_max: float | None = None, output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    return dequantize_affine(
        input, block_size, scale, zero_point, input_dtype, quant_min, quant_max, output_dtype=output_dtype
    )


_FUNCTIONS = {"choose_qparams_affine": _choose, "quantize_affine": quantize_affine, "dequantize_affine": _dequantize}
_LIBRARIES: list[torch.library.Library] = []  # an op disappears with its library


@cache
def define() -> None:
    """Define the ops."""
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.torchao, name):
            library = torch.library.Library("torchao", "FRAGMENT")
            library.define(name + schema)
            library.impl(name, _FUNCTIONS[name], "CompositeImplicitAutograd")
            _LIBRARIES.append(library)


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
