"""Quantizers for the int8 kernels that inductor uses: x86, Arm, Intel GPUs.

A pattern is a layer and what a kernel computes with it: convolution or linear (+ batch norm in training) (+ add)
(+ activation function). Its inputs are quantized, its output is not: the next pattern quantizes its input. Operators
that only move or compare values, as max_pool2d or cat, are quantized if their input comes from a pattern, and share
the parameters of input and output.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, Node

from pennyweight.export.decomposed_ops import BATCH_NORMS, calls

from .annotate import (
    get_bias_qspec,
    get_input_act_qspec,
    get_module_name_filter,
    get_output_act_qspec,
    get_weight_qspec,
    is_annotated,
    mark_annotated,
)
from .specs import ANNOTATION, QuantizationAnnotation, QuantizationConfig, Quantizer, SharedQuantizationSpec

_ATEN = torch.ops.aten
_ADD = (_ATEN.add.Tensor, _ATEN.add_.Tensor)
_RELU = (_ATEN.relu.default, _ATEN.relu_.default)
_CONV_FUNCTIONS = (
    *_RELU, _ATEN.hardtanh.default, _ATEN.hardtanh_.default, _ATEN.hardswish.default, _ATEN.hardswish_.default,
    _ATEN.relu6.default, _ATEN.relu6_.default, _ATEN.silu.default, _ATEN.silu_.default,
)  # fmt: skip
_LINEAR_FUNCTIONS = (
    *_RELU, _ATEN.leaky_relu.default, _ATEN.leaky_relu_.default, _ATEN.tanh.default, _ATEN.tanh_.default,
    _ATEN.gelu.default,
)  # fmt: skip
_CONV1D, _CONV2D, _LINEAR = _ATEN.conv1d.default, _ATEN.conv2d.default, _ATEN.linear.default
_MATMUL, _MUL, _CAT, _MAX_POOL = _ATEN.matmul.default, _ATEN.mul.Tensor, _ATEN.cat.default, _ATEN.max_pool2d.default
_FLATTEN = _ATEN.flatten.using_ints

MOVES_CODES = {_MAX_POOL, _CAT, _ATEN.avg_pool2d.default, _ATEN.adaptive_avg_pool2d.default, _FLATTEN}
DEFAULT = {*MOVES_CODES, _CONV1D, _CONV2D, _LINEAR, _MUL}
QUANTIZABLE = {*DEFAULT, _MATMUL}

FilterFn = Callable[[list[Node]], bool]


@dataclass
class PatternAnnotation(QuantizationAnnotation):
    """``_is_output_of_quantized_pattern``: the node is the last one of a pattern with quantized inputs."""

    _is_output_of_quantized_pattern: bool = False


def _note(node: Node, inputs: dict[Node, Any] | None = None, output: Any = None, last: bool = False) -> None:
    node.meta[ANNOTATION] = PatternAnnotation(inputs or {}, output, True, True, last)


def _leave(nodes: Iterable[Node]) -> None:
    """Decide that nodes are not quantized."""
    for node in nodes:
        _note(node)


class X86InductorQuantizer(Quantizer):
    """Quantizes for inductor on x86 (oneDNN): activations uint8, weights int8 per channel with the default config.

    A config is set for all default operators, an operator, or a module by its path; the most specific one counts, and
    None leaves layers as they are. Configs of one quantizer are all static or all dynamic, all for training or none:
    others are skipped with a warning.

    >>> from pennyweight import graph_mode as gm
    >>> quantizer = gm.X86InductorQuantizer().set_global(gm.get_default_x86_inductor_quantization_config())
    """

    operators: ClassVar[dict[Any, Any]] = {
        nn.Conv1d: _CONV1D, F.conv1d: _CONV1D, nn.Conv2d: _CONV2D, F.conv2d: _CONV2D, nn.Linear: _LINEAR,
        F.linear: _LINEAR, nn.MaxPool2d: _MAX_POOL, F.max_pool2d: _MAX_POOL, torch.cat: _CAT,
        nn.AvgPool2d: _ATEN.avg_pool2d.default, F.avg_pool2d: _ATEN.avg_pool2d.default,
        nn.AdaptiveAvgPool2d: _ATEN.adaptive_avg_pool2d.default,
        F.adaptive_avg_pool2d: _ATEN.adaptive_avg_pool2d.default, torch.flatten: _FLATTEN, torch.matmul: _MATMUL,
        torch.mul: _MUL,
    }  # fmt: skip
    default: ClassVar[set[Any]] = DEFAULT
    quantizable: ClassVar[set[Any]] = QUANTIZABLE
    conv_functions: tuple[Any, ...] = _CONV_FUNCTIONS  # that are fused with a convolution

    def __init__(self) -> None:
        super().__init__()
        self.global_config: QuantizationConfig | None = None
        self.operator_type_qconfig: dict[Any, QuantizationConfig | None] = {}
        self.module_name_qconfig: dict[str, QuantizationConfig | None] = {}

    # -- configs -----------------------------------------------------------------------------------------------------

    def _fits(self, what: str, config: QuantizationConfig | None) -> bool:
        """Does a config have the mode of the others? Warns if not."""
        if config is None:
            return True
        others = [*self.module_name_qconfig.values(), *self.operator_type_qconfig.values(), self.global_config]
        fits, act = True, config.input_activation
        for other in others:
            if other is None:
                continue
            if other.is_qat != config.is_qat:
                warnings.warn("Mixed QAT and Non-QAT quantization config is not supported.", stacklevel=4)
                fits = False
            before = other.input_activation
            if before is not None and act is not None and before.is_dynamic != act.is_dynamic:
                warnings.warn("Mixed dynamic and static quantization config is not supported.", stacklevel=4)
                fits = False
            if not fits:
                warnings.warn(f"Skip the {what}.", stacklevel=3)
                break
        return fits

    def set_global(self, quantization_config: QuantizationConfig) -> Self:
        """The config of all operators that are quantized by default."""
        if self._fits("global quantization config", quantization_config):
            self.global_config = quantization_config
        return self

    def get_global_quantization_config(self) -> QuantizationConfig | None:
        """What :meth:`set_global` set; warns if it was not called."""
        if not isinstance(self.global_config, QuantizationConfig):
            warnings.warn(
                f"The global_config for {type(self).__name__} is currently invalid. Please ensure that you use "
                "set_global to establish the global quantization configuration.",
                stacklevel=2,
            )
        return self.global_config

    def set_function_type_qconfig(
        self, function_type: Callable[..., Any], quantization_config: QuantizationConfig | None
    ) -> Self:
        """The config of a function, for example ``torch.matmul``, and of modules that call it."""
        return self._set_operator("function", function_type, quantization_config)

    def set_module_type_qconfig(
        self, module_type: type[nn.Module], quantization_config: QuantizationConfig | None
    ) -> Self:
        """The config of a module type, for example ``nn.Linear``, and of the function that it calls."""
        return self._set_operator("Module", module_type, quantization_config)

    def _set_operator(self, kind: str, of: Any, config: QuantizationConfig | None) -> Self:
        if not self._fits(f"quantization config for {of}", config):
            return self
        if of in self.operators:
            self._set_aten_operator_qconfig(self.operators[of], config)
        else:
            warnings.warn(
                f"{kind}: Unable to customize quantization config for {of} by {type(self).__name__}.", stacklevel=3
            )
        return self

    def set_module_name_qconfig(self, module_name: str, quantization_config: QuantizationConfig | None) -> Self:
        """The config of all quantizable operators in the module of this path."""
        if self._fits(f"quantization config for {module_name}", quantization_config):
            self.module_name_qconfig[module_name] = quantization_config
        return self

    def _set_aten_operator_qconfig(self, operator_type: Any, quantization_config: QuantizationConfig | None) -> Self:
        if operator_type in self.quantizable:
            self.operator_type_qconfig[operator_type] = quantization_config
        else:
            warnings.warn(f"operator: Unable to quantize {operator_type} by {type(self).__name__}.", stacklevel=2)
        return self

    # -- annotation --------------------------------------------------------------------------------------------------

    def annotate(self, model: GraphModule) -> GraphModule:
        """Module paths first, then operators, then the global config; a node is annotated once."""
        for path, config in self.module_name_qconfig.items():
            inside = get_module_name_filter(path)
            self._annotate_with_config(model, config, lambda nodes, inside=inside: all(map(inside, nodes)))  # type: ignore[misc]
        for target, config in self.operator_type_qconfig.items():
            self._annotate_with_config(model, config, functools.partial(_one_of, {target}))
        if self.global_config:
            self._annotate_with_config(model, self.global_config, functools.partial(_one_of, self.default))
        self._share_outputs(model)
        return model

    def validate(self, model: GraphModule) -> None:
        """Nothing: every annotation is supported."""

    def _annotate_with_config(self, model: GraphModule, config: QuantizationConfig | None, wanted: FilterFn) -> None:
        if config is None or config.is_qat:
            self._annotate_trained_norms(model, config, wanted)
        self._annotate_layers(model, config, wanted, (_CONV1D, _CONV2D), _CONV_FUNCTIONS, alone=(_CONV2D,))
        self._annotate_layers(model, config, wanted, (_LINEAR,), _LINEAR_FUNCTIONS, alone=(_LINEAR,))
        self._annotate_products(model, config, wanted)
        for node in model.graph.nodes:
            self._annotate_propagated(node, config, wanted)

    def _annotate_layers(
        self, model: GraphModule, config: QuantizationConfig | None, wanted: FilterFn, layers: Sequence[Any],
        functions: Sequence[Any], alone: Sequence[Any], sums: bool = True, relu_after_sum: bool = True,
    ) -> None:  # fmt: skip
        """Layers with add and relu, with add, with a function, alone, in this order."""
        found = [node for node in model.graph.nodes if calls(node, *layers)]
        is_conv = _LINEAR not in layers
        for with_relu in (True, False) if relu_after_sum else (False,):
            for layer in found if sums else ():
                if is_conv and layer.target != _CONV2D:
                    continue
                for add, other, relu in _sums(layer, with_relu):
                    nodes = [relu, add, layer] if relu is not None else [add, layer]
                    if not _take(nodes, config, wanted):
                        continue
                    self._note_layer(layer, config)
                    # the other summand of a linear layer stays float: quantized, it costs accuracy
                    inputs = {other: get_input_act_qspec(config)} if is_conv else {}
                    _note(add, inputs, last=relu is None)
                    if relu is not None:
                        _note(relu, last=True)
        for layer in found:
            for user in layer.users:
                fused = calls(user, *functions) and (layer.target != _CONV1D or calls(user, *_RELU))
                if fused and _take([user, layer], config, wanted):
                    self._note_layer(layer, config)
                    _note(user, last=True)
        for layer in found:
            if layer.target in alone and _take([layer], config, wanted):
                self._note_layer(layer, config, last=True)

    def _note_layer(self, layer: Node, config: QuantizationConfig | None, last: bool = False) -> None:
        specs = (get_input_act_qspec(config), get_weight_qspec(config), get_bias_qspec(config))
        inputs = {n: spec for n, spec in zip(layer.args[:3], specs, strict=False) if isinstance(n, Node)}
        _note(layer, inputs, last=last)

    def _annotate_trained_norms(self, model: GraphModule, config: QuantizationConfig | None, wanted: FilterFn) -> None:
        """conv2d and batch norm (+ add) (+ function). The output is quantized: folding needs the pattern intact."""
        found = [(n, n.args[0]) for n in model.graph.nodes if calls(n, *BATCH_NORMS) and calls(n.args[0], _CONV2D)]

        def take(nodes: list[Node], norm: Node, conv: Node, more: dict[Node, Any]) -> None:
            if not _skip(list(dict.fromkeys([*nodes, norm, conv])), wanted):
                self._note_layer(conv, config) if config is not None else _leave([conv])
                if config is None:
                    _leave(nodes)
                else:
                    for node in nodes[1:]:
                        _note(node, more)
                    inputs = more if len(nodes) == 1 else {}
                    _note(nodes[0], inputs, get_output_act_qspec(config), last=True)
                mark_annotated([conv, norm, *nodes], PatternAnnotation)

        for with_relu in (True, False) if self.conv_functions else (False,):
            for norm, conv in found:
                for add, other, relu in _sums(norm, with_relu):
                    nodes = [relu, add] if relu is not None else [add]
                    take(nodes, norm, conv, {other: get_input_act_qspec(config)})
        for norm, conv in found:
            for user in norm.users:
                if calls(user, *self.conv_functions):
                    take([user], norm, conv, {})
        for norm, conv in found:
            take([norm], norm, conv, {})

    def _annotate_products(self, model: GraphModule, config: QuantizationConfig | None, wanted: FilterFn) -> None:
        """matmul, and mul of two tensors of one shape."""
        for target in (_MATMUL, _MUL):
            for node in model.graph.nodes:
                if not calls(node, target) or not _take([node], config, wanted):
                    continue
                a, b = node.args[:2]
                if target is _MUL and not (
                    _is_tensor(a) and _is_tensor(b) and a.meta["val"].shape == b.meta["val"].shape
                ):
                    continue
                _note(node, {n: get_input_act_qspec(config) for n in node.args}, last=True)

    def _annotate_propagated(self, node: Node, config: QuantizationConfig | None, wanted: FilterFn) -> None:
        if node.op != "call_function" or node.target not in MOVES_CODES or not _take([node], config, wanted):
            return
        sources = node.all_input_nodes if node.target is _CAT else node.all_input_nodes[:1]
        if not all(_ends_pattern(source) for source in sources):
            if node.target is _MAX_POOL:
                warnings.warn(
                    f"The input of {node.name} is not quantized, so max_pool2d is not quantized with config {config}.",
                    stacklevel=2,
                )
            return
        if node.target is _FLATTEN and node.users and not any(user.target in self.quantizable for user in node.users):
            return
        inputs: dict[Node, Any] = {sources[0]: get_input_act_qspec(config)}
        for source in sources[1:]:
            inputs.setdefault(source, SharedQuantizationSpec((sources[0], node)))
        _note(node, inputs, last=True)

    def _share_outputs(self, model: GraphModule) -> None:
        """The output of an operator that moves codes has the parameters of its input."""
        for node in model.graph.nodes:
            if node.op == "call_function" and node.target in MOVES_CODES and _ends_pattern(node):
                node.meta[ANNOTATION].output_qspec = SharedQuantizationSpec((node.all_input_nodes[0], node))


def _one_of(targets: set[Any], nodes: list[Node]) -> bool:
    """Is exactly one node of a pattern a call of these operators? Raises NotImplementedError for more."""
    n = sum(node.target in targets for node in nodes)
    if n > 1:
        raise NotImplementedError(f"Several nodes within a single pattern are of {targets}.")
    return n == 1


def _skip(nodes: list[Node], wanted: FilterFn) -> bool:
    return is_annotated(nodes) or not wanted(nodes)


def _take(nodes: list[Node], config: QuantizationConfig | None, wanted: FilterFn) -> bool:
    """Is a pattern to be quantized? With a config None it is marked as left alone."""
    if _skip(nodes, wanted):
        return False
    if config is None:
        _leave(nodes)
    return config is not None


def _sums(node: Node, with_relu: bool) -> list[tuple[Node, Node, Node | None]]:
    """(add, its other summand, relu or None) after a node that nobody else reads."""
    add = next(iter(node.users), None)
    if len(node.users) != 1 or not calls(add, *_ADD):
        return []
    assert add is not None
    a, b = add.args[:2]
    other = b if a is node else a
    if not isinstance(other, Node):
        return []
    if not with_relu:
        return [(add, other, None)]
    return [(add, other, relu) for relu in add.users if calls(relu, *_RELU)]


def _is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def _ends_pattern(node: Node) -> bool:
    annotation = node.meta.get(ANNOTATION)
    return (
        annotation is not None
        and annotation._annotated
        and getattr(annotation, "_is_output_of_quantized_pattern", False)
    )
