"""After conversion: a dequantize for each user of a tensor, and metadata on the new operators.

Backends match dequantize -> operator -> quantize. That pattern has no other users if every operator has its own
dequantize.
"""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node, map_arg

from pennyweight.export.decomposed_ops import CHOOSE, DEQUANTIZE, QUANTIZE, calls, data_users

from .annotate import is_valid_annotation
from .specs import ANNOTATION

_PORTED = ("stack_trace", "quantization_tag")


def copy_dequantize_per_user(model: GraphModule) -> None:
    """Give each annotated user of a dequantized tensor its own dequantize, in place. Dynamic ones stay shared."""
    for node in list(model.graph.nodes):
        if not calls(node, *DEQUANTIZE) or len(data_users(node)) <= 1 or _is_dynamic(node):
            continue
        for user in data_users(node):
            if is_valid_annotation(user.meta.get(ANNOTATION)):
                with model.graph.inserting_after(node):
                    own = model.graph.node_copy(node)
                _replace_input(user, node, own)
    model.graph.eliminate_dead_code()
    model.recompile()


def _replace_input(user: Node, old: Node, new: Node) -> None:
    user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda n: new if n is old else n)


def _is_dynamic(dequantize: Node) -> bool:
    """Are the parameters those of choose_qparams?"""
    codes: Any = dequantize.args[0]
    if not calls(codes, *QUANTIZE) or not isinstance(codes.args[1], Node):
        return False
    return any(calls(source, *CHOOSE.values()) for source in codes.args[1].all_input_nodes)


def port_metadata(model: GraphModule) -> None:
    """Copy stack traces and tags to quantize and dequantize, in place: from the node that an annotation stands on.

    The quantize of a weight gets those of the weight.
    """
    for node in model.graph.nodes:
        annotation = node.meta.get(ANNOTATION)
        if not is_valid_annotation(annotation):
            continue
        for source, spec in annotation.input_qspec_map.items():
            if spec is not None:
                _port_input(source, node, bool(getattr(spec, "is_dynamic", False)))
        if annotation.output_qspec is not None:
            for user in data_users(node):
                if calls(user, *QUANTIZE):
                    _copy(node, user)


def _port_input(source: Node, user: Node, dynamic: bool) -> None:
    for dequantize in user.all_input_nodes:
        if not calls(dequantize, *DEQUANTIZE) or not _comes_from(dequantize, source):
            continue
        codes: Any = dequantize.args[0]
        _copy(user, dequantize)
        if not calls(codes, *QUANTIZE):
            return
        if dynamic:
            _copy(user, codes)
            for item in codes.args[1:3]:
                for choose in item.all_input_nodes if isinstance(item, Node) else ():
                    _copy(user, choose)
        else:
            _port_weight(codes)
        return


def _port_weight(codes: Node) -> None:
    """Metadata of a weight to its quantize, and to operators between them that only move values."""
    path = [codes]
    before: Any = codes.args[0]
    while isinstance(before, Node) and before.op == "call_function" and len(before.all_input_nodes) == 1:
        path.append(before)
        before = before.args[0]
    if isinstance(before, Node) and before.op == "get_attr":
        for node in path:
            _copy(before, node)


def _comes_from(node: Any, source: Node) -> bool:
    while calls(node, *QUANTIZE, *DEQUANTIZE):
        node = node.args[0]
    return node is source


def _copy(source: Node, to: Node) -> None:
    to.meta.update({name: source.meta[name] for name in _PORTED if name in source.meta})
