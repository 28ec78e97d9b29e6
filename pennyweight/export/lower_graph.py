"""lower(graph): layers of a converted graph on int8 kernels, without a compiler.

    y = layer(dequantize(quantize(x)), dequantize(codes), bias)

becomes one module that quantizes x with the same parameters, multiplies codes in integers, and returns floats. quantize
and dequantize that nobody reads any more are removed, see :mod:`pennyweight.export.lower_values` for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from ..core.formats import INT7, INT8, UINT7, UINT8, Format
from ..core.model_arguments import check_arguments
from ..core.numerics import Parts
from ..core.spec import ActivationSpec, QuantSpec
from ..core.tensor import AffineQuantizedTensor
from ..inference.freeze import freeze_
from ..kernels.repack import prepare as pack
from ..kernels.table import case_of, select
from ..planning.quantize_report import Report, Row
from ..support.errors import ArgumentError, Refusal
from .decomposed_ops import CHOOSE, DEQUANTIZE, DEQUANTIZE_CHANNEL, QUANTIZE, calls
from .graph_edits import FROM_NODE, constant_of, erase_dead, evaluate, made_from, new_name, producers
from .lower_values import lower_values


class _Dynamic(nn.Module):
    """A layer whose input is quantized with one scale, computed from each input, as ``choose_qparams`` does in graphs.

    codes: (first, last, least scale) of the input. symmetric: zero point 0. The weight has a static activation.

    scale = (max - min) / (last - first), zero_point = first - round(min / scale), with 0 inside the range;
    symmetric: scale = max |x| / ((last - first) / 2).
    """

    codes: tuple[int, int, float]
    symmetric: bool
    weight: Any

    def _weight(self, x: Tensor) -> AffineQuantizedTensor:
        first, last, eps = self.codes
        if x.numel() == 0:
            return self.weight
        low, high = torch.aminmax(x.detach())
        low, high = low.clamp(max=0).double(), high.clamp(min=0).double()
        if self.symmetric:
            scale = (torch.maximum(-low, high) / ((last - first) / 2)).clamp(min=eps)
            zero_point = torch.zeros_like(scale)
        else:
            scale = ((high - low) / (last - first)).clamp(min=eps)
            zero_point = (first - torch.round(low / scale)).clamp(first, last)
        w: AffineQuantizedTensor = self.weight
        return w.with_(act_scale=scale.float().reshape(1), act_zero_point=zero_point.float().reshape(1))


class DynamicLinear(_Dynamic, nn.Linear):
    """A linear layer with an input scale per call."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self._weight(input), self.bias)


class DynamicConv1d(_Dynamic, nn.Conv1d):
    """A convolution of one dimension with an input scale per call."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self._weight(input), self.bias)


class DynamicConv2d(_Dynamic, nn.Conv2d):
    """A convolution of two dimensions with an input scale per call."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self._weight(input), self.bias)


DynamicConv: dict[int, Any] = {1: DynamicConv1d, 2: DynamicConv2d}
_ATEN = torch.ops.aten
_LINEAR = _ATEN.linear.default
_CONVS: dict[Any, int] = {
    _ATEN.conv1d.default: 1, _ATEN.conv1d.padding: 1, _ATEN.conv2d.default: 2, _ATEN.conv2d.padding: 2
}  # fmt: skip
# (dtype of the codes, first, last) -> format
_INPUTS: dict[tuple[torch.dtype, int, int], Format] = {
    (torch.uint8, 0, 255): UINT8,
    (torch.uint8, 0, 127): UINT7,
    (torch.int8, -128, 127): INT8,
    (torch.int8, -64, 63): INT7,
}


class Lowered(NamedTuple):
    """What :func:`lower` returns."""

    model: GraphModule
    report: Report


@dataclass(frozen=True)
class Input:
    """How the input of a layer is quantized. dynamic: (first code, last code, least scale), or None."""

    node: Node
    format: Format
    scale: float = 1.0
    zero_point: int = 0
    dynamic: tuple[int, int, float] | None = None
    symmetric: bool = False


