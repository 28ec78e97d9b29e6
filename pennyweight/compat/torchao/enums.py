"""torchao's enumerations and named tuples, with torchao's members and values."""

# ruff: noqa: UP042 - StrEnum prints the value where torchao's print the member

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from ...planning.granularity import MappingType, PerGroup, PerRow, PerTensor

__all__ = [
    "FP8Granularity", "Float8MMConfig", "Float8PackingFormat", "Int4ChooseQParamsAlgorithm", "Int4PackingFormat",
    "IntxChooseQParamsAlgorithm", "IntxPackingFormat", "KernelPreference", "MXFP8Dim0CastKernelChoice",
    "MXFP8Dim1CastKernelChoice", "MXGemmKernelChoice", "MXLinearRecipeName", "MappingType", "NVFP4MMConfig",
    "PackingFormat", "QuantizationStep", "ScaleCalculationMode", "TorchAODType", "UIntxChooseQParamsAlgorithm",
    "ZeroPointDomain",
]  # fmt: skip

FP8Granularity = PerTensor | PerRow | PerGroup


class ZeroPointDomain(Enum):
    """Domain of the zero point: added to the codes (INT), to the values (FLOAT), or nowhere (NONE).

    INT    x = (code - zero_point) * scale
    FLOAT  x = (code - mid) * scale + zero_point, mid = (quant_min + quant_max + 1) / 2
    NONE   x = code * scale
    """

    INT = 1
    FLOAT = 2
    NONE = 3


def _enum(name: str, doc: str, members: str, kind: type | None = str) -> Any:
    """An enum whose values are the names of its members in lower case. ``kind`` str: members are strings, too."""
    new: Any = Enum(name, {member: member.lower() for member in members.split()}, module=__name__, type=kind)
    new.__doc__ = doc
    return new


TorchAODType: Any = Enum("TorchAODType", [f"INT{bits}" for bits in range(1, 8)], module=__name__)
TorchAODType.__doc__ = "Placeholders for ``torch.int1`` to ``torch.int7`` from before torch had them; accepted instead."
KernelPreference = _enum(
    "KernelPreference", "The kernel family requested for a weight. AUTO: selected by the kernel table.",
    "AUTO TORCH MSLK FBGEMM EMULATED DEEPGEMM TRITON CUTEDSL",  # FBGEMM: MSLK in older releases
)  # fmt: skip
PackingFormat = _enum(
    "PackingFormat", "Whether codes are in element order (PLAIN) or in the layout of one kernel (OPAQUE).",
    "PLAIN OPAQUE",
)  # fmt: skip
Int4PackingFormat = _enum(
    "Int4PackingFormat", "Byte orders of int4 weights.",
    "PLAIN PRESHUFFLED PLAIN_INT32 TILE_PACKED_TO_4D MARLIN_SPARSE OPAQUE",  # the last two: older releases
)  # fmt: skip
Int4ChooseQParamsAlgorithm = _enum(
    "Int4ChooseQParamsAlgorithm", "How scales of int4 weights are chosen.", "TINYGEMM HQQ"
)
IntxPackingFormat = _enum(
    "IntxPackingFormat", "Byte orders of 1- to 8-bit integer weights.",
    "UNPACKED_TO_INT8 OPAQUE_ATEN_KLEIDIAI OPAQUE_TORCHAO_AUTO OPAQUE_TORCHAO_KLEIDIAI OPAQUE_TORCHAO_LOWBIT",
)  # fmt: skip
IntxChooseQParamsAlgorithm = _enum(
    "IntxChooseQParamsAlgorithm", "How scales of 1- to 8-bit integer weights are chosen.", "AFFINE HQQ_SCALE_ONLY"
)
UIntxChooseQParamsAlgorithm = _enum(
    "UIntxChooseQParamsAlgorithm", "How scales of unsigned integer weights are chosen.", "MIN_MAX HQQ"
)
QuantizationStep = _enum(
    "QuantizationStep", "Steps of the configs that need calibration data.",
    "PREPARE CONVERT PREPARE_FOR_LOADING PREPARE_FOR_SMOOTHQUANT_SMOOTHING_FACTOR "
    "PREPARE_FOR_SMOOTHQUANT_ACTIVATION_SCALES",
)  # fmt: skip
ScaleCalculationMode = _enum(
    "ScaleCalculationMode",
    "How the power-of-two scale of an MX block is rounded; the rules \"mx_...\" of :mod:`pennyweight.core.qparams`.",
    "FLOOR RCEIL CEIL EVEN", None,
)  # fmt: skip
MXFP8Dim0CastKernelChoice = _enum("MXFP8Dim0CastKernelChoice", "Kernels that cast rows to MXFP8.", "TRITON TORCH", None)
MXFP8Dim1CastKernelChoice = _enum(
    "MXFP8Dim1CastKernelChoice", "Kernels that cast columns to MXFP8.", "TRITON CUDA TORCH CUTEDSL FLYDSL", None
)
MXGemmKernelChoice = _enum(
    "MXGemmKernelChoice", "Kernels of MX products; older releases.", "EMULATED CUTLASS CUBLAS", None
)
MXLinearRecipeName = _enum(
    "MXLinearRecipeName", "Ready-made MX training recipes; older releases.",
    "MXFP8_EMULATED MXFP8_CUBLAS MXFP4_EMULATED MXFP4_CUTLASS", None,
)  # fmt: skip
NVFP4MMConfig = _enum(
    "NVFP4MMConfig", "Whether NVFP4 products quantize the activation; older releases.", "DYNAMIC WEIGHT_ONLY", None
)


class Float8PackingFormat(str, Enum):
    """Byte orders of float8 weights."""

    PLAIN = "plain"
    SPARSE_2D_DATA_2D_METADATA = "sparse_2d_data_2d_metadata"
    SPARSE_1D_DATA_1D_METADATA = "sparse_1d_data_1d_metadata"
    SPARSE_CUTLASS = "sparse_2d_data_2d_metadata"  # noqa: PIE796 - the older name of the same member


class Float8MMConfig(NamedTuple):
    """Options of float8 products: in float32 instead, fast accumulation, padding of the contracted axis."""

    emulate: bool = False
    use_fast_accum: bool = False
    pad_inner_dim: bool = False
