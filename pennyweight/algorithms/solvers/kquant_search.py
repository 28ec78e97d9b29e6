"""Scale search for ggml's K-quants and IQ4 types, for the GGUF writer and as a candidate of the solver "imatrix".

Each sub-block tries several scales around that of its range; weighted least squares then fits the scale (and offset)
to the resulting codes, and the candidate with the smallest weighted error is kept. The scales of a super-block are then
rounded to multiples of one float16 number, and the codes are recomputed by rounding to nearest under the stored scales.
Method and weights follow ggml's make_qkx2_quants and make_qx_quants (ggml-quants.c, Kawrakow 2023).

Each sub-block is a column: x is [elements of a sub-block, sub-blocks].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core import spec as specs
from ...core.formats import IQ4_NL
from ...core.numerics import Parts
from ...core.spec import QuantSpec

_TINY = 1e-30  # squares below this count as zero
_CHUNK = 1 << 17  # elements per chunk: the search needs some tens of arrays of that size


def half(d: Tensor) -> Tensor:
    """d as float16. Raises ValueError if it is out of range."""
    if d.numel() and float(d.abs().max()) > 65504:
        raise ValueError(f"a block needs a scale or offset of {float(d.abs().max()):.4g}; the float16 maximum is 65504")
    return d.to(torch.float16)


def pairwise_sum(x: Tensor) -> Tensor:
    """Pairwise sum over the first axis, whose size is a power of two: bit-identical on every machine."""
    while x.shape[0] > 1:
        n = x.shape[0] // 2
        x = x[:n] + x[n:]
    return x[0]


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b > _TINY, a / b, 0)


def root(x: Tensor) -> Tensor:
    """Square root, rounded correctly: float32 square roots of vector math libraries may be off in the last place."""
    return x.double().sqrt().float()


def _columns(x: Tensor, size: int) -> Tensor:
    """[super-blocks, elements] as [size, sub-blocks]."""
    return x.reshape(-1, size).t().contiguous()


def _rms(x: Tensor, size: int) -> Tensor:
    """Root mean square of each super-block of columns, for each of its sub-blocks."""
    squares = pairwise_sum(x.square()).view(-1, size // x.shape[0])
    total = pairwise_sum(squares.t()) / size
    return root(total).repeat_interleave(size // x.shape[0])


# -- scale and offset --------------------------------------------------------------------------------------------------


def _affine(x: Tensor, w: Tensor, top: int, start: float, step: float, tries: int) -> tuple[Tensor, Tensor]:
    """Scale and minimum (at most 0) of each column that minimise the sum of w * (scale * code + least - x)**2."""
    lo = x.amin(0).clamp(max=0)
    span = x.amax(0) - lo
    above, wx = x - lo, w * x
    sw, swx = pairwise_sum(w), pairwise_sum(wx)

    def fit(codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Least squares for given codes, and the error without its constant term."""
        wl = w * codes
        sl, sll, sxl = pairwise_sum(wl), pairwise_sum(wl * codes), pairwise_sum(wx * codes)
        det = sw * sll - sl * sl
        scale = _ratio(sw * sxl - swx * sl, det)
        least = _ratio(sll * swx - sl * sxl, det)
        free = (det > _TINY) & (least <= 0)
        scale = torch.where(free, scale, _ratio(sxl, sll))
        least = torch.where(free, least, 0)
        return scale, least, _error(scale, least, sl, sll, sxl)

    def _error(scale: Tensor, least: Tensor, sl: Tensor, sll: Tensor, sxl: Tensor) -> Tensor:
        return scale * scale * sll + 2 * scale * (least * sl - sxl) + least * (least * sw - 2 * swx)

    best_scale, best_least = span / top, lo
    codes = (above * _ratio(torch.full_like(span, top), span)).round_().clamp_(0, top)
    wl = w * codes
    best = _error(best_scale, best_least, pairwise_sum(wl), pairwise_sum(wl * codes), pairwise_sum(wx * codes))
    for i in range(tries + 1):
        if i < tries:
            codes = (above * _ratio(torch.full_like(span, top + start + step * i), span)).round_().clamp_(0, top)
        else:  # the best again: its codes may change with the new offset
            codes = ((x - best_least) * _ratio(torch.ones_like(span), best_scale)).round_().clamp_(0, top)
        scale, least, error = fit(codes)
        better = (error < best) & (scale > 0)
        best_scale = torch.where(better, scale, best_scale)
        best_least = torch.where(better, least, best_least)
        best = torch.where(better, error, best)
    return best_scale, best_least


