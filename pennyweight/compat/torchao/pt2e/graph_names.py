"""Names of torchao that are called otherwise in :mod:`pennyweight.graph_mode`, and unions of types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
from torch.fx import GraphModule, Node

from ....graph_mode.fake_quantize import FakeQuantizeBase
from ....graph_mode.graph_edits import fold_constants, replace_by_constant
from ....graph_mode.inductor_quantizers import (
    DEFAULT as default_quantizable_ops,
)
from ....graph_mode.inductor_quantizers import MOVES_CODES as int8_in_int8_out_ops
from ....graph_mode.inductor_quantizers import QUANTIZABLE as quantizable_ops
from ....graph_mode.inductor_quantizers import PatternAnnotation as _X86InductorQuantizationAnnotation
from ....graph_mode.numeric_debugger import source_of as _extract_node_source_debug_info
from ....graph_mode.observer_base import ObserverBase, PartialWrapper
from ....graph_mode.observer_base import UniformQuantizationObserverBase as _ObserverBase
from ....graph_mode.observer_base import bind as _with_args
from ....graph_mode.observer_base import bind_callable as _with_callable_args
from ....graph_mode.specs import ANNOTATION as Q_ANNOTATION_KEY
from ....graph_mode.xnnpack_annotators import scalars_to_constants as _convert_scalars_to_attrs

__all__ = [
    "QUANT_ANNOTATION_KEY",
    "Q_ANNOTATION_KEY",
    "ObserverOrFakeQuantize",
    "ObserverOrFakeQuantizeConstructor",
    "OperatorPatternType",
    "_ObserverBase",
    "_X86InductorQuantizationAnnotation",
    "_convert_scalars_to_attrs",
    "_extract_node_source_debug_info",
    "_with_args",
    "_with_callable_args",
    "constant_fold",
    "default_quantizable_ops",
    "int8_in_int8_out_ops",
    "is_const_source",
    "propagation_quantizable_ops",
    "quantizable_ops",
    "replace_node_with_constant",
]  # fmt: skip

QUANT_ANNOTATION_KEY = Q_ANNOTATION_KEY
propagation_quantizable_ops = int8_in_int8_out_ops
ObserverOrFakeQuantize = ObserverBase | FakeQuantizeBase
ObserverOrFakeQuantizeConstructor = PartialWrapper | type[ObserverBase] | type[FakeQuantizeBase]
OperatorPatternType = Annotated[list[Callable[..., Any]], None]


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
