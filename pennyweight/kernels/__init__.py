"""The kernel table and its rows. Each file defines one family of kernels, the layout it reads, and when it applies.

Files for GPUs are imported with the first weight on a GPU, or when all rows or a layout of theirs are asked for.
"""

from ..core.fallback import strict
from ..core.layouts import register_layout_later
from . import (
    convolution,
    embedding,
    linear,
    matmul,
    recurrent,
    reference,
    repack,
    torch_int4,
    torch_int8,
)
from .cpu import conv as cpu_conv
from .cpu import conv_transposed as cpu_conv_transposed
from .cpu import convert as cpu_convert
from .cpu import embedding as cpu_embedding
from .cpu import experts as cpu_experts
from .cpu import float_linear as cpu_float_linear
from .cpu import int_linear as cpu_int_linear
from .table import (
    Case,
    Explanation,
    Kernel,
    explain,
    explain_case,
    get_kernel,
    kernels,
    register_kernel,
    register_later,
    select,
)

__all__ = [
    "Case",
    "Explanation",
    "Kernel",
    "convolution",
    "cpu_conv",
    "cpu_conv_transposed",
    "cpu_convert",
    "cpu_embedding",
    "cpu_experts",
    "cpu_float_linear",
    "cpu_int_linear",
    "embedding",
    "explain",
    "explain_case",
    "get_kernel",
    "kernels",
    "linear",
    "matmul",
    "recurrent",
    "reference",
    "register_kernel",
    "repack",
    "select",
    "strict",
    "torch_int4",
    "torch_int8",
]  # fmt: skip


def _import_gpu_rows() -> None:
    from . import torch_gpu  # noqa: F401
    from .triton import scaled_mm, weight_only  # noqa: F401


register_later("cuda", _import_gpu_rows)
for _name in ("gpu", "torch_blocks_gpu", "torch_int4_gpu"):
    register_layout_later(_name, _import_gpu_rows)
