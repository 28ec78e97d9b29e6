"""Where a converted graph differs from the exported one: outputs of nodes that come from the same node, compared.

Nodes are matched by ``from_node``, which torch.export and this package write into the metadata of nodes.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from pennyweight.export.graph_edits import FROM_NODE, new_name

from .partitions import bfs_trace_with_node_process

CUSTOM_KEY, NUMERIC_DEBUG_HANDLE_KEY, FROM_NODE_KEY = "custom", "numeric_debug_handle", FROM_NODE
log = logging.getLogger(__name__)

Recorded = dict["NodeSourceDebugInfo", tuple[str | None, object, list[Any]]]


@dataclass(frozen=True)
class NodeSourceDebugInfo:
    """The node of the exported graph that a node comes from."""

    name: str
    graph_id: int


def generate_numeric_debug_handle(ep: ExportedProgram) -> None:
    """Number the nodes of an exported program: ``node.meta["custom"]["numeric_debug_handle"]``; old numbers stay.

    Raises ValueError for another kind of model.
    """
    if not isinstance(ep, ExportedProgram):
        raise ValueError(f"Expected ep to be ExportedProgram, got {type(ep)}: call torch.export.export first")
    nodes: list[Node] = []
    bfs_trace_with_node_process(ep, nodes.append)
    last = max((n.meta.get(CUSTOM_KEY, {}).get(NUMERIC_DEBUG_HANDLE_KEY, 0) for n in nodes), default=0)
    for node in nodes:
        custom = node.meta.setdefault(CUSTOM_KEY, {})
        if NUMERIC_DEBUG_HANDLE_KEY not in custom:
            last += 1
            custom[NUMERIC_DEBUG_HANDLE_KEY] = last


def source_of(node: Node) -> NodeSourceDebugInfo | None:
    """The first node that a node was made from; None for inputs, outputs and nodes that no graph before had."""
    sources = node.meta.get(FROM_NODE_KEY)
    if (
        node.op in ("placeholder", "output")
        or not sources
        or sources[-1].pass_name == "ExportedProgram.module().unlift()"
    ):
        return None
    source = sources[-1]
    while source.from_node:
        source = source.from_node[-1]
    return NodeSourceDebugInfo(source.name, source.graph_id)


class OutputLogger(nn.Module):
    """Keeps what passes through it, detached: ``stats``."""

    _is_impure = True  # must not be removed as dead code

    def __init__(
        self, debug_info: NodeSourceDebugInfo, node_name: str | None = None, nn_module_stack: object | None = None
    ) -> None:
        super().__init__()
        self.debug_info, self.node_name, self.nn_module_stack = debug_info, node_name, nn_module_stack
        self.stats: list[object] = []

    def forward(self, x: object) -> object:
        self.stats.append(torch.utils._pytree.tree_map_only(Tensor, Tensor.detach, x))
        return x

    def extra_repr(self) -> str:
        return f"debug_info={self.debug_info}, node_name={self.node_name}, num_stats={len(self.stats)}"


def prepare_for_propagation_comparison(model: GraphModule) -> GraphModule:
    """A copy of the graph with an ``OutputLogger`` after each node that comes from the exported graph."""
    model = copy.deepcopy(model)
    for node in list(model.graph.nodes):
        source = source_of(node)
        if source is None:
            continue
        users = list(node.users)
        name = new_name(f"{node.name}_logger")(model)
        setattr(model, name, OutputLogger(source, node.name, node.meta.get("nn_module_stack")))
        with model.graph.inserting_after(node):
            logger = model.graph.call_module(name, (node,), {})
        for user in users:
            user.replace_input_with(node, logger)
    model.recompile()
    return model


def _same_shapes(x: object, y: object) -> bool:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return x.shape == y.shape
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return all(map(_same_shapes, x, y))
    if isinstance(x, dict) and isinstance(y, dict):
        return all(key in y and _same_shapes(value, y[key]) for key, value in x.items())
    return type(x) is type(y) and x == y


def _apply(loss: Callable[[Tensor, Tensor], Tensor], x: object, y: object) -> object:
    if isinstance(x, Tensor) and isinstance(y, Tensor):
        return loss(x.to(torch.float32), y.to(torch.float32))
    if isinstance(x, (list, tuple)) and isinstance(y, (list, tuple)):
        return type(x)([_apply(loss, a, b) for a, b in zip(x, y, strict=False)])
    if isinstance(x, dict) and isinstance(y, dict):
        return {key: _apply(loss, value, y[key]) for key, value in x.items()}
    return None


def _sqnr(x: Tensor, y: Tensor) -> Tensor:
    """20 log10(|x| / |x - y|), in decibels."""
    return 20 * torch.log10(torch.norm(x) / torch.norm(x - y))


@dataclass(frozen=True)
class QuantizationComparisonResult:
    """Two outputs of one node. Raises ValueError if they are not tensors, or collections of them, of equal shapes."""

    actual: Any
    ref: Any

    def __post_init__(self) -> None:
        for name in ("actual", "ref"):
            if not isinstance(getattr(self, name), (Tensor, list, tuple, dict)):
                raise ValueError(
                    f"`self.{name}` value must be a Tensor, list, tuple or dict, got: {getattr(self, name)}"
                )
        if not _same_shapes(self.ref, self.actual):
            raise ValueError(f"Cannot compare tensors with different shapes: ref={self.ref} vs actual={self.actual}")

    @property
    def mse_loss(self) -> Any:
        """Mean squared difference."""
        return self.loss(F.mse_loss)

    @property
    def sqnr(self) -> Any:
        """Signal to noise in decibels; infinite if the outputs are equal."""
        return self.loss(_sqnr)

    def loss(self, loss_function: Callable[[Tensor, Tensor], Tensor]) -> Any:
        """``loss_function(actual, ref)`` of each tensor, in float32."""
        return _apply(loss_function, self.actual, self.ref)

    def __repr__(self) -> str:
        return f"QuantizationComparisonResult(mse_loss={self.mse_loss}, sqnr={self.sqnr})"


@dataclass(frozen=True)
class NodeAccuracySummary:
    """The comparisons of one node, one for each call of the models."""

    debug_info: NodeSourceDebugInfo
    actual_node_name: str
    actual_module_stack: str
    ref_node_name: str
    ref_module_stack: str
    results: Sequence[QuantizationComparisonResult]


def extract_results_from_loggers(model: GraphModule) -> Recorded:
    """What the loggers of a model kept, by the node that it comes from."""
    loggers = [m for _, m in model.named_children() if isinstance(m, OutputLogger) and m.stats]
    return {m.debug_info: (m.node_name, m.nn_module_stack, m.stats) for m in loggers}


def _stack_text(stack: object) -> str:
    return str(list(stack.values())[-1][0]) if isinstance(stack, dict) and stack else str(stack)


def compare_results(ref_results: Recorded, actual_results: Recorded) -> dict[NodeSourceDebugInfo, NodeAccuracySummary]:
    """Compare the nodes that both models have. Raises ValueError, naming the nodes, if outputs cannot be compared."""
    summaries = {}
    for source, (ref_name, ref_stack, ref_stats) in ref_results.items():
        if source not in actual_results:
            log.debug("no node of the other model comes from %s", source)
            continue
        name, stack, stats = actual_results[source]
        try:
            results = [QuantizationComparisonResult(actual=a, ref=b) for a, b in zip(stats, ref_stats, strict=False)]
        except ValueError as error:
            raise ValueError(f"For debug_info={source} from ref node {ref_name} and actual node {name}") from error
        summaries[source] = NodeAccuracySummary(
            source, name or "", _stack_text(stack), ref_name or "", _stack_text(ref_stack), results
        )
    return summaries
