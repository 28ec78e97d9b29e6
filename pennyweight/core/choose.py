"""Choosing quantization parameters from data: pure functions, one per rule, found by name.

Every rule sees the blocks of x as a view [g0, b0, g1, b1, ..] and returns scale, zero_point and offset of shape
[g0, g1, ..]. Arithmetic stays in the dtype of x (as torchao's does, bit for bit, for the rules it has); a block that is
all zero gets a positive scale (``eps``), so no value is ever NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import blocks
from .formats import E8M0
from .spec import QuantSpec


class Params(NamedTuple):
    """Chosen real numbers, before they are stored: each of the part shape, or None."""

    scale: Tensor | None = None
    zero_point: Tensor | None = None
    offset: Tensor | None = None


Rule = Callable[[Tensor, QuantSpec, float], Params]
RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable[[Rule], Rule]:
    """Register a rule under a name."""

    def add(fn: Rule) -> Rule:
        RULES[name] = fn
        return fn

    return add


def default_rule(spec: QuantSpec) -> str:
    """The rule used where none is named: what the parts of the spec call for."""
    if isinstance(spec.scale, QuantSpec) and spec.scale.format is E8M0:
        return "mx_floor"
    return "minmax" if spec.offset is not None else "asymmetric" if spec.zero_point else "symmetric"


def choose(x: Tensor, spec: QuantSpec, rule: str | None = None, eps: float | None = None) -> Params:
    """Parameters for x under ``spec``.

    x: float tensor, already padded to whole blocks. rule: a name in :data:`RULES`, default by the spec's parts.
    eps: floor of the scale, default the smallest normal number of x's dtype. Raises ValueError for an unknown rule.
    """
    if spec.scale is None:
        return Params()
    name = rule or default_rule(spec)
    if name not in RULES:
        raise ValueError(f"unknown rule {name!r} for choosing parameters; known: {', '.join(sorted(RULES))}")
    view = blocks.split(x, blocks.counts(spec.block, x.shape))
    return RULES[name](view, spec, torch.finfo(x.dtype).smallest_normal if eps is None else eps)


def _range(x: Tensor) -> tuple[Tensor, Tensor]:
    """Least and greatest element of each block."""
    if x.numel() == 0:
        zero = x.new_zeros(x.shape[::2])
        return zero, zero
    inner = blocks.inner_axes(x.ndim // 2)
    return x.amin(inner), x.amax(inner)


def _absmax(x: Tensor) -> Tensor:
    lo, hi = _range(x)
    return torch.maximum(-lo, hi).clamp(min=0)


def _span(lo: Tensor, hi: Tensor, steps: float) -> Tensor:
    """(hi - lo) / steps in the dtype of the input; in float64 only where that overflows."""
    narrow = (hi - lo) / steps
    return torch.where(narrow.isfinite(), narrow, ((hi.double() - lo.double()) / steps).to(narrow.dtype))


@rule("symmetric")
def symmetric(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """scale = absmax / ((hi - lo) / 2) for integers, so that the positive end may clip by half a step;
    scale = absmax / hi for floats and tables. torchao: MappingType.SYMMETRIC."""
    f = spec.format
    two_sided = f.kind == "int" and f.lo < spec.mid
    reach = (f.hi - f.lo) / 2 if two_sided else _reach(spec)
    return Params((_absmax(x) / reach).clamp(min=eps))


@rule("symmetric_no_clip")
def symmetric_no_clip(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """scale = max(min / lo, max / hi), so that nothing clips. torchao: SYMMETRIC_NO_CLIPPING_ERR."""
    lo, hi = _range(x)
    bottom, top = spec.format.lo - spec.mid, spec.format.hi - spec.mid
    scale = lo.clamp(max=0) / bottom
    if top > 0:  # int1 has no positive number
        scale = torch.maximum(scale, hi.clamp(min=0) / top)
    return Params(scale.clamp(min=eps))


@rule("asymmetric")
def asymmetric(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """scale = (max - min) / (hi - lo) with zero in the range; zero_point = lo - round(min / scale), clamped."""
    lo, hi = _range(x)
    f = spec.format
    lo, hi = lo.clamp(max=0), hi.clamp(min=0)
    scale = _span(lo, hi, f.hi - f.lo).clamp(min=eps)
    return Params(scale, (f.lo - (lo / scale).round()).clamp(f.lo, f.hi))


@rule("minmax")
def minmax(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """scale = (max - min) / (hi - lo); offset = min + scale * (mid - lo), real. Zero need not be representable.
    With uint4 and mid 8 these are tinygemm's numbers."""
    lo, hi = _range(x)
    f = spec.format
    scale = _span(lo, hi, f.hi - f.lo).clamp(min=eps)
    return Params(scale, None, lo + scale * (spec.mid - f.lo))