@check_arguments()
def lower(model: nn.Module) -> Lowered:
    """Quantized layers of a converted graph on int8 kernels; returns (model, report). The argument is unchanged.

    model: a graph with ``quantize`` and ``dequantize`` operators for a CPU, as torchao's ``convert_pt2e`` makes it
    (here ``convert`` of ``pennyweight_torchao.graph_mode``). Lowered are linear layers and convolutions of one and two
    dimensions with int8 weights, per tensor or per output channel, whose input is quantized per tensor, static or
    dynamic. Every other layer that reads dequantized tensors stays as it is; its row in the report has the reason. Each
    lowered layer equals the graph up to the rounding of float32 sums, so codes computed from its output differ by at
    most one. The result is for inference: weights do not require grad. Raises ArgumentError if the model is not a
    graph.
    """
    if not isinstance(model, GraphModule):
        raise ArgumentError(
            f"lower: needs a graph of torch.export with quantize and dequantize operators, got {type(model).__name__}; "
            "for a module use pw.quantize_ and pw.inference.freeze_"
        )
    model = _copy(model)
    rows, known = [], {}  # type: ignore[var-annotated]
    for node in list(model.graph.nodes):
        if calls(node, *_CONVS, _LINEAR) or _reads_codes(node):
            rows.append(_lower(model, node, known))
    erase_dead(model)
    lower_values(model)
    model.graph.lint()
    model.recompile()
    freeze_(model)
    return Lowered(model, Report("lower", rows, verb="lowered"))


def _copy(model: GraphModule) -> GraphModule:
    """A graph of its own over the same parameters and buffers, which are not changed."""
    graph, copies = Graph(), {}  # type: ignore[var-annotated]
    graph.output(graph.graph_copy(model.graph, copies))
    graph._codegen = model.graph._codegen  # the names of inputs and the tree of outputs
    copied = GraphModule(model, graph)
    copied.meta.update(model.meta)
    return copied


def _reads_codes(node: Node) -> bool:
    """Does an operator, other than quantize, read dequantized tensors?"""
    return node.op == "call_function" and not calls(node, *QUANTIZE, *DEQUANTIZE) and any(
        calls(source, *DEQUANTIZE) for source in node.all_input_nodes
    )  # fmt: skip


def _lower(model: GraphModule, node: Node, known: dict[Any, Any]) -> Row:
    name, kind = _name(node), str(node.target).removeprefix("aten.").rpartition(".")[0]
    weight = _before(node.args[1]) if len(node.args) > 1 else None
    shape = tuple(constant_of(model, weight).shape) if isinstance(weight, Node) and weight.op == "get_attr" else ()
    size = constant_of(model, weight).nbytes if shape else 0
    try:
        module = _module(model, node, known)
    except Refusal as reason:
        return Row(name, kind, shape, "", "", size, size, note=str(reason))
    attribute = new_name("lowered_")(model)
    model.add_module(attribute, module)
    source = _input(node.args[0]).node
    with model.graph.inserting_before(node):
        call = model.graph.call_module(attribute, (source,), {})
    call.meta.update({key: value for key, value in node.meta.items() if key != "quantization_annotation"})
    call.meta[FROM_NODE] = made_from(node, "lower")
    node.replace_all_uses_with(call)
    model.graph.erase_node(node)
    w: Any = module.weight
    op = "linear" if isinstance(module, nn.Linear) else "convolution"
    kernel = select(op, case_of(w, torch.float32)).name
    return Row(name, kind, tuple(w.shape), str(w.spec), kernel, size, int(w.nbytes))


def _name(node: Node) -> str:
    """The path of the module that a node comes from, else its own name."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return path.removeprefix("L['self'].") or node.name


def _before(node: Any) -> Any:
    """The node of the codes that dequantize reads, else the node."""
    return node.args[0] if calls(node, *DEQUANTIZE) else node


def _module(model: GraphModule, node: Node, known: dict[Any, Any]) -> nn.Module:
    """The module that computes what ``node`` does. Raises Refusal."""
    if not calls(node, *_CONVS, _LINEAR):
        raise Refusal(f"no int8 kernel for {node.target}")
    given = _input(node.args[0])
    w = _weight(model, node, given)
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    key = (node.target, node.args[1:], tuple(node.kwargs.items()), given)
    if repr(key) in known:
        return known[repr(key)]
    b = None
    if isinstance(bias, Node):
        if producers(bias) is None:
            raise Refusal("its bias depends on the input of the graph")
        b = evaluate(model, bias, {}).detach().float()
    if select("linear" if node.target is _LINEAR else "convolution", case_of(w, torch.float32)).name == "dequantize":
        raise Refusal("no int8 kernel of this machine takes it; pw.explain shows why")
    known[repr(key)] = _linear(w, b, given) if node.target is _LINEAR else _conv(node, w, b, given)
    return known[repr(key)]


def _input(node: Any) -> Input:
    """How a layer's input is quantized. Raises Refusal."""
    if not calls(node, *DEQUANTIZE):
        raise Refusal("its input is not quantized")
    codes = node.args[0]
    if not calls(codes, *QUANTIZE):
        raise Refusal("the codes of its input are not computed in the graph")
    if node.target is DEQUANTIZE_CHANNEL:
        raise Refusal("its input is quantized per channel")
    if codes.args[1:] != node.args[1:]:
        raise Refusal("its input is quantized and dequantized with different parameters")
    source, scale, zero_point, low, high, dtype = codes.args[:6]
    if "val" in source.meta and source.meta["val"].dtype != torch.float32:
        raise Refusal(f"its input is {source.meta['val'].dtype}, kernels for graphs take float32")
    found = _INPUTS.get((dtype, low, high))
    if found is None:
        raise Refusal(f"its input has the codes {low} to {high} of {dtype}; kernels take all codes or half of them")
    if not isinstance(scale, Node):
        return Input(source, found, float(scale), int(zero_point))
    choose: Any = scale.args[0] if scale.args else None
    if not calls(choose, *CHOOSE.values()) or choose.args[0] is not source:
        raise Refusal("the parameters of its input are computed from something else")
    symmetric = choose.target is CHOOSE[torch.per_tensor_symmetric]
    return Input(source, found, dynamic=(low, high, float(choose.args[3])), symmetric=symmetric)