def _multiples(values: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Non-negative values [super-blocks, k] as codes 0 .. top (float32) times one float16 scale per super-block."""
    d = half(values.amax(1, keepdim=True) / top)
    return (values * _ratio(torch.ones_like(d, dtype=torch.float32), d.float())).round().clamp(0, top), d


def _with_offset(x: Tensor, importance: Tensor | None, params: _SearchParams) -> Parts:
    cols = _columns(x, params.size)
    sigma = _rms(cols, 256)
    if importance is None:
        w = sigma + cols.abs()
    else:
        w = _columns(importance, params.size) * root(2 * (sigma * sigma) + cols * cols)
    scale, least = _affine(cols, w, params.top, params.start, params.step, params.tries)
    per = 256 // params.size
    sc, d = _multiples(scale.view(-1, per), params.scale_top)
    mn, dmin = _multiples(least.abs().view(-1, per), params.scale_top)  # not -least, which may be -0

    def codes_of(sc: Tensor, mn: Tensor) -> tuple[Tensor, Tensor]:
        scale, minus = (d.float() * sc).view(-1), (dmin.float() * mn).view(-1)
        codes = ((cols + minus) * _ratio(torch.ones_like(scale), scale)).round().clamp(0, params.top)
        return codes, pairwise_sum(w * (codes * scale - minus - cols).square())

    # try neighbours of both rounded values: scale, minimum and new codes can compensate for each other's rounding
    codes, least = codes_of(sc, mn)
    first, second = sc, mn
    for up, down in ((a, b) for a in (-1, 0, 1) for b in (-1, 0, 1) if (a, b) != (0, 0)):
        tried = (first + up).clamp(0, params.scale_top), (second + down).clamp(0, params.scale_top)
        found, error = codes_of(*tried)
        better = error < least
        codes, least = torch.where(better, found, codes), torch.where(better, error, least)
        sc = torch.where(better.view(-1, per), tried[0], sc)
        mn = torch.where(better.view(-1, per), tried[1], mn)
    return Parts(
        codes.to(torch.uint8).t().reshape(-1, 256),
        Parts(sc.to(torch.uint8), d),
        offset=Parts(mn.to(torch.uint8), -dmin),
    )


# -- scale alone -------------------------------------------------------------------------------------------------------


def _numbers(x: Tensor, params: _SearchParams) -> tuple[Tensor, Tensor]:
    """Codes of the nearest values, and these values."""
    if params.table:
        values = torch.tensor(IQ4_NL.values, device=x.device, dtype=torch.float32)
        codes = torch.bucketize(x, (values[1:] + values[:-1]) / 2)
        return codes, values[codes]
    codes = x.round().clamp(-params.top - 1, params.top)
    return codes, codes


def _centred(x: Tensor, w: Tensor, params: _SearchParams) -> Tensor:
    """Scale of each column that minimises the sum of w * (scale * value - x)**2. Its sign maps the element with the
    largest magnitude to the end of the grid with the larger magnitude."""
    largest = x.gather(0, x.abs().argmax(0, keepdim=True))[0]
    wx = w * x
    reach = params.start
    best_scale, best = torch.zeros_like(largest), torch.zeros_like(largest)
    for i in range(-params.tries, params.tries + 2):
        if i <= params.tries:
            inverse = _signed_ratio(torch.full_like(largest, -(reach + params.step * i)), largest)
        else:
            inverse = _signed_ratio(torch.ones_like(largest), best_scale)
        q = _numbers(x * inverse, params)[1]
        sxq, sqq = pairwise_sum(wx * q), pairwise_sum(w * q * q)
        scale = _ratio(sxq, sqq)
        gain = sxq * scale  # error reduction compared to a scale of zero
        better = gain > best
        best_scale = torch.where(better, scale, best_scale)
        best = torch.where(better, gain, best)
    return best_scale


def _signed_ratio(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(b.abs() > _TINY, a / b, 0)


def _about_zero(x: Tensor, importance: Tensor | None, params: _SearchParams) -> Parts:
    size = x.shape[1]
    cols = _columns(x, params.size)
    if importance is None:
        w = cols.abs() + _rms(cols, size)
    else:
        w = _columns(importance, params.size) * root(2 * _rms(cols, size).square() + cols * cols)
    scale = _centred(cols, w, params).view(-1, size // params.size)

    def codes_of(scale: Tensor) -> tuple[Tensor, Tensor]:
        scale = scale.view(-1)
        codes, numbers = _numbers(cols * _signed_ratio(torch.ones_like(scale), scale), params)
        return codes, pairwise_sum(w * (numbers * scale - cols).square())

    if params.scale_top == 0:
        stored: Any = half(scale)
        codes = codes_of(stored.float())[0]
    else:
        largest = scale.gather(1, scale.abs().argmax(1, keepdim=True))
        d = half(largest / -(params.scale_top + 1))
        sc = (
            (scale * _signed_ratio(torch.ones_like(d, dtype=torch.float32), d.float()))
            .round()
            .clamp(-params.scale_top - 1, params.scale_top)
        )
        codes, least = codes_of(d.float() * sc)
        for tried in ((sc + step).clamp(-params.scale_top - 1, params.scale_top) for step in (-1, 1)):
            found, error = codes_of(d.float() * tried)
            better = error < least
            codes, least = torch.where(better, found, codes), torch.where(better, error, least)
            sc = torch.where(better.view(sc.shape), tried, sc)
        stored = Parts(sc.to(torch.int8), d)
    dtype = torch.uint8 if params.table else torch.int8
    return Parts(codes.to(dtype).t().reshape(-1, size), stored)


# -- one float16 scale per block, with importance ----------------------------------------------------------------------


def _unsigned(x: Tensor, importance: Tensor, params: _SearchParams) -> Parts:
    """As :func:`_about_zero`, with codes from 0 on."""
    found = _about_zero(x, importance, params)
    return found._replace(codes=(found.codes + (params.top + 1)).view(torch.uint8))


def _with_float_offset(x: Tensor, importance: Tensor, params: _SearchParams) -> Parts:
    """Float16 scale and offset of each block."""
    cols = _columns(x, params.size)
    w = _columns(importance, params.size) * root(2 * _rms(cols, params.size).square() + cols * cols)
    fitted = _affine(cols, w, params.top, params.start, params.step, params.tries)
    scale, least = (half(part + 0.0) for part in fitted)  # never -0
    codes = ((cols - least.float()) * _ratio(torch.ones_like(w[0]), scale.float())).round().clamp(0, params.top)
    return Parts(codes.to(torch.uint8).t().contiguous(), scale[:, None], offset=least[:, None])


@dataclass(frozen=True)
class _SearchParams:
    """Search parameters of one type.

    size          elements of a sub-block
    top           the largest code; without an offset the smallest is -top - 1
    scale_top     the largest code of a scale; 0: scales are float16
    start, step   candidate i scales the range to ``top + start + step * i``; without an offset to ``start + step * i``
    tries         number of candidates; without an offset on each side
    """

    size: int
    top: int
    scale_top: int
    start: float
    step: float
    tries: int
    table: bool = False


_TYPES: dict[str, tuple[Callable[..., Parts], _SearchParams]] = {
    "Q2_K": (_with_offset, _SearchParams(16, 3, 15, -0.5, 0.1, 16)),
    "Q4_K": (_with_offset, _SearchParams(32, 15, 63, -1.0, 0.1, 21)),
    "Q5_K": (_with_offset, _SearchParams(32, 31, 63, -0.5, 0.1, 16)),
    "Q3_K": (_about_zero, _SearchParams(16, 3, 31, 4.0, 0.1, 9)),
    "Q6_K": (_about_zero, _SearchParams(16, 31, 127, 32.0, 0.1, 9)),
    "IQ4_NL": (_about_zero, _SearchParams(32, 15, 0, 120.0, 4.0, 9, table=True)),
    "IQ4_XS": (_about_zero, _SearchParams(32, 15, 31, 120.0, 4.0, 9, table=True)),
}
# Types whose rule without importance is a formula (io/gguf/quantize.py)
_WEIGHTED: dict[str, tuple[Callable[..., Parts], _SearchParams]] = {
    "Q4_0": (_unsigned, _SearchParams(32, 7, 0, 8.0, 0.1, 9)),
    "Q5_0": (_unsigned, _SearchParams(32, 15, 0, 16.0, 0.1, 9)),
    "Q4_1": (_with_float_offset, _SearchParams(32, 15, 0, -1.0, 0.1, 21)),
    "Q5_1": (_with_float_offset, _SearchParams(32, 31, 0, -0.5, 0.1, 16)),
}
_SPECS: dict[QuantSpec, str] = {getattr(specs, name): name for name in _TYPES}


def chosen() -> dict[str, Callable[..., Parts]]:
    """Search functions by type: (values [blocks, elements], importance of the same shape or None) -> parts."""
    return {name: partial(search, params=params) for name, (search, params) in _TYPES.items()}


def weighted() -> dict[str, Callable[..., Parts]]:
    """As :func:`chosen`, for types that are searched only with importance."""
    return {name: partial(search, params=params) for name, (search, params) in _WEIGHTED.items()}


def search_kquant(weight: Tensor, spec: QuantSpec, importance: Tensor) -> list[Parts]:
    """Search result for a matrix [N, K] with the importance of each element [N, K]. Empty if the spec is not one of
    these types, if rows are not whole super-blocks, or if values exceed the float16 range."""
    name = _SPECS.get(spec.with_(layout="plain"))
    n, k = weight.shape
    size = 32 if name == "IQ4_NL" else 256  # elements of a super-block
    if name is None or k % size or not n or float(weight.abs().max()) > 65504:
        return []
    search, params = _TYPES[name]
    step = max(1, _CHUNK // k)
    pieces: list[Parts] = []
    for start in range(0, n, step):
        blocks, weights = (t[start : start + step].float().reshape(-1, size) for t in (weight, importance))
        pieces.append(search(blocks, weights, params))
    return [stack_rows(pieces).map(lambda t: t.reshape(n, k // size * t.shape[1]).contiguous())]


def stack_rows(pieces: list[Parts]) -> Parts:
    """Concatenate parts along the rows."""
    out: list[Any] = []
    for parts in zip(*pieces, strict=True):
        first = parts[0]
        out.append(stack_rows(list(parts)) if isinstance(first, Parts) else None if first is None else torch.cat(parts))
    return Parts(*out)
