"""Nodes of exported graphs, with those in the bodies of control flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

_BODIES = {
    torch.ops.higher_order.cond: (1, 2),
    torch.ops.higher_order.map_impl: (0,),
    torch.ops.higher_order.scan: (0,),
    torch.ops.higher_order.while_loop: (1,),
}  # operator -> arguments that are graphs


def bfs_trace_with_node_process(model: ExportedProgram | GraphModule, node_op: Callable[[Node], Any]) -> None:
    """Call ``node_op`` with each node other than inputs and outputs, also in the bodies of control flow.

    Raises AssertionError for another kind of model.
    """
    assert isinstance(model, (ExportedProgram, GraphModule)), (
        f"Expected GraphModule or ExportedProgram, got {type(model)}"
    )
    queue = [model.graph_module if isinstance(model, ExportedProgram) else model]
    for graph in queue:
        for node in graph.graph.nodes:
            if node.op not in ("output", "placeholder"):
                node_op(node)
        queue += [
            graph.get_submodule(str(node.args[index].target))
            for node in graph.graph.nodes
            if node.op == "call_function"
            for index in _BODIES.get(node.target, ())
        ]
