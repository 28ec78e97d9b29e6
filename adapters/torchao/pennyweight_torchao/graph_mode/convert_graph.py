"""convert(model): observers of a prepared graph replaced by quantize and dequantize operators with their parameters."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pennyweight.export.decomposed_ops import (
    CHOOSE,
    CONVERT,
    DEQUANTIZE_CHANNEL,
    DEQUANTIZE_DYNAMIC,
    DEQUANTIZE_TENSOR,
    QUANTIZE,
    QUANTIZE_CHANNEL,
    QUANTIZE_DYNAMIC,
    QUANTIZE_TENSOR,
)
from pennyweight.export.graph_edits import (
    FROM_NODE,
    add_constant,
    evaluate,
    fold_constants,
    made_from,
    producers,
    the_device,
)
from pennyweight.support.errors import ArgumentError

from .code_range import EPS, is_per_channel, to_underlying_dtype
from .dequantize_copies import copy_dequantize_per_user, port_metadata
from .prepare_graph import forbid_train_eval, is_observer, loop_bodies
from .qat_batch_norm import fold_trained_batch_norms
from .range_observers import _RangeObserver

_STATIC = (
    torch.quint8, torch.qint8, torch.qint32, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32,
    torch.float8_e5m2, torch.float8_e4m3fn,
)  # fmt: skip
_HOW = "replace_observer_with_quantize_dequantize_node"


def convert(model: GraphModule, fold_quantize: bool = True) -> GraphModule:
    """Convert a calibrated or trained graph of :func:`prepare` or :func:`prepare_qat`, which is changed in place.

    Each observer becomes quantize and dequantize, ``torch.ops.quantized_decomposed.*``; dynamic ones get
    choose_qparams before them. Every user of a tensor gets a dequantize of its own. fold_quantize: weights are stored
    as codes, with dequantize left in the graph. Observers of weights that did not run run now. Raises ArgumentError if
    the model is not a graph.
    """
    if not isinstance(model, GraphModule):
        raise ArgumentError(f"convert: needs a graph from prepare or prepare_qat, got {type(model).__name__}")
    meta = model.meta
    for body in loop_bodies(model):
        setattr(model, body, convert(model.get_submodule(body), fold_quantize))  # type: ignore[arg-type]
    _run_weight_observers(model)
    device = the_device(model)
    for node in list(model.graph.nodes):
        if is_observer(model, node):
            _replace_observer(model, node, model.get_submodule(str(node.target)), device)
    model.graph.eliminate_dead_code()
    model = GraphModule(model, model.graph)
    model.delete_all_unused_submodules()
    fold_trained_batch_norms(model)
    copy_dequantize_per_user(model)
    port_metadata(model)
    if fold_quantize:
        fold_constants(model, _quantizes)
    model.meta.update(meta)
    forbid_train_eval(model)
    return model


def _quantizes(node: Node) -> bool:
    """Does it quantize? Named by the operator, so that other libraries' affine operators count."""
    return node.target in QUANTIZE or ".quantize_affine" in str(node.target)


def _run_weight_observers(model: GraphModule) -> None:
    """Run the observers of constants that have not seen a tensor: their values do not depend on calibration."""
    known: dict[Node, Any] = {}
    for node in model.graph.nodes:
        if is_observer(model, node):
            observer = model.get_submodule(str(node.target))
            if isinstance(observer, _RangeObserver) and _empty(observer) and producers(node) is not None:
                with torch.no_grad():
                    observer(evaluate(model, node.args[0], known))


def _empty(observer: _RangeObserver) -> bool:
    low = observer.min_val
    return low.numel() == 0 or (low.ndim == 0 and bool(low == torch.inf))


def _replace_observer(model: GraphModule, node: Node, observer: Any, device: torch.device | None) -> None:
    if hasattr(observer, "convert"):
        observer.convert(model, node)
        return
    source: Any = node.args[0]
    with model.graph.inserting_before(node):
        if getattr(observer, "is_dynamic", False):
            new = _dynamic(model, node, source, observer)
        elif observer.dtype in _STATIC:
            new = _static(model, node, source, observer, device)
        elif observer.dtype == torch.float16:
            half = model.graph.call_function(CONVERT, (source, torch.float16))
            new = model.graph.call_function(CONVERT, (half, torch.float))
        else:  # no operator for this dtype: nothing is quantized
            new = source
    node.replace_all_uses_with(new)
    model.graph.erase_node(node)


def _static(model: GraphModule, node: Node, source: Node, observer: Any, device: torch.device | None) -> Node:
    scale, zero_point = observer.calculate_qparams()
    codes = (observer.quant_min, observer.quant_max, to_underlying_dtype(observer.dtype))
    if is_per_channel(observer.qscheme):
        scope = _scope(source)
        s = add_constant(model, model.graph, f"{scope}_scale_", scale, device)
        z = add_constant(model, model.graph, f"{scope}_zero_point_", zero_point, device)
        parameters = (s, z, int(observer.ch_axis), *codes)
        return _pair(model, node, source, QUANTIZE_CHANNEL, DEQUANTIZE_CHANNEL, parameters)
    return _pair(model, node, source, QUANTIZE_TENSOR, DEQUANTIZE_TENSOR, (float(scale), int(zero_point), *codes))


def _dynamic(model: GraphModule, node: Node, source: Node, observer: Any) -> Node:
    dtype = to_underlying_dtype(observer.dtype)
    assert dtype in (torch.uint8, torch.int8), (
        f"only uint8 and int8 are supported for dynamic quantization, got {dtype}"
    )
    eps = getattr(observer, "eps", EPS)
    codes = (observer.quant_min, observer.quant_max)
    choose = CHOOSE[getattr(observer, "qscheme", torch.per_tensor_affine)]
    chosen = model.graph.call_function(choose, (source, *codes, float(eps), dtype))
    scale, zero_point = (model.graph.call_function(operator.getitem, (chosen, i)) for i in (0, 1))
    return _pair(model, node, source, QUANTIZE_DYNAMIC, DEQUANTIZE_DYNAMIC, (scale, zero_point, *codes, dtype))


def _pair(model: GraphModule, node: Node, source: Node, quantize: Any, dequantize: Any, parameters: Any) -> Node:
    """quantize and dequantize with the same parameters, in the dtype of the source."""
    dtype = source.meta["val"].dtype if "val" in source.meta else torch.float32
    codes = model.graph.call_function(quantize, (source, *parameters))
    keywords = {} if dtype == torch.float32 else {"out_dtype": dtype}
    values = model.graph.call_function(dequantize, (codes, *parameters), keywords)
    for made in (codes, values):
        made.meta[FROM_NODE] = made_from(node, _HOW)
    return values


def _scope(source: Node) -> str:
    """The last name of the path of the module that a node comes from; "" outside of modules."""
    stack = source.meta.get("nn_module_stack") if source.op != "get_attr" else None
    return str(list(stack.values())[-1][0]).rpartition(".")[2] if stack else ""
