"""A converted graph in plain operators of torch: quantize and dequantize spelled out, products of codes in integers.

    q = clamp(round(x * (1 / scale)) + zero_point, first, last)
    y = (q - zero_point) * scale
    layer: sum((q_x - zero_point_x) * q_w) in int32, * (scale_x * scale_w), + bias in float32

It shows what a backend has to compute. It is slow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from pennyweight.export.decomposed_ops import (
    DEQUANTIZE,
    DEQUANTIZE_CHANNEL,
    DEQUANTIZE_DYNAMIC,
    DEQUANTIZE_TENSOR,
    QUANTIZE,
    QUANTIZE_CHANNEL,
    calls,
)
from pennyweight.export.graph_edits import add_constant, erase_dead, evaluate, producers

_ATEN = torch.ops.aten
_LAYERS = (_ATEN.linear.default, _ATEN.conv1d.default, _ATEN.conv2d.default)


def use_integer_arithmetic(model: GraphModule) -> None:
    """Rewrite the graph in place. Layers need an input quantized per tensor and a weight without zero points; the
    others multiply floats."""
    for node in list(model.graph.nodes):
        if calls(node, *_LAYERS):
            _layer(model, node)
    erase_dead(model)
    for node in list(model.graph.nodes):
        if calls(node, *QUANTIZE):
            _quantize(model, node)
        elif calls(node, *DEQUANTIZE):
            _dequantize(model, node)
    erase_dead(model)
    model.graph.lint()
    model.recompile()


def _layer(model: GraphModule, node: Node) -> None:
    target: Any = node.target
    x, w, *rest = node.args
    if not calls(x, DEQUANTIZE_TENSOR, DEQUANTIZE_DYNAMIC) or not calls(w, DEQUANTIZE_TENSOR, DEQUANTIZE_CHANNEL):
        return
    if producers(w) is None:  # type: ignore[arg-type]
        return
    codes, scale, zero_point = x.args[:3]  # type: ignore[union-attr]
    w_codes, w_scale, w_zero_point = w.args[:3]  # type: ignore[union-attr]
    zero = evaluate(model, w_zero_point, {}) if isinstance(w_zero_point, Node) else w_zero_point
    shifts = bool((zero != 0).any()) if isinstance(zero, torch.Tensor) else zero != 0
    if shifts or (w.target is DEQUANTIZE_CHANNEL and w.args[3] != 0):  # type: ignore[union-attr]
        return
    if isinstance(w_scale, Node):
        value = evaluate(model, w_scale, {})
    else:  # a scalar on the CPU can be multiplied with tensors anywhere
        value = torch.tensor(w_scale, dtype=torch.float32, device="cpu")
    rows = value if node.target is _LAYERS[0] or value.ndim == 0 else value.reshape(-1, *(1,) * (_rank(node) - 2))
    call = model.graph.call_function
    bias, others = (rest[0], rest[1:]) if rest else (None, [])
    with model.graph.inserting_before(node):
        shifted = call(_ATEN.sub.Tensor, (_integers(model, codes), _as_integer(model, zero_point)))
        products = call(target, (shifted, _integers(model, w_codes), None, *others))
        by_row = add_constant(model, model.graph, "_weight_scale_", rows)
        factor = call(_ATEN.mul.Tensor, (by_row, scale))
        y = call(_ATEN.mul.Tensor, (products, factor))
        if bias is not None:
            flat = node.target is _LAYERS[0]
            shaped = bias if flat else call(_ATEN.reshape.default, (bias, [-1, *(1,) * (_rank(node) - 2)]))
            y = call(_ATEN.add.Tensor, (y, shaped))
        y = call(_ATEN.to.dtype, (y, torch.float32))  # scales computed from the input are float64
    y.meta.update({name: value for name, value in node.meta.items() if name != "quantization_annotation"})
    node.replace_all_uses_with(y)
    model.graph.erase_node(node)


def _rank(node: Node) -> int:
    return 3 if node.target is _ATEN.conv1d.default else 4


def _integers(model: GraphModule, codes: Any) -> Node:
    return model.graph.call_function(_ATEN.to.dtype, (codes, torch.int32))


def _as_integer(model: GraphModule, zero_point: Any) -> Any:
    return _integers(model, zero_point) if isinstance(zero_point, Node) else zero_point


def _shaped(model: GraphModule, node: Node, value: Any, axis: int) -> Node:
    """Parameters per channel, as a tensor that broadcasts over the input of quantize or dequantize."""
    source: Any = node.args[0]
    rank = source.meta["val"].ndim if "val" in source.meta else evaluate(model, source, {}).ndim
    shape = [-1 if i == axis else 1 for i in range(rank)]
    return model.graph.call_function(_ATEN.reshape.default, (value, shape))


def _parameters(model: GraphModule, node: Node) -> tuple[Any, Any, int, int, torch.dtype]:
    """(scale, zero point, first code, last code, dtype), per channel as tensors that broadcast."""
    _, scale, zero_point, *rest = node.args
    if node.target in (QUANTIZE_CHANNEL, DEQUANTIZE_CHANNEL):
        axis, *rest = rest
        scale, zero_point = _shaped(model, node, scale, axis), _shaped(model, node, zero_point, axis)  # type: ignore[arg-type]
    return scale, zero_point, *rest  # type: ignore[return-value]


def _quantize(model: GraphModule, node: Node) -> None:
    call = model.graph.call_function
    with model.graph.inserting_before(node):
        scale, zero_point, low, high, dtype = _parameters(model, node)
        inverse = call(_ATEN.reciprocal.default, (scale,)) if isinstance(scale, Node) else 1.0 / scale
        x = call(_ATEN.round.default, (call(_ATEN.mul.Tensor, (node.args[0], inverse)),))
        x = call(_ATEN.clamp.default, (call(_ATEN.add.Tensor, (x, zero_point)), low, high))
        new = call(_ATEN.to.dtype, (x, dtype))
    _replace(model, node, new)


def _dequantize(model: GraphModule, node: Node) -> None:
    call = model.graph.call_function
    out = node.kwargs.get("out_dtype") or torch.float32
    with model.graph.inserting_before(node):
        scale, zero_point, *_ = _parameters(model, node)
        codes = call(_ATEN.to.dtype, (node.args[0], torch.float32))
        y = call(_ATEN.mul.Tensor, (call(_ATEN.sub.Tensor, (codes, zero_point)), scale))
        new = call(_ATEN.to.dtype, (y, out))
    _replace(model, node, new)


def _replace(model: GraphModule, node: Node, new: Node) -> None:
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    model.graph.erase_node(node)
