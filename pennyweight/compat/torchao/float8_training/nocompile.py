"""torchao.prototype.float8nocompile: float8 layers for eager mode, and casts into a memory layout.

torchao has Triton kernels for these; our layers are the same with and without torch.compile.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from .casting import hp_tensor_to_float8_dynamic
from .config import Float8LinearConfig
from .layers import Float8Linear, matmul_with_hp_or_float8_args, swap_linear_layers
from .products import GemmInputRole, LinearMMConfig

__all__ = [
    "Float8LinearNoCompile", "KernelAlgorithm", "ToFP8ColumnMajor", "ToFP8ColumnMajorT", "ToFP8RowAndColumnMajor",
    "ToFP8RowMajor", "ToFP8RowMajorT", "ToFP8RowMajorTAndNonT", "convert_to_float8_nocompile_training",
    "hp_to_fp8_col_major", "hp_to_fp8_col_major_t", "hp_to_fp8_col_major_t_and_non_t", "hp_to_fp8_row_and_col_major",
    "hp_to_fp8_row_major", "hp_to_fp8_row_major_t", "hp_to_fp8_row_major_t_and_non_t", "matmul_with_args_in_hp",
    "matmul_with_args_in_hp_no_precompute_for_backward",
]  # fmt: skip


class KernelAlgorithm(Enum):
    """How a GPU finds the absmax of a tensor; accepted, without effect."""

    ATOMIC_MAX = "atomic_max"
    REDUCTION = "reduction"


# -- casts into a layout -----------------------------------------------------------------------------------------------

_Layout = Callable[[Any], Any]
_LAYOUTS: dict[str, _Layout] = {
    "rows": lambda t: t.clone(memory_format=torch.contiguous_format),
    "columns": lambda t: t.t().clone(memory_format=torch.contiguous_format).t(),
    "rows of the transpose": lambda t: t.t().clone(memory_format=torch.contiguous_format),
    "columns of the transpose": lambda t: t.t(),
}


def _cast(
    hp_tensor: Tensor, fp8_dtype: torch.dtype, linear_mm_config: LinearMMConfig, gemm_input_role: GemmInputRole,
    *layouts: str,
) -> Any:  # fmt: skip
    assert hp_tensor.is_contiguous(), "input tensor must be contiguous"
    t = hp_tensor_to_float8_dynamic(hp_tensor, fp8_dtype, linear_mm_config, gemm_input_role=gemm_input_role)
    made = tuple(_LAYOUTS[name](t) for name in layouts)
    return made[0] if len(made) == 1 else made


def _function(doc: str, *layouts: str) -> Callable[..., Any]:
    def cast(
        hp_tensor: Tensor, fp8_dtype: torch.dtype, linear_mm_config: LinearMMConfig,
        gemm_input_role: GemmInputRole = GemmInputRole.INPUT, algo: KernelAlgorithm = KernelAlgorithm.ATOMIC_MAX,
    ) -> Any:  # fmt: skip
        return _cast(hp_tensor, fp8_dtype, linear_mm_config, gemm_input_role, *layouts)

    cast.__doc__ = f"A matrix as float8 training tensor with one dynamic scale, {doc}. The gradient passes."
    return cast


hp_to_fp8_row_major = _function("in row-major memory", "rows")
hp_to_fp8_row_major_t = _function("transposed, in row-major memory", "rows of the transpose")
hp_to_fp8_col_major = _function("in column-major memory", "columns")
hp_to_fp8_col_major_t = _function("transposed, in column-major memory", "columns of the transpose")
hp_to_fp8_row_and_col_major = _function("in row-major and in column-major memory", "rows", "columns")
hp_to_fp8_row_major_t_and_non_t = _function(
    "in row-major memory, and its transpose in row-major memory", "rows", "rows of the transpose"
)
hp_to_fp8_col_major_t_and_non_t = _function(
    "in column-major memory, and its transpose in column-major memory", "columns", "columns of the transpose"
)


class _Cast:
    """``apply(tensor, float8_dtype, linear_mm_config, gemm_input_role, kernel_algo)`` of one of the functions."""


class ToFP8RowMajor(_Cast):
    apply = staticmethod(hp_to_fp8_row_major)


class ToFP8RowMajorT(_Cast):
    apply = staticmethod(hp_to_fp8_row_major_t)


class ToFP8ColumnMajor(_Cast):
    apply = staticmethod(hp_to_fp8_col_major)


class ToFP8ColumnMajorT(_Cast):
    apply = staticmethod(hp_to_fp8_col_major_t)


class ToFP8RowAndColumnMajor(_Cast):
    apply = staticmethod(hp_to_fp8_row_and_col_major)


class ToFP8RowMajorTAndNonT(_Cast):
    apply = staticmethod(hp_to_fp8_row_major_t_and_non_t)


# -- layers ------------------------------------------------------------------------------------------------------------


class matmul_with_args_in_hp:
    """The products of :class:`Float8LinearNoCompile` as a function."""

    @staticmethod
    def apply(
        input_hp: Tensor, weight_hp: Tensor, config: Float8LinearConfig, linear_mm_config: LinearMMConfig | None = None,
        kernel_algo: KernelAlgorithm = KernelAlgorithm.ATOMIC_MAX,
    ) -> Tensor:  # fmt: skip
        """input [.., K] · weight [N, K]ᵀ and its gradients under the casts of ``config``."""
        return matmul_with_hp_or_float8_args.apply(input_hp, weight_hp.t(), linear_mm_config, config)


matmul_with_args_in_hp_no_precompute_for_backward = matmul_with_args_in_hp


class Float8LinearNoCompile(Float8Linear):
    """:class:`Float8Linear` with torchao's options of its kernels, which have no effect here."""

    def __init__(
        self, *args: Any, config: Float8LinearConfig, kernel_algo: KernelAlgorithm = KernelAlgorithm.ATOMIC_MAX,
        no_precompute_for_backward: bool = False, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(*args, config=config, **kwargs)
        self.kernel_algo, self.no_precompute_for_backward = kernel_algo, no_precompute_for_backward

    @classmethod
    def from_float(  # type: ignore[override]
        cls, mod: nn.Linear, config: Float8LinearConfig | None = None,
        kernel_algo: KernelAlgorithm = KernelAlgorithm.ATOMIC_MAX, no_precompute_for_backward: bool = False,
    ) -> Float8LinearNoCompile:  # fmt: skip
        """A layer with the parameters of ``mod``, which are shared."""
        made: Any = super().from_float(mod, config)
        made.kernel_algo, made.no_precompute_for_backward = kernel_algo, no_precompute_for_backward
        return made


def convert_to_float8_nocompile_training(
    module: nn.Module, *, config: Float8LinearConfig | None = None,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    kernel_algo: KernelAlgorithm = KernelAlgorithm.ATOMIC_MAX, no_precompute_for_backward: bool = False,
) -> nn.Module:  # fmt: skip
    """Every linear layer that ``module_filter_fn(layer, name)`` selects becomes a :class:`Float8LinearNoCompile`; the
    model is returned."""
    return swap_linear_layers(
        module,
        lambda layer: Float8LinearNoCompile.from_float(layer, config, kernel_algo, no_precompute_for_backward),
        module_filter_fn=module_filter_fn,
    )
