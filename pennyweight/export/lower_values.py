"""What is left between lowered layers: quantize followed by dequantize, and operators that only move values."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from .decomposed_ops import DEQUANTIZE_TENSOR, QUANTIZE_TENSOR, calls

_ATEN = torch.ops.aten
# Their results are some of the values of their input.
_MOVES = (
    _ATEN.max_pool2d.default, _ATEN.flatten.using_ints, _ATEN.view.default, _ATEN.reshape.default,
    _ATEN.permute.default, _ATEN.transpose.int, _ATEN.squeeze.dim, _ATEN.unsqueeze.default, _ATEN.slice.Tensor,
)  # fmt: skip


def lower_values(model: GraphModule) -> None:
    """Faster forms of the operators between layers, in place.

    - max_pool2d of quantized values: the maximum is taken first, because rounding keeps the order. It reads
      channels-last memory, in which torch has a fast one.
    - A tensor that consists of values of a tensor with the same parameters is not quantized again: nothing changes.
    - The other pairs of quantize and dequantize are computed in float, without a tensor of codes; the same numbers.
    """
    for node in list(model.graph.nodes):
        if calls(node, _ATEN.max_pool2d.default) and "val" in node.meta and node.meta["val"].ndim == 4:
            _pool_first(model, node)
    for node in list(model.graph.nodes):
        if _is_pair(node) and _quantized_before(node.args[0].args[0], node.args[1:]):
            node.replace_all_uses_with(node.args[0].args[0])
    model.graph.eliminate_dead_code()
    for node in list(model.graph.nodes):
        if _is_pair(node) and len(node.args[0].users) == 1:
            _round_in_float(model, node)
    model.graph.eliminate_dead_code()


def _is_pair(node: Any) -> bool:
    """dequantize of quantize with the same static parameters."""
    if not calls(node, DEQUANTIZE_TENSOR) or node.kwargs or not calls(node.args[0], QUANTIZE_TENSOR):
        return False
    return bool(node.args[0].args[1:] == node.args[1:])


def _pool_first(model: GraphModule, pool: Node) -> None:
    source: Any = pool.args[0]
    pair = source if _is_pair(source) and list(source.users) == [pool] else None
    with model.graph.inserting_before(pool):
        read = source if pair is None else pair.args[0].args[0]
        read = model.graph.call_function(_ATEN.contiguous.default, (read,), {"memory_format": torch.channels_last})
    pool.update_arg(0, read)
    if pair is None:
        return
    users = list(pool.users)
    with model.graph.inserting_after(pool):
        codes = model.graph.call_function(QUANTIZE_TENSOR, (pool, *pair.args[1:]))
    with model.graph.inserting_after(codes):
        values = model.graph.call_function(DEQUANTIZE_TENSOR, (codes, *pair.args[1:]))
    values.meta.update(pool.meta)
    for user in users:
        user.replace_input_with(pool, values)


def _quantized_before(node: Any, parameters: Any) -> bool:
    """Are all values of a node those that dequantize gives with these parameters?"""
    while calls(node, *_MOVES):
        node = node.args[0]
    return calls(node, DEQUANTIZE_TENSOR) and node.args[1:] == parameters and not node.kwargs


def _round_in_float(model: GraphModule, dequantize: Node) -> None:
    """(clamp(round(x / scale) + zero_point, first, last) - zero_point) * scale, as the operators compute it."""
    quantize: Any = dequantize.args[0]
    source, scale, zero_point, low, high, dtype = quantize.args
    if dtype not in (torch.uint8, torch.int8) or "val" not in source.meta or source.meta["val"].dtype != torch.float32:
        return
    with model.graph.inserting_before(dequantize):
        x = model.graph.call_function(_ATEN.mul.Tensor, (source, 1.0 / scale))
        steps = [(_ATEN.round_.default, ()), (_ATEN.clamp_.default, (low - zero_point, high - zero_point))]
        for target, arguments in [*steps, (_ATEN.mul_.Tensor, (scale,))]:
            x = model.graph.call_function(target, (x, *arguments))
    x.meta.update(dequantize.meta)
    x.meta["val"] = source.meta["val"]
    dequantize.replace_all_uses_with(x)
    model.graph.erase_node(dequantize)
    model.graph.erase_node(quantize)
