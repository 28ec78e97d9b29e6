"""Bits per weight: everything that is stored for a layer's weights, times 8, by the weights. 8 bytes are 64 bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from benchmarks.accuracy.subjects import Subject


@dataclass(frozen=True)
class Bits:
    """What a peer stores of a weight [rows, columns], in bits.

    code        of each weight
    per_group   of each group of ``group`` weights in a row; group None: the row
    per_row, per_column, per_layer
    why         what they are
    """

    code: float
    group: int | None = None
    per_group: float = 0
    per_row: float = 0
    per_column: float = 0
    per_layer: float = 0
    why: str = ""

    def of(self, shapes: Iterable[tuple[int, ...]]) -> float:
        """Per weight, over layers of these shapes."""
        total = weights = 0.0
        for rows, *rest in shapes:
            columns = math.prod(rest)
            groups = math.ceil(columns / (self.group or columns))
            width = groups * (self.group or columns)
            total += rows * (width * self.code + groups * self.per_group + self.per_row)
            total += columns * self.per_column + self.per_layer
            weights += rows * columns
        return total / weights


@dataclass(frozen=True)
class BitsByColumns:
    """Of a peer that stores layers differently by their number of columns.

    of_columns  columns -> Bits
    """

    of_columns: Callable[[int], Bits]
    why: str

    def of(self, shapes: Iterable[tuple[int, ...]]) -> float:
        total = weights = 0.0
        for shape in shapes:
            count = math.prod(shape)
            total += count * self.of_columns(count // shape[0]).of([shape])
            weights += count
        return total / weights


def stored_bytes(w: Any) -> int:
    """Of an AffineQuantizedTensor as files hold it: codes packed to their bits, all parts, nothing of a kernel."""
    from pennyweight.core.layouts import compact_layout

    shape = tuple(w.shape)
    size = int(w.spec.with_(layout=compact_layout(w.spec, shape)).nbytes(shape))
    for name in ("act_scale", "act_zero_point"):
        part = getattr(w, name, None)
        size += part.nbytes if isinstance(part, Tensor) else 0
    return size


def bits_of(model: nn.Module, subject: Subject) -> float:
    """Of our model, counted: the subject's layers as they are stored, and every tensor the float model has not."""
    from pennyweight import AffineQuantizedTensor

    float_shapes = subject.shapes()
    layers = {f"{name}.weight" for name in subject.layers}
    total = 0
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, AffineQuantizedTensor):
            if name not in layers and name in float_shapes:
                raise ValueError(f"{name} is quantized, but it is to be left float for everyone")
            total += stored_bytes(tensor)
        elif name in layers or float_shapes.get(name) != tuple(tensor.shape):
            total += tensor.nbytes
    return 8 * total / sum(math.prod(float_shapes[name]) for name in layers)
