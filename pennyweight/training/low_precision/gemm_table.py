"""Table of the implementations of a · bᵀ for two quantized matrices.

Operands are quantized on the fly, so a row is selected by their specs, the sizes and the device alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.numerics import Parts, dequantize
from ...core.spec import QuantSpec
from ...kernels.target import target_of
from ...kernels.torch_gpu import LIMITS, accepts_float8
from ...kernels.torch_int8 import constant_while_tracing, int_mm_saturates


class QuantizedOperand(NamedTuple):
    """A matrix [rows, contracted] as parts. nan: [rows, 1] or [1, 1], NaN for rows with NaN or inf, else 0. dense: the
    codes are already dequantized values."""

    parts: Parts
    spec: QuantSpec
    shape: tuple[int, int]
    nan: Tensor | None = None
    dense: bool = False

    def value(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The dequantized matrix."""
        if self.dense:
            return self.parts.codes.to(dtype)
        x = dequantize(self.parts, self.spec, self.shape, dtype)
        return x if self.nan is None else x + self.nan.to(dtype)

    def t(self) -> QuantizedOperand:
        """The transposed matrix; only for a single scale."""
        codes, scale = self.parts.codes.t().contiguous(), self.parts.scale.t()
        return QuantizedOperand(Parts(codes, scale), self.spec, (self.shape[1], self.shape[0]), self.nan)


@dataclass(frozen=True)
class ProductCase:
    """Inputs of the selection. shape: rows of a, rows of b, contracted. dtype: of the result."""

    a: QuantSpec
    b: QuantSpec
    shape: tuple[int, int, int]
    dtype: torch.dtype
    device: str  # what it runs on: "cpu", "cuda:sm_90", see kernels/target.py


@dataclass(frozen=True)
class Product:
    """One row. run: (a, b, dtype of the result) -> a · bᵀ, in float32, or better at no extra cost.

    accepts  case -> True, or the reason why not
    """

    name: str
    run: Callable[[QuantizedOperand, QuantizedOperand, torch.dtype], Tensor]
    accepts: Callable[[ProductCase], bool | str]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of computation."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _plain_scale(spec: QuantSpec) -> bool | str:
    """Whether the scale is constant along the contracted axis; else the reason."""
    if not isinstance(spec.scale, torch.dtype) or spec.zero_point or spec.offset is not None or spec.mid:
        return f"{spec} has more than one plain scale per block"
    return spec.block in (None, (-1,)) or f"scales of {spec} change along the contraction"


def _both_plain(case: ProductCase) -> bool | str:
    for spec in (case.a, case.b):
        verdict = _plain_scale(spec)
        if verdict is not True:
            return verdict
    return True


def _scaled(y: Tensor, a: QuantizedOperand, b: QuantizedOperand) -> Tensor:
    """Apply scales [rows, 1] or [1, 1] to the sums of codes."""
    return y * a.parts.scale.to(y.dtype) * b.parts.scale.to(y.dtype).t()


# -- plain rows, on every device ---------------------------------------------------------------------------------------


def by_value(a: QuantizedOperand, b: QuantizedOperand, dtype: torch.dtype) -> Tensor:
    """Products of dequantized operands, summed in float32. Those of blocks under powers of two (MX) are exact before
    the sum, up to 24 bits."""
    return F.linear(a.value(wide_dtype(dtype)), b.value(wide_dtype(dtype)))


def by_code(a: QuantizedOperand, b: QuantizedOperand, dtype: torch.dtype) -> Tensor:
    """Products of codes, exact, summed in float32 (of integers exactly up to 2**24); then the scales."""
    one, two = (q.spec.format.decode(q.parts.codes, wide_dtype(dtype)) for q in (a, b))
    return _scaled(F.linear(one, two), a, b)


@constant_while_tracing
def _saturates() -> bool:
    return int_mm_saturates()


# -- integers ----------------------------------------------------------------------------------------------------------


def _padded(codes: Tensor, rows: int, contracted: int) -> Tensor:
    """Codes padded with zeros to multiples of ``rows`` and ``contracted``."""
    more = (-codes.shape[1] % contracted, -codes.shape[0] % rows)
    if more == (0, 0):
        return codes
    bytes_ = codes.view(torch.uint8) if codes.dtype.is_floating_point else codes
    return F.pad(bytes_, (0, more[0], 0, more[1])).view(codes.dtype)


