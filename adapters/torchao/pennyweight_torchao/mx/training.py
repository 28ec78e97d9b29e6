"""MX training of torchao 0.9 to 0.12: MXLinear and its config, over our recipes of low-precision training.

    output       y  = x · wᵀ    grad_input   gx = g · w     grad_weight   gw = gᵀ · x

Each operand is quantized along the contracted axis, in blocks under scales rounded down ("mx_floor"). An axis that the
block does not divide is padded; torchao raises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pennyweight.core.spec import QuantSpec
from pennyweight.io.codecs.torchao.mx import BLOCK_SIZE_DEFAULT, DTYPE_TO_SHORT_STR, E8M0_SCALE, element
from pennyweight.planning.configs import AOBaseConfig
from pennyweight.planning.module_handlers import register_quantize_module_handler
from pennyweight.training import Gemm, LowPrecisionLinear, Operand, Recipe

from ..enums import MXGemmKernelChoice, MXLinearRecipeName
from .checks import check_kernel_choice

__all__ = ["MXLinear", "MXLinearConfig"]


@dataclass
class MXLinearConfig(AOBaseConfig):
    """Elements of inputs, weights and gradients. A GPU kernel choice is checked as in torchao and has no effect."""

    block_size: int = BLOCK_SIZE_DEFAULT
    elem_dtype: Any = torch.float8_e4m3fn
    elem_dtype_weight_override: Any = None
    elem_dtype_grad_output_override: Any = None
    gemm_kernel_choice: MXGemmKernelChoice = MXGemmKernelChoice.EMULATED
    use_fp8_dim1_cast_triton_kernel: bool = False
    use_fp4_custom_triton_dequant_kernel: bool = False

    def __post_init__(self) -> None:
        element(self.elem_dtype)
        check_kernel_choice(self.gemm_kernel_choice, self.block_size, self.elem_dtype)
        for name in ("elem_dtype_weight_override", "elem_dtype_grad_output_override"):
            given = getattr(self, name)
            if given is None:
                continue
            element(given)
            if self.gemm_kernel_choice is not MXGemmKernelChoice.EMULATED:
                raise AssertionError(f"{name} needs gemm_kernel_choice EMULATED, got {self.gemm_kernel_choice}")

    @staticmethod
    def from_recipe_name(recipe_name: MXLinearRecipeName | str) -> MXLinearConfig:
        """The config of a recipe. Raises AssertionError for another name."""
        names = [name.value for name in MXLinearRecipeName]
        if isinstance(recipe_name, str) and recipe_name not in names:
            raise AssertionError(f"recipe_name {recipe_name} not in valid names {names}")
        fmt, _, kernel = MXLinearRecipeName(recipe_name).value.partition("_")
        elem = torch.float8_e4m3fn if fmt == "mxfp8" else torch.float4_e2m1fn_x2
        return MXLinearConfig(elem_dtype=elem, gemm_kernel_choice=MXGemmKernelChoice(kernel))

    def short_str(self) -> str:
        """The config in a few words, for the layer's repr."""
        text = f"bl_sz={self.block_size}, lp_dtype={DTYPE_TO_SHORT_STR[self.elem_dtype]}"
        for name, short in (("weight", "w"), ("grad_output", "go")):
            other = getattr(self, f"elem_dtype_{name}_override")
            text += "" if other is None else f", lp_{short}_override={DTYPE_TO_SHORT_STR[other]}"
        text += f", kernel={self.gemm_kernel_choice.value}"
        for name in ("use_fp8_dim1_cast_triton_kernel", "use_fp4_custom_triton_dequant_kernel"):
            text += f", {name}=True" if getattr(self, name) else ""
        return text

    def recipe(self) -> Recipe:
        """Our recipe."""
        weight, grad = self.elem_dtype_weight_override, self.elem_dtype_grad_output_override
        return _recipe(self.elem_dtype, weight or self.elem_dtype, grad or self.elem_dtype, self.block_size)


def _recipe(in_elem: Any, w_elem: Any, grad_elem: Any, block_size: int) -> Recipe:
    x, w, g = (
        Operand(QuantSpec(element(e), (block_size,), E8M0_SCALE), "mx_floor") for e in (in_elem, w_elem, grad_elem)
    )
    return Recipe("torchao.mx", Gemm(x, w), Gemm(g, w), Gemm(g, x))


class MXLinear(LowPrecisionLinear):
    """nn.Linear whose three products are computed in MX; ``config`` has the elements."""

    config: MXLinearConfig

    @classmethod
    def from_float(cls, mod: nn.Linear, config: MXLinearConfig | None = None) -> MXLinear:
        """``mod`` itself, with this class. Raises AssertionError for anything but an nn.Linear."""
        config = MXLinearConfig() if config is None else config
        if not isinstance(mod, nn.Linear) or not isinstance(config, MXLinearConfig):
            raise AssertionError(
                f"MXLinear.from_float takes an nn.Linear and an MXLinearConfig, got {type(mod).__name__} and "
                f"{type(config).__name__}"
            )
        mod.__class__ = cls
        mod.config, mod.recipe = config, config.recipe()  # type: ignore[assignment]
        return mod  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return f"{nn.Linear.extra_repr(self)}, {self.config.short_str()}"


@register_quantize_module_handler(MXLinearConfig)
def _mx_linear(module: nn.Module, config: MXLinearConfig) -> nn.Module:
    return MXLinear.from_float(module, config)  # type: ignore[arg-type]
