"""torchao.float8: training with float8 products, over our recipes.

Scales are recomputed in each product ("dynamic"); fast accumulation, emulation and padding depend on the device here,
so their flags do not change results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import nn

from ...core.formats import E4M3, E5M2
from ...core.spec import QuantSpec
from ...planning.granularity import PerGroup, PerRow, PerTensor
from ...training import Gemm, LowPrecisionLinear, Operand, Recipe, get_recipe

__all__ = [
    "CastConfig", "FP8Granularity", "Float8GemmConfig", "Float8Linear", "Float8LinearConfig", "Float8LinearRecipeName",
    "Float8TypeConfig", "ScalingGranularity", "ScalingType", "_auto_filter_for_recipe", "_auto_filter_for_rowwise",
    "_auto_filter_for_tensorwise", "convert_to_float8_training", "e4m3_dtype", "e5m2_dtype",
    "precompute_float8_dynamic_scale_for_fsdp", "swap_linear_layers", "type_config",
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


@dataclass(frozen=True)
class CastConfig:
    """How one operand is cast; DISABLED: not at all."""

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None

    def short_str(self) -> str:
        dtype = {e4m3_dtype: "e4m3", e5m2_dtype: "e5m2"}[self.target_dtype]  # type: ignore[index]
        return f"{self.scaling_type.short_str()}_{self.scaling_granularity.short_str()}_{dtype}"

    def side(self, default: Any, power_of_two: bool) -> Operand | None:
        """Convert to our Operand."""
        if self.scaling_type is ScalingType.DISABLED:
            return None
        known = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2, None: default}
        if self.target_dtype not in known:
            raise ValueError(f"CastConfig: target_dtype must be float8_e4m3fn or float8_e5m2, got {self.target_dtype}")
        block = (-1,) if self.scaling_granularity is ScalingGranularity.AXISWISE else None
        return Operand(QuantSpec(known[self.target_dtype], block), "mx_rceil" if power_of_two else None)


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
        self.recipe()
        for name, other, dtype in (
            ("input", "grad_weight", e4m3_dtype), ("weight", "grad_input", e4m3_dtype),
            ("grad_output", "grad_weight", e5m2_dtype),
        ):  # fmt: skip
            for field in (f"cast_config_{name}", f"cast_config_{name}_for_{other}"):
                cast = getattr(self, field) or getattr(self, f"cast_config_{name}")
                filled = cast if cast.target_dtype is not None else replace(cast, target_dtype=dtype)
                object.__setattr__(self, field, filled)  # of a frozen dataclass, while it is made

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> Float8LinearConfig:
        """The config of a recipe. Raises ValueError for another name."""
        name = Float8LinearRecipeName(recipe_name)
        if name is Float8LinearRecipeName.TENSORWISE:
            return Float8LinearConfig()
        row = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=torch.float8_e4m3fn)
        if name is Float8LinearRecipeName.ROWWISE:
            return Float8LinearConfig(
                cast_config_input=row, cast_config_weight=row, cast_config_grad_output=row,
                round_scales_to_power_of_2=True,
            )  # fmt: skip
        off = CastConfig(scaling_type=ScalingType.DISABLED)
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


class Float8Linear(LowPrecisionLinear):
    """nn.Linear whose three products are computed in float8; ``config`` has the casts."""

    config: Float8LinearConfig

    def __init__(self, *args: Any, config: Float8LinearConfig, **kwargs: Any) -> None:
        super().__init__(*args, recipe=config.recipe(), **kwargs)
        self.config = config

    @classmethod
    def from_float(cls, mod: nn.Linear, config: Float8LinearConfig | None = None) -> Float8Linear:
        """A layer with the parameters of ``mod``, which are shared."""
        made = cls(mod.in_features, mod.out_features, False, config=config or Float8LinearConfig(), device="meta")
        made.weight, made.bias = mod.weight, mod.bias
        return made.train(mod.training)

    @property
    def scaling_type_input(self) -> ScalingType:
        return self.config.cast_config_input.scaling_type

    @property
    def scaling_type_weight(self) -> ScalingType:
        return self.config.cast_config_weight.scaling_type

    @property
    def scaling_type_grad_output(self) -> ScalingType:
        return self.config.cast_config_grad_output.scaling_type

    def extra_repr(self) -> str:
        c = self.config
        casts = {"i": c.cast_config_input, "w": c.cast_config_weight, "go": c.cast_config_grad_output}
        for short, first, other in (
            ("i_gw", "i", c.cast_config_input_for_grad_weight), ("w_gi", "w", c.cast_config_weight_for_grad_input),
            ("go_gw", "go", c.cast_config_grad_output_for_grad_weight),
        ):  # fmt: skip
            if other is not None and other != casts[first]:
                casts[short] = other
        listed = ",".join(f"{short}:{cast.short_str()}" for short, cast in casts.items())
        return f'{nn.Linear.extra_repr(self)}, cast_configs={listed}"'  # with torchao's closing quote


def swap_linear_layers(
    module: nn.Module, from_float_func: Callable[[nn.Linear], nn.Linear], *,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:  # fmt: skip
    """Replace linear layers, which ``module_filter_fn(layer, name)`` may select, by ``from_float_func(layer)``; returns
    the model. The filter sees linear layers only. A model that is one linear layer is not changed: its replacement is
    returned. Raises AssertionError if that one has children."""

    def wanted(layer: nn.Module, name: str) -> bool:
        return isinstance(layer, nn.Linear) and (module_filter_fn is None or module_filter_fn(layer, name))

    if wanted(module, ""):
        if next(module.children(), None) is not None:
            raise AssertionError(f"Does not support a root nn.Linear with children: {module}")
        return from_float_func(module)  # type: ignore[arg-type]
    names = [name for name, _ in module.named_modules() if name]
    for name in reversed(names):  # children before their parents
        layer = module.get_submodule(name)
        if wanted(layer, name):
            parent, _, attribute = name.rpartition(".")
            setattr(module.get_submodule(parent), attribute, from_float_func(layer))  # type: ignore[arg-type]
    return module


def convert_to_float8_training(
    module: nn.Module, *, module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    config: Float8LinearConfig | None = None,
) -> nn.Module:  # fmt: skip
    """As in torchao: every selected linear layer, of any size, becomes a Float8Linear; the model is returned.

    ``pennyweight.training.convert_to_float8_training`` leaves layers alone for which float8 does not pay, and raises if
    no layer remains.
    """
    how = config or Float8LinearConfig()
    return swap_linear_layers(
        module, lambda layer: Float8Linear.from_float(layer, how), module_filter_fn=module_filter_fn
    )


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """No-op: there is no float8 all-gather whose scales could be precomputed."""


# -- filters -----------------------------------------------------------------------------------------------------------


def _auto_filter_for_recipe(
    recipe: str | Float8LinearRecipeName, filter_fqns: Sequence[str]
) -> Callable[[nn.Module, str], bool]:
    """torchao's choice of layers that are large enough for float8 on an H100, without those whose name contains one of
    ``filter_fqns``. Raises ValueError for another recipe, NotImplementedError for rowwise_with_gw_hp."""
    name = Float8LinearRecipeName(recipe)
    if name is Float8LinearRecipeName.ROWWISE_WITH_GW_HP:
        raise NotImplementedError(f"Unsupported recipe: {name}")
    chosen = _auto_filter_for_tensorwise if name is Float8LinearRecipeName.TENSORWISE else _auto_filter_for_rowwise
    return partial(chosen, filter_fqns=filter_fqns)


def _eligible(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> bool:
    if not isinstance(mod, nn.Linear) or any(part in fqn for part in filter_fqns):
        return False
    return all(size % 16 == 0 for size in mod.weight.shape)  # what float8 matrix units of GPUs need


def _auto_filter_for_rowwise(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> bool:
    if not _eligible(mod, fqn, filter_fqns):
        return False
    n, k = mod.weight.shape  # type: ignore[union-attr]
    return n > 2048 and k > 1024 and (n > 4096 or k > 2048)


def _auto_filter_for_tensorwise(mod: nn.Module, fqn: str, filter_fqns: Sequence[str]) -> bool:
    if not _eligible(mod, fqn, filter_fqns):
        return False
    n, k = mod.weight.shape  # type: ignore[union-attr]
    return k > 4096 or n > 1024
