"""A small builder of ONNX nodes that replace one placeholder."""

from __future__ import annotations

from typing import Any

import numpy as np


class Nodes:
    """Nodes to be inserted at one place of a graph, and the initializers they need.

    Initializers are shared through ``shared``, by name: uses of one weight that need the same bytes store them once.
    """

    def __init__(self, graph: Any, shared: dict[str, Any], prefix: str) -> None:
        self.graph, self.shared, self.prefix = graph, shared, prefix
        self.made: list[Any] = []

    def op(self, kind: str, *inputs: Any, domain: str = "", **attributes: Any) -> Any:
        """The first output of a new node. Inputs: values, arrays (which become constants) or None."""
        import onnx_ir as ir

        given = [self.constant(x) if isinstance(x, (np.ndarray, np.generic)) else x for x in inputs]
        name = f"{self.prefix}.{kind}.{len(self.made)}"
        node = ir.Node(
            domain, kind, given, ir.convenience.convert_attributes(attributes), name=name,
            outputs=[ir.Value(name=name)],
        )  # fmt: skip
        self.made.append(node)
        return node.outputs[0]

    def constant(self, array: Any) -> Any:
        """A small constant of the pattern; equal ones are shared."""
        array = np.asarray(array)
        return self.stored(f"const.{array.dtype}.{list(array.shape)}.{array.tolist()}", lambda: array, own=False)

    def stored(self, name: str, make: Any, dtype: Any = None, *, own: bool = True) -> Any:
        """The initializer of that name, created on first use. ``dtype``: the ONNX dtype if numpy has none.

        make() -> array; for 4-bit dtypes, bytes with two codes each, and the shape: (array, shape).
        """
        import onnx_ir as ir

        key = name
        if key not in self.shared:
            made = make()
            name = name if own else f"pennyweight.constant.{len(self.shared)}"
            if isinstance(made, tuple):
                tensor: Any = ir.PackedTensor(made[0], dtype, shape=made[1], name=name)
            else:
                array = np.ascontiguousarray(made)
                tensor = ir.Tensor(array, dtype, shape=ir.Shape(array.shape), name=name)
            value = ir.Value(name=name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
            self.graph.register_initializer(value)
            self.shared[key] = value
        return self.shared[key]

    # -- short names of common ops ------------------------------------------------------------------------

    def cast(self, x: Any, to: Any) -> Any:
        return self.op("Cast", x, to=int(to))

    def floats(self, x: Any) -> Any:
        import onnx_ir as ir

        return self.cast(x, ir.DataType.FLOAT)

    def reshape(self, x: Any, *shape: int) -> Any:
        """0 keeps the size of that axis, -1 is inferred."""
        return self.op("Reshape", x, np.array(shape, np.int64))

    def cut_last(self, x: Any, start: int, stop: int) -> Any:
        axis = np.array([-1], np.int64)
        return self.op("Slice", x, np.array([start], np.int64), np.array([stop], np.int64), axis)
