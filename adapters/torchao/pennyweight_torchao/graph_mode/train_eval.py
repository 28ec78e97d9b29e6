"""Switch an exported graph between training and evaluation: dropout and batch norm, which are fixed in the graph."""

from __future__ import annotations

import types

import torch
from torch.fx import GraphModule, Node

from pennyweight.export.decomposed_ops import calls

_ATEN = torch.ops.aten
_DROPOUTS = (_ATEN.dropout.default, _ATEN.dropout_.default)
_NORMS = (_ATEN.batch_norm.default, _ATEN.cudnn_batch_norm.default, _ATEN.miopen_batch_norm.default)
_STATE = "_exported_training"  # attribute of the graph: what it was switched to last


def move_exported_model_to_eval(model: GraphModule) -> GraphModule:
    """Dropout passes its input on, batch norm uses running statistics. In place; returns the model."""
    return _switch(model, training=False)


def move_exported_model_to_train(model: GraphModule) -> GraphModule:
    """Dropout drops, batch norm uses and records the statistics of the batch. In place; returns the model.

    A dropout or batch norm that the model was exported with in evaluation mode is switched too.
    """
    return _switch(model, training=True)


def allow_exported_model_train_eval(model: GraphModule) -> GraphModule:
    """``model.train()`` and ``model.eval()`` switch dropout and batch norm from now on. Returns the model."""
    model.train = types.MethodType(_train, model)  # type: ignore[method-assign]
    model.eval = types.MethodType(_eval, model)  # type: ignore[method-assign]
    return model


def _train(self: GraphModule, mode: bool = True) -> GraphModule:
    return _switch(self, training=mode)


def _eval(self: GraphModule) -> GraphModule:
    return _switch(self, training=False)


def _switch(model: GraphModule, training: bool) -> GraphModule:
    if getattr(model, _STATE, not training) == training:
        return model
    setattr(model, _STATE, training)
    for node in model.graph.nodes:
        if calls(node, *_DROPOUTS):
            _set(node, 2, "train", training)
        elif calls(node, *_NORMS):
            _set(node, 5, "training", training)
    model.graph.eliminate_dead_code()
    model.recompile()
    return model


def _set(node: Node, position: int, name: str, value: bool) -> None:
    """Set an argument of an operator, given by position or by name."""
    if name in node.kwargs:
        node.kwargs = {**node.kwargs, name: value}
    elif len(node.args) > position:
        node.args = (*node.args[:position], value, *node.args[position + 1 :])
    else:
        node.kwargs = {**node.kwargs, name: value}
