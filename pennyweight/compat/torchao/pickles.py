"""Loads torch.load files written by torchao: the allowed names in a pickle, and their counterparts here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...planning import granularity
from . import attributes, block_views, enums, float_views, int4_views, int_views, v0_8_aqt, v0_8_layouts

__all__ = ["GLOBALS", "allow"]

_Q = "quantization"
_W = f"{_Q}.quantize_.workflows"


def _mapping_type(value: Any) -> granularity.MappingType:
    """torchao's enum starts at one."""
    return list(granularity.MappingType)[value - 1] if isinstance(value, int) else granularity.MappingType(value)


def _at(homes: str, source: Any, *names: str) -> Iterator[tuple[str, Any]]:
    for home in homes.split():
        for name in names:
            yield f"{home}.{name}", getattr(source, name)


# Name in a pickle, below "torchao" -> its counterpart here.
GLOBALS: dict[str, Any] = dict(
    (
        *_at(f"{_Q} {_W} {_W}.int8.int8_tensor", int_views, "Int8Tensor", "QuantizeTensorToInt8Kwargs"),
        *_at(f"{_Q} {_W} {_W}.intx.intx_unpacked_to_int8_tensor", int_views, "IntxUnpackedToInt8Tensor",
             "IntxUnpackedToInt8TensorActivationQuantization"),
        *_at(f"{_Q} {_W} {_W}.int4.int4_tensor", int4_views, "Int4Tensor"),
        *_at(f"prototype.quantization.int4 prototype.quantization.int4.int4_opaque_tensor {_Q} {_W} "
             f"{_W}.int4.int4_opaque_tensor", int4_views, "Int4OpaqueTensor"),
        *_at(f"{_Q} {_W} {_W}.float8.float8_tensor", float_views, "Float8Tensor", "QuantizeTensorToFloat8Kwargs"),
        *_at(f"{_Q} {_W}.nf4.nf4_tensor dtypes dtypes.nf4tensor", block_views, "NF4Tensor"),
        *_at("prototype.mx_formats.mx_tensor", block_views, "MXTensor", "QuantizeTensorToMXKwargs"),
        *_at("prototype.mx_formats.nvfp4_tensor", block_views, "NVFP4Tensor", "QuantizeTensorToNVFP4Kwargs"),
        *_at("dtypes dtypes.affine_quantized_tensor", v0_8_aqt, "AffineQuantizedTensor"),
        *_at(f"{_Q} {_Q}.linear_activation_quantized_tensor", v0_8_aqt, "LinearActivationQuantizedTensor"),
        *_at(f"{_Q}.quant_api", v0_8_aqt, "_int8_asymm_per_token_quant", "_int8_symm_per_token_reduced_range_quant"),
        *_at("dtypes.utils dtypes", v0_8_layouts, "PlainLayout"),
        *_at("dtypes.uintx.plain_layout dtypes.affine_quantized_tensor", v0_8_layouts, "PlainAQTTensorImpl"),
        *_at("dtypes.uintx.q_dq_layout", v0_8_layouts, "QDQLayout", "QDQTensorImpl"),
        *_at("dtypes.uintx.uintx_layout", v0_8_layouts, "UintxLayout", "UintxAQTTensorImpl", "UintxTensor"),
        *_at("dtypes.uintx.int4_cpu_layout", v0_8_layouts, "Int4CPULayout", "Int4CPUAQTTensorImpl"),
        *_at("dtypes.uintx.tensor_core_tiled_layout", v0_8_layouts, "TensorCoreTiledLayout",
             "TensorCoreTiledAQTTensorImpl"),
        *_at("dtypes.floatx.float8_layout", v0_8_layouts, "Float8Layout", "Float8AQTTensorImpl"),
        *_at(f"{_Q}.granularity {_Q}", granularity, "PerAxis", "PerBlock", "PerGroup", "PerRow", "PerTensor",
             "PerToken"),
        *_at(f"{_Q}.quant_primitives {_Q}", enums, "ZeroPointDomain"),
        *_at(f"{_Q}.quantize_.common.kernel_preference {_Q}.quantize_.common", enums, "KernelPreference"),
        *_at("float8.inference", enums, "Float8MMConfig"),
        (f"{_Q}.quant_primitives.MappingType", _mapping_type),
        (f"{_Q}.MappingType", _mapping_type),
    )
)  # fmt: skip


def allow(name: str) -> None:
    """Allow these names in torch.load(weights_only=True), under the name of the library."""
    assert attributes.ATTRIBUTES  # loaded tensors have torchao's attributes
    torch.serialization.add_safe_globals([(value, f"{name}.{path}") for path, value in GLOBALS.items()])
