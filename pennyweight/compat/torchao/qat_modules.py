"""torchao.quantization.qat: its modules and two-step quantizers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...core.formats import INT4
from ...core.numerics import fake_quantize
from ...core.spec import QuantSpec
from ...planning.config_resolution import Filter
from ...planning.configs import (
    AOBaseConfig,
    Float8DynamicActivationInt4WeightConfig,
    Int4WeightOnlyConfig,
    Int8DynamicActivationInt4WeightConfig,
    SpecConfig,
)
from ...quantize.pipeline import quantize_
from ...training import FakeQuantizedEmbedding, FakeQuantizedLinear, QATConfig
from ...training.qat.modules import FakeQuantized
from .linear_modules import TwoStepQuantizer
from .qat_configs import (
    FakeQuantizeConfigBase,
    Float8FakeQuantizeConfig,
    Int4WeightFakeQuantizeConfig,
    IntxFakeQuantizeConfig,
)

__all__ = [
    "ComposableQATQuantizer", "FakeQuantizedEmbedding", "FakeQuantizedLinear", "FakeQuantizer", "FakeQuantizerBase",
    "Float8ActInt4WeightQATQuantizer", "Float8FakeQuantizer", "Int4WeightFakeQuantizer",
    "Int4WeightOnlyEmbeddingQATQuantizer", "Int4WeightOnlyQATQuantizer", "Int8DynActInt4WeightQATQuantizer",
    "IntxFakeQuantizer", "TwoStepQuantizer", "disable_4w_fake_quant", "disable_8da4w_fake_quant",
    "disable_linear_fake_quant", "enable_4w_fake_quant", "enable_8da4w_fake_quant", "enable_linear_fake_quant",
]  # fmt: skip


class FakeQuantizerBase(nn.Module):
    """Quantizes and dequantizes x with a straight-through gradient, by a fake quantization config."""

    def __init__(self, config: FakeQuantizeConfigBase) -> None:
        super().__init__()
        self.config, self.enabled = config, True
        if config.range_learning:
            raise ValueError("a separate fake quantizer cannot learn a range; prepare a layer with range_learning")

    def forward(self, x: Tensor) -> Tensor:
        if not self.enabled:
            return x
        if self.config.of_inputs:
            act = self.config.activation_spec
            return fake_quantize(x, act.spec, act.rule, act.eps)
        return fake_quantize(x, self.config.weight_spec, self.config.rule, self.config.eps)

    def extra_repr(self) -> str:
        return str(self.config)

    @staticmethod
    def from_config(config: FakeQuantizeConfigBase | None) -> FakeQuantizerBase | None:
        """The fake quantizer of a config."""
        if config is None:
            return None
        for kind, quantizer in _QUANTIZERS.items():
            if isinstance(config, kind):
                return quantizer(config)
        raise ValueError(f"Unknown config type: {config}")


class IntxFakeQuantizer(FakeQuantizerBase):
    """Integers."""


class FakeQuantizer(IntxFakeQuantizer):
    """The older name."""


class Float8FakeQuantizer(FakeQuantizerBase):
    """float8."""


class Int4WeightFakeQuantizer(FakeQuantizerBase):
    """int4 in groups."""


_QUANTIZERS: dict[type, type[FakeQuantizerBase]] = {
    IntxFakeQuantizeConfig: IntxFakeQuantizer,
    Float8FakeQuantizeConfig: Float8FakeQuantizer,
    Int4WeightFakeQuantizeConfig: Int4WeightFakeQuantizer,
}


def enable_linear_fake_quant(mod: nn.Module, enabled: bool = True) -> None:
    """For ``model.apply``: switch a prepared linear layer on or off."""
    if isinstance(mod, FakeQuantized) and isinstance(mod, nn.Linear):
        mod.fake_quant_enabled = enabled


def disable_linear_fake_quant(mod: nn.Module) -> None:
    """For ``model.apply``."""
    enable_linear_fake_quant(mod, enabled=False)


enable_8da4w_fake_quant = enable_4w_fake_quant = enable_linear_fake_quant
disable_8da4w_fake_quant = disable_4w_fake_quant = disable_linear_fake_quant


def _is_embedding(module: nn.Module, fqn: str) -> bool:
    return isinstance(module, nn.Embedding)


class _TwoSteps(TwoStepQuantizer):
    """Prepare and convert with one config. Layers whose size the group does not divide are skipped."""

    config: AOBaseConfig
    filter: Filter | None = None
    padding_allowed = False

    def prepare(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        policy = "pad" if self.padding_allowed else "skip"
        quantize_(model, QATConfig(self.config), self.filter, on_indivisible=policy)
        return model

    def convert(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Convert prepared layers to quantized weights; modules are kept."""
        quantize_(model, QATConfig(step="convert"), self.filter or _is_linear)
        return model


def _is_linear(module: nn.Module, fqn: str) -> bool:
    return isinstance(module, nn.Linear)


class Int8DynActInt4WeightQATQuantizer(_TwoSteps):
    """int4 weights in groups with int8 inputs."""

    def __init__(
        self, groupsize: int = 256, padding_allowed: bool = False, precision: torch.dtype = torch.float32,
        scales_precision: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self.config, self.padding_allowed = Int8DynamicActivationInt4WeightConfig(groupsize), padding_allowed


class Int4WeightOnlyQATQuantizer(_TwoSteps):
    """int4 weights in groups, with offsets."""

    def __init__(
        self, groupsize: int = 256, inner_k_tiles: int | None = 8, precision: torch.dtype = torch.bfloat16,
        scales_precision: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        self.config = Int4WeightOnlyConfig(groupsize)


class Float8ActInt4WeightQATQuantizer(_TwoSteps):
    """int4 weights in groups with float8 inputs."""

    def __init__(self, group_size: int | None = 64, scale_precision: torch.dtype = torch.bfloat16) -> None:
        self.config = Float8DynamicActivationInt4WeightConfig(group_size=64 if group_size is None else group_size)


class Int4WeightOnlyEmbeddingQATQuantizer(_TwoSteps):
    """int4 embedding tables in groups."""

    filter = staticmethod(_is_embedding)

    def __init__(
        self, group_size: int = 256, scale_precision: torch.dtype = torch.float32,
        zero_point_precision: torch.dtype = torch.int32,
    ) -> None:  # fmt: skip
        self.config = SpecConfig(QuantSpec(INT4, (group_size,), scale_precision), rule="symmetric")


class ComposableQATQuantizer(TwoStepQuantizer):
    """Several, one after another."""

    def __init__(self, quantizers: list[TwoStepQuantizer]) -> None:
        self.quantizers = quantizers

    def prepare(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        for quantizer in self.quantizers:
            model = quantizer.prepare(model)
        return model

    def convert(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        for quantizer in self.quantizers:
            model = quantizer.convert(model)
        return model
