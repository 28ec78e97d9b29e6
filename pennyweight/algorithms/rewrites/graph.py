"""Data-flow graph of a model, recorded in one run without keeping the tensors.

Rewrites use it instead of a table of model classes to find the linear layers that read a norm or write to the residual
stream. The graph proposes candidates; a run with changed weights verifies them (equalization.py, quarot.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ...core.tensor import AffineQuantizedTensor
from ..calibration.block_order import inference_mode
from ..calibration.float32_products import run_batch
from ..calibration.input_hooks import COMPOSITE, READERS, read_linear

CONVOLUTIONS = {torch.conv1d, torch.conv2d, torch.conv3d}
# Operations that change neither the position nor the value of a channel
TRANSPARENT = frozenset(
    {
        "view", "reshape", "transpose", "permute", "contiguous", "clone", "dropout", "to", "float", "half", "bfloat16",
        "double", "type_as", "detach", "flatten", "unflatten", "unsqueeze", "squeeze", "expand", "expand_as", "repeat",
        "__getitem__", "select", "narrow", "index_select", "alias", "swapaxes", "t", "T", "mT", "data",
    }
)  # fmt: skip
ADDS = frozenset(("add", "__add__", "__radd__", "__iadd__", "add_", "sub", "__sub__", "cat", "concat"))
SCALES = frozenset(("mul", "__mul__", "__rmul__", "__imul__", "mul_", "div", "__truediv__", "__itruediv__", "div_"))


@dataclass(eq=False)
class Matrix:
    """A weight of a matrix product.

    transposed  stored as [in, out]; ``view`` is [out, in]
    width       input size; height: output size
    kind        "linear", "convolution" or "embedding"
    """

    name: str
    module: nn.Module
    param: str
    transposed: bool
    kind: str = "linear"

    @property
    def weight(self) -> Tensor:
        return self.module._parameters[self.param]  # type: ignore[return-value]

    @property
    def view(self) -> Tensor:
        w = self.weight.data
        return w.t() if self.transposed else w

    @property
    def width(self) -> int:
        return int(self.weight.shape[0 if self.transposed else 1])

    @property
    def height(self) -> int:
        return int(self.weight.shape[1 if self.transposed else 0])

    @property
    def bias(self) -> Tensor | None:
        return self.module._parameters.get(self.param.replace("weight", "bias")) if "weight" in self.param else None

    @property
    def plain(self) -> bool:
        """Whether its values can be changed: floating point and not quantized."""
        w = self.weight
        return not isinstance(w, AffineQuantizedTensor) and w.is_floating_point() and w.layout is torch.strided


@dataclass(eq=False)
class Node:
    """The operation that produced a tensor.

    kind    "norm", "matrix", "parameter", "op", or "unknown" (an input, a buffer, a constant)
    name    of the op, module or parameter
    what    the module of a norm, or the Matrix
    """

    kind: str
    name: str
    parents: tuple[Node, ...] = ()
    what: Any = None

    def resolved(self) -> Node:
        """The nearest ancestor that is not just a view or copy of one tensor."""
        node = self
        while node.kind == "op" and node.name in TRANSPARENT and len(node.parents) == 1:
            node = node.parents[0]
        return node


@dataclass
class Trace:
    """uses: (matrix, node of its input) in call order. norms: every norm call, in call order."""

    uses: list[tuple[Matrix, Node]] = field(default_factory=list)
    norms: list[Node] = field(default_factory=list)


def trace(model: nn.Module, batch: Any) -> Trace:
    """Run the model once in eval mode and record its data flow."""
    recorder = _Recorder(model)
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if norm_width(module) > 0:
                hooks.enter_context(module.register_forward_hook(recorder.norm_hook(name)))
        with inference_mode(model), recorder:
            run_batch(model, batch)
    return recorder.found


def norm_width(module: nn.Module) -> int:
    """Length of the weight of a possible norm: a module without children and with a vector ``weight``. Else 0."""
    w = module._parameters.get("weight")
    if w is None or w.ndim != 1 or any(True for _ in module.children()) or isinstance(w, AffineQuantizedTensor):
        return 0
    return int(w.shape[0])


def sources(node: Node) -> Iterator[Node]:
    """Norms, matrices, parameters and unknowns from which a tensor is computed by ops only; each once."""
    seen, todo = {id(node)}, [node]
    while todo:
        at = todo.pop()
        if at.kind != "op":
            yield at
            continue
        for parent in reversed(at.parents):
            if id(parent) not in seen:
                seen.add(id(parent))
                todo.append(parent)


def ops_between(node: Node, source: Node) -> frozenset[str]:
    """Names of all ops on paths from ``source`` to ``node``."""
    reach: dict[int, bool] = {}
    names: set[str] = set()
    todo = [(node, False)]
    while todo:  # post-order: parents first, then whether the node reaches the source
        at, done = todo.pop()
        if at is source:
            reach[id(at)] = True
        elif at.kind != "op":
            reach[id(at)] = False
        elif done:
            reach[id(at)] = any(reach.get(id(p), False) for p in at.parents)
            if reach[id(at)]:
                names.add(at.name)
        elif id(at) not in reach:
            reach[id(at)] = False
            todo.append((at, True))
            todo.extend((p, False) for p in at.parents)
    return frozenset(names)


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found = Trace()
        self.nodes: Any = WeakIdKeyDictionary()
        self.parameters: dict[int, tuple[str, nn.Module, str]] = {}
        self.matrices: dict[int, Matrix] = {}
        for prefix, module in model.named_modules():
            for name, p in module._parameters.items():
                if p is not None:
                    full = f"{prefix}.{name}" if prefix else name
                    self.parameters.setdefault(id(p), (full, module, name))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in COMPOSITE:  # it multiplies weights inside
            with self:
                return COMPOSITE[func](*args, **kwargs)
        out = func(*args, **kwargs)
        outs = [out] if isinstance(out, Tensor) else [o for o in out if isinstance(o, Tensor)] if isinstance(
            out, (tuple, list)
        ) else []  # fmt: skip
        if outs:
            node = self._node(func, args, kwargs)
            for o in outs:
                if id(o) not in self.parameters:
                    self.nodes[o] = node
        return out

    def norm_hook(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor) and args and isinstance(args[0], Tensor):
                node = Node("norm", name, (self._of(args[0]),), module)
                self.nodes[output] = node
                self.found.norms.append(node)

        return hook

    def _of(self, x: Tensor) -> Node:
        node = self.nodes.get(x)
        if node is None:
            place = self.parameters.get(id(x))
            node = (
                Node("unknown", "", what=tuple(x.shape)) if place is None else Node("parameter", place[0], what=place)
            )
            self.nodes[x] = node
        return node

    def _node(self, func: Any, args: Any, kwargs: Any) -> Node:
        reader = READERS.get(func) or (read_linear if func is F.embedding else None)
        if reader is not None:
            found = reader(args, kwargs)
            matrix = None if found is None else self._matrix(found[1], func)
            if found is not None and matrix is not None:
                source = self._of(found[0])
                if matrix.kind == "linear":
                    self.found.uses.append((matrix, source))
                return Node("matrix", matrix.name, (source,), matrix)
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        flat: list[Any] = []
        for item in (*args, *kwargs.values()):
            flat.extend(item if isinstance(item, (tuple, list)) else [item])
        if name == "__getitem__":
            flat = flat[:1]
        return Node("op", name, tuple(self._of(t) for t in flat if isinstance(t, Tensor) and t.numel() != 1))

    def _matrix(self, w: Any, func: Any) -> Matrix | None:
        if id(w) not in self.parameters:
            return None
        kind = "embedding" if func is F.embedding else "convolution" if func in CONVOLUTIONS else "linear"
        if kind != "convolution" and w.ndim != 2:
            return None
        key = id(w) if kind == "linear" else -id(w)  # a tied table is a separate matrix per use
        if key not in self.matrices:
            name, module, param = self.parameters[id(w)]
            self.matrices[key] = Matrix(name, module, param, kind == "linear" and func is not F.linear, kind)
        return self.matrices[key]
