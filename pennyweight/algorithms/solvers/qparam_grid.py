"""Quantization grid of a matrix: the representable values of each element, candidate grids, and rounding to a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...core import blocks
from ...core.numerics import (
    Parts,
    RoundingTerms,
    encode,
    quantize,
    rounding_terms,
    store_qparams,
    stored_value,
)
from ...core.qparams import Params, choose, default_rule
from ...core.qparams_search import select_blocks, shrunk_range, squared_errors
from ...core.spec import QuantSpec
from ..base import Task

Rounder = Callable[[int, Tensor], tuple[Tensor, Tensor]]


class QParamGrid(NamedTuple):
    """The grid of a matrix [N, K]. Matrices are transposed here, so that access to a column is contiguous.

    chosen  block parameters as chosen
    stored  as stored, [G, N] for the G blocks of a row, or None
    group   int64 [K], the block of each column
    common  what rounding needs of ``stored``, [G, N]; None for formats that are not rounded with it
    """

    spec: QuantSpec
    chosen: Params
    stored: Params
    group: Tensor
    common: RoundingTerms | None

    def columns(self, start: int, end: int) -> Params:
        """Stored parameters of each element of the columns in [start, end), flat."""
        group = self.group[start:end]
        return Params(*(None if p is None else p.index_select(0, group).flatten() for p in self.stored))

    def nearest(self, w: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """(codes, values) of w [k, N], the columns from ``start`` on, rounded to nearest."""
        flat = self.columns(start, start + w.shape[0])
        codes = encode(w.reshape(-1, 1), self.spec, flat)
        return codes.view(w.shape), stored_value(codes, self.spec, flat).view(w.shape)

    def terms(self, start: int, end: int) -> RoundingTerms | None:
        """``common`` of the columns in [start, end), [end - start, N]."""
        if self.common is None:
            return None
        group = self.group[start:end]
        return RoundingTerms(*(t.index_select(0, group) if isinstance(t, Tensor) else t for t in self.common))

    def rounder(self, start: int, end: int) -> Rounder:
        """:meth:`nearest` of one column w [N] after another of those in [start, end): (its number from ``start`` on, w)
        -> (codes as numbers, values) [N]. The same results, with what depends on the parameters alone computed once."""
        t = None if self.common is None or self.common.table is not None else self.terms(start, end)
        if t is None:
            return partial(self._nearest_alone, start)

        def nearest(j: int, w: Tensor) -> tuple[Tensor, Tensor]:
            code = w * t.factor[j]
            if t.offset is not None:
                assert t.least is not None
                assert t.divisor is not None
                code.sub_(t.least[j]).div_(t.divisor[j])
            code.round_()
            if t.zero_point is not None:
                code.add_(t.zero_point[j])
            code = (code.add_(t.shift) if t.shift else code).clamp_(t.lo, t.hi)
            value = code - t.mid if t.mid else code
            value = (value if t.zero_point is None else value - t.zero_point[j]) * t.scale[j]
            return code, value if t.offset is None else value.add_(t.offset[j])

        return nearest

    def _nearest_alone(self, start: int, j: int, w: Tensor) -> tuple[Tensor, Tensor]:
        codes, values = self.nearest(w.unsqueeze(0), start + j)
        return codes[0], values[0]

    def values(self, codes: Tensor) -> Tensor:
        """Dequantized codes [K, N]."""
        flat = self.columns(0, codes.shape[0])
        return stored_value(codes.reshape(-1, 1), self.spec, flat).view(codes.shape)

    def parts(self, weight: Tensor, codes: Tensor) -> Parts:
        """Plain parts of a weight [N, K] with codes [K, N]; padding is rounded to nearest."""
        parts = quantize(weight, self.spec, params=self.chosen)
        parts.codes[: codes.shape[1], : codes.shape[0]] = codes.t()
        return parts


def make_grid(chosen: Params, spec: QuantSpec, shape: torch.Size, stored: Params | None = None) -> QParamGrid:
    """Grid of block parameters [N / b0, K / b1] for a matrix of this shape. stored: as they are stored, if known."""
    rows, size = blocks.resolve(spec.block, shape)

    def turned(part: Tensor | None) -> Tensor | None:
        return None if part is None else part.repeat_interleave(rows, 0)[: shape[0]].t().contiguous()

    seen = Params(*map(turned, store_qparams(chosen, spec)[1] if stored is None else stored))
    device = next((p.device for p in seen if p is not None), None)
    group = torch.arange(shape[1], device=device, dtype=torch.int64) // size
    return QParamGrid(spec, chosen, seen, group, rounding_terms(spec, seen))


# Fractions of the range: below 0.8 clipping costs more than finer steps gain, at every bit width tried (docs/log.md)
SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)


def grid_candidates(
    task: Task, names: tuple[str | float, ...], importance: Tensor | None
) -> Iterator[tuple[str, Params]]:
    """(name, parameters) of candidate grids: "scheme" is the scheme's own rule, a number the range times that fraction,
    "mse" minimises the squared error of each block, "weighted" the same with columns weighted by ``importance`` [K],
    "extreme" maps the largest element of each block to the end with one more code, so that scales are signed.
    """
    w = blocks.pad(task.weight, task.spec.block)
    base = task.rule or default_rule(task.spec)
    shrunk: Callable[[float], Params] | None = None
    for name in names:
        if task.spec.scale is None:
            yield "none", Params()
            return
        if name == "scheme":
            yield "scheme", choose(w, task.spec, base, task.eps)
        elif name == "mse":
            yield "mse", choose(w, task.spec, "mse", task.eps)
        elif name == "weighted":
            if importance is not None:
                yield "weighted", weighted_range(task, importance)
        elif name == "extreme":
            if _has_spare_end(task.spec):
                yield "extreme", extreme_scale(w, task.spec)
        elif isinstance(name, float):
            shrunk = shrunk or shrunk_range(
                blocks.split(w, blocks.counts(task.spec.block, w.shape)), task.spec, base, task.eps
            )
            yield f"{name:g}", shrunk(name)
        else:
            known = "'scheme', 'mse', 'weighted', 'extreme', or a fraction of the range"
            raise ValueError(f"unknown grid {name!r}; known: {known}")


def range_shares(view: Tensor, spec: QuantSpec, rule: str | None, eps: float | None) -> Iterator[Params]:
    """Parameters for the fractions 1, 0.98 .. 0.5 of each block's range."""
    choose = shrunk_range(view, spec, rule or default_rule(spec), eps)
    for step in range(26):
        yield choose(1 - step / 50)


