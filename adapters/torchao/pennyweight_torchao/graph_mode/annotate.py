"""Helpers to annotate nodes and to take specs from a :class:`QuantizationConfig`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Node

from .specs import ANNOTATION, QuantizationAnnotation, QuantizationConfig, QuantizationSpec, QuantizationSpecBase

_PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)


def _activation(spec: QuantizationSpec | None) -> QuantizationSpec | None:
    if spec is not None:
        assert spec.qscheme in _PER_TENSOR, f"activations are quantized per tensor, got qscheme {spec.qscheme}"
    return spec


def get_input_act_qspec(quantization_config: QuantizationConfig | None) -> QuantizationSpec | None:
    """Spec of inputs; None if there is none. Raises AssertionError unless it is per tensor."""
    return None if quantization_config is None else _activation(quantization_config.input_activation)


def get_output_act_qspec(quantization_config: QuantizationConfig | None) -> QuantizationSpec | None:
    """Spec of outputs; None if there is none. Raises AssertionError unless it is per tensor."""
    return None if quantization_config is None else _activation(quantization_config.output_activation)


def get_weight_qspec(quantization_config: QuantizationConfig | None) -> QuantizationSpec | None:
    """Spec of weights; None if there is none. Raises ValueError if it is not symmetric."""
    spec = None if quantization_config is None else quantization_config.weight
    if spec is not None and spec.qscheme not in (torch.per_tensor_symmetric, torch.per_channel_symmetric, None):
        raise ValueError(f"Unsupported quantization_spec {spec} for weight: qscheme must be symmetric")
    return spec


def get_bias_qspec(quantization_config: QuantizationConfig | None) -> QuantizationSpec | None:
    """Spec of biases; None if there is none. Raises AssertionError unless its dtype is float32."""
    spec = None if quantization_config is None else quantization_config.bias
    if spec is not None:
        assert spec.dtype == torch.float, f"Only float dtype for bias is supported, got {spec.dtype}"
    return spec


def annotate_input_qspec_map(node: Node, input_node: Node, qspec: QuantizationSpecBase | None) -> None:
    """Set the spec of the edge from ``input_node`` to ``node``."""
    annotation = node.meta.setdefault(ANNOTATION, QuantizationAnnotation())
    if annotation.input_qspec_map is None:
        annotation.input_qspec_map = {}
    annotation.input_qspec_map[input_node] = qspec


def annotate_output_qspec(node: Node, qspec: QuantizationSpecBase | None) -> None:
    """Set the spec of the output of ``node``."""
    node.meta.setdefault(ANNOTATION, QuantizationAnnotation()).output_qspec = qspec


def is_valid_annotation(annotation: QuantizationAnnotation | None) -> bool:
    """True if the annotation quantizes an input or the output."""
    return annotation is not None and (len(annotation.input_qspec_map) > 0 or annotation.output_qspec is not None)


def module_paths(node: Node) -> list[str]:
    """Paths of the modules that a node comes from, the outermost first; dynamo's ``L['self'].`` is left out."""
    return [str(path).removeprefix("L['self'].") for path, _ in node.meta.get("nn_module_stack", {}).values()]


def get_module_name_filter(module_name: str) -> Callable[[Node], bool]:
    """A function of a node: does it come from the module of this path, or from one inside it?"""

    def module_name_filter(n: Node) -> bool:
        return module_name in module_paths(n)

    return module_name_filter


def get_module_type_filter(module_type: Any) -> Callable[[Node], bool]:
    """A function of a node: does it come from a module of this type?"""
    wanted = f"{module_type.__module__}.{module_type.__qualname__}"

    def module_type_filter(n: Node) -> bool:
        types = [kind for _, kind in n.meta.get("nn_module_stack", {}).values()]
        return wanted in [f"{t.__module__}.{t.__qualname__}" if isinstance(t, type) else t for t in types]

    return module_type_filter


def is_annotated(nodes: Iterable[Node]) -> bool:
    """True if a quantizer has decided about one of the nodes."""
    return any(node.meta[ANNOTATION]._annotated for node in nodes if ANNOTATION in node.meta)


def mark_annotated(
    nodes: Iterable[Node | None], make: Callable[[], QuantizationAnnotation] = QuantizationAnnotation
) -> None:
    """Mark nodes as decided; those without annotation get an empty one of ``make``."""
    for node in nodes:
        if node is not None:
            node.meta.setdefault(ANNOTATION, make())._annotated = True
