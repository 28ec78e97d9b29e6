"""torchao.float8.config: the casts of the three products of a linear layer, as our recipes.

Scales are recomputed in each product ("dynamic"); fast accumulation, emulation and padding depend on the device here,
so their flags do not change results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch

from pennyweight.core.formats import E4M3, E5M2
from pennyweight.core.spec import QuantSpec
from pennyweight.planning.granularity import PerGroup, PerRow, PerTensor
from pennyweight.training import Gemm, Operand, Recipe, get_recipe

__all__ = [
    "CastConfig", "FP8Granularity", "Float8GemmConfig", "Float8LinearConfig", "Float8LinearRecipeName",
    "Float8TypeConfig", "ScalingGranularity", "ScalingType", "e4m3_dtype", "e5m2_dtype", "type_config",
]  # fmt: skip

FP8Granularity = PerTensor | PerRow | PerGroup


@dataclass
class Float8TypeConfig:
    """The float8 formats: those of the OCP standard (AMD's MI300 variants are not supported)."""

    e4m3_dtype = torch.float8_e4m3fn
    e5m2_dtype = torch.float8_e5m2


type_config = Float8TypeConfig()
e4m3_dtype, e5m2_dtype = type_config.e4m3_dtype, type_config.e5m2_dtype


class ScalingType(Enum):
    DYNAMIC = "dynamic"
    DISABLED = "disabled"

    def short_str(self) -> str:
        return {"dynamic": "dyn", "disabled": "dis"}[self.value]


class ScalingGranularity(Enum):
    TENSORWISE = "tensorwise"
    AXISWISE = "axiswise"

    def short_str(self) -> str:
        return {"tensorwise": "ten", "axiswise": "axs"}[self.value]


_FORMATS = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, None: None}


@dataclass(frozen=True)
class CastConfig:
    """How one operand is cast; DISABLED: not at all."""

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        assert self.scaling_granularity is ScalingGranularity.TENSORWISE or self.scaling_type is ScalingType.DYNAMIC, (
            f"CastConfig: axiswise scaling is dynamic, got scaling_type {self.scaling_type}"
        )
        assert self.target_dtype in _FORMATS, (
            f"CastConfig: target_dtype must be float8_e4m3fn or float8_e5m2, got {self.target_dtype}"
        )

    def short_str(self) -> str:
        dtype = {e4m3_dtype: "e4m3", e5m2_dtype: "e5m2"}[self.target_dtype]  # type: ignore[index]
        return f"{self.scaling_type.short_str()}_{self.scaling_granularity.short_str()}_{dtype}"

    def side(self, default: Any, power_of_two: bool) -> Operand | None:
        """Convert to our Operand."""
        if self.scaling_type is ScalingType.DISABLED:
            return None
        block = (-1,) if self.scaling_granularity is ScalingGranularity.AXISWISE else None
        return Operand(QuantSpec(_FORMATS[self.target_dtype] or default, block), "mx_rceil" if power_of_two else None)


@dataclass(frozen=True)
class Float8GemmConfig:
    use_fast_accum: bool = False


class Float8LinearRecipeName(Enum):
    TENSORWISE = "tensorwise"
    ROWWISE = "rowwise"
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"


@dataclass(frozen=True)
class Float8LinearConfig:
    """The casts of the three products. By default, the casts for the other products equal the first one's."""

    cast_config_input: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = CastConfig()
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    force_recompute_fp8_weight_in_bwd: bool = False
    round_scales_to_power_of_2: bool = False

    def __post_init__(self) -> None:
        if self.enable_fsdp_float8_all_gather:
            raise ValueError("enable_fsdp_float8_all_gather is not supported: FSDP gathers weights in their own dtype")
        self._check_products()
        self.recipe()
        for name, other, dtype in (
            ("input", "grad_weight", e4m3_dtype), ("weight", "grad_input", e4m3_dtype),
            ("grad_output", "grad_weight", e5m2_dtype),
        ):  # fmt: skip
            for field in (f"cast_config_{name}", f"cast_config_{name}_for_{other}"):
                cast = getattr(self, field) or getattr(self, f"cast_config_{name}")
                filled = cast if cast.target_dtype is not None else replace(cast, target_dtype=dtype)
                object.__setattr__(self, field, filled)  # of a frozen dataclass, while it is made
            first, second = getattr(self, f"cast_config_{name}"), getattr(self, f"cast_config_{name}_for_{other}")
            off = ScalingType.DISABLED in (first.scaling_type, second.scaling_type)
            assert off or first.target_dtype == second.target_dtype, (
                f"{name} must be cast to the same dtype in both products, got {first.target_dtype} and "
                f"{second.target_dtype}"
            )

    def _check_products(self) -> None:
        """Raise AssertionError for a product of a cast operand and one that is not."""
        x, w, g = self.cast_config_input, self.cast_config_weight, self.cast_config_grad_output
        w_again, x_again = self.cast_config_weight_for_grad_input or w, self.cast_config_input_for_grad_weight or x
        g_again = self.cast_config_grad_output_for_grad_weight or g
        off = ScalingType.DISABLED
        for one, two, product in ((x, w, "output"), (g, w_again, "grad_input"), (x_again, g_again, "grad_weight")):
            assert (one.scaling_type is off) == (two.scaling_type is off), (
                f"incompatible operand precision for {product}: {one.scaling_type.value} and {two.scaling_type.value}"
            )

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> Float8LinearConfig:
        """The config of a recipe. Raises AssertionError for another name."""
        names = [n.value for n in Float8LinearRecipeName]
        assert recipe_name in (*names, *Float8LinearRecipeName), f"recipe_name {recipe_name} not in valid names {names}"
        name = Float8LinearRecipeName(recipe_name)
        if name is Float8LinearRecipeName.TENSORWISE:
            return Float8LinearConfig()
        row = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=torch.float8_e4m3fn)
        if name is Float8LinearRecipeName.ROWWISE:
            return Float8LinearConfig(
                cast_config_input=row, cast_config_weight=row, cast_config_grad_output=row,
                round_scales_to_power_of_2=True,
            )  # fmt: skip
        off = CastConfig(scaling_type=ScalingType.DISABLED, target_dtype=torch.float8_e4m3fn)
        return Float8LinearConfig(
            cast_config_input=row, cast_config_input_for_grad_weight=off, cast_config_weight=row,
            cast_config_weight_for_grad_input=CastConfig(target_dtype=torch.float8_e4m3fn), cast_config_grad_output=row,
            cast_config_grad_output_for_grad_weight=off, round_scales_to_power_of_2=True,
        )  # fmt: skip

    def recipe(self) -> Recipe:
        """Our recipe; under its registered name if it has one."""
        p = self.round_scales_to_power_of_2
        x, w, g = self.cast_config_input, self.cast_config_weight, self.cast_config_grad_output
        made = Recipe(
            "torchao.float8",
            Gemm(x.side(E4M3, p), w.side(E4M3, p)),
            Gemm(g.side(E5M2, p), (self.cast_config_weight_for_grad_input or w).side(E4M3, p)),
            Gemm(
                (self.cast_config_grad_output_for_grad_weight or g).side(E5M2, p),
                (self.cast_config_input_for_grad_weight or x).side(E4M3, p),
            ),
        )
        known = (get_recipe(name.value) for name in Float8LinearRecipeName)
        return next((r for r in known if r.with_(name=made.name) == made), made)
