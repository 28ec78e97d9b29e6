"""torchao's tensor impls of layouts for one GPU or processor, and gemlite's layout.

Here they hold plain codes: ``Impl(int_data, scale, zero_point, _layout)``; weights are packed for the kernel that runs.
"""

from __future__ import annotations

from typing import Any

import torch

from ....planning.granularity import MappingType
from ..enums import ZeroPointDomain
from ..qparams import require
from ..v0_8_layouts import (
    AQTTensorImpl,
    BlockSparseLayout,
    Int4XPULayout,
    Int8DynamicActInt4WeightCPULayout,
    MarlinSparseLayout,
    Pieces,
    SemiSparseLayout,
    _impl,
    _layout,
)

__all__ = [
    "BlockSparseAQTTensorImpl", "DA8W4CPUAQTTensorImpl", "GemliteAQTTensorImpl", "GemlitePackedLayout",
    "Int4XPUAQTTensorImpl", "MarlinSparseAQTTensorImpl", "SemiSparseAQTTensorImpl", "get_gemlite_aqt_kwargs",
    "get_gemlite_quant_kwargs",
]  # fmt: skip

BlockSparseAQTTensorImpl = _impl("BlockSparseAQTTensorImpl", "Blocks that are not zero.", BlockSparseLayout)
SemiSparseAQTTensorImpl = _impl("SemiSparseAQTTensorImpl", "2:4 sparse int_data.", SemiSparseLayout)
MarlinSparseAQTTensorImpl = _impl("MarlinSparseAQTTensorImpl", "2:4 sparse 4-bit codes.", MarlinSparseLayout)
Int4XPUAQTTensorImpl = _impl("Int4XPUAQTTensorImpl", "packed_weight for Intel's GPUs, scale, zero.", Int4XPULayout)
DA8W4CPUAQTTensorImpl = _impl(
    "DA8W4CPUAQTTensorImpl", "packed_weight, scales, qzeros, compensation.", Int8DynamicActInt4WeightCPULayout
)
GemlitePackedLayout = _layout(
    "GemlitePackedLayout", "4- and 8-bit weights for gemlite's Triton kernels.", ("group_size", int | None, 128),
    ("bit_width", int, 4), ("packing_bitwidth", int | None, None), ("mode", str | None, "weight_only"),
    ("contiguous", bool | None, None),
)  # fmt: skip


class GemliteAQTTensorImpl(AQTTensorImpl):
    """packed_weight, scale, zero_point."""

    layouts = (GemlitePackedLayout,)

    @classmethod
    def build(  # type: ignore[override]
        cls, packed_weight: Any, scale: Any, zero_point: Any, gemlite_kwargs: Any, _layout: Any
    ) -> Pieces:
        raise ValueError(
            "codes packed by gemlite: unpack them with gemlite on the GPU that packed them, then quantize the weight"
        )

    @classmethod
    def from_plain(cls, data: Any, scale: Any, zero_point: Any, _layout: Any) -> Pieces:
        return Pieces(data, scale, zero_point, _layout)


def get_gemlite_quant_kwargs(bit_width: int, group_size: int, dtype: torch.dtype = torch.float16) -> dict[str, Any]:
    """Arguments of ``to_affine_quantized_intx``: asymmetric uint codes with real zero points in groups, or symmetric
    int8 codes for 8 bits."""
    common: dict[str, Any] = {"block_size": (1, group_size)}
    if bit_width == 8:
        return common | {
            "mapping_type": MappingType.SYMMETRIC, "target_dtype": torch.int8, "quant_min": -128, "quant_max": 127,
            "eps": 1e-5, "zero_point_dtype": None, "zero_point_domain": ZeroPointDomain.NONE,
        }  # fmt: skip
    return common | {
        "mapping_type": MappingType.ASYMMETRIC, "target_dtype": torch.uint8, "quant_min": 0,
        "quant_max": (1 << bit_width) - 1, "eps": 1e-6, "zero_point_dtype": dtype,
        "zero_point_domain": ZeroPointDomain.FLOAT,
    }  # fmt: skip


def get_gemlite_aqt_kwargs(
    weight: torch.Tensor, group_size: int | None = 64, bit_width: int = 4, packing_bitwidth: int | None = None,
    mode: str | bool | None = "weight_only", use_hqq: bool = True, contiguous: bool | None = None,
) -> dict[str, Any]:  # fmt: skip
    """:func:`get_gemlite_quant_kwargs` of a weight [N, K] with its layout. Raises AssertionError for what gemlite does
    not support. In the place of ``mode``, 0.9 had ``contiguous``."""
    if not isinstance(mode, str):
        mode, contiguous = "weight_only", mode
    require(bit_width in (4, 8), f"gemlite only works with bit_width 4,8 but got {bit_width}")
    require(
        weight.dtype in (torch.float16, torch.bfloat16),
        f"gemlite only works with dtype torch.float16 or torch.bfloat16 but got {weight.dtype}",
    )
    require(
        group_size in (32, 64, 128, 256, 512, 1024, None),
        f"gemlite's groups have 32 to 1024 elements, got {group_size}",
    )
    require(group_size is None or bit_width != 8, "gemlite only works with group_size=None for bit_width=8")
    require(packing_bitwidth in (8, 16, 32, None), f"Invalid packing bitwidth, got {packing_bitwidth}")
    require(mode in ("weight_only", "dynamic"), f"Invalid mode: should be weight_only or dynamic, got {mode}")
    group = weight.shape[1] if group_size is None else group_size
    layout = GemlitePackedLayout(group, bit_width, packing_bitwidth, mode, contiguous)
    return get_gemlite_quant_kwargs(bit_width, group, weight.dtype) | {"_layout": layout, "use_hqq": use_hqq}
