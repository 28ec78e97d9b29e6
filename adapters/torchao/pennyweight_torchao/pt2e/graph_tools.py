"""torchao's small helpers for exported graphs."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.nn.utils.parametrize import is_parametrized

from pennyweight.export.decomposed_ops import calls, data_users, is_batch_norm, is_conv, is_conv_transpose, is_size
from pennyweight.export.graph_edits import add_constant, constant_of, new_name
from pennyweight.export.graph_edits import producers as collect_producer_nodes

from ..graph_mode.code_range import is_per_channel, is_per_tensor
from ..graph_mode.dequantize_copies import _comes_from
from ..graph_mode.fold_batch_norm import fold_batch_norms
from ..graph_mode.prepare_graph import forbid_train_eval
from ..graph_mode.train_eval import (
    allow_exported_model_train_eval,
    move_exported_model_to_eval,
    move_exported_model_to_train,
)

__all__ = [
    "_allow_exported_model_train_eval", "_disallow_eval_train", "_filter_sym_size_users", "_fuse_conv_bn_",
    "_fuse_linear_bn_", "_get_aten_graph_module_for_pattern", "_get_node_name_to_scope",
    "_get_tensor_constant_from_node", "_is_bn_node", "_is_connected", "_is_conv_node",
    "_is_conv_or_conv_transpose_node", "_is_conv_transpose_node", "_is_linear_node", "_is_sym_size_node",
    "_move_exported_model_to_eval", "_move_exported_model_to_train", "collect_producer_nodes",
    "create_getattr_from_value", "get_fqn_to_example_inputs", "get_new_attr_name_with_prefix", "get_qparam_dict",
    "getattr_from_fqn", "has_no_children_ignoring_parametrizations",
]  # fmt: skip

_move_exported_model_to_eval, _move_exported_model_to_train = move_exported_model_to_eval, move_exported_model_to_train
_allow_exported_model_train_eval = allow_exported_model_train_eval
_is_conv_node, _is_conv_transpose_node, _is_bn_node, _is_sym_size_node = (
    is_conv,
    is_conv_transpose,
    is_batch_norm,
    is_size,
)
_filter_sym_size_users, _fuse_conv_bn_, _fuse_linear_bn_ = data_users, fold_batch_norms, fold_batch_norms
get_new_attr_name_with_prefix = new_name


def _is_conv_or_conv_transpose_node(n: Node) -> bool:
    return is_conv(n) or is_conv_transpose(n)


def _is_linear_node(n: Node) -> bool:
    return calls(n, torch.ops.aten.linear.default)


def _is_connected(source: Node, dest: Node) -> bool:
    return _comes_from(dest, source)


def _get_tensor_constant_from_node(node: Node | None, m: nn.Module) -> Any:
    return constant_of(m, node)


def _disallow_eval_train(model: GraphModule) -> GraphModule:
    forbid_train_eval(model)
    return model


def _get_node_name_to_scope(model: GraphModule) -> dict[str, tuple[str, type]]:
    """Name of a node -> last name of the path and type of the module that it comes from."""
    scopes = {}
    for node in model.graph.nodes:
        path, kind = list((node.meta.get("nn_module_stack") or {"": ("", type(None))}).values())[-1]
        scopes[node.name] = (path.rpartition(".")[2], kind)
    return scopes


def _get_aten_graph_module_for_pattern(
    pattern: Any, example_inputs: tuple[Any, ...], is_cuda: bool = False, **kwargs: Any
) -> GraphModule:
    """The exported graph of a module, without updates of buffers."""
    if is_cuda:
        example_inputs = tuple(x.cuda() if isinstance(x, Tensor) else x for x in example_inputs)
    module: Any = torch.export.export(pattern, example_inputs, kwargs, strict=True).module()
    for node in reversed(list(module.graph.nodes)):
        update = calls(node, torch.ops.aten.copy_.default) or (node.op == "call_module" and node.name == "_guards_fn")
        if update and not node.users:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def create_getattr_from_value(
    module: nn.Module, graph: Graph, prefix: str, value: Any, device: torch.device | None = None
) -> Node:
    """Register a constant and return a node that reads it."""
    return add_constant(module, graph, prefix, value, device)


def getattr_from_fqn(obj: Any, fqn: str) -> Any:
    """The attribute at a path."""
    return functools.reduce(getattr, fqn.split("."), obj)


def get_qparam_dict(observer_or_fake_quant: Any) -> dict[str, Any]:
    """qscheme, dtype, scale, zero_point, quant_min, quant_max, axis if per channel. Placeholders have no scale."""
    seen = observer_or_fake_quant
    qscheme = getattr(seen, "qscheme", None)
    if not qscheme or type(seen).__name__ == "PlaceholderObserver":
        return {"qscheme": None, "dtype": seen.dtype}
    if not (is_per_tensor(qscheme) or is_per_channel(qscheme)):
        raise RuntimeError(f"Unrecognized qscheme: {qscheme}")
    found: dict[str, Any] = {"dtype": seen.dtype, "qscheme": torch.per_tensor_affine}
    if is_per_channel(qscheme):
        symmetric = qscheme == torch.per_channel_symmetric
        found |= {"qscheme": torch.per_channel_affine if symmetric else qscheme, "axis": seen.ch_axis}
    found["scale"], found["zero_point"] = seen.calculate_qparams()
    return found | {n: getattr(seen, n) for n in ("quant_min", "quant_max") if hasattr(seen, n)}


def has_no_children_ignoring_parametrizations(module: nn.Module) -> bool:
    """Has a module no submodules other than parametrizations?"""
    return not module._modules or (is_parametrized(module) and list(module._modules) == ["parametrizations"])


def get_fqn_to_example_inputs(model: nn.Module, example_inputs: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
    """Path of a module -> the positional arguments of its last call; defaults are filled in after the given ones."""
    found: dict[str, tuple[Any, ...]] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
            parameters = [p for p in inspect.signature(module.forward).parameters.values() if p.kind < p.VAR_POSITIONAL]
            rest = [kwargs.get(p.name, p.default) for p in parameters[len(args) :]]
            found[name] = (*args, *(value for value in rest if value is not inspect.Parameter.empty))

        return hook

    handles = [m.register_forward_hook(record(name), with_kwargs=True) for name, m in model.named_modules()]
    try:
        model(*example_inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found
