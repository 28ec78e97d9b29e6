"""A quantized weight as rows of codes, the common input of all ONNX patterns.

    x[r, k] = (decode(codes[r, k]) - zero[r, k // block]) * scale[r, k // block] + offset[r, k // block]

Scales that are themselves quantized are written as the float32 values they represent, which changes no value.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import blocks
from ..core.formats import E8M0, Format
from ..core.numerics import part_value
from ..core.tensor import AffineQuantizedTensor

Array = np.ndarray


@dataclass(frozen=True)
class CodeRows:
    """A weight of stored shape ``shape`` as a matrix [R, K].

    shape   original shape; same elements in the same order
    codes   [R, K], in the format's own dtype
    block   columns that share a scale; K for one scale per row
    scale   [R, ceil(K / block)], or [1, 1]; float32
    zero    subtracted from codes: one number, or integers in the shape of scale
    offset  added to the product, in the shape of scale; None: nothing
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    codes: Tensor
    block: int
    scale: Tensor
    zero: int | Tensor = 0
    offset: Tensor | None = None

    @property
    def height(self) -> int:
        return self.codes.shape[0]

    @property
    def width(self) -> int:
        return self.codes.shape[1]

    @property
    def n_blocks(self) -> int:
        return -(-self.width // self.block)

    @property
    def one_scale(self) -> bool:
        return self.scale.numel() == 1 and self.n_blocks == 1

    @property
    def storage_bits(self) -> int:
        """Bits per code in packed bytes: 1, 2, 4; or 8."""
        return next(b for b in (1, 2, 4, 8) if b >= self.format.bits)

    def zeros(self) -> Tensor:
        """``zero`` as int32 in the shape of scale."""
        if isinstance(self.zero, Tensor):
            return self.zero.to(torch.int32)
        return torch.full(tuple(self.scale.shape), self.zero, dtype=torch.int32, device="cpu")

    def sub_blocks(self, block: int) -> CodeRows:
        """The same values with a smaller block that divides this one, or any block if a row has one scale."""
        if block == self.block:
            return self
        n = -(-self.width // block)

        def again(part: Any) -> Any:
            if not isinstance(part, Tensor):
                return part
            wide = part.expand(self.height, -1)
            wide = wide.repeat_interleave(max(1, self.block // block), 1) if self.n_blocks > 1 else wide.expand(-1, n)
            return wide[:, :n].contiguous()

        return CodeRows(
            self.name, self.shape, self.format, self.codes, block, again(self.scale), again(self.zero),
            again(self.offset),
        )  # fmt: skip


def refusal(w: AffineQuantizedTensor) -> str | None:
    """Why a weight cannot be written as rows; None if it can."""
    if w.spec.format is E8M0:
        return "e8m0 is only a scale format"
    if w.spec.format.kind == "learned":
        return "its codes index its own table"
    if 0 in w.shape:
        return "it has no elements"
    return None if _cut(w) is not None else f"blocks {list(w.spec.block or ())} share scales along several inner axes"


def rows_of(w: AffineQuantizedTensor, name: str) -> CodeRows:
    """The rows of a weight for which :func:`refusal` is None, in stored order."""
    spec, shape, parts = w.spec, w.stored_shape, w.plain_parts()
    cut = _cut(w)
    assert cut is not None
    sizes, counts = blocks.resolve(spec.block, shape), blocks.counts(spec.block, shape)
    codes = parts.codes
    for axis, n in enumerate(shape):
        codes = codes.narrow(axis, 0, n)
    height, inner = math.prod(shape[:cut]), math.prod(shape[cut + 1 :])

    def flat(part: Tensor) -> Tensor:
        if part.numel() == 1:
            return part.reshape(1, 1)
        for axis in range(cut):
            part = part.repeat_interleave(sizes[axis], axis).narrow(axis, 0, shape[axis])
        return part.reshape(height, counts[cut]).contiguous()

    def value(part: Any, kind: Any) -> Tensor | None:
        return None if part is None else flat(part_value(part, kind, counts, torch.float32))

    scale = value(parts.scale, spec.scale)
    return CodeRows(
        name, tuple(shape), spec.format, codes.reshape(height, -1).contiguous(), sizes[cut] * inner,
        torch.ones(1, 1, dtype=torch.float32, device="cpu") if scale is None else scale,
        spec.mid if parts.zero_point is None else flat(parts.zero_point.to(torch.int32)),
        value(parts.offset, spec.offset),
    )  # fmt: skip


def _cut(w: AffineQuantizedTensor) -> int | None:
    """The axis along which blocks run: the axes before it form rows, those after it lie entirely within a block."""
    shape = w.stored_shape
    if len(shape) < 2:
        return None
    sizes = blocks.resolve(w.spec.block, shape)
    return next((c for c in range(1, len(shape)) if all(sizes[a] == shape[a] for a in range(c + 1, len(shape)))), None)


# -- bytes -----------------------------------------------------------------------------------------------------------


def unsigned(r: CodeRows) -> tuple[Array, int]:
    """Codes [R, K] as unsigned numbers of ``storage_bits``, and the shift added to make them unsigned."""
    codes = r.codes
    if r.format.native_float:
        raise ValueError(f"{r.name}: {r.format} codes are not integers")
    shift = 1 << (r.storage_bits - 1) if r.format.kind == "int" and r.format.signed else 0
    return (codes.to(torch.int16) + shift).to(torch.uint8).numpy(), shift


def pad_columns(codes: Array, multiple: int) -> Array:
    """codes padded with zero columns to a multiple."""
    more = -codes.shape[1] % multiple
    return np.pad(codes, ((0, 0), (0, more))) if more else codes


def packed(codes: Array, bits: int) -> Array:
    """uint8 codes [R, K] as bytes [R, K * bits / 8], the first code lowest. K must fill whole bytes."""
    per = 8 // bits
    if per == 1:
        return codes
    places = codes.reshape(codes.shape[0], -1, per)
    out = np.zeros(places.shape[:2], np.uint8)
    for i in range(per):
        out |= places[..., i] << np.uint8(bits * i)
    return out
