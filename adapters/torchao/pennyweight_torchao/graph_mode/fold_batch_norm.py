"""Batch norms folded into the convolutions and linear layers before them: y = bn(conv(x, w) + b) = conv(x, w') + b'.

w' = w * gamma / sqrt(var + eps), b' = (b - mean) * gamma / sqrt(var + eps) + beta.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn.utils.fusion import fuse_conv_bn_weights, fuse_linear_bn_weights

from pennyweight.export.decomposed_ops import FROZEN_BATCH_NORM, calls, is_batch_norm, is_conv, is_conv_transpose
from pennyweight.export.graph_edits import constant_of, erase_dead, set_parameter

_LINEAR = torch.ops.aten.linear.default


def batch_norm_arguments(node: Node) -> dict[str, Any]:
    """All arguments of a batch norm by name, defaults included."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema}


def normalized(node: Node) -> Node | None:
    """The node that has the normalized tensor; None if nobody reads it."""
    if node.target == torch.ops.aten.batch_norm.default:
        return node
    return next((user for user in node.users if user.target is operator.getitem and user.args[1] == 0), None)


def fold_batch_norms(model: GraphModule) -> None:
    """Fold every batch norm whose input is a convolution or a linear layer that nobody else reads, in place.

    A module that is called several times is folded once. A weight that is also used without this batch norm, or with
    another one, keeps its values; the folded layer gets a copy. Left alone, with a warning: a batch norm after a linear
    layer with an input of more than two dimensions, because they work on different axes.
    """
    folded: dict[tuple[Any, ...], tuple[str, str]] = {}
    for node in list(model.graph.nodes):
        if not calls(node, torch.ops.aten.batch_norm.default, FROZEN_BATCH_NORM):
            continue
        layer = node.args[0]
        if not (is_conv(layer) or is_conv_transpose(layer) or calls(layer, _LINEAR)) or len(layer.users) != 1:
            continue
        if calls(layer, _LINEAR) and _dimensions(layer.args[0]) > 2:
            warnings.warn(
                f"Not fusing linear+bn for node '{layer.name}': its input has {_dimensions(layer.args[0])} dimensions, "
                "so Linear and BatchNorm operate on different axes",
                stacklevel=3,
            )
        elif foldable(layer, node):
            fold_batch_norm(model, layer, node, folded)
    erase_dead(model)
    model.recompile()


def _dimensions(node: Any) -> int:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.ndim if isinstance(value, Tensor) else 0


def foldable(layer: Node, norm: Node) -> bool:
    """Are all tensors of both constants, and is there one scale per output channel of the layer's weight?"""
    a = batch_norm_arguments(norm)
    constants = (*layer.args[1:3], *(a[name] for name in ("weight", "bias", "running_mean", "running_var")))
    if a["running_mean"] is None or a["running_var"] is None:
        return False
    if is_conv_transpose(layer) and len(layer.args) > 6 and layer.args[6] != 1:
        return False  # with groups, the axis of output channels counts those of one group
    return all(n is None or (isinstance(n, Node) and n.op == "get_attr") for n in constants)


def fold_batch_norm(
    model: GraphModule, layer: Node, norm: Node, folded: dict[tuple[Any, ...], tuple[str, str]], own: bool | None = None
) -> None:
    """Fold one batch norm. folded: what was folded before in this graph -> the paths of its parameters. own: may the
    weight be overwritten? Default: if all its uses are folded in the same way."""
    a = batch_norm_arguments(norm)
    weight, bias = layer.args[1], layer.args[2] if len(layer.args) > 2 else None
    names = ("weight", "bias", "running_mean", "running_var")
    key = (weight.target, bias and bias.target, *(a[n] and a[n].target for n in names), a["eps"])  # type: ignore[union-attr]
    if key not in folded:
        w, b = constant_of(model, weight), constant_of(model, bias)  # type: ignore[arg-type]
        gamma, beta, mean, var = (constant_of(model, a[n]) for n in names)
        with torch.no_grad():
            if calls(layer, _LINEAR):
                new = fuse_linear_bn_weights(w, b, mean, var, a["eps"], gamma, beta)
            else:
                new = fuse_conv_bn_weights(w, b, mean, var, a["eps"], gamma, beta, is_conv_transpose(layer))
        path = str(weight.target)  # type: ignore[union-attr]
        own = _only_used_here(model, weight, layer, norm) if own is None else own
        path_b = str(bias.target) if isinstance(bias, Node) and own else ""
        if not own:
            path = _free(model, f"{path}_folded")
        path_b = path_b or _free(model, f"{path}_bias")
        set_parameter(model, path, new[0], w.requires_grad)
        set_parameter(model, path_b, new[1], w.requires_grad)
        folded[key] = path, path_b
    path, path_b = folded[key]
    with model.graph.inserting_before(layer):
        readers = [_reader(model, weight, path), _reader(model, bias, path_b)]
    fake: Any = layer.meta.get("val")
    if readers[1] is not bias and hasattr(fake, "fake_mode"):
        readers[1].meta["val"] = fake.fake_mode.from_tensor(constant_of(model, readers[1]), static_shapes=True)
    # the layer may read its weight through quantize and dequantize
    layer.args = (layer.args[0], readers[0], readers[1], *layer.args[3:])
    out = normalized(norm)
    if out is not None:
        out.replace_all_uses_with(layer)
        if out is not norm:
            model.graph.erase_node(out)
    if not norm.users:
        model.graph.erase_node(norm)


def _only_used_here(model: GraphModule, node: Any, layer: Node, norm: Node) -> bool:
    """Is every use of a parameter by the same kind of layer followed by the same batch norm?"""
    first = batch_norm_arguments(norm)
    for reader in model.graph.find_nodes(op="get_attr"):
        if reader.target != node.target:
            continue
        for user in reader.users:
            after = next(iter(user.users), None) if len(user.users) == 1 else None
            if user is layer:
                continue
            if user.target != layer.target or not is_batch_norm(after):
                return False
            second = batch_norm_arguments(after)  # type: ignore[arg-type]
            if any(_target(first[n]) != _target(second[n]) for n in ("weight", "bias", "running_mean", "running_var")):
                return False
    return True


def _target(node: Any) -> Any:
    return node.target if isinstance(node, Node) else node


def _free(model: GraphModule, path: str) -> str:
    """A path that the model does not have."""
    owner: Any = model
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    found, i = name, 0
    while owner is not None and hasattr(owner, found):
        found, i = f"{name}{i}", i + 1
    return ".".join((*parents, found))


def _reader(model: GraphModule, node: Any, path: str) -> Node:
    """A node that reads the attribute: the given one if it does."""
    if isinstance(node, Node) and node.target == path:
        return node
    reader = model.graph.get_attr(path)
    if isinstance(node, Node):
        reader.meta.update(node.meta)
    return reader