def int_mm(a: QuantizedOperand, b: QuantizedOperand, dtype: torch.dtype) -> Tensor:
    """``torch._int_mm``: exact sums in int32. On a GPU it needs multiples of 8, and more than 16 rows."""
    one, two = a.parts.codes, b.parts.codes
    if one.device.type != "cpu":
        one, two = _padded(one, 32, 16), _padded(two, 16, 16)
    # torch 2.13 misreads strides (1, 1) of a single row; a view of all elements has other strides
    sums = torch._int_mm(one.reshape(-1).view(one.shape), two.t())
    sums = sums[: a.shape[0], : b.shape[0]]
    return _scaled(sums.to(wide_dtype(dtype)), a, b)


def _accepts_int(case: ProductCase) -> bool | str:
    for spec in (case.a, case.b):
        if spec.format.kind != "int" or spec.format.code_dtype is not torch.int8:
            return "needs signed integers on both sides"
    verdict = _both_plain(case)
    if verdict is not True:
        return verdict
    if case.shape[2] < 2:  # torch 2.13 misreads strides (1, 1), on this side too
        return "one contracted element"
    if case.shape[2] * 128 * 128 >= 1 << 31:
        return f"sums of {case.shape[2]} products may overflow int32"
    if case.device == "cpu":
        return not _saturates() or "torch._int_mm saturates on this CPU (no VNNI): its sums are wrong"
    return LIMITS["int8"].refuses(case.device, torch.float32) or True


# -- float8 on GPUs ----------------------------------------------------------------------------------------------------


def scaled_mm(a: QuantizedOperand, b: QuantizedOperand, dtype: torch.dtype) -> Tensor:
    """``torch._scaled_mm`` on codes padded to multiples of 16. Hopper accumulates with fewer bits than float32."""
    one, two = _padded(a.parts.codes, 16, 16), _padded(b.parts.codes, 16, 16)
    rows = any(q.parts.scale.numel() > 1 for q in (a, b))
    scales = [_row_scales(q, codes.shape[0]) if rows else q.parts.scale for q, codes in ((a, one), (b, two))]
    y = torch._scaled_mm(one, two.t(), scale_a=scales[0], scale_b=scales[1].t(), out_dtype=dtype)
    return y[: a.shape[0], : b.shape[0]]


def _row_scales(q: QuantizedOperand, rows: int) -> Tensor:
    scale = q.parts.scale.float().expand(q.shape[0], 1)
    return F.pad(scale, (0, 0, 0, rows - q.shape[0]), value=1.0).contiguous()


def _accepts_scaled(case: ProductCase) -> bool | str:
    verdict = accepts_float8(case.a, case.b)
    if verdict is not True:
        return verdict
    verdict = _both_plain(case)
    if verdict is not True:
        return verdict
    if case.device == "cpu":
        return "on a CPU it is slower than the float32 product of the codes, with the same sums"
    rows = case.a.block is not None or case.b.block is not None
    return LIMITS["rows" if rows else "tensor"].refuses(case.device, case.dtype) or True


# Best first.
PRODUCTS = (
    Product("torch._int_mm", int_mm, _accepts_int),
    Product("torch._scaled_mm", scaled_mm, _accepts_scaled),
    Product("float32 of codes", by_code, _both_plain),
    Product("float32 of values", by_value, lambda case: True),
)


def case_of(a: QuantizedOperand, b: QuantizedOperand, dtype: torch.dtype) -> ProductCase:
    """The case of two operands."""
    shape = (a.shape[0], b.shape[0], a.shape[1])
    return ProductCase(a.spec, b.spec, shape, dtype, target_of(a.parts.codes.device))


def select(case: ProductCase) -> Product:
    """The first row that accepts a case; the last accepts all."""
    for row in PRODUCTS:
        if row.accepts(case) is True:
            return row
    raise AssertionError(case)


def explain(case: ProductCase) -> list[tuple[str, str]]:
    """(name, verdict) of each row for a case; the row with verdict RUNS is used."""
    found, chosen = [], False
    for row in PRODUCTS:
        verdict = row.accepts(case)
        if verdict is True:
            verdict, chosen = "works, but a better one runs" if chosen else "RUNS", True
        found.append((row.name, str(verdict)))
    return found
