"""Captures a model as a torch graph, with a placeholder op for each use of a quantized weight.

Each placeholder refers to its weight by an index. No values pass through torch's exporter: a placeholder becomes an
ONNX node of a private domain, which is finally replaced by the real nodes, with the stored bytes. Placeholders cannot
be executed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor

from ..core.tensor import AffineQuantizedTensor
from ..kernels.graph_weight import flatten, weight_of

# -- placeholder ops ---------------------------------------------------------------------------------------------------

DOMAIN = "pennyweight.export"
LIBRARY = torch.library.Library("pennyweight_export", "DEF")
LIBRARY.define("linear(Tensor x, Tensor? bias, int weight, int width) -> Tensor")
LIBRARY.define("embedding(Tensor index, int weight, int width) -> Tensor")
LIBRARY.define("values(int weight, int[] shape) -> Tensor")
LIBRARY.define("input(Tensor x, int weight) -> Tensor")


def _linear(x: Tensor, bias: Tensor | None, weight: int, width: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


def _embedding(index: Tensor, weight: int, width: int) -> Tensor:
    return index.new_empty((*index.shape, width), dtype=torch.float32)


def _values(weight: int, shape: Sequence[int]) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def _input(x: Tensor, weight: int) -> Tensor:
    return torch.empty_like(x)


for _name, _fake in (("linear", _linear), ("embedding", _embedding), ("values", _values), ("input", _input)):
    torch.library.register_fake(f"pennyweight_export::{_name}", _fake, lib=LIBRARY)

ops = torch.ops.pennyweight_export
# Tensor inputs of the node of each op; its weight is an attribute
_INPUTS = {"linear": ("x", "bias"), "embedding": ("index",), "values": (), "input": ("x",)}


def translations() -> dict[Any, Callable[..., Any]]:
    """For ``torch.onnx.export(custom_translation_table=)``: each placeholder as one node of :data:`DOMAIN`."""
    import onnx
    from onnxscript import values

    opset = values.Opset(DOMAIN, 1)

    def node(name: str) -> Any:
        schema = onnx.defs.OpSchema
        optional, integer = schema.FormalParameterOption.Optional, schema.AttrType.INT
        ins = [schema.FormalParameter(i, "S", param_option=optional) for i in _INPUTS[name]]
        kinds = [("T", ["tensor(float)"], ""), ("S", ["tensor(float)", "tensor(int64)", "tensor(int32)"], "")]
        return values.Op(
            opset, name,
            schema(
                name, DOMAIN, 1, inputs=ins, outputs=[schema.FormalParameter("y", "T")],
                type_constraints=kinds if ins else kinds[:1], attributes=[schema.Attribute("weight", integer, "")],
            ),
        )  # fmt: skip

    linear, embedding, floats, put = (node(name) for name in _INPUTS)
    return {
        ops.linear.default: lambda x, bias, weight, width: linear(x, bias, weight=weight),
        ops.embedding.default: lambda index, weight, width: embedding(index, weight=weight),
        ops.values.default: lambda weight, shape: floats(weight=weight),
        ops.input.default: lambda x, weight: put(x, weight=weight),
    }


# -- capture -----------------------------------------------------------------------------------------------------------

QT = AffineQuantizedTensor
aten = torch.ops.aten
_CONVOLUTIONS = (
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv1d.padding, aten.conv2d.padding,
    aten.conv3d.padding, aten.convolution.default,
)  # fmt: skip
# Ops on a weight that return a weight: evaluated here, on the weight itself
_VIEWS = (
    aten.t.default, aten.transpose.int, aten.permute.default, aten.numpy_T.default, aten.detach.default,
    aten.alias.default, aten.slice.Tensor, aten.select.int, aten.split.Tensor, aten.split_with_sizes.default,
    aten.chunk.default, aten.unsqueeze.default, aten.contiguous.default, aten.to.dtype,
)  # fmt: skip


@dataclass
class Weight:
    """A quantized weight in use, in stored order, and the ops that use it.

    name  unique; equal to ``parameter``, unless that is used in several pieces
    """

    name: str
    parameter: str
    tensor: QT
    uses: list[str] = field(default_factory=list)


@dataclass
class Captured:
    """An exported torch program, the weights that its placeholders index, and its unquantized parameters."""

    program: torch.export.ExportedProgram
    weights: list[Weight]
    floats: dict[str, Tensor]


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any) -> Captured:
    """Export with placeholders. Raises ValueError naming a weight whose use has no placeholder."""
    with torch.no_grad():
        program = torch.export.export(model, args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)
    first = {id(p): name for name, p in model.named_parameters()}
    return _Marking(program, first).run()


class _Marking:
    def __init__(self, program: torch.export.ExportedProgram, first: dict[int, str]) -> None:
        self.program, self.graph = program, program.graph_module.graph
        self.weights: list[Weight] = []
        self.known: dict[tuple[Any, ...], int] = {}
        stored = {**program.constants, **program.state_dict}
        targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs if spec.target}
        vals = [node.meta.get("val") for node in self.graph.nodes]
        self.fake = next((v.fake_mode for v in vals if isinstance(v, FakeTensor)), contextlib.nullcontext())
        self.value: dict[fx.Node, Any] = {}  # graph inputs and values computed only from weights
        self.name: dict[fx.Node, str] = {}
        for node in self.graph.nodes:
            target = targets.get(node.name) if node.op == "placeholder" else None
            if target is not None and isinstance(stored.get(target), Tensor):
                value = stored[target]
                self.value[node], self.name[node] = value, first.get(id(value), target)  # tied: the first name

    def run(self) -> Captured:
        uses: dict[Any, Callable[[fx.Node], None]] = {
            torch.ops.pennyweight.linear.default: self._linear, aten.embedding.default: self._embedding,
            aten.addmm.default: self._addmm, aten.mm.default: self._product, aten.matmul.default: self._product,
            **dict.fromkeys(_CONVOLUTIONS, self._convolution),
        }  # fmt: skip
        self.graph.eliminate_dead_code()  # unused parameters are not written
        for node in list(self.graph.nodes):
            if node.op != "call_function":
                continue
            if node.target is torch.ops.export.access_subclass_inner_tensor.default:
                if node.args[0] in self.value:
                    self._follow(node, node.args[0], getattr(self.value[node.args[0]], node.args[1]))
                continue
            if not any(isinstance(self.value.get(n), QT) for n in node.all_input_nodes):
                if node.target is torch.ops.pennyweight.linear.default:
                    self._linear(node)
                continue
            if node.target in _VIEWS or getattr(node.target, "__name__", "") == "getitem":
                made = self._evaluated(node)
                if made is not None:
                    self._follow(node, node.args[0], made)
                    continue
            uses.get(node.target, self._other)(node)
        self._clean()
        left = [spec.target for spec in self.program.graph_signature.input_specs if spec.target]
        return Captured(self.program, self.weights, {n: p for n, p in self.program.state_dict.items() if n in left})

    def _follow(self, node: fx.Node, source: fx.Node, value: Any) -> None:
        self.value[node], self.name[node] = value, self.name[source]

    def _evaluated(self, node: fx.Node) -> Any:
        """A view of a weight, if it is again a quantized tensor; else None."""
        plain = [a for a in node.args[1:] if isinstance(a, fx.Node)]
        if plain or node.kwargs.get("memory_format"):
            return None
        with torch.no_grad():
            source: Any = node.args[0]
            made = node.target(self.value[source], *node.args[1:], **node.kwargs)  # type: ignore[operator]
        first = made[0] if isinstance(made, (list, tuple)) else made
        return made if isinstance(first, QT) and first.dtype is torch.float32 else None

    def _number(self, w: QT, name: str, use: str) -> int:
        """The index of a weight in stored order; equal for uses that share their parts."""
        parts = [(p.data_ptr(), p.dtype, p.shape, p.stride()) for p in flatten(w)[0]]
        key = (*parts, w.stored_shape)
        if key not in self.known:
            self.known[key] = len(self.weights)
            pieces = sum(other.parameter == name for other in self.weights)
            own = f"{name}.piece{pieces}" if pieces else name
            # keeps its parts alive, so that their addresses are not reused
            self.weights.append(Weight(own, name, w.with_(axes=None, shape=w.stored_shape)))
        weight = self.weights[self.known[key]]
        weight.uses.append(use)
        return self.known[key]

    def _replace(self, node: fx.Node, op: Any, *args: Any) -> None:
        with self.graph.inserting_before(node):
            new = self.graph.call_function(op, args)
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        self.graph.erase_node(node)

    def _linear(self, node: fx.Node) -> None:
        x, parts, bias, key = node.args
        tensors = [self.value.get(p) for p in parts]  # type: ignore[union-attr,arg-type]
        if not all(isinstance(t, Tensor) for t in tensors):
            raise ValueError(
                f"{node.name}: a part of its quantized weight is computed by the model; it has no stored data"
            )
        w = weight_of(key, tensors)  # type: ignore[arg-type]
        name = self.name[parts[0]]  # type: ignore[index]
        self._replace(node, ops.linear.default, x, bias, self._number(w, name, "linear"), int(w.shape[0]))

    def _embedding(self, node: fx.Node) -> None:
        w, index = self.value.get(node.args[0]), node.args[1]  # type: ignore[arg-type]
        if not isinstance(w, QT) or w.axes is not None:
            self._other(node)
            return
        number = self._number(w, self.name[node.args[0]], "embedding")  # type: ignore[index]
        self._replace(node, ops.embedding.default, index, number, int(w.shape[1]))

    def _addmm(self, node: fx.Node) -> None:
        bias, x, w = node.args
        if any(v != 1 for v in node.kwargs.values()):  # beta * bias + alpha * (x @ w)
            self._other(node)
        else:
            self._matrix(node, x, w, bias)

    def _product(self, node: fx.Node) -> None:
        x, w = node.args
        self._matrix(node, x, w, None)

    def _matrix(self, node: fx.Node, x: Any, w: Any, bias: Any) -> None:
        """x @ w for a weight [K, N] whose blocks run along K."""
        value = self.value.get(w)
        if x in self.value or not isinstance(value, QT) or value.axes != (1, 0):
            self._other(node)
            return
        self._replace(
            node, ops.linear.default, x, bias, self._number(value, self.name[w], "linear"), int(value.shape[1])
        )

    def _convolution(self, node: fx.Node) -> None:
        x, w = node.args[:2]
        value = self.value.get(w)  # type: ignore[arg-type]
        if isinstance(value, QT) and value.act is not None and x not in self.value:
            number = self._number(value, self.name[w], "convolution")  # type: ignore[index]
            with self.graph.inserting_before(node):
                put = self.graph.call_function(ops.input.default, (x, number))
            put.meta = dict(x.meta)  # type: ignore[union-attr]
            node.update_arg(0, put)
        self._floats(node)

    def _other(self, node: fx.Node) -> None:
        for n in node.all_input_nodes:
            w = self.value.get(n)
            if isinstance(w, QT) and w.act is not None:
                raise ValueError(
                    f"{self.name[n]}: {node.target} uses this weight, which has activation quantization ({w.act}); "
                    "that can be exported only for linear layers and convolutions. Quantize it weight-only, or skip it"
                )
        self._floats(node)

    def _floats(self, node: fx.Node) -> None:
        """Replace the weights of an op by their float values."""
        for n in node.all_input_nodes:
            w = self.value.get(n)
            if not isinstance(w, QT):
                continue
            if isinstance(w, (list, tuple)) or "val" not in n.meta:
                raise ValueError(f"{self.name[n]}: {node.target} uses several pieces of this weight at once")
            number = self._number(w, self.name[n], "values")
            with self.graph.inserting_before(node):
                new = self.graph.call_function(ops.values.default, (number, list(w.stored_shape)))
                with self.fake:
                    new.meta["val"] = torch.empty(w.stored_shape, dtype=torch.float32, device="cpu")
                if w.axes is not None:
                    stored, new = new, self.graph.call_function(aten.permute.default, (new, list(w.axes)))
                    new.meta["val"] = stored.meta["val"].permute(w.axes)
            node.replace_input_with(n, new)

    def _clean(self) -> None:
        """Remove the weights themselves from the program."""
        self.graph.eliminate_dead_code()
        gone = {n.name: n for n in self.value if n.op == "placeholder" and not n.users}
        specs = self.program.graph_signature.input_specs
        for spec in [s for s in specs if s.arg.name in gone]:
            specs.remove(spec)
            self.graph.erase_node(gone[spec.arg.name])
        left = {spec.target for spec in specs}
        for table in (self.program.state_dict, self.program.constants):
            for name in [n for n in table if n not in left]:
                del table[name]
        self.graph.lint()
        self.program.graph_module.recompile()
