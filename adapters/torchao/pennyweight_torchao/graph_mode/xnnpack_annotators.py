"""Annotators of :class:`XNNPACKQuantizer`: one function per pattern of operators, in a table by name.

Inputs and outputs of a pattern are quantized. Operators that only move or compare values share the observer of their
input.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.passes.utils.source_matcher_utils import get_source_partitions

from pennyweight.export.decomposed_ops import BATCH_NORMS, calls, is_conv, is_conv_transpose
from pennyweight.export.graph_edits import constant_of, new_name

from .annotate import (
    get_bias_qspec,
    get_input_act_qspec,
    get_output_act_qspec,
    get_weight_qspec,
    is_annotated,
    mark_annotated,
)
from .specs import ANNOTATION, QuantizationAnnotation, QuantizationConfig, SharedQuantizationSpec

_ATEN = torch.ops.aten
_RELU = (_ATEN.relu.default, _ATEN.relu_.default)
_LINEAR = _ATEN.linear.default
_ADD, _MUL = (_ATEN.add.Tensor, _ATEN.add_.Tensor), (_ATEN.mul.Tensor, _ATEN.mul_.Tensor)
_TRANSPOSED_2D = (
    _ATEN.conv_transpose1d.default, _ATEN.conv_transpose2d.input, _ATEN.conv_transpose1d, _ATEN.conv_transpose2d
)  # fmt: skip
_LARGEST = 3402823500000000.0  # beyond it, histograms overflow
_SHARING = (
    _ATEN.relu.default, _ATEN.hardtanh.default, _ATEN.hardtanh_.default, _ATEN.max_pool2d.default, _ATEN.mean.default,
    _ATEN.mean.dim, _ATEN.permute.default, _ATEN.permute_copy.default, _ATEN.squeeze.dim, _ATEN.squeeze_copy.dim,
    _ATEN.adaptive_avg_pool2d.default, _ATEN.view_copy.default, _ATEN.view.default, _ATEN.slice_copy.Tensor,
    _ATEN.flatten.using_ints,
)  # fmt: skip

Config = QuantizationConfig | None
Filter = Callable[[Node], bool] | None
AnnotatorType = Callable[[GraphModule, Config, Filter], list[list[Node]] | None]
OP_TO_ANNOTATOR: dict[str, AnnotatorType] = {}


def register_annotator(op: str) -> Callable[[AnnotatorType], AnnotatorType]:
    """Put an annotator into the table, under a name."""

    def decorator(annotator: AnnotatorType) -> AnnotatorType:
        OP_TO_ANNOTATOR[op] = annotator
        return annotator

    return decorator


def _note(node: Node, inputs: dict[Node, Any], output: Any = None) -> None:
    node.meta[ANNOTATION] = QuantizationAnnotation(inputs, output, _annotated=True)


def _free(partition: Sequence[Node], wanted: Filter) -> bool:
    return not is_annotated(partition) and (wanted is None or all(map(wanted, partition)))


def _layer_inputs(layer: Node, config: Config) -> dict[Node, Any]:
    specs = (get_input_act_qspec(config), get_weight_qspec(config), get_bias_qspec(config))
    return {n: spec for n, spec in zip(layer.args[:3], specs, strict=False) if isinstance(n, Node)}


def _annotate_layers(
    gm: GraphModule, config: Config, filter_fn: Filter = None, *, is_layer: Callable[[Node], bool],
    ends: Callable[[Node], Node | None],
) -> list[list[Node]]:  # fmt: skip
    """Layers with a weight whose pattern ends in ``ends(layer)``, which may be the layer itself."""
    found = []
    for layer in gm.graph.nodes:
        end = ends(layer) if is_layer(layer) else None
        if end is None:
            continue
        inputs = _layer_inputs(layer, config)
        partition = [*dict.fromkeys([end, layer]), *list(inputs)[1:]]
        # a linear layer alone: its weight may be that of another call or module
        if not _free([layer] if is_layer is _is_linear and end is layer else partition, filter_fn):
            continue
        output = get_output_act_qspec(config)
        _note(layer, inputs, output if end is layer else None)
        if end is not layer:
            _note(end, {}, output)
        mark_annotated(partition)
        found.append(partition)
    return found


def _itself(layer: Node) -> Node | None:
    return layer


def _relu_after(node: Node) -> Node | None:
    """The relu that is the only user of a node."""
    user = next(iter(node.users), None)
    return user if len(node.users) == 1 and calls(user, *_RELU) else None


def _norm_after(layer: Node) -> Node | None:
    """The batch norm that is the only user of a layer."""
    user = next(iter(layer.users), None)
    return user if len(layer.users) == 1 and calls(user, *BATCH_NORMS) else None


def _norm_relu_after(layer: Node) -> Node | None:
    norm = _norm_after(layer)
    return None if norm is None else _relu_after(norm)


def _is_linear(node: Node) -> bool:
    return calls(node, _LINEAR)


def _is_conv_1d_2d(node: Node) -> bool:
    return calls(node, _ATEN.conv1d.default, _ATEN.conv2d.default)


def _is_transposed_1d_2d(node: Node) -> bool:
    return calls(node, *_TRANSPOSED_2D)


_LAYERS: dict[str, tuple[Callable[[Node], bool], Callable[[Node], Node | None]]] = {
    "linear": (_is_linear, _itself),
    "linear_relu": (_is_linear, _relu_after),
    "conv": (_is_conv_1d_2d, _itself),
    "conv_relu": (is_conv, _relu_after),
    "conv_transpose_relu": (is_conv_transpose, _relu_after),
    "conv_bn": (_is_conv_1d_2d, _norm_after),
    "conv_bn_relu": (_is_conv_1d_2d, _norm_relu_after),
    "conv_transpose_bn": (_is_transposed_1d_2d, _norm_after),
    "conv_transpose_bn_relu": (_is_transposed_1d_2d, _norm_relu_after),
}


OP_TO_ANNOTATOR.update(
    {name: partial(_annotate_layers, is_layer=is_layer, ends=ends) for name, (is_layer, ends) in _LAYERS.items()}
)


def _quantizable_operand(node: Node, gm: GraphModule) -> bool:
    """Is it a float32 tensor, and not a constant too large for a histogram?"""
    value = node.meta.get("val")
    if not isinstance(value, FakeTensor) or value.dtype != torch.float32:
        return False
    if node.op != "get_attr":
        return True
    constant = constant_of(gm, node)
    return not (constant.numel() == 1 and abs(constant.item()) > _LARGEST)


def _annotate_binary(
    gm: GraphModule, config: Config, filter_fn: Filter = None, *, targets: Sequence[Any], relu: bool
) -> list[list[Node]]:
    """add or mul, alone or followed by relu."""
    found = []
    for node in gm.graph.nodes:
        end = (_relu_after(node) if relu else node) if calls(node, *targets) else None
        if end is None or not _free(list(dict.fromkeys([end, node])), filter_fn):
            continue
        operands = [n for n in node.args[:2] if isinstance(n, Node)]
        if not all(_quantizable_operand(n, gm) for n in operands):
            continue
        output = get_output_act_qspec(config)
        _note(node, {n: get_input_act_qspec(config) for n in operands}, output if end is node else None)
        if end is not node:
            _note(end, {}, output)
        found.append([*dict.fromkeys([end, node]), *operands])
    return found


for _name, _targets in (("add", _ADD), ("mul", _MUL)):
    OP_TO_ANNOTATOR[_name] = partial(_annotate_binary, targets=_targets, relu=False)
    OP_TO_ANNOTATOR[f"{_name}_relu"] = partial(_annotate_binary, targets=_targets, relu=True)


@register_annotator("gru_io_only")
def _annotate_gru_io_only(gm: GraphModule, config: Config, filter_fn: Filter = None) -> list[list[Node]]:
    """The inputs and outputs of an nn.GRU; what it computes stays float."""
    found = []
    by_type = get_source_partitions(gm.graph, [nn.GRU], filter_fn)
    for partition in itertools.chain.from_iterable(by_type.values()):
        found.append(partition.nodes)
        if is_annotated(partition.input_nodes + partition.output_nodes):
            continue
        for source in partition.input_nodes[:2]:
            _note(next(iter(source.users)), {source: get_input_act_qspec(config)})
        assert len(partition.output_nodes) == 2, f"expecting GRU to have two outputs, got {partition.output_nodes}"
        for node in partition.output_nodes:
            _note(node, {}, get_output_act_qspec(config))
        mark_annotated(partition.nodes)
    return found


@register_annotator("adaptive_avg_pool2d")
def _annotate_adaptive_avg_pool2d(gm: GraphModule, config: Config, filter_fn: Filter = None) -> list[list[Node]]:
    """The output shares the observer of the input, which is that of the producer if it has one."""
    found = []
    for pool in gm.graph.nodes:
        if not calls(pool, _ATEN.adaptive_avg_pool2d.default) or (filter_fn is not None and not filter_fn(pool)):
            continue
        if is_annotated([pool]):
            continue
        source = pool.args[0]
        before = source.meta.get(ANNOTATION)
        own = before is None or not before._annotated or before.output_qspec is None
        spec = get_input_act_qspec(config) if own else SharedQuantizationSpec(source)
        _note(pool, {source: spec}, SharedQuantizationSpec((source, pool)))
        found.append([pool])
    return found


@register_annotator("cat")
def _annotate_cat(gm: GraphModule, config: Config, filter_fn: Filter = None) -> list[list[Node]]:
    """All inputs and the output share the observer of the first input."""
    found = []
    for cat in gm.graph.nodes:
        if not calls(cat, _ATEN.cat.default) or (filter_fn is not None and not filter_fn(cat)) or is_annotated([cat]):
            continue
        first, *others = cat.args[0]
        shared = SharedQuantizationSpec((first, cat))
        inputs: dict[Node, Any] = {first: get_input_act_qspec(config)}
        for other in others:
            inputs.setdefault(other, shared)
        _note(cat, inputs, shared)
        found.append([cat])
    return found


def propagate_annotation(model: GraphModule) -> None:
    """Operators that only move or compare values share the observer of their producer's output."""
    for node in model.graph.nodes:
        if node.op != "call_function" or node.target not in _SHARING or not isinstance(node.args[0], Node):
            continue
        before = node.args[0].meta.get(ANNOTATION)
        if before is None or before.output_qspec is None or is_annotated([node]):
            continue
        shared = SharedQuantizationSpec(node.args[0])
        _note(node, {node.args[0]: shared}, shared)


def scalars_to_constants(model: GraphModule) -> GraphModule:
    """Numbers in add and mul become buffers ``_tensor_constant_0``, .., so that they can be quantized."""
    for node in model.graph.nodes:
        if not calls(node, _ATEN.add.Tensor, _ATEN.mul.Tensor):
            continue
        args = []
        for arg in node.args:
            if not isinstance(arg, Node):
                name = new_name("_tensor_constant_")(model)
                value = torch.tensor(float(arg), dtype=torch.float32, device=node.meta["val"].device)
                model.register_buffer(name, value)
                with model.graph.inserting_before(node):
                    arg = model.graph.create_node("get_attr", name, (), {})
                arg.meta["val"] = node.meta["val"].fake_mode.from_tensor(value, static_shapes=True)
            args.append(arg)
        node.args = tuple(args)
    model.recompile()
    return model