def _weight(model: GraphModule, node: Node, given: Input) -> AffineQuantizedTensor:
    """The weight as a quantized tensor, packed for its kernel. Raises Refusal."""
    values = node.args[1]
    if not calls(values, *DEQUANTIZE):
        raise Refusal("its weight is not quantized")
    source: Any = values.args[0]  # type: ignore[union-attr]
    if producers(source) is None:
        raise Refusal("its weight depends on the input of the graph")
    codes = evaluate(model, source, {}).detach()
    parameters = [evaluate(model, a, {}) if isinstance(a, Node) else a for a in values.args[1:4]]  # type: ignore[union-attr]
    scale, zero_point = (torch.as_tensor(p, dtype=torch.float32) for p in parameters[:2])
    if codes.dtype != torch.int8 or codes.device.type != "cpu":
        raise Refusal(f"its weight is {codes.dtype} on {codes.device}; kernels for graphs take int8 on a CPU")
    if bool((zero_point != 0).any()):
        raise Refusal("its weight has zero points")
    if values.target is DEQUANTIZE_CHANNEL and parameters[2] != 0:  # type: ignore[union-attr]
        raise Refusal(f"its weight has a scale per index of axis {parameters[2]}, not per output channel")
    rows = scale.reshape(-1).expand(codes.shape[0]).contiguous().reshape(-1, *(1,) * (codes.ndim - 1))
    act = ActivationSpec(QuantSpec(given.format, None, scale=torch.float32, zero_point=True), "static")
    spec = QuantSpec(INT8, (1, *(-1,) * (codes.ndim - 1)), scale=torch.float32)
    parts = Parts(
        codes=codes.contiguous(), scale=rows,
        act_scale=torch.tensor([given.scale], dtype=torch.float32, device=codes.device),
        act_zero_point=torch.tensor([given.zero_point], dtype=torch.float32, device=codes.device),
    )  # fmt: skip
    w = AffineQuantizedTensor(parts, spec, tuple(codes.shape), torch.float32, act)
    return pack(w, ("linear" if codes.ndim == 2 else "convolution",), torch.float32)


def _linear(w: AffineQuantizedTensor, bias: Tensor | None, given: Input) -> nn.Module:
    n, k = w.shape
    kind = nn.Linear if given.dynamic is None else DynamicLinear
    return _filled(kind(k, n, bias is not None, device="meta"), w, bias, given)


def _conv(node: Node, w: AffineQuantizedTensor, bias: Tensor | None, given: Input) -> nn.Module:
    rank = _CONVS[node.target]
    arguments = dict(zip(("stride", "padding", "dilation", "groups"), node.args[3:], strict=False)) | dict(node.kwargs)
    stride, padding, dilation = (
        _repeated(arguments.get(name, default), rank)
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    groups: Any = arguments.get("groups", 1)
    if any(isinstance(value, Node) for value in (stride, padding, dilation)):
        raise Refusal("its stride, padding or dilation is computed in the graph")
    o, c, *kernel = w.shape
    base: Any = (nn.Conv1d, nn.Conv2d)[rank - 1] if given.dynamic is None else DynamicConv[rank]
    made = base(c * groups, o, tuple(kernel), stride, padding, dilation, groups, bias is not None, device="meta")
    return _filled(made, w, bias, given)


def _repeated(value: Any, rank: int) -> Any:
    if isinstance(value, str):
        return value
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * rank if len(values) == 1 else values


def _filled(module: Any, w: AffineQuantizedTensor, bias: Tensor | None, given: Input) -> nn.Module:
    module.weight = nn.Parameter(w, requires_grad=False)
    if bias is not None:
        module.bias = nn.Parameter(bias, requires_grad=False)
    if given.dynamic is not None:
        module.codes, module.symmetric = given.dynamic, given.symmetric
    return module.eval()
