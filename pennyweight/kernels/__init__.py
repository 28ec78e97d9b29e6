"""The kernel table and its rows. Each file defines one family of kernels, the layout it reads, and when it applies."""

from typing import Any

from . import (
    convolution,
    embedding,
    linear,
    matmul,
    recurrent,
    reference,
    repack,
    torch_gpu,
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
from .table import Case, Explanation, Kernel, explain, explain_case, get_kernel, kernels, register_kernel, select
from .triton import int8_linear as triton_int8_linear
from .triton import self_test_verdict
from .triton import weight_only as triton_weight_only

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
    "torch_gpu",
    "torch_int4",
    "torch_int8",
    "triton_int8_linear",
    "triton_weight_only",
]  # fmt: skip


def _prove(device: Any, family: str) -> dict[str, str | None]:
    """The cases import the kernels that ask for their verdict, and nobody needs them before a GPU is used."""
    from .triton import self_test

    return self_test.prove(device, family=family)


self_test_verdict.register(_prove)
