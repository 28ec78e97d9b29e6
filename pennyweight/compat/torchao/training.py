"""torchao.float8, torchao.prototype.quantized_training and torchao.optim, over our training and optim.

float8     Scales are recomputed in each product ("dynamic"); fast accumulation, emulation and FSDP's float8 all-gather
           depend on device and mesh here, so their flags do not change results.
optim      States are our quantized tensors. The formats of second moments differ from torchao's (docs/optimizers.md),
           as do the block sizes of 4-bit states unless ``block_size`` is given; a learning rate need not be a tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from ...core.formats import E4M3, E5M2
from ...core.spec import QuantSpec
from ...optim import AdamW8bit
from ...planning.module_handlers import register_quantize_module_handler
from ...training import (
    BitNetTrainingConfig,
    Gemm,
    Int8MixedPrecisionTrainingConfig,
    Int8WeightOnlyTrainingConfig,
    LowPrecisionTrainingConfig,
    Operand,
    Recipe,
    get_recipe,
)
from ...training import LowPrecisionLinear as Float8Linear
from ...training import LowPrecisionLinear as Int8MixedPrecisionTrainingLinear
from ...training import convert_to_float8_training as _convert
from ...training.low_precision.configs import make_trainable, names_weight

__all__ = [
    "BitNetTrainingConfig", "CastConfig", "Float8GemmConfig", "Float8Linear", "Float8LinearConfig",
    "Float8LinearRecipeName", "Int8MixedPrecisionTrainingConfig", "Int8MixedPrecisionTrainingLinear",
    "Int8WeightOnlyQuantizedTrainingConfig", "ScalingGranularity", "ScalingType", "_AdamW", "bitnet_training",
    "convert_to_float8_training", "get_bitnet_scale", "int8_mixed_precision_training",
    "int8_weight_only_quantized_training", "precompute_bitnet_scale_for_fsdp",
    "precompute_float8_dynamic_scale_for_fsdp", "quantize_bitnet_weight", "quantize_int8_rowwise",
]  # fmt: skip

# -- float8 ------------------------------------------------------------------------------------------------------------


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


def convert_to_float8_training(
    module: nn.Module, *, module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
    config: Float8LinearConfig | None = None,
) -> nn.Module:  # fmt: skip
    """As in torchao: linear layers train in float8, in place; the model is returned."""
    how = (config or Float8LinearConfig()).recipe()
    return _convert(module, module_filter_fn=module_filter_fn, config=LowPrecisionTrainingConfig(how))


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """No-op: there is no float8 all-gather whose scales could be precomputed."""


# -- int8 and ternary training -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Int8WeightOnlyQuantizedTrainingConfig(Int8WeightOnlyTrainingConfig):
    """Weights that stay int8 during training. torchao always rounds the update stochastically; here the optimizers of
    ``torchao.optim`` do, others within ``pennyweight.training.stochastic_rounding(step)``."""


register_quantize_module_handler(Int8WeightOnlyQuantizedTrainingConfig, tells=names_weight)(make_trainable)
int8_weight_only_quantized_training = Int8WeightOnlyQuantizedTrainingConfig
int8_mixed_precision_training = Int8MixedPrecisionTrainingConfig
bitnet_training = BitNetTrainingConfig


def quantize_int8_rowwise(
    tensor: Tensor, stochastic_rounding: bool = False, eps: float = 1e-12
) -> tuple[Tensor, Tensor]:
    """(int8 codes, scale a row) of a matrix: scale = absmax / 127."""
    scale = tensor.abs().amax(1) / 127
    steps = tensor * (1.0 / scale.float().clip(eps)).to(tensor.dtype).unsqueeze(1)
    steps = (steps + torch.rand_like(steps)).floor() if stochastic_rounding else steps.round()
    return steps.clip(-128, 127).to(torch.int8), scale


def get_bitnet_scale(x: Tensor) -> Tensor:
    """mean |x|."""
    return x.abs().mean()


def quantize_bitnet_weight(w: Tensor, scale: Tensor, eps: float = 1e-5) -> Tensor:
    """int8 codes -1, 0, 1."""
    return (w / scale.clip(eps)).round().clip(-1, 1).to(torch.int8)


def precompute_bitnet_scale_for_fsdp(module: nn.Module) -> None:
    """No-op: the scale is computed from the gathered weight."""


# -- optimizers --------------------------------------------------------------------------------------------------------


class _AdamW(AdamW8bit):
    """AdamW with float32 states, for quantized parameters; bit-identical to torch.optim for the others."""

    LEAST = math.inf

    def __init__(
        self, params: Any, lr: Any = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 1e-2, amsgrad: bool = False, *, bf16_stochastic_round: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, bf16_stochastic_round=bf16_stochastic_round)
