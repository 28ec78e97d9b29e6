"""Constant folding of graphs, under torchao's names."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from pennyweight.export.graph_edits import fold_constants, replace_by_constant

__all__ = ["constant_fold", "is_const_source", "replace_node_with_constant"]


def constant_fold(gm: GraphModule, constraint_fn: Callable[[Node], bool] | None = None) -> None:
    """Replace nodes that depend on constants only, and meet the constraint, by buffers. Dequantize is not folded."""
    fold_constants(gm, constraint_fn or _folds)


def _folds(node: Node) -> bool:
    return "dequantize" not in str(node.target) and bool(node.all_input_nodes)


def is_const_source(node: Node, lifted_constant_names: list[str] | None) -> bool:
    """Does a node read a parameter or buffer, or one of these inputs?"""
    return node.op == "get_attr" or node.name in (lifted_constant_names or ())


def replace_node_with_constant(
    gm: GraphModule, node: Node, constant: torch.Tensor | None = None, name: str | None = None
) -> None:
    """Replace a node by a buffer, or, without a constant, by an input of the graph."""
    if constant is not None and name is None:
        replace_by_constant(gm, node, constant)
        return
    assert name is not None, "an input of the graph needs a name"
    with gm.graph.inserting_before(node):
        new = gm.graph.create_node("placeholder" if constant is None else "get_attr", name, (), {})
    if constant is not None:
        gm.register_buffer(name, constant)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    gm.graph.erase_node(node)
