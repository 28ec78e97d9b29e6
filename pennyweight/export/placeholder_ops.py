"""Placeholder ops for quantized weights during ONNX export. Each refers to its weight by an index.

No values pass through torch's exporter: a placeholder becomes an ONNX node of a private domain, which is finally
replaced by the real nodes, with the stored bytes. Placeholders cannot be executed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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
