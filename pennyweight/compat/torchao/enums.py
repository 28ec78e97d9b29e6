"""torchao's enumerations and named tuples, with torchao's members and values."""

# ruff: noqa: UP042 - StrEnum prints the value where torchao's print the member

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ...planning.granularity import MappingType, PerGroup, PerRow, PerTensor

__all__ = [
    "FP8Granularity",
    "Float8MMConfig",
    "Float8PackingFormat",
    "Int4ChooseQParamsAlgorithm",
    "Int4PackingFormat",
    "IntxChooseQParamsAlgorithm",
    "IntxPackingFormat",
    "KernelPreference",
    "MXFP8Dim0CastKernelChoice",
    "MXFP8Dim1CastKernelChoice",
    "MXGemmKernelChoice",
    "MXLinearRecipeName",
    "MappingType",
    "NVFP4MMConfig",
    "PackingFormat",
    "QuantizationStep",
    "ScaleCalculationMode",
    "TorchAODType",
    "UIntxChooseQParamsAlgorithm",
    "ZeroPointDomain",
]

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


class TorchAODType(Enum):
    """Placeholders for ``torch.int1`` to ``torch.int7`` from before torch had them; accepted in place of them."""

    INT1 = 1
    INT2 = 2
    INT3 = 3
    INT4 = 4
    INT5 = 5
    INT6 = 6
    INT7 = 7


class KernelPreference(str, Enum):
    """The kernel family requested for a weight. AUTO: selected by the kernel table."""

    AUTO = "auto"
    TORCH = "torch"
    MSLK = "mslk"
    FBGEMM = "fbgemm"  # MSLK in older releases
    EMULATED = "emulated"
    DEEPGEMM = "deepgemm"
    TRITON = "triton"
    CUTEDSL = "cutedsl"


class PackingFormat(str, Enum):
    """Whether codes are in element order (PLAIN) or in the layout of one kernel (OPAQUE)."""

    PLAIN = "plain"
    OPAQUE = "opaque"


class Int4PackingFormat(str, Enum):
    """Byte orders of int4 weights."""

    PLAIN = "plain"
    PRESHUFFLED = "preshuffled"
    PLAIN_INT32 = "plain_int32"
    TILE_PACKED_TO_4D = "tile_packed_to_4d"
    MARLIN_SPARSE = "marlin_sparse"  # older releases
    OPAQUE = "opaque"  # older releases


class Int4ChooseQParamsAlgorithm(str, Enum):
    """How scales of int4 weights are chosen."""

    TINYGEMM = "tinygemm"
    HQQ = "hqq"


class Float8PackingFormat(str, Enum):
    """Byte orders of float8 weights."""

    PLAIN = "plain"
    SPARSE_2D_DATA_2D_METADATA = "sparse_2d_data_2d_metadata"
    SPARSE_1D_DATA_1D_METADATA = "sparse_1d_data_1d_metadata"
    SPARSE_CUTLASS = "sparse_2d_data_2d_metadata"  # noqa: PIE796 - the older name of the same member


class IntxPackingFormat(str, Enum):
    """Byte orders of 1- to 8-bit integer weights."""

    UNPACKED_TO_INT8 = "unpacked_to_int8"
    OPAQUE_ATEN_KLEIDIAI = "opaque_aten_kleidiai"
    OPAQUE_TORCHAO_AUTO = "opaque_torchao_auto"
    OPAQUE_TORCHAO_KLEIDIAI = "opaque_torchao_kleidiai"
    OPAQUE_TORCHAO_LOWBIT = "opaque_torchao_lowbit"


class IntxChooseQParamsAlgorithm(str, Enum):
    """How scales of 1- to 8-bit integer weights are chosen."""

    AFFINE = "affine"
    HQQ_SCALE_ONLY = "hqq_scale_only"


class UIntxChooseQParamsAlgorithm(str, Enum):
    """How scales of unsigned integer weights are chosen."""

    MIN_MAX = "min_max"
    HQQ = "hqq"


class QuantizationStep(str, Enum):
    """Steps of the configs that need calibration data."""

    PREPARE = "prepare"
    CONVERT = "convert"
    PREPARE_FOR_LOADING = "prepare_for_loading"
    PREPARE_FOR_SMOOTHQUANT_SMOOTHING_FACTOR = "prepare_for_smoothquant_smoothing_factor"
    PREPARE_FOR_SMOOTHQUANT_ACTIVATION_SCALES = "prepare_for_smoothquant_activation_scales"


class ScaleCalculationMode(Enum):
    """How the power-of-two scale of an MX block is rounded; the rules "mx_..." of :mod:`pennyweight.core.qparams`."""

    FLOOR = "floor"
    RCEIL = "rceil"
    CEIL = "ceil"
    EVEN = "even"


class MXFP8Dim0CastKernelChoice(Enum):
    """Kernels that cast rows to MXFP8."""

    TRITON = "triton"
    TORCH = "torch"


class MXFP8Dim1CastKernelChoice(Enum):
    """Kernels that cast columns to MXFP8."""

    TRITON = "triton"
    CUDA = "cuda"
    TORCH = "torch"
    CUTEDSL = "cutedsl"
    FLYDSL = "flydsl"


class MXGemmKernelChoice(Enum):
    """Kernels of MX products; older releases."""

    EMULATED = "emulated"
    CUTLASS = "cutlass"
    CUBLAS = "cublas"


class MXLinearRecipeName(Enum):
    """Ready-made MX training recipes; older releases."""

    MXFP8_EMULATED = "mxfp8_emulated"
    MXFP8_CUBLAS = "mxfp8_cublas"
    MXFP4_EMULATED = "mxfp4_emulated"
    MXFP4_CUTLASS = "mxfp4_cutlass"


class NVFP4MMConfig(Enum):
    """Whether NVFP4 products quantize the activation; older releases."""

    DYNAMIC = "dynamic"
    WEIGHT_ONLY = "weight_only"


class Float8MMConfig(NamedTuple):
    """Options of float8 products: in float32 instead, fast accumulation, padding of the contracted axis."""

    emulate: bool = False
    use_fast_accum: bool = False
    pad_inner_dim: bool = False
