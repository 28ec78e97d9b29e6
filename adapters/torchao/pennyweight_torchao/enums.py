"""torchao's enumerations and named tuples, with torchao's members and values."""

# ruff: noqa: UP042 - StrEnum prints the value where torchao's print the member

from __future__ import annotations

from enum import Enum
from functools import partial
from typing import Any

from pennyweight.io.codecs.torchao.enums import (
    Float8MMConfig,
    KernelPreference,
    MXGemmKernelChoice,
    NVFP4MMConfig,
    ScaleCalculationMode,
    ZeroPointDomain,
    enum_of_names,
)
from pennyweight.planning.granularity import MappingType, PerGroup, PerRow, PerTensor

__all__ = [
    "FP8Granularity", "Float8MMConfig", "Float8PackingFormat", "Int4ChooseQParamsAlgorithm", "Int4PackingFormat",
    "IntxChooseQParamsAlgorithm", "IntxPackingFormat", "KernelPreference", "MXFP8Dim0CastKernelChoice",
    "MXFP8Dim1CastKernelChoice", "MXGemmKernelChoice", "MXLinearRecipeName", "MappingType", "NVFP4MMConfig",
    "PackingFormat", "QuantizationStep", "ScaleCalculationMode", "TorchAODType", "UIntxChooseQParamsAlgorithm",
    "ZeroPointDomain",
]  # fmt: skip

FP8Granularity = PerTensor | PerRow | PerGroup


_enum = partial(enum_of_names, __name__)
TorchAODType: Any = Enum("TorchAODType", [f"INT{bits}" for bits in range(1, 8)], module=__name__)
TorchAODType.__doc__ = "Placeholders for ``torch.int1`` to ``torch.int7`` from before torch had them; accepted instead."
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
MXFP8Dim0CastKernelChoice = _enum("MXFP8Dim0CastKernelChoice", "Kernels that cast rows to MXFP8.", "TRITON TORCH", None)
MXFP8Dim1CastKernelChoice = _enum(
    "MXFP8Dim1CastKernelChoice", "Kernels that cast columns to MXFP8.", "TRITON CUDA TORCH CUTEDSL FLYDSL", None
)
MXLinearRecipeName = _enum(
    "MXLinearRecipeName", "Ready-made MX training recipes; older releases.",
    "MXFP8_EMULATED MXFP8_CUBLAS MXFP4_EMULATED MXFP4_CUTLASS", None,
)  # fmt: skip


class Float8PackingFormat(str, Enum):
    """Byte orders of float8 weights."""

    PLAIN = "plain"
    SPARSE_2D_DATA_2D_METADATA = "sparse_2d_data_2d_metadata"
    SPARSE_1D_DATA_1D_METADATA = "sparse_1d_data_1d_metadata"
    SPARSE_CUTLASS = "sparse_2d_data_2d_metadata"  # noqa: PIE796 - the older name of the same member
