"""Default configs of the quantizers for inductor, and the quantizers for Arm and Intel GPUs."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from .fake_quantize import FakeQuantize, FusedMovingAvgObsFakeQuantize
from .histogram_observer import HistogramObserver
from .inductor_quantizers import (
    _CONV2D,
    _LINEAR,
    _LINEAR_FUNCTIONS,
    _MATMUL,
    _MAX_POOL,
    FilterFn,
    X86InductorQuantizer,
)
from .passive_observers import PlaceholderObserver
from .range_observers import (
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
)
from .specs import QuantizationConfig, QuantizationSpec

EPS = 2**-12  # least scale of an activation and of a weight


def activation_spec(dtype: torch.dtype, low: int, high: int, is_qat: bool, is_dynamic: bool) -> QuantizationSpec:
    """Affine per tensor: static from a histogram, or in training from moving averages; dynamic from each input."""
    more: dict[str, Any] = {"eps": EPS}
    kind: Any = PlaceholderObserver if is_dynamic else HistogramObserver
    if is_qat:
        kind = FakeQuantize if is_dynamic else FusedMovingAvgObsFakeQuantize
        if is_dynamic:
            more["observer"] = MovingAverageMinMaxObserver.with_args(averaging_constant=1)
    return QuantizationSpec(
        dtype, kind.with_args(**more), low, high, torch.per_tensor_affine, is_dynamic=is_dynamic
    )  # fmt: skip


def weight_spec(low: int, high: int, per_channel: bool, is_qat: bool) -> QuantizationSpec:
    """Symmetric int8, per output channel or per tensor."""
    observer: Any = PerChannelMinMaxObserver if per_channel else MinMaxObserver
    trained: Any = MovingAveragePerChannelMinMaxObserver if per_channel else MovingAverageMinMaxObserver
    make = FusedMovingAvgObsFakeQuantize.with_args(eps=EPS, observer=trained) if is_qat else observer.with_args(eps=EPS)
    scheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric
    return QuantizationSpec(torch.int8, make, low, high, scheme, ch_axis=0)


@functools.lru_cache
def get_default_x86_inductor_quantization_config(
    is_qat: bool = False, is_dynamic: bool = False, reduce_range: bool = False
) -> QuantizationConfig:
    """Activations uint8 per tensor, weights int8 per output channel, biases float.

    is_qat: for :func:`prepare_qat`. is_dynamic: activations are quantized with the range of each input. reduce_range:
    activations use 0 to 127, for processors without VNNI, whose kernels overflow with 0 to 255.
    """
    act = activation_spec(torch.uint8, 0, 127 if reduce_range else 255, is_qat, is_dynamic)
    return QuantizationConfig(act, act, weight_spec(-128, 127, True, is_qat), None, is_qat)


@functools.lru_cache
def get_default_arm_inductor_quantization_config(is_qat: bool = False, is_dynamic: bool = False) -> QuantizationConfig:
    """Activations int8 affine per tensor, weights int8 per tensor, biases float."""
    act = activation_spec(torch.int8, -128, 127, is_qat, is_dynamic)
    return QuantizationConfig(act, act, weight_spec(-128, 127, False, is_qat), None, is_qat)


@functools.lru_cache
def get_default_xpu_inductor_quantization_config() -> QuantizationConfig:
    """Activations int8 affine per tensor, weights int8 per output channel, biases float."""
    act = activation_spec(torch.int8, -128, 127, False, False)
    return QuantizationConfig(act, act, weight_spec(-128, 127, True, False), None, False)


class ArmInductorQuantizer(X86InductorQuantizer):
    """Quantizes for inductor on 64-bit Arm: convolutions (+ add, batch norm), linear layers (+ function), matmul."""

    operators: ClassVar[dict[Any, Any]] = {
        nn.Conv2d: _CONV2D, F.conv2d: _CONV2D, nn.Linear: _LINEAR, F.linear: _LINEAR, torch.matmul: _MATMUL
    }  # fmt: skip
    default: ClassVar[set[Any]] = {_CONV2D, _LINEAR}
    quantizable: ClassVar[set[Any]] = {_CONV2D, _LINEAR, _MATMUL}
    conv_functions: tuple[Any, ...] = ()

    def _annotate_with_config(self, model: GraphModule, config: QuantizationConfig | None, wanted: FilterFn) -> None:
        if config is None or config.is_qat:
            self._annotate_trained_norms(model, config, wanted)
        self._annotate_layers(model, config, wanted, (_CONV2D,), (), alone=(_CONV2D,), relu_after_sum=False)
        self._annotate_layers(model, config, wanted, (_LINEAR,), _LINEAR_FUNCTIONS, alone=(_LINEAR,), sums=False)
        self._annotate_products(model, config, wanted)

    def _share_outputs(self, model: GraphModule) -> None:
        """Nothing: no operator that moves codes is quantized."""


class XPUInductorQuantizer(X86InductorQuantizer):
    """As :class:`X86InductorQuantizer`, without batch norms in training and without max_pool2d."""

    def _annotate_trained_norms(self, model: GraphModule, config: QuantizationConfig | None, wanted: FilterFn) -> None:
        """Nothing: no such kernel."""

    def _annotate_propagated(self, node: Node, config: QuantizationConfig | None, wanted: FilterFn) -> None:
        if node.target is not _MAX_POOL:
            super()._annotate_propagated(node, config, wanted)
