"""prepare(model, quantizer): observers or fake quantizers in an exported graph, as a quantizer's annotations ask."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node

from pennyweight.export.graph_edits import FROM_NODE, insert_observer, producers
from pennyweight.support.errors import ArgumentError

from .fake_quantize import FakeQuantizeBase
from .fold_batch_norm import fold_batch_norms
from .observer_base import ObserverBase, SelfConverting
from .qat_batch_norm import fuse_batch_norms_for_training
from .sharing import annotated_places, group_places, make_observers
from .specs import ANNOTATION, EdgeOrNode, Quantizer

Observers = dict[EdgeOrNode, nn.Module | None]
OBSERVERS = (ObserverBase, FakeQuantizeBase, SelfConverting)
_LOOPS = {torch.ops.higher_order.scan: 0, torch.ops.higher_order.while_loop: 1}  # argument that is the body


def prepare(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """Prepare for calibration. model: ``torch.export.export(model, inputs).module()``, changed in place.

    Batch norms after convolutions and linear layers are folded into their weights. Run the result on sample data, then
    call :func:`convert`. Bodies of ``scan`` and ``while_loop`` are prepared too. Raises ArgumentError if the model is
    not an exported graph.
    """
    _check(model, "prepare")
    fold_batch_norms(model)
    prepared = _annotate_and_insert(model, quantizer, qat=False)
    for body in loop_bodies(prepared):
        setattr(prepared, body, prepare(prepared.get_submodule(body), quantizer))  # type: ignore[arg-type]
    return prepared


def prepare_qat(model: GraphModule, quantizer: Quantizer) -> GraphModule:
    """Prepare for training with fake quantizers. model: exported in training mode, changed in place.

    Convolutions followed by a batch norm see weights scaled by the running statistics, as after folding (see
    :mod:`pennyweight_torchao.graph_mode.qat_batch_norm`). Train the result, then call :func:`convert`.
    """
    _check(model, "prepare_qat")
    return _annotate_and_insert(model, quantizer, qat=True)


def _check(model: Any, function: str) -> None:
    if not isinstance(model, GraphModule):
        raise ArgumentError(
            f"{function}: needs an exported graph, got {type(model).__name__}; "
            "call torch.export.export(model, example_inputs).module() first"
        )


def _annotate_and_insert(model: GraphModule, quantizer: Quantizer, qat: bool) -> GraphModule:
    meta = model.meta
    model = quantizer.transform_for_annotation(model)
    quantizer.annotate(model)
    quantizer.validate(model)
    if qat:
        fuse_batch_norms_for_training(model)
    prepared = insert_observers(model, qat, quantizer.prepare_obs_or_fq_callback)
    prepared.meta.update(meta)
    forbid_train_eval(prepared)
    return prepared


def insert_observers(model: GraphModule, qat: bool, callback: Any = None) -> GraphModule:
    """Make the observers that annotations ask for and insert them, as submodules ``activation_post_process_N``.

    callback: called with the model and the observers by place, before they are inserted.
    """
    nodes = list(model.graph.nodes)
    specs = annotated_places(model)
    observers = make_observers(specs, group_places(specs), qat)
    if callback is not None:
        callback(model, observers)
    buffers = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    for node in nodes:
        if ANNOTATION in node.meta:
            _observe_inputs(model, node, observers, buffers)
            if isinstance(node.meta.get("val"), FakeTensor) and observers.get(node) is not None:
                _observe_output(model, node, observers)
    return GraphModule(model, model.graph)


def _observe_inputs(model: GraphModule, node: Node, observers: Observers, buffers: set[str]) -> None:
    def observed(arg: Any) -> Any:
        if isinstance(arg, (list, tuple)):
            return type(arg)(observed(a) for a in arg)
        return _observed(model, node, arg, observers, buffers) if isinstance(arg, Node) else arg

    node.args = tuple(observed(arg) for arg in node.args)
    for name, value in node.kwargs.items():
        if any(isinstance(n, Node) for n in torch.utils._pytree.tree_leaves(value)):
            raise AssertionError(
                f"keyword argument '{name}' of {node.name} is a tensor, which is not supported for annotation: "
                "pass it by position"
            )


def _observed(model: GraphModule, node: Node, arg: Node, observers: Observers, buffers: set[str]) -> Node:
    """The node that ``node`` reads in place of ``arg``."""
    source = arg
    while is_observer(model, source):
        source = source.args[0]  # type: ignore[assignment]
    observer = observers.get((source, node))
    if observer is None or _writes_buffer(node, source, buffers) or observers.get(source) is observer:
        return arg
    for user in arg.users:  # the same observer for another user of the tensor
        if is_observer(model, user) and model.get_submodule(str(user.target)) is observer:
            return user
    return insert_observer(model, arg, observer)


def _observe_output(model: GraphModule, node: Node, observers: Observers) -> None:
    observer = observers[node]
    assert observer is not None
    users = list(node.users)
    seen = insert_observer(model, node, observer)
    if FROM_NODE in node.meta:
        seen.meta[FROM_NODE] = node.meta[FROM_NODE]
    for user in users:
        user.replace_input_with(node, seen)


def _writes_buffer(node: Node, arg: Node, buffers: set[str]) -> bool:
    """Does ``node`` write to ``arg``, which is a buffer? Observed, the write would go to a copy."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not node.args or node.args[0] is not arg:
        return False
    first = schema.arguments[0].alias_info if schema.arguments else None
    if first is None or not first.is_write:
        return False
    return any(n.op == "get_attr" and str(n.target) in buffers for n in producers(arg) or ())


def is_observer(model: GraphModule, node: Any) -> bool:
    """Does a node call an observer or fake quantizer?"""
    if not isinstance(node, Node) or node.op != "call_module":
        return False
    return isinstance(model.get_submodule(str(node.target)), OBSERVERS)


def loop_bodies(model: GraphModule) -> list[str]:
    """Names of the graphs that ``scan`` and ``while_loop`` repeat."""
    nodes = [node for node in model.graph.nodes if node.op == "call_function" and node.target in _LOOPS]
    return [str(node.args[_LOOPS[node.target]].target) for node in nodes]


_NO_SWITCH = (
    "Calling train() or eval() is not supported for exported models. Please call move_exported_model_to_train(model) "
    "or move_exported_model_to_eval(model) instead, or allow_exported_model_train_eval(model) to have train() and "
    "eval() do that. They switch dropout and batch norm; other differences are fixed in the graph."
)


def forbid_train_eval(model: GraphModule) -> None:
    """``model.train()`` and ``model.eval()`` raise NotImplementedError: they would change nothing in the graph."""

    model.train = model.eval = _refuse_switch  # type: ignore[method-assign]


def _refuse_switch(mode: bool = True) -> NoReturn:  # a function of the module, so that models can be pickled
    raise NotImplementedError(_NO_SWITCH)