def _has_spare_end(spec: QuantSpec) -> bool:
    """Whether codes are centred on zero with one more code on one side, such as -8 to 7."""
    f = spec.format
    return f.kind == "int" and f.lo - spec.mid < -(f.hi - spec.mid) and isinstance(spec.scale, torch.dtype) and not (
        spec.zero_point or spec.offset is not None
    )  # fmt: skip


def extreme_scale(w: Tensor, spec: QuantSpec) -> Params:
    """scale = (the element of largest absolute value) / lo, with its sign (ggml's Q4_0)."""
    view = blocks.split(w, blocks.counts(spec.block, w.shape))
    inner = blocks.inner_axes(w.ndim)
    lo, hi = view.amin(inner), view.amax(inner)
    end = torch.where(hi > -lo, hi, lo)
    scale = end / (spec.format.lo - spec.mid)
    return Params(torch.where(scale == 0, torch.finfo(scale.dtype).tiny, scale))


def weighted_range(task: Task, importance: Tensor) -> Params:
    """The fraction 1, 0.98 .. 0.5 of the range that minimises sum_j h_j (w_j - q_j)^2 in each block (llama.cpp's
    imatrix search, over ranges)."""
    spec, shape = task.spec, task.weight.shape
    w = blocks.pad(task.weight, spec.block)
    h = blocks.pad(importance.expand(shape), spec.block)
    part_shape = blocks.counts(spec.block, w.shape)
    view, weight = blocks.split(w, part_shape), blocks.split(h, part_shape)
    best: Params | None = None
    least = torch.zeros((), device=w.device, dtype=torch.float32)
    for p in range_shares(view, spec, task.rule, task.eps):
        error = squared_errors(view, spec, store_qparams(p, spec)[1], weight)
        if best is None:
            best, least = p, error
            continue
        better = error < least
        least = torch.where(better, error, least)
        best = select_blocks(better, p, best)
    assert best is not None
    return best
