"""The operators ``torch.ops.torchao.*`` that graphs with affine observers contain: the functions of primitives.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....planning.granularity import MappingType
from ..primitives import choose_qparams_affine, dequantize_affine, quantize_affine

__all__: list[str] = []

_SCHEMAS = {
    "quantize_affine": "(Tensor input, SymInt[] block_size, Tensor scale, Tensor? zero_point, "
    "ScalarType output_dtype, Scalar? quant_min=None, Scalar? quant_max=None) -> Tensor",
    "dequantize_affine": "(Tensor input, SymInt[] block_size, Tensor scale, Tensor? zero_point, "
    "ScalarType input_dtype, Scalar? quant_min=None, Scalar? quant_max=None, ScalarType output_dtype=6) -> Tensor",
    "choose_qparams_affine": "(Tensor input, str mapping_type, SymInt[] block_size, ScalarType target_dtype, "
    "Scalar? quant_min=None, Scalar? quant_max=None, float? eps=None, ScalarType? scale_dtype=None, "
    "ScalarType? zero_point_dtype=None, bool keepdim=False) -> (Tensor, Tensor)",
}  # 6: float32


def _choose(x: Tensor, mapping_type: str, *args: Any, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return choose_qparams_affine(x, MappingType[mapping_type], *args)


_RUN = {"quantize_affine": quantize_affine, "dequantize_affine": dequantize_affine, "choose_qparams_affine": _choose}
LIBRARY = torch.library.Library("torchao", "FRAGMENT")
for _name, _schema in _SCHEMAS.items():
    if not hasattr(torch.ops.torchao, _name):
        LIBRARY.define(_name + _schema)
        LIBRARY.impl(_name, _RUN[_name], "CompositeImplicitAutograd")
