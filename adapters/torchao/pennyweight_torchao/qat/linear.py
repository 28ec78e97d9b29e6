"""torchao.quantization.qat.linear: linear layers with fake quantizers, and the switches for ``model.apply``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pennyweight.training.qat.modules import FakeQuantized

from ..enums import TorchAODType, ZeroPointDomain
from ..linear_modules import _check_linear_int4_k
from ..qparams import require
from .deployment import DeployedLinear, Deployment, applies, deployment, spec_config
from .fake_quantize_configs import FakeQuantizeConfigBase, IntxFakeQuantizeConfig
from .fake_quantizers import FakeQuantizerBase

__all__ = [
    "FakeQuantizedLinear", "Int4WeightOnlyQATLinear", "Int8DynActInt4WeightQATLinear", "_get_4w_weight_config",
    "_get_8da4w_activation_config", "_get_8da4w_weight_config", "disable_4w_fake_quant", "disable_8da4w_fake_quant",
    "disable_linear_fake_quant", "enable_4w_fake_quant", "enable_8da4w_fake_quant", "enable_linear_fake_quant",
]  # fmt: skip


class FakeQuantizedLinear(nn.Linear):
    """A linear layer whose input and weight pass through fake quantizers: F.linear(act(x), weight(w), bias).

    activation_fake_quantizer, weight_fake_quantizer  modules, or None without a config

    Raises ValueError if a group size does not divide ``in_features``. Layers that ``quantize_`` prepares give the
    values of the converted layer, see :class:`Deployment`.
    """

    activation_fake_quantizer: nn.Module | None
    weight_fake_quantizer: nn.Module | None
    deployment: Deployment | None = None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False,
        activation_config: FakeQuantizeConfigBase | None = None, weight_config: FakeQuantizeConfigBase | None = None,
        *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, bias, *args, **kwargs)
        group = _group_size(weight_config)
        if group is not None and in_features % group != 0:
            raise ValueError(f"in_features ({in_features}) % group_size ({group}) must be == 0")
        self.activation_fake_quantizer = _quantizer(activation_config)
        self.weight_fake_quantizer = _quantizer(weight_config)

    @property
    def fake_quantized(self) -> tuple[str, ...]:
        """Parameters that ``quantize_`` must not quantize before the layer is converted."""
        return () if self.weight_fake_quantizer is None else ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        act, weight = self.activation_fake_quantizer, self.weight_fake_quantizer
        values = x if act is None else act(x)
        w = self.weight if weight is None else weight(self.weight)
        if not applies(self.deployment, act, weight, self.weight):
            return F.linear(values, w, self.bias)
        assert self.deployment is not None
        with torch.no_grad():
            deployed = F.linear(x, self.deployment.weight(self.weight), self.bias)
        return DeployedLinear.apply(values, w, self.bias, deployed)

    def to_linear(self) -> nn.Linear:
        """A plain linear layer with the same parameters; on the meta device with its own."""
        return _share(self, self._meta())

    def _meta(self) -> nn.Linear:
        return nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta", self.weight.dtype)

    @classmethod
    def from_linear(
        cls, mod: nn.Linear, activation_config: FakeQuantizeConfigBase | None = None,
        weight_config: FakeQuantizeConfigBase | None = None,
    ) -> FakeQuantizedLinear:  # fmt: skip
        """A new layer with the parameters of ``mod``; on the meta device with its own."""
        new = FakeQuantizedLinear(
            mod.in_features, mod.out_features, mod.bias is not None, activation_config, weight_config,
            device="meta", dtype=mod.weight.dtype,
        )  # fmt: skip
        return _share(mod, new)

    def deploy(self, config: Any = None) -> None:
        """Compute, from now on, as this layer will under ``config``; by default under what its configs train for."""
        activation, weight = (
            None if q is None else getattr(q, "config", None)
            for q in (self.activation_fake_quantizer, self.weight_fake_quantizer)
        )
        config = spec_config(activation, weight) if config is None else config
        self.deployment = deployment(self._meta(), config, activation, weight)


def _quantizer(config: FakeQuantizeConfigBase | None) -> FakeQuantizerBase | None:
    return None if config is None else FakeQuantizerBase.from_config(config)


def _group_size(config: Any) -> int | None:
    """The group size of integer weights, if they have groups."""
    if not isinstance(config, IntxFakeQuantizeConfig):
        return None
    return getattr(config.granularity, "group_size", None)


def _share(old: nn.Linear, new: Any) -> Any:
    """``new``, which is on the meta device, with the parameters and the mode of ``old``."""
    if not old.weight.is_meta:
        new.weight, new.bias = old.weight, old.bias
    return new.train(old.training)


# -- layers of the quantizers ------------------------------------------------------------------------------------------


class _Switched(FakeQuantizedLinear):
    """With methods that switch its fake quantizers."""

    def enable_fake_quant(self, enabled: bool = True) -> None:
        for quantizer in (self.activation_fake_quantizer, self.weight_fake_quantizer):
            if quantizer is not None:
                quantizer.enabled = enabled

    def disable_fake_quant(self) -> None:
        self.enable_fake_quant(False)


class Int8DynActInt4WeightQATLinear(_Switched):
    """int8 inputs per token, asymmetric, and int4 weights in groups, symmetric: computes as
    :class:`Int8DynActInt4WeightLinear` does. Scales of inputs are float32.

    precision         dtype of the weight and the bias
    scales_precision  dtype of the weight's scales and zero points
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, device: Any = None, groupsize: int = 256,
        precision: torch.dtype = torch.float32, scales_precision: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        activation = _get_8da4w_activation_config(torch.float32)
        weight = _get_8da4w_weight_config(groupsize, scales_precision)
        super().__init__(in_features, out_features, bias, activation, weight, device=device, dtype=precision)
        self.deploy()


