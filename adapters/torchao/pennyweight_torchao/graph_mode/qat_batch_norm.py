"""Batch norms in training with fake quantization: the convolution sees the weights that folding would give.

With running statistics mean and var, s = gamma / sqrt(var + eps):

    y = batch_norm(conv(x, fake_quantize(w * s)) / s + b)

so the fake quantizer sees the folded weight, and the batch norm still sees, and normalizes by, the statistics of the
batch (Krishnamoorthi 2018, arXiv 1806.08342, section 3.2.2). :func:`fold_trained_batch_norms` removes all of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pennyweight.export.decomposed_ops import (
    BATCH_NORMS,
    DEQUANTIZE,
    QUANTIZE,
    calls,
    is_batch_norm,
    is_conv,
    is_conv_transpose,
)
from pennyweight.export.graph_edits import erase_dead

from .fold_batch_norm import batch_norm_arguments, fold_batch_norm, foldable
from .specs import ANNOTATION, DerivedQuantizationSpec, SharedQuantizationSpec

_ATEN = torch.ops.aten


def fuse_batch_norms_for_training(model: GraphModule) -> None:
    """Rewrite each convolution whose only user is a batch norm with trained scale, in place.

    Annotations stay with their nodes; those of the convolution's weight move to the scaled weight, those of its bias to
    a zero bias, because the real one is added after the division by s.
    """
    for norm in list(model.graph.nodes):
        if not calls(norm, *BATCH_NORMS):
            continue
        conv = norm.args[0]
        if not (is_conv(conv) or is_conv_transpose(conv)) or len(conv.users) != 1 or not foldable(conv, norm):
            continue
        if batch_norm_arguments(norm)["weight"] is not None:
            _scale_weight(model, conv, norm)
    model.recompile()


def _scale_weight(model: GraphModule, conv: Node, norm: Node) -> None:
    a = batch_norm_arguments(norm)
    weight: Any = conv.args[1]
    bias: Any = conv.args[2] if len(conv.args) > 2 else None
    dimensions = weight.meta["val"].ndim
    per_channel = [1, -1] + [1] * (dimensions - 2)
    by_weight = per_channel if is_conv_transpose(conv) else [-1] + [1] * (dimensions - 1)
    call = model.graph.call_function
    with model.graph.inserting_before(conv):
        std = call(_ATEN.sqrt.default, (call(_ATEN.add.Tensor, (a["running_var"], a["eps"])),))
        scale = call(_ATEN.div.Tensor, (a["weight"], std))
        scaled = call(_ATEN.mul.Tensor, (weight, call(_ATEN.reshape.default, (scale, by_weight))))
        scaled.meta["val"] = weight.meta["val"]
        zero = None
        if bias is not None:
            zero = call(_ATEN.zeros_like.default, (bias,), {"dtype": bias.meta["val"].dtype, "pin_memory": False})
            zero.meta["val"] = bias.meta["val"]
    conv.args = (conv.args[0], scaled, zero, *conv.args[3:])
    with model.graph.inserting_before(norm):
        y = call(_ATEN.div.Tensor, (conv, call(_ATEN.reshape.default, (scale, per_channel))))
        if bias is not None:
            y = call(_ATEN.add.Tensor, (y, call(_ATEN.reshape.default, (bias, per_channel))))
    norm.replace_input_with(conv, y)
    _move_annotations(model, conv, {weight: scaled, bias: zero})


def _move_annotations(model: GraphModule, conv: Node, moved: dict[Any, Any]) -> None:
    """Edges into ``conv`` from the keys of ``moved`` become edges from its values, wherever a spec names them."""

    def place(at: Any) -> Any:
        if isinstance(at, tuple):
            return (moved.get(at[0], at[0]), at[1]) if at[1] is conv else at
        return at

    def spec(s: Any) -> Any:
        if isinstance(s, SharedQuantizationSpec):
            return SharedQuantizationSpec(place(s.edge_or_node))
        if isinstance(s, DerivedQuantizationSpec):
            return dataclasses.replace(s, derived_from=[place(at) for at in s.derived_from])
        return s

    for node in model.graph.nodes:
        annotation = node.meta.get(ANNOTATION)
        if annotation is None:
            continue
        of_conv = node is conv
        annotation.input_qspec_map = {
            moved.get(source, source) if of_conv else source: spec(s)
            for source, s in annotation.input_qspec_map.items()
        }
        annotation.output_qspec = spec(annotation.output_qspec)


def fold_trained_batch_norms(model: GraphModule) -> None:
    """In a converted graph: fold the batch norms that :func:`fuse_batch_norms_for_training` rewrote, in place.

    Weights are folded with the running statistics, and quantized with the trained parameters.
    """
    found: list[Any] = [
        (norm, *parts) for norm in model.graph.nodes if is_batch_norm(norm) and (parts := _find(norm)) is not None
    ]
    norms_of: dict[str, set[str]] = {}
    for norm, _, scaled, *_ in found:
        norms_of.setdefault(scaled.args[0].target, set()).add(_mean(norm))
    scaled_nodes = {scaled for _, _, scaled, *_ in found}
    shared = {
        reader.target
        for reader in model.graph.find_nodes(op="get_attr")
        if reader.target in norms_of
        and (len(norms_of[reader.target]) > 1 or any(user not in scaled_nodes for user in reader.users))
    }
    folded: dict[tuple[Any, ...], tuple[str, str]] = {}
    for norm, conv, scaled, bias, _ in found:
        _unscale_weight(model, norm, conv, scaled, bias, folded, scaled.args[0].target not in shared)
    erase_dead(model)
    model.recompile()


def _mean(norm: Node) -> str:
    """The path of the running mean, which names the batch norm."""
    return str(batch_norm_arguments(norm)["running_mean"].target)


def _find(norm: Node) -> tuple[Node, Node, Node | None, Node] | None:
    """(convolution, scaled weight, bias, quotient) before a rewritten batch norm."""
    y: Any = norm.args[0]
    bias = None
    if calls(y, _ATEN.add.Tensor) and calls(y.args[1], _ATEN.reshape.default):
        bias, y = y.args[1].args[0], y.args[0]
    if not calls(y, _ATEN.div.Tensor) or not calls(y.args[1], _ATEN.reshape.default):
        return None
    conv = y.args[0]
    scale = y.args[1].args[0]
    if not (is_conv(conv) or is_conv_transpose(conv)) or not calls(scale, _ATEN.div.Tensor):
        return None
    scaled = _unquantized(conv.args[1])
    if not calls(scaled, _ATEN.mul.Tensor) or not calls(scaled.args[1], _ATEN.reshape.default):
        return None
    return (conv, scaled, bias, y) if scaled.args[1].args[0] is scale else None


def _unquantized(node: Any) -> Any:
    """The tensor before quantize and dequantize."""
    while calls(node, *QUANTIZE, *DEQUANTIZE):
        node = node.args[0]
    return node


def _unscale_weight(
    model: GraphModule, norm: Node, conv: Node, scaled: Node, bias: Node | None,
    folded: dict[tuple[Any, ...], tuple[str, str]], own: bool,
) -> None:  # fmt: skip
    weight: Any = scaled.args[0]
    quantized = [conv.args[1], conv.args[2] if len(conv.args) > 2 else None]
    zero = _unquantized(quantized[1])
    owner = _mean(norm).rpartition(".")[0]
    # first as a plain convolution and batch norm, folded; then with the quantization of weight and bias in between
    conv.args = (conv.args[0], weight, bias, *conv.args[3:])
    norm.replace_input_with(norm.args[0], conv)  # type: ignore[arg-type]
    fold_batch_norm(model, conv, norm, folded, own)
    _drop_count(model, owner)
    for at, old, plain in ((1, scaled, weight), (2, zero, bias)):
        chain: Any = quantized[at - 1]
        if chain is None or chain is old:
            continue
        reader: Any = conv.args[at]
        if reader is not plain:  # a new node, which stands after those that quantize
            first = chain
            while calls(first.args[0], *QUANTIZE, *DEQUANTIZE):
                first = first.args[0]
            first.prepend(reader)
        old.replace_all_uses_with(reader)
        conv.update_arg(at, chain)


def _drop_count(model: GraphModule, owner: str) -> None:
    """Erase the update of ``num_batches_tracked`` of a folded batch norm."""
    for node in reversed(list(model.graph.nodes)):  # a module called twice counts twice, one update after the other
        counter: Any = node.args[0] if calls(node, _ATEN.add_.Tensor) and not node.users else None
        if isinstance(counter, Node) and counter.target == f"{owner}.num_batches_tracked":
            model.graph.erase_node(node)
