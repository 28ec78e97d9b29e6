"""A quantizer for XNNPACK: int8 activations and weights, inputs and outputs of each operator quantized."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from .annotate import get_module_name_filter, get_module_type_filter
from .inductor_configs import activation_spec, weight_spec
from .specs import QuantizationConfig, Quantizer
from .xnnpack_annotators import OP_TO_ANNOTATOR, Filter, propagate_annotation, scalars_to_constants

Pattern = list[Callable[..., Any]]
_TRAINED = ("conv_bn_relu", "conv_bn", "conv_transpose_bn_relu", "conv_transpose_bn")
_STATIC = (
    "linear_relu", "linear", "conv_relu", "conv", "conv_transpose_relu", "adaptive_avg_pool2d", "gru_io_only",
    "add_relu", "add", "mul_relu", "mul", "cat",
)  # fmt: skip
_PATTERNS: dict[str, list[Pattern]] = {
    "conv2d": [[nn.Conv2d, nn.ReLU], [nn.Conv2d, F.relu], [F.conv2d, nn.ReLU], [F.conv2d, F.relu]],
    "linear": [[nn.Linear], [F.linear]],
    "add": [[torch.add]],
    "adaptive_avg_pool2d": [[nn.AdaptiveAvgPool2d], [F.adaptive_avg_pool2d]],
}


class OperatorConfig(NamedTuple):
    """A config and the patterns, as lists of modules and functions, that it can be used for."""

    config: QuantizationConfig
    operators: list[Pattern]


@functools.lru_cache
def get_symmetric_quantization_config(
    is_per_channel: bool = False, is_qat: bool = False, is_dynamic: bool = False, act_qmin: int = -128,
    act_qmax: int = 127, weight_qmin: int = -127, weight_qmax: int = 127,
) -> QuantizationConfig:  # fmt: skip
    """Activations int8 affine per tensor, weights int8 symmetric per tensor or output channel, biases float.

    is_qat: for :func:`prepare_qat`. is_dynamic: inputs are quantized with the range of each input, outputs are not.
    """
    act = activation_spec(torch.int8, act_qmin, act_qmax, is_qat, is_dynamic)
    weight = weight_spec(weight_qmin, weight_qmax, is_per_channel, is_qat)
    return QuantizationConfig(act, None if is_dynamic else act, weight, None, is_qat)


@functools.cache
def _supported() -> list[OperatorConfig]:
    configs = [
        get_symmetric_quantization_config(**arguments)
        for arguments in ({}, {"is_qat": True}, {"is_per_channel": True}, {"is_per_channel": True, "is_qat": True})
    ]
    return [OperatorConfig(config, copy.deepcopy(patterns)) for config in configs for patterns in _PATTERNS.values()]


def _is_or_feeds(target: Any, node: Node) -> bool:
    """Is a node of a pattern a call of the operator, or a parameter?"""
    return node.op != "call_function" or node.target == target


class XNNPACKQuantizer(Quantizer):
    """Quantizes linear layers, convolutions (+ batch norm in training), add, mul, all (+ relu), cat, adaptive pooling.

    A config is set for a module path, else for a module type, else for all. With a dynamic global config, only linear
    layers are quantized.

    >>> quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
    """

    STATIC_QAT_ONLY_OPS: ClassVar[list[str]] = list(_TRAINED)
    STATIC_OPS: ClassVar[list[str]] = list(_STATIC)
    DYNAMIC_OPS: ClassVar[list[str]] = ["linear"]

    def __init__(self) -> None:
        super().__init__()
        self.global_config: QuantizationConfig | None = None
        self.operator_type_config: dict[Any, QuantizationConfig | None] = {}
        self.module_type_config: dict[Any, QuantizationConfig | None] = {}
        self.module_name_config: dict[str, QuantizationConfig | None] = {}

    @classmethod
    def get_supported_quantization_configs(cls) -> list[QuantizationConfig]:
        """The configs, in no order."""
        return list({config for config, _ in _supported()})

    @classmethod
    def get_supported_operator_for_quantization_config(
        cls, quantization_config: QuantizationConfig | None
    ) -> list[Pattern]:
        """The patterns of a config; of all configs for None."""
        if quantization_config is None:
            return [pattern for _, patterns in _supported() for pattern in patterns]
        return next((patterns for config, patterns in _supported() if config == quantization_config), [])

    @classmethod
    def get_supported_operators(cls) -> list[OperatorConfig]:
        """All configs with their patterns."""
        return _supported()

    def set_global(self, quantization_config: QuantizationConfig) -> Self:
        """The config of modules without one of their own."""
        self.global_config = quantization_config
        return self

    def set_operator_type(self, operator_type: Any, quantization_config: QuantizationConfig) -> Self:
        """The config of an operator, for example ``torch.ops.aten.linear.default``."""
        self.operator_type_config[operator_type] = quantization_config
        return self

    def set_module_type(self, module_type: type[nn.Module], quantization_config: QuantizationConfig) -> Self:
        """The config of modules of a type."""
        self.module_type_config[module_type] = quantization_config
        return self

    def set_module_name(self, module_name: str, quantization_config: QuantizationConfig | None) -> Self:
        """The config of the module of a path. Raises AssertionError for None."""
        assert quantization_config is not None, "quantization_config == None is not supported: leave the module out"
        self.module_name_config[module_name] = quantization_config
        return self

    def transform_for_annotation(self, model: GraphModule) -> GraphModule:
        """Numbers in add and mul become constants."""
        return scalars_to_constants(model)

    def annotate(self, model: GraphModule) -> GraphModule:
        """Module paths first, then module types, then operators, then the global config."""
        config = self.global_config
        dynamic = config is not None and config.input_activation is not None and config.input_activation.is_dynamic
        own: list[Callable[[Node], bool]] = []
        for path, of_path in self.module_name_config.items():
            own.append(get_module_name_filter(path))
            self._annotate(model, of_path, own[-1], dynamic)
        for kind, of_kind in self.module_type_config.items():
            own.append(get_module_type_filter(kind))
            self._annotate(model, of_kind, own[-1], dynamic)
        for target, of_target in self.operator_type_config.items():
            self._annotate(model, of_target, functools.partial(_is_or_feeds, target), dynamic)
        self._annotate(model, config, lambda n: not any(inside(n) for inside in own), dynamic)
        propagate_annotation(model)
        return model

    def _annotate(self, model: GraphModule, config: QuantizationConfig | None, wanted: Filter, dynamic: bool) -> None:
        if config is None:
            return
        static = (*self.STATIC_QAT_ONLY_OPS, *self.STATIC_OPS) if config.is_qat else self.STATIC_OPS
        for name in self.DYNAMIC_OPS if dynamic else static:
            OP_TO_ANNOTATOR[name](model, config, wanted)

    def validate(self, model: GraphModule) -> None:
        """Nothing: every annotation is supported."""