class Int4WeightOnlyQATLinear(_Switched):
    """uint4 weights in groups with tinygemm's zero points: computes as :class:`WeightOnlyInt4Linear` does.

    Raises ValueError if the layer would need padding, AssertionError for scales that are not bfloat16.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = False, device: Any = None, groupsize: int = 256,
        inner_k_tiles: int = 8, precision: torch.dtype = torch.bfloat16, scales_precision: torch.dtype = torch.bfloat16,
    ) -> None:  # fmt: skip
        require(scales_precision == torch.bfloat16, f"only bf16 is supported for scales, got {scales_precision}")
        if not _check_linear_int4_k(in_features, groupsize, inner_k_tiles):
            raise ValueError(
                f"Padding for QAT 4w is not supported yet: {in_features} inputs are not whole groups of {groupsize} in "
                f"tiles of {inner_k_tiles} times 16"
            )
        weight = _get_4w_weight_config(groupsize, scales_precision)
        super().__init__(in_features, out_features, bias, None, weight, device=device, dtype=precision)
        self.inner_k_tiles = inner_k_tiles
        self.deploy()


def _get_8da4w_activation_config(qparams_precision: torch.dtype) -> IntxFakeQuantizeConfig:
    """int8 per token, asymmetric, with float32 scales and zero points. Raises AssertionError for another precision."""
    require(qparams_precision == torch.float32, f"scales of inputs are float32, got {qparams_precision}")
    return IntxFakeQuantizeConfig(
        torch.int8, "per_token", is_symmetric=False, scale_precision=qparams_precision,
        zero_point_precision=qparams_precision, eps=torch.finfo(qparams_precision).eps,
    )  # fmt: skip


def _get_8da4w_weight_config(group_size: int, qparams_precision: torch.dtype) -> IntxFakeQuantizeConfig:
    """int4 in groups, symmetric."""
    return IntxFakeQuantizeConfig(
        TorchAODType.INT4, group_size=group_size, is_symmetric=True, scale_precision=qparams_precision,
        zero_point_precision=qparams_precision,
    )  # fmt: skip


def _get_4w_weight_config(group_size: int, qparams_precision: torch.dtype) -> IntxFakeQuantizeConfig:
    """uint4 in groups with tinygemm's zero points."""
    return IntxFakeQuantizeConfig(
        torch.uint4, group_size=group_size, is_symmetric=False, scale_precision=qparams_precision,
        zero_point_precision=qparams_precision, zero_point_domain=ZeroPointDomain.FLOAT,
    )  # fmt: skip


# -- switches ----------------------------------------------------------------------------------------------------------


def enable_linear_fake_quant(mod: nn.Module, enabled: bool = True) -> None:
    """For ``model.apply``: switch the fake quantizers of a prepared linear layer on or off."""
    if isinstance(mod, FakeQuantizedLinear):
        for quantizer in (mod.activation_fake_quantizer, mod.weight_fake_quantizer):
            if quantizer is not None:
                quantizer.enabled = enabled
    elif isinstance(mod, FakeQuantized) and isinstance(mod, nn.Linear):  # prepared by pennyweight.QATConfig
        mod.fake_quant_enabled = enabled


def disable_linear_fake_quant(mod: nn.Module) -> None:
    """For ``model.apply``."""
    enable_linear_fake_quant(mod, enabled=False)


def enable_8da4w_fake_quant(mod: nn.Module) -> None:
    """For ``model.apply``: switch on an :class:`Int8DynActInt4WeightQATLinear`."""
    if isinstance(mod, Int8DynActInt4WeightQATLinear):
        mod.enable_fake_quant()


def disable_8da4w_fake_quant(mod: nn.Module) -> None:
    """For ``model.apply``: switch off an :class:`Int8DynActInt4WeightQATLinear`."""
    if isinstance(mod, Int8DynActInt4WeightQATLinear):
        mod.disable_fake_quant()


def enable_4w_fake_quant(mod: nn.Module) -> None:
    """For ``model.apply``: switch on an :class:`Int4WeightOnlyQATLinear`."""
    if isinstance(mod, Int4WeightOnlyQATLinear):
        mod.enable_fake_quant()


def disable_4w_fake_quant(mod: nn.Module) -> None:
    """For ``model.apply``: switch off an :class:`Int4WeightOnlyQATLinear`."""
    if isinstance(mod, Int4WeightOnlyQATLinear):
        mod.disable_fake_quant()
