"""Patterns in exported graphs: nodes by the module or function that they come from, and sequences of those."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.passes.utils.source_matcher_utils import (
    SourcePartition,
    check_subgraphs_connected,
    get_source_partitions,
)

_BODIES = {
    torch.ops.higher_order.cond: (1, 2),
    torch.ops.higher_order.map_impl: (0,),
    torch.ops.higher_order.scan: (0,),
    torch.ops.higher_order.while_loop: (1,),
}  # operator -> arguments that are graphs

_equivalent: list[set[Any]] = [
    {nn.Conv1d, F.conv1d},
    {nn.Conv2d, F.conv2d},
    {nn.AdaptiveAvgPool2d, F.adaptive_avg_pool2d},
    {nn.ReLU, F.relu, F.relu_},
    {nn.BatchNorm2d, F.batch_norm},
    {nn.Hardtanh, F.hardtanh, F.hardtanh_},
    {torch.add, operator.add, operator.iadd, "add", "add_"},
    {torch.mul, operator.mul, operator.imul, "mul", "mul_"},
]


def get_equivalent_types() -> list[set[Any]]:
    """Sets of modules and functions that mean the same in a pattern."""
    return _equivalent


def update_equivalent_types_dict(customized_equivalent_types: list[set[Any]] | None = None) -> None:
    """Replace the sets. Raises ValueError for None."""
    global _equivalent  # noqa: PLW0603 - the interface is one table for the process
    if customized_equivalent_types is None:
        raise ValueError("customized_equivalent_types should not be None: give a list of sets of types")
    _equivalent = customized_equivalent_types


def _matching(kind: Any) -> list[Any]:
    return [kind, *(other for group in _equivalent if kind in group for other in group)]


def find_sequential_partitions(
    gm: GraphModule, partition_types: Sequence[Any], include_functional_equivalent: bool = True,
    filter_fn: Callable[[Node], bool] | None = None,
) -> list[tuple[SourcePartition, ...]]:  # fmt: skip
    """All sequences of partitions of these types in which each reads from the one before it.

    Raises ValueError if two of the types are the same or equivalent.
    """
    seen: set[Any] = set()
    for kind in partition_types:
        if seen & set(_matching(kind)):
            raise ValueError(f"Invalid partition types: {partition_types}. Each type in the sequence must be unique")
        seen |= set(_matching(kind))
    found = []
    for kind in partition_types:
        by_type = get_source_partitions(gm.graph, _matching(kind), filter_fn)
        found.append(list(itertools.chain.from_iterable(by_type.values())))
    return [
        candidate
        for candidate in itertools.product(*found)
        if all(check_subgraphs_connected(a, b) for a, b in itertools.pairwise(candidate))
    ]


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
