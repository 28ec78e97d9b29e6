"""torchao.prototype.moe_training.config: how the products of linear and expert layers are quantized."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Literal

import torch

from pennyweight.core.formats import E4M3
from pennyweight.io.codecs.torchao.tensor_class import FLOAT8
from pennyweight.planning.configs import AOBaseConfig
from pennyweight.training import Gemm, Operand, Recipe, get_recipe

from ..enums import KernelPreference, ScaleCalculationMode
from ..float8_training.config import Float8LinearConfig

__all__ = [
    "Float8TrainingOpConfig", "Float8TrainingRecipe", "MXFP8TrainingOpConfig", "MXFP8TrainingRecipe",
    "MoEScalingType", "MoETrainingConfig", "TrainingOpBaseConfig",
]  # fmt: skip


class Float8TrainingRecipe(Enum):
    FP8_ROWWISE = "fp8_rowwise"


class MXFP8TrainingRecipe(Enum):
    MXFP8_RCEIL = "mxfp8_rceil"
    MXFP8_RCEIL_WGRAD_WITH_HP = "mxfp8_rceil_wgrad_with_hp"
    MXFP8_EMULATED_RCEIL = "mxfp8_emulated_rceil"


class TrainingOpBaseConfig(AOBaseConfig):
    """Base of the configs whose ``quantize_`` replaces every parameter of the selected modules, and of modules in them,
    by a weight with quantized products."""

    def linear_recipe(self) -> Recipe:
        """The recipe of linear layers."""
        raise NotImplementedError(f"{type(self).__name__} is a base class; use Float8TrainingOpConfig")

    def grouped_recipe(self) -> Recipe:
        """The recipe of grouped products."""
        raise NotImplementedError(f"{type(self).__name__} is a base class; use Float8TrainingOpConfig")


def float8_rows(float8_dtype: torch.dtype) -> Recipe:
    """One scale per row of each product, a power of two. Raises ValueError for another dtype than the OCP standard's
    float8."""
    if float8_dtype not in FLOAT8:
        raise ValueError(f"float8_dtype must be float8_e4m3fn or float8_e5m2, got {float8_dtype}")
    fmt = FLOAT8[float8_dtype]
    rows = get_recipe("rowwise")
    return rows if fmt is E4M3 else rows.with_formats(fmt, fmt, fmt)


def mxfp8(mode: ScaleCalculationMode, wgrad_with_hp: bool) -> Recipe:
    """Blocks of 32 along each contraction; grad_weight in high precision if asked. mode: how scales are rounded to
    powers of two."""
    recipe = get_recipe("mxfp8_with_gw_hp" if wgrad_with_hp else "mxfp8")
    rule = f"mx_{mode.value}"

    def gemm(g: Gemm) -> Gemm:
        sides = (replace(s, rule=rule) if isinstance(s, Operand) else s for s in (g.a, g.b))
        return Gemm(*sides, g.hadamard)

    if mode is ScaleCalculationMode.RCEIL:
        return recipe
    products = {name: gemm(getattr(recipe, name)) for name in ("output", "grad_input", "grad_weight")}
    return recipe.with_(name=f"{recipe.name}_{mode.value}", **products)


@dataclass(frozen=True)
class Float8TrainingOpConfig(TrainingOpBaseConfig):
    """float8 products with one scale per row.

    float8_dtype          format of the grouped products
    out_dtype             dtype of the grouped products' results; None: that of the tokens
    float8_linear_recipe  recipe of linear layers: "tensorwise", "rowwise" or "rowwise_with_gw_hp"
    pad_token_groups_for_grouped_mm  for GPUs; results do not depend on it
    """

    float8_dtype: torch.dtype = torch.float8_e4m3fn
    out_dtype: torch.dtype | None = torch.bfloat16
    pad_token_groups_for_grouped_mm: bool = False
    float8_linear_recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "rowwise"

    def __post_init__(self) -> None:
        self.grouped_recipe()
        self.linear_recipe()

    def linear_recipe(self) -> Recipe:
        return Float8LinearConfig.from_recipe_name(self.float8_linear_recipe).recipe()

    def grouped_recipe(self) -> Recipe:
        return float8_rows(self.float8_dtype)

    @classmethod
    def from_recipe(cls, recipe: Float8TrainingRecipe) -> Float8TrainingOpConfig:
        """Raises ValueError for another recipe."""
        if recipe is not Float8TrainingRecipe.FP8_ROWWISE:
            raise ValueError(f"Unsupported FP8 recipe: {recipe}")
        return cls()


@dataclass(frozen=True)
class MXFP8TrainingOpConfig(TrainingOpBaseConfig):
    """MXFP8 products: blocks of 32 with power-of-two scales.

    kernel_preference       accepted; the kernel is chosen by the table of products
    out_dtype               dtype of the grouped products' results; None: that of the tokens
    wgrad_with_hp           grad_weight in high precision
    scale_calculation_mode  how scales are rounded
    pad_token_groups_for_grouped_mm  for GPUs; results do not depend on it
    """

    kernel_preference: KernelPreference = KernelPreference.AUTO
    out_dtype: torch.dtype | None = torch.bfloat16
    wgrad_with_hp: bool = False
    scale_calculation_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL
    pad_token_groups_for_grouped_mm: bool = False

    def linear_recipe(self) -> Recipe:
        return mxfp8(self.scale_calculation_mode, self.wgrad_with_hp)

    grouped_recipe = linear_recipe

    @classmethod
    def from_recipe(cls, recipe: MXFP8TrainingRecipe) -> MXFP8TrainingOpConfig:
        """Raises ValueError for another recipe."""
        fields: dict[MXFP8TrainingRecipe, dict[str, Any]] = {
            MXFP8TrainingRecipe.MXFP8_RCEIL: {},
            MXFP8TrainingRecipe.MXFP8_RCEIL_WGRAD_WITH_HP: {"wgrad_with_hp": True},
            MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL: {"kernel_preference": KernelPreference.EMULATED},
        }
        if recipe not in fields:
            raise ValueError(f"Unsupported MXFP8 recipe: {recipe}")
        return cls(**fields[recipe])


class MoEScalingType(Enum):
    """How :class:`MoETrainingConfig` scales its operands."""

    FP8_ROWWISE = "fp8_rowwise"
    MXFP8 = "mxfp8"


@dataclass(frozen=True)
class MoETrainingConfig(TrainingOpBaseConfig):
    """torchao 0.12's config, with the scaling types of 0.13: quantized grouped products; linear layers in high
    precision."""

    scaling_type: MoEScalingType = MoEScalingType.FP8_ROWWISE
    out_dtype = torch.bfloat16

    def grouped_recipe(self) -> Recipe:
        if self.scaling_type is MoEScalingType.MXFP8:
            return mxfp8(ScaleCalculationMode.RCEIL, False)
        return get_recipe("rowwise")
