"""What torchao rejects: elements that are not MX, and kernels that do not support them. The kernel table chooses the
kernel that runs; these checks are for code that relies on the error."""

from __future__ import annotations

from typing import Any

import torch

from pennyweight.io.codecs.torchao.mx import DTYPE_TO_SHORT_STR

from ..enums import KernelPreference, MXGemmKernelChoice

__all__ = ["_validate_kernel_preference"]


def check_kernel_choice(choice: MXGemmKernelChoice, block_size: int, elem_dtype: Any) -> None:
    """Raise AssertionError for a kernel choice that torchao 0.12 rejects."""
    sizes = {MXGemmKernelChoice.CUTLASS: (32,), MXGemmKernelChoice.CUBLAS: (16, 32)}.get(choice)
    if sizes is None:
        return
    if block_size not in sizes:
        raise AssertionError(f"block_size must be one of {sizes} for the {choice.value} kernels, got {block_size}")
    if DTYPE_TO_SHORT_STR[elem_dtype] not in ("f8e4m3", "f4e2m1"):
        raise AssertionError(
            f"elem_dtype must be float8_e4m3fn or float4_e2m1fn_x2 for {choice.value}, got {elem_dtype}"
        )


def _validate_kernel_preference(kernel_preference: KernelPreference, block_size: int, elem_dtype: Any) -> None:
    """Raise AssertionError unless the preference is EMULATED, or AUTO with e4m3 or e2m1 in blocks of 32."""
    fits = elem_dtype in (torch.float8_e4m3fn, torch.float4_e2m1fn_x2) and block_size == 32
    if kernel_preference != KernelPreference.EMULATED and not (kernel_preference == KernelPreference.AUTO and fits):
        raise AssertionError(
            f"kernel_preference {kernel_preference} does not support {elem_dtype} in blocks of {block_size}; use "
            "KernelPreference.EMULATED"
        )
