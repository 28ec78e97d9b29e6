"""Transforms of tensors between Hugging Face and GGUF, by name, with their inverses.

Source: llama.cpp's converter (conversion/llama.py, conversion/gemma.py, 2026). The tests compare with transformers'
GGUF reader.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.blocks import resolve
from ...core.tensor import AffineQuantizedTensor


@dataclass(frozen=True)
class Transform:
    """A named transform, with the number of attention heads if needed.

    "same"      nothing
    "rotary"    reorders rows: Hugging Face keeps the two halves of a head apart, rotating row i with row
                i + head_dim/2; llama.cpp's "llama" interleaves them
    "plus_one"  w + 1 in GGUF: Gemma multiplies by 1 + w, llama.cpp by the stored value
    """

    name: str = "same"
    heads: int = 0

    def __post_init__(self) -> None:
        if self.name not in _CHANGES:
            raise ValueError(f"unknown transform {self.name!r}; known: {', '.join(_CHANGES)}")
        if self.name == "rotary" and (type(self.heads) is not int or self.heads <= 0):
            raise ValueError(f"rotary needs a positive number of heads, got {self.heads!r}")

    def to_gguf(self, x: Tensor, name: str = "tensor") -> Tensor:
        """x as stored in GGUF. Quantized tensors stay quantized, bit for bit. Raises ValueError naming the tensor."""
        return _CHANGES[self.name](self, x, name, True)

    def from_gguf(self, x: Tensor, name: str = "tensor") -> Tensor:
        """The inverse of :meth:`to_gguf`."""
        return _CHANGES[self.name](self, x, name, False)

    def row_order(self, n_rows: int, to_gguf: bool, name: str = "tensor") -> Tensor | None:
        """int64 [n_rows]: row i of the result is row order[i] of the source; None if the order does not change.

        Raises ValueError if the rows are not whole heads of an even size.
        """
        if self.name != "rotary":
            return None
        if n_rows % (2 * self.heads):
            raise ValueError(
                f"{name}: {n_rows} rows are not {self.heads} heads of an even size; "
                "check the numbers of heads in the config"
            )
        half = n_rows // self.heads // 2
        shape = (self.heads, 2, half) if to_gguf else (self.heads, half, 2)
        return torch.arange(n_rows, dtype=torch.int64, device="cpu").view(shape).transpose(1, 2).reshape(-1)

    @property
    def moves_rows_only(self) -> bool:
        """Whether rows are copied unchanged, so that any stored form of a row can be reordered."""
        return self.name != "plus_one"


def _same(t: Transform, x: Tensor, name: str, to_gguf: bool) -> Tensor:
    return x


def _rotary(t: Transform, x: Tensor, name: str, to_gguf: bool) -> Tensor:
    order = t.row_order(x.shape[0], to_gguf, name)
    assert order is not None
    if isinstance(x, AffineQuantizedTensor):
        size = x.axes is None and resolve(x.spec.block, x.stored_shape)[0]
        if size not in (1, x.shape[0]):
            raise ValueError(
                f"{name}: its rows share scales in blocks ({x.spec}), so they cannot be reordered exactly; "
                "dequantize it first, or quantize with blocks along the last axis"
            )
    return x.index_select(0, order.to(x.device))


def _plus_one(t: Transform, x: Tensor, name: str, to_gguf: bool) -> Tensor:
    if isinstance(x, AffineQuantizedTensor):
        raise ValueError(f"{name}: a norm is stored as weight + 1, but its codes cannot represent that; dequantize it")
    # float32, as llama.cpp's converter does: bfloat16 + 1 would lose most of a small weight
    return x.float() + (1 if to_gguf else -1)


_CHANGES: dict[str, Callable[[Transform, Tensor, str, bool], Tensor]] = {
    "same": _same,
    "rotary": _rotary,
    "plus_one": _plus_one,
}
SAME = Transform()