@rule("mse")
def mse(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """Search the shrink factor 1, 0.99 .. 0.5 of the default rule's range that minimises each block's squared error.

    Never worse than the default rule, whose range is the first candidate.
    """
    from .numerics import encode, stored_value

    base = RULES[default_rule(spec)]
    inner = blocks.inner_axes(x.ndim // 2)
    best: Params | None = None
    least: Tensor | None = None
    for step in range(51):
        p = base(x * (1 - step / 100), spec, eps)
        codes = encode(x, spec, p)
        error = (stored_value(codes, spec, p).to(x.dtype) - x).float().square().sum(inner)
        if best is None or least is None:
            best, least = p, error
            continue
        better = error < least
        least = torch.where(better, error, least)
        best = Params(*(None if a is None else torch.where(better, b, a) for a, b in zip(best, p, strict=True)))
    assert best is not None
    return best


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent, clamped to what e8m0 holds; float32 (2**-127 is a subnormal there)."""
    e = exponent.clamp(-127, 127)
    return torch.ldexp(torch.ones_like(e, dtype=torch.float64), e).float()


def _exponent(x: Tensor) -> tuple[Tensor, Tensor]:
    """floor(log2 x) and whether x is above that power of two; x > 0 (0 gives the least exponent)."""
    mantissa, exponent = torch.frexp(x.float())
    return torch.where(x > 0, exponent - 1, -127), mantissa != 0.5


def _reach(spec: QuantSpec) -> float:
    return max(spec.format.hi, -spec.format.lo)


def _element_exponent(spec: QuantSpec) -> int:
    return math.floor(math.log2(_reach(spec)))


@rule("mx_floor")
def mx_floor(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """OCP MX v1.0: 2**(floor(log2 absmax) - emax); the largest elements may saturate."""
    exponent, _ = _exponent(_absmax(x))
    return Params(_power_of_two(exponent - _element_exponent(spec)))


@rule("mx_ceil")
def mx_ceil(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """2**(ceil(log2 absmax) - emax): floor plus one unless absmax is a power of two."""
    amax = _absmax(x)
    exponent, above = _exponent(amax)
    return Params(_power_of_two(exponent + (above & (amax > 0)) - _element_exponent(spec)))


@rule("mx_even")
def mx_even(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """As floor, after rounding absmax to the element's mantissa width, so that it does not saturate."""
    amax = _absmax(x).float()
    mantissa_bits = round(-math.log2(2 - _reach(spec) / 2.0 ** _element_exponent(spec)))
    half = 1 << (23 - mantissa_bits - 1)  # half a unit of the last kept bit of a float32
    rounded = ((amax.view(torch.int32) + half) & ~((half << 1) - 1)).view(torch.float32)
    exponent, _ = _exponent(rounded)
    return Params(_power_of_two(exponent - _element_exponent(spec)))


@rule("mx_rceil")
def mx_rceil(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """2**ceil(log2(absmax / hi)): the least power of two under which nothing saturates."""
    ratio = _absmax(x).float() / _reach(spec)
    exponent, above = _exponent(ratio)
    return Params(_power_of_two(exponent + (above & (ratio > 0))))
