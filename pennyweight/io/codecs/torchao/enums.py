"""torchao's enumerations that are stored in its files, with torchao's members and values."""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple


class ZeroPointDomain(Enum):
    """Domain of the zero point: added to the codes (INT), to the values (FLOAT), or nowhere (NONE).

    INT    x = (code - zero_point) * scale
    FLOAT  x = (code - mid) * scale + zero_point, mid = (quant_min + quant_max + 1) / 2
    NONE   x = code * scale
    """

    INT = 1
    FLOAT = 2
    NONE = 3


def enum_of_names(module: str, name: str, doc: str, members: str, kind: type | None = str) -> Any:
    """An enum whose values are the names of its members in lower case. ``kind`` str: members are strings, too."""
    new: Any = Enum(name, {member: member.lower() for member in members.split()}, module=module, type=kind)
    new.__doc__ = doc
    return new


KernelPreference = enum_of_names(
    __name__, "KernelPreference", "The kernel family requested for a weight. AUTO: selected by the kernel table.",
    "AUTO TORCH MSLK FBGEMM EMULATED DEEPGEMM TRITON CUTEDSL",  # FBGEMM: MSLK in older releases
)  # fmt: skip
ScaleCalculationMode = enum_of_names(
    __name__, "ScaleCalculationMode",
    "How the power-of-two scale of an MX block is rounded; the rules \"mx_...\" of :mod:`pennyweight.core.qparams`.",
    "FLOOR RCEIL CEIL EVEN", None,
)  # fmt: skip
MXGemmKernelChoice = enum_of_names(
    __name__, "MXGemmKernelChoice", "Kernels of MX products; older releases.", "EMULATED CUTLASS CUBLAS", None
)
NVFP4MMConfig = enum_of_names(
    __name__, "NVFP4MMConfig", "Whether NVFP4 products quantize the activation; older releases.",
    "DYNAMIC WEIGHT_ONLY", None,
)  # fmt: skip


class Float8MMConfig(NamedTuple):
    """Options of float8 products: in float32 instead, fast accumulation, padding of the contracted axis."""

    emulate: bool = False
    use_fast_accum: bool = False
    pad_inner_dim: bool = False
