"""Finds the chains of a convolution net: which nodes of its graph one native call takes.

A node becomes part of a chain if it is a quantized convolution with a static input scale, or an operation on images
that a step can compute: an activation, an addition of equal sizes, max pooling, global average pooling. All other nodes
run as they are. Classes of nets play no role; those of torch.nn's layers do.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..core.tensor import AffineQuantizedTensor
from ..kernels.conv_chain import AddStep, ConvChain, ConvStep, InputStep, MaxStep, MeanStep, fits
from ..support.errors import Refusal
from .detect_changes import own_class

INF = math.inf
Clip = tuple[float, float]


# -- operations --------------------------------------------------------------------------------------------------------


def _pair(value: Any) -> tuple[int, int]:
    both = (value, value) if isinstance(value, int) else tuple(value)
    return (both[0], both[-1])


_CLIPS: dict[Any, Clip] = {F.relu: (0.0, INF), torch.relu: (0.0, INF), "relu": (0.0, INF), F.relu6: (0.0, 6.0)}
_INPLACE = {F.relu_, torch.relu_, F.hardtanh_, torch.clamp_, operator.iadd, "relu_", "clamp_", "add_"}
_CLIPS |= {F.relu_: (0.0, INF), torch.relu_: (0.0, INF), "relu_": (0.0, INF)}
_FUNCTIONS: dict[Any, str] = {F.silu: "silu", F.hardswish: "hardswish"}
_BOUNDS = {torch.clamp: INF, torch.clamp_: INF, "clamp": INF, "clamp_": INF, F.hardtanh: 1.0, F.hardtanh_: 1.0}


class Reader:
    """Reads nodes of a graph as operations."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        self.root = root
        self.modules: dict[Any, nn.Module] = {
            node: root.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"
        }

    def kind(self, node: fx.Node) -> Any:
        module = self.modules.get(node)
        return None if module is None else own_class(module)

    def clip(self, node: fx.Node) -> Clip | None:
        """The bounds of an activation that only clips."""
        module: Any = self.modules.get(node)
        if module is not None:
            kind = self.kind(node)
            if kind in (nn.ReLU, nn.ReLU6):
                return (0.0, INF if kind is nn.ReLU else 6.0)
            return (float(module.min_val), float(module.max_val)) if kind is nn.Hardtanh else None
        if node.op not in ("call_function", "call_method"):
            return None
        target: Any = node.target
        if target in _CLIPS:
            return _CLIPS[target]
        if target not in _BOUNDS:
            return None
        most = _BOUNDS[target]
        names = ("min", "max") if most == INF else ("min_val", "max_val")
        given = [*node.args[1:3], *[None] * (3 - len(node.args))]
        lo, hi = (node.kwargs.get(n, v) for n, v in zip(names, given, strict=False))
        lo, hi = (-most if lo is None else lo), (most if hi is None else hi)
        if not isinstance(lo, (int, float)) or not isinstance(hi, (int, float)) or not lo <= hi:
            return None
        return float(lo), float(hi)

    def function(self, node: fx.Node) -> str | None:
        """The name of another activation."""
        kind = self.kind(node)
        if kind is nn.GELU:
            module: Any = self.modules[node]
            return "gelu_tanh" if module.approximate == "tanh" else "gelu"
        if kind in (nn.SiLU, nn.Hardswish):
            return "silu" if kind is nn.SiLU else "hardswish"
        return _FUNCTIONS.get(node.target) if node.op == "call_function" and not node.args[1:] else None

    def identity(self, node: fx.Node) -> bool:
        return self.kind(node) in (nn.Identity, nn.Dropout, nn.Dropout2d)

    def sum(self, node: fx.Node) -> bool:
        targets = (operator.add, operator.iadd, torch.add, "add", "add_")
        return (
            node.op in ("call_function", "call_method") and node.target in targets and len(node.args) == 2
            and not node.kwargs and all(isinstance(a, fx.Node) for a in node.args)
        )  # fmt: skip

    def pool(self, node: fx.Node) -> tuple[tuple[int, int], ...] | None:
        """Kernel, stride and padding of max pooling."""
        module: Any = self.modules.get(node)
        if module is not None:
            if self.kind(node) is not nn.MaxPool2d or module.ceil_mode or module.return_indices:
                return None
            found = (module.kernel_size, module.stride, module.padding, module.dilation)
        elif node.op == "call_function" and node.target in (F.max_pool2d, torch.max_pool2d):
            names, values = ("kernel_size", "stride", "padding", "dilation"), (None, None, 0, 1)
            given = [*node.args[1:5], *values[len(node.args) - 1 :]]
            if len(node.args) > 5 or node.kwargs.keys() - {*names, "input", "ceil_mode", "return_indices"}:
                return None
            if node.kwargs.get("ceil_mode") or node.kwargs.get("return_indices") or "input" in node.kwargs:
                return None
            found = tuple(node.kwargs.get(n, v) for n, v in zip(names, given, strict=True))  # type: ignore[assignment]
        else:
            return None
        kernel, stride, padding, dilation = found
        if _pair(dilation) != (1, 1):
            return None
        return _pair(kernel), _pair(kernel if stride in (None, []) else stride), _pair(padding)

    def mean(self, node: fx.Node) -> bool:
        """Whether it is the mean of each channel, with the axes kept."""
        module: Any = self.modules.get(node)
        one = (1, (1, 1), [1, 1], (1,))
        if module is not None:
            return self.kind(node) is nn.AdaptiveAvgPool2d and module.output_size in one
        if node.op == "call_function" and node.target is F.adaptive_avg_pool2d:
            return len(node.args) == 2 and not node.kwargs and node.args[1] in one
        return False

    def convolution(self, node: fx.Node) -> ConvStep | str | None:
        """A convolution that native code runs, or the reason why it does not; None: no convolution."""
        module: Any = self.modules.get(node)
        if not isinstance(module, nn.Conv2d):
            return None
        if type(module).forward is not nn.Conv2d.forward or "forward" in module.__dict__:
            return "it does more than F.conv2d"
        if module.padding_mode != "zeros" or (isinstance(module.padding, str) and module.padding != "valid"):
            return f"padding {module.padding!r} of mode {module.padding_mode!r}"
        reason = fits(module.weight, module.groups)
        if reason:
            return reason
        if module.bias is not None and not bool(torch.isfinite(module.bias).all()):
            return "the bias is not finite"
        padding = (0, 0) if isinstance(module.padding, str) else _pair(module.padding)
        weight: Any = module.weight
        return ConvStep(
            0, 0, weight, module.bias, _pair(module.stride), padding, _pair(module.dilation), int(module.groups)
        )


# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Segment:
    """Nodes that one native call computes. inputs, outputs: nodes whose values it reads and makes."""

    nodes: list[fx.Node]
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    chain: ConvChain | None = None


@dataclass(eq=False)
class Net:
    """A net as nodes and segments in the order in which they run. left: convolutions in no chain, and why."""

    items: list[fx.Node | Segment]
    placeholders: list[fx.Node]
    output: Any
    taken: list[str]
    left: dict[str, str]


def observe(root: nn.Module, graph: fx.Graph, inputs: Sequence[Tensor]) -> dict[fx.Node, Any]:
    """The shape of each node's tensor in one run, None if it is not a float32 tensor."""

    class Shapes(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            y = super().run_node(n)
            found[n] = tuple(y.shape) if isinstance(y, Tensor) and y.dtype is torch.float32 else None
            return y

    found: dict[fx.Node, Any] = {}
    Shapes(root, graph=graph).run(*inputs)
    return found


def plan(root: nn.Module, graph: fx.Graph, inputs: Sequence[Tensor]) -> Net:
    """Divide the graph into chains and other nodes. Raises Refusal if the call is not one with float32 tensors only."""
    nodes = list(graph.nodes)
    placeholders = [n for n in nodes if n.op == "placeholder"]
    if len(placeholders) != len(inputs) or any(n.args or str(n.target).startswith("*") for n in placeholders):
        raise Refusal("its forward takes other arguments than tensors")
    try:
        shapes = observe(root, graph, inputs)
    except Exception as error:
        raise Refusal(f"the example does not fit it: {type(error).__name__}: {error}") from error
    reader = Reader(root, graph)
    convolutions: dict[fx.Node, ConvStep] = {}
    left: dict[str, str] = {}
    for node in nodes:
        found = reader.convolution(node)
        if isinstance(found, ConvStep) and len(node.args) == 1 and not node.kwargs:
            convolutions[node] = found
        elif isinstance(found, str):
            left[str(node.target)] = found
    taken = _taken(reader, nodes, shapes, convolutions)
    segments = _segments(nodes, taken)
    items: list[fx.Node | Segment] = []
    names: list[str] = []
    for part in segments:
        if isinstance(part, Segment) and any(n in convolutions for n in part.nodes):
            _ends(part)
            part.chain = _chain(part, reader, convolutions)
            names += [str(n.target) for n in part.nodes if n in convolutions]
            items.append(part)
        else:
            items += part.nodes if isinstance(part, Segment) else [part]
    return Net(items, placeholders, nodes[-1].args[0], names, left)


def _taken(
    reader: Reader, nodes: list[fx.Node], shapes: dict[fx.Node, Any], convolutions: dict[fx.Node, ConvStep]
) -> set[fx.Node]:
    """Nodes that a step can compute."""
    taken: set[fx.Node] = set()
    for node in nodes:
        sources = node.all_input_nodes
        image = all(shapes.get(n) is not None and len(shapes[n]) == 4 for n in (node, *sources))
        if not sources or not image:
            continue
        if node in convolutions:
            taken.add(node)
            continue
        if node.target in _INPLACE or getattr(reader.modules.get(node), "inplace", False):
            first: Any = node.args[0]
            if len(first.users) > 1 or first.op == "placeholder":  # others would read the changed tensor
                continue
        if reader.sum(node):
            if len({shapes[n] for n in (node, *sources)}) == 1:
                taken.add(node)
        elif len(sources) != 1 or not node.args or node.args[0] is not sources[0]:
            continue
        elif reader.function(node) is not None:
            source = sources[0]
            while reader.identity(source) and len(source.users) == 1:
                source = source.all_input_nodes[0]
            if source in convolutions and len(source.users) == 1:
                taken.add(node)
        elif reader.clip(node) or reader.pool(node) or reader.mean(node) or reader.identity(node):
            taken.add(node)
    return taken


def _segments(nodes: list[fx.Node], taken: set[fx.Node]) -> list[fx.Node | Segment]:
    """Nodes in an order in which they can run, those that are taken together as early as possible.

    The level of a node is the number of changes from taken to other nodes before it.
    """
    level: dict[fx.Node, int] = {}
    for node in nodes:
        own = node in taken
        level[node] = max((level[n] + (n in taken and not own) for n in node.all_input_nodes), default=0)
    found: list[fx.Node | Segment] = []
    for i in range(1 + max(level.values(), default=0)):
        found += [n for n in nodes if level[n] == i and n not in taken and n.op not in ("placeholder", "output")]
        together = [n for n in nodes if level[n] == i and n in taken]
        if together:
            found.append(Segment(together))
    return found


def _ends(part: Segment) -> None:
    inside = set(part.nodes)
    for node in part.nodes:
        part.inputs += [n for n in node.all_input_nodes if n not in inside and n not in part.inputs]
        if any(user not in inside for user in node.users):
            part.outputs.append(node)


def _chain(part: Segment, reader: Reader, convolutions: dict[fx.Node, ConvStep]) -> ConvChain:
    """The steps of a segment. Activations and additions become part of the convolution before them."""
    steps: list[Any] = []
    number: dict[fx.Node, int] = {}
    waiting: dict[fx.Node, ConvStep] = {}  # convolutions whose only reader has not been seen

    def value(node: fx.Node) -> int:
        if node in waiting:
            emit(node, waiting.pop(node))
        return number[node]

    def emit(node: fx.Node, step: Any) -> None:
        number[node] = len(steps)
        steps.append(replace(step, y=len(steps)))

    def keep(node: fx.Node, step: ConvStep) -> None:
        """Wait for the only reader of a node."""
        if len(node.users) == 1 and node not in part.outputs:
            waiting[node] = step
        else:
            emit(node, step)

    for i, node in enumerate(part.inputs):
        emit(node, InputStep(i, 0))
    for node in part.nodes:
        first: Any = node.args[0]
        first_use = waiting.get(first)
        if node in convolutions:
            keep(node, replace(convolutions[node], x=value(first)))
        elif reader.identity(node):
            if first_use is not None:
                keep(node, waiting.pop(first))
            elif node in part.outputs:  # each output is a tensor of its own
                emit(node, AddStep(value(first), 0))
            else:
                number[node] = value(first)
        elif reader.sum(node):
            _add(node, waiting, value, keep, emit)
        elif (name := reader.function(node)) is not None:
            assert first_use is not None
            keep(node, replace(waiting.pop(first), function=name))
        elif (clip := reader.clip(node)) is not None:
            if first_use is not None:
                lo, hi = (min(max(bound, clip[0]), clip[1]) for bound in (first_use.lo, first_use.hi))
                keep(node, replace(waiting.pop(first), lo=lo, hi=hi))
            else:
                emit(node, AddStep(value(first), 0, None, *clip))
        elif (pool := reader.pool(node)) is not None:
            kernel, stride, padding = pool
            emit(node, MaxStep(value(first), 0, kernel, stride, padding))
        else:
            emit(node, MeanStep(value(first), 0))
    return ConvChain(tuple(steps), tuple(value(n) for n in part.outputs))


_NAMES = {(-INF, INF): None, (0.0, INF): "relu", (0.0, 6.0): "relu6"}


def _add(
    node: fx.Node, waiting: dict[fx.Node, ConvStep], value: Callable[[fx.Node], int],
    keep: Callable[[fx.Node, ConvStep], None], emit: Callable[[fx.Node, Any], None],
) -> None:  # fmt: skip
    """An addition: of the other number, in the convolution that can do it and has the most products."""

    def joins(n: Any) -> bool:
        s = waiting.get(n)
        if s is None or s.residual is not None:
            return False
        clip = (s.lo, s.hi)
        return clip == (-INF, INF) or (s.function is None and clip in _NAMES)

    a, b = node.args
    hosts = sorted((n for n in (a, b) if joins(n)), key=lambda n: waiting[n].weight.numel())  # type: ignore[index]
    if a is b or not hosts:
        emit(node, AddStep(value(a), 0, value(b)))  # type: ignore[arg-type]
        return
    host: Any = hosts[-1]
    step = waiting.pop(host)
    other: Any = b if host is a else a
    if step.function is None:
        step = replace(step, function=_NAMES[step.lo, step.hi], lo=-INF, hi=INF)
    keep(node, replace(step, residual=value(other)))


def quantized(root: nn.Module) -> int:
    """Number of convolutions of two dimensions with quantized weights."""
    return sum(
        isinstance(m, nn.Conv2d) and isinstance(m._parameters.get("weight"), AffineQuantizedTensor)
        for m in root.modules()
    )
