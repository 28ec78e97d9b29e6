"""Numbers of the MX and NVFP4 formats under torchao's names, taken from our formats where those have them."""

from __future__ import annotations

from math import floor, log2
from typing import Any

import torch

from ....core.formats import E2M1, E2M3, E3M2, E4M3, E5M2, Format

__all__ = [
    "BF16_EXP_BIAS", "BLOCK_SIZE_DEFAULT", "DTYPE_FP4", "DTYPE_FP6_E2M3", "DTYPE_FP6_E3M2", "DTYPE_TO_SHORT_STR",
    "E8M0_EXPONENT_BIAS", "E8M0_EXPONENT_NAN_VAL", "F4_E2M1_EXP_BIAS", "F4_E2M1_MAX", "F4_E2M1_MAX_INT",
    "F4_E2M1_MAX_POW2", "F4_E2M1_MIN_NORMAL", "F6_E2M3_EXP_BIAS", "F6_E2M3_MAX", "F6_E2M3_MAX_INT",
    "F6_E2M3_MAX_POW2", "F6_E2M3_MIN_NORMAL", "F6_E3M2_EXP_BIAS", "F6_E3M2_MAX", "F6_E3M2_MAX_INT",
    "F6_E3M2_MAX_POW2", "F6_E3M2_MIN_NORMAL", "F8E4M3_MAX", "F8E4M3_MAX_POW2", "F8E5M2_MAX", "F8E5M2_MAX_POW2",
    "F32_EXP_BIAS", "F32_MIN_NORMAL", "SUPPORTED_ELEM_DTYPES",
]  # fmt: skip

DTYPE_FP4 = "fp4_e2m1"  # of torch before 2.8; torch.float4_e2m1fn_x2 since
DTYPE_FP6_E3M2 = "fp6_e3m2"
DTYPE_FP6_E2M3 = "fp6_e2m3"

SUPPORTED_ELEM_DTYPES: list[Any] = [
    torch.float8_e4m3fn, torch.float8_e5m2, DTYPE_FP6_E2M3, DTYPE_FP6_E3M2, torch.float4_e2m1fn_x2,
]  # fmt: skip
DTYPE_TO_SHORT_STR: dict[Any, str] = {
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2", DTYPE_FP6_E2M3: "f6e2m3", DTYPE_FP6_E3M2: "f6e3m2",
    DTYPE_FP4: "f4e2m1", torch.float4_e2m1fn_x2: "f4e2m1",
}  # fmt: skip
ELEMENTS: dict[Any, Format] = {
    torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, DTYPE_FP6_E2M3: E2M3, DTYPE_FP6_E3M2: E3M2,
    torch.float4_e2m1fn_x2: E2M1, DTYPE_FP4: E2M1,
}  # fmt: skip


def element(elem_dtype: Any) -> Format:
    """Our format of a torchao element. Raises AssertionError for another value, as torchao does."""
    if not isinstance(elem_dtype, (str, torch.dtype)) or elem_dtype not in ELEMENTS:
        known = ", ".join(str(e).removeprefix("torch.") for e in SUPPORTED_ELEM_DTYPES)
        raise AssertionError(f"elem_dtype must be one of {known}, got {elem_dtype}")
    return ELEMENTS[elem_dtype]


def max_exponent(fmt: Format) -> int:
    """Exponent of the greatest power of two of the format."""
    return floor(log2(fmt.hi))


F8E4M3_MAX, F8E5M2_MAX = E4M3.hi, E5M2.hi
F6_E2M3_MAX, F6_E3M2_MAX, F4_E2M1_MAX = E2M3.hi, E3M2.hi, E2M1.hi
F8E4M3_MAX_POW2, F8E5M2_MAX_POW2 = max_exponent(E4M3), max_exponent(E5M2)
F6_E2M3_MAX_POW2, F6_E3M2_MAX_POW2, F4_E2M1_MAX_POW2 = max_exponent(E2M3), max_exponent(E3M2), max_exponent(E2M1)

E8M0_EXPONENT_BIAS, E8M0_EXPONENT_NAN_VAL = 127, 255
F32_EXP_BIAS = BF16_EXP_BIAS = 127
F6_E2M3_EXP_BIAS, F6_E3M2_EXP_BIAS, F4_E2M1_EXP_BIAS = 1, 3, 1
F32_MIN_NORMAL = 2.0**-126
F6_E2M3_MIN_NORMAL, F6_E3M2_MIN_NORMAL, F4_E2M1_MIN_NORMAL = 1.0, 0.25, 1.0
F6_E2M3_MAX_INT, F6_E3M2_MAX_INT, F4_E2M1_MAX_INT = 31, 31, 7  # codes of the greatest numbers
BLOCK_SIZE_DEFAULT = 32

# Widths of the fields of a float, and masks of its code
SBITS, EBITS_F32, MBITS_F32 = 1, 8, 23
EBITS_F4_E2M1, MBITS_F4_E2M1 = 2, 1
EBITS_F6_E2M3, MBITS_F6_E2M3 = 2, 3
EBITS_F6_E3M2, MBITS_F6_E3M2 = 3, 2
EBITS_F8_E4M3, MBITS_F8_E4M3 = 4, 3
EBITS_F8_E5M2, MBITS_F8_E5M2 = 5, 2
SIGN_MASK_F4, MANTISSA_MASK_F4 = 0x8, 0x1
SIGN_MASK_F6_E2M3, MANTISSA_MASK_F6_E2M3 = 0x20, 0x7
SIGN_MASK_F6_E3M2, MANTISSA_MASK_F6_E3M2 = 0x20, 0x3
ZERO_BITS_F32, ZERO_POINT_FIVE_BITS_F32 = 0x0, 0x3F000000
