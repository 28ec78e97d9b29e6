"""Quantization parameters from data: pure functions, one per rule, registered by name.

Every rule gets the blocks of x as a view [g0, b0, g1, b1, ..] and returns scale, zero_point and offset of shape
[g0, g1, ..]. Arithmetic is in the dtype of x (bit-identical to torchao for the rules that it has), or in float32 if the
scale is itself quantized. An all-zero block gets a positive scale (``eps``), so no value is NaN.
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
    """Chosen parameters before storage: each has the part shape, or is None."""

    scale: Tensor | None = None
    zero_point: Tensor | None = None
    offset: Tensor | None = None
    table: Tensor | None = None  # the numbers of a learned format, [codes, dim]


Rule = Callable[[Tensor, QuantSpec, float], Params]
RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable[[Rule], Rule]:
    """Register a rule under a name."""

    def add(fn: Rule) -> Rule:
        RULES[name] = fn
        return fn

    return add


# Rules that depend only on the minimum and maximum of each block.
BY_RANGE = frozenset((
    "symmetric", "absmax", "symmetric_no_clip", "asymmetric", "minmax", "mx_floor", "mx_ceil", "mx_even", "mx_rceil",
))  # fmt: skip


def default_rule(spec: QuantSpec) -> str:
    """The default rule for the parts of the spec."""
    if isinstance(spec.scale, QuantSpec) and spec.scale.format is E8M0:
        return "mx_floor"
    return "minmax" if spec.offset is not None else "asymmetric" if spec.zero_point else "symmetric"


def choose(x: Tensor, spec: QuantSpec, rule: str | None = None, eps: float | None = None) -> Params:
    """Parameters for x: exactly those that ``spec`` stores.

    x: float tensor, already padded to whole blocks. rule: a name in :data:`RULES`, default :func:`default_rule`.
    eps: floor of the scale, default the smallest normal number of the dtype in which it is chosen (of float32 for
    formats other than integers). Raises ValueError if the rule is unknown or chooses a zero point or offset that the
    spec does not store, or if eps is not positive.
    """
    if spec.scale is None:
        return Params()
    name = rule or default_rule(spec)
    if name not in RULES:
        raise ValueError(f"unknown rule {name!r} for quantization parameters; known: {', '.join(sorted(RULES))}")
    if eps is not None and not eps > 0:
        raise ValueError(f"eps is the minimum scale and must be positive, got {eps}")
    view = blocks.split(x, blocks.counts(spec.block, x.shape))
    return only_stored(RULES[name](view, spec, scale_floor(x.dtype, spec, eps)), spec, name)


def only_stored(p: Params, spec: QuantSpec, name: str) -> Params:
    """Fill in zeros for a zero point or offset that the spec stores but the rule does not choose."""
    assert p.scale is not None
    if p.zero_point is not None and not spec.zero_point:
        raise ValueError(f"rule {name!r} chooses a zero point, which {spec} does not store; give it zero_point=True")
    if p.offset is not None and spec.offset is None:
        raise ValueError(f"rule {name!r} chooses an offset, which {spec} does not store; give it an offset dtype")
    zero_point = torch.zeros_like(p.scale) if spec.zero_point and p.zero_point is None else p.zero_point
    return Params(
        p.scale, zero_point, torch.zeros_like(p.scale) if spec.offset is not None and p.offset is None else p.offset
    )


def scale_floor(dtype: torch.dtype, spec: QuantSpec, eps: float | None) -> float:
    """The minimum scale: representable in the dtype, and for float64 also in a narrower dtype of the scale."""
    if isinstance(spec.scale, QuantSpec) or (dtype is torch.float64 and spec.scale is not torch.float64):
        dtype = torch.float32
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    if eps is not None:
        return max(eps, least)
    # torchao's floor for integers. Its float formats have none, and in float16 their scales are often subnormal.
    return info.smallest_normal if spec.format.kind == "int" else max(least, torch.finfo(torch.float32).smallest_normal)


def _range(x: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of each block, in the dtype in which the scale is chosen."""
    if x.numel() == 0:
        lo = hi = x.new_zeros(x.shape[::2])
    else:
        inner = blocks.inner_axes(x.ndim // 2)
        lo, hi = x.amin(inner), x.amax(inner)
    if not isinstance(spec.scale, QuantSpec):
        return lo, hi
    limit = torch.finfo(torch.float32).max  # float64 has a larger range
    return lo.float().clamp(-limit, limit), hi.float().clamp(-limit, limit)


def _absmax(x: Tensor, spec: QuantSpec) -> Tensor:
    lo, hi = _range(x, spec)
    return torch.maximum(-lo, hi)


def _at_least(scale: Tensor, eps: float) -> Tensor:
    """scale, clamped to be positive and finite."""
    return scale.clamp(eps, torch.finfo(scale.dtype).max)


def _span(lo: Tensor, hi: Tensor, steps: float) -> Tensor:
    """(hi - lo) / steps; divides first only if the difference overflows."""
    narrow = (hi - lo) / steps
    return torch.where(narrow.isfinite(), narrow, hi / steps - lo / steps)


# -- from the range of a block -----------------------------------------------------------------------------------------
# lo, hi: minimum and maximum of each block; first, last: smallest and largest code. For callers without a spec, too.


def symmetric_scale(lo: Tensor, hi: Tensor, first: float, last: float, eps: float) -> Tensor:
    """absmax / ((last - first) / 2), at least ``eps``."""
    return _at_least(torch.maximum(-lo, hi) / ((last - first) / 2), eps)


def no_clip_scale(lo: Tensor, hi: Tensor, bottom: float, top: float, eps: float) -> Tensor:
    """max(lo / bottom, hi / top), at least ``eps``; an end of 0 is ignored."""
    sides = [end / value for end, value in ((lo, bottom), (hi, top)) if value]
    return _at_least(sides[0] if len(sides) == 1 else torch.maximum(*sides), eps)


def range_scale(lo: Tensor, hi: Tensor, steps: float, eps: float) -> Tensor:
    """(hi - lo) / steps, at least ``eps``."""
    return _at_least(_span(lo, hi, steps), eps)


def zero_point_of(
    lo: Tensor, scale: Tensor, first: float, last: float, rounding: Callable[[Tensor], Tensor] = torch.round
) -> Tensor:
    """The code of zero if ``lo`` has the first code: first - round(lo / scale), clamped to the codes."""
    return (first - rounding(lo / scale)).clamp(first, last)


def offset_of(lo: Tensor, hi: Tensor, scale: Tensor, depth: float, steps: float) -> Tensor:
    """lo + scale * depth: the value of the code that is ``depth`` above the first of steps + 1 codes; finite."""
    offset = lo + scale * depth
    part = depth / steps  # if the product overflows: the same point, as a mean of the ends
    limit = torch.finfo(offset.dtype).max  # for formats with lo > 0 the offset is below the minimum of x
    return torch.where(offset.isfinite(), offset, lo * (1 - part) + hi * part).clamp(-limit, limit)


# -- rules -------------------------------------------------------------------------------------------------------------


def _ends(spec: QuantSpec) -> tuple[float, float]:
    """Smallest and largest number that a scale multiplies."""
    return spec.format.lo - spec.mid, spec.format.hi - spec.mid


def _reach(spec: QuantSpec) -> float:
    bottom, top = _ends(spec)
    return max(top, -bottom)


@rule("symmetric")
def symmetric(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """scale = absmax / ((hi - lo) / 2) for integers, so that the positive end may clip by half a step;
    absmax / max(hi, -lo) for floats and tables; max / hi for formats without negative numbers, which clip negative x.
    torchao: MappingType.SYMMETRIC."""
    f = spec.format
    bottom, top = _ends(spec)
    if bottom >= 0:
        return Params(_at_least(_range(x, spec)[1] / top, eps))
    if f.kind == "int":
        return Params(symmetric_scale(*_range(x, spec), f.lo, f.hi, eps))
    return Params(_at_least(_absmax(x, spec) / _reach(spec), eps))


@rule("absmax")
def absmax(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """scale = absmax / min(hi, -lo), so that nothing clips and codes are symmetric (-127 to 127 for int8);
    symmetric_no_clip for one-sided formats. LLM.int8(), ggml's Q8_0, torchao before 0.13."""
    bottom, top = _ends(spec)
    if bottom >= 0 or top <= 0:
        return symmetric_no_clip(x, spec, eps)
    return Params(_at_least(_absmax(x, spec) / min(top, -bottom), eps))


@rule("absmean")
def absmean(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """scale = mean |x|, for ternary weights. BitNet b1.58 (Ma et al. 2024)."""
    if x.numel() == 0:
        return Params(_at_least(x.new_zeros(x.shape[::2]), eps))
    mean = x.abs().mean(blocks.inner_axes(x.ndim // 2), dtype=torch.float64)  # independent of summation order
    return Params(_at_least(mean.to(torch.float32 if isinstance(spec.scale, QuantSpec) else x.dtype), eps))


@rule("symmetric_no_clip")
def symmetric_no_clip(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """scale = max(min / lo, max / hi), so that nothing clips; an end without numbers (int1 has no positive ones) is
    ignored. torchao: SYMMETRIC_NO_CLIPPING_ERR."""
    return Params(no_clip_scale(*_range(x, spec), *_ends(spec), eps))


@rule("asymmetric")
def asymmetric(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """scale = (max - min) / (hi - lo) with zero in the range; zero_point = lo - round(min / scale), clamped.
    torchao: MappingType.ASYMMETRIC."""
    lo, hi = _range(x, spec)
    f = spec.format
    lo, hi = lo.clamp(max=0), hi.clamp(min=0)
    scale = range_scale(lo, hi, f.hi - f.lo, eps)
    return Params(scale, zero_point_of(lo, scale, f.lo, f.hi))


@rule("minmax")
def minmax(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """scale = (max - min) / (hi - lo); offset = min + scale * (mid - lo), real. Zero need not be representable.
    With uint4 and mid 8 this is the tinygemm scheme. If the offset has a one-sided format, min is clamped to at most 0
    (ggml's K-quants)."""
    lo, hi = _range(x, spec)
    if isinstance(spec.offset, QuantSpec) and spec.offset.one_sided:
        lo = lo.clamp(max=0)
    f = spec.format
    scale = range_scale(lo, hi, f.hi - f.lo, eps)
    return Params(scale, None, offset_of(lo, hi, scale, spec.mid - f.lo, f.hi - f.lo))


def _power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent, clamped to the range of e8m0; float32 (in which 2**-127 is subnormal)."""
    e = exponent.clamp(-127, 127)
    return torch.ldexp(torch.ones_like(e, dtype=torch.float64), e).float()


def _exponent(x: Tensor) -> tuple[Tensor, Tensor]:
    """floor(log2 x) and whether x is above that power of two; x > 0 (0 gives the minimum exponent)."""
    mantissa, exponent = torch.frexp(x.float())
    return torch.where(x > 0, exponent - 1, -127), mantissa != 0.5


def _largest(spec: QuantSpec) -> float:
    """The largest positive number of the element format, which the MX rules use; if there is none, the largest
    magnitude of the negative ones."""
    bottom, top = _ends(spec)
    return top if top > 0 else -bottom


def _element_exponent(spec: QuantSpec) -> int:
    return math.floor(math.log2(_largest(spec)))


def _mantissa_bits(spec: QuantSpec) -> int:
    """Mantissa bits of the element format: 2**bits numbers are in [1, 2). 0 for formats that are not floats."""
    f = spec.format
    if f.native_float:
        return round(-math.log2(torch.finfo(f.code_dtype).eps))
    return round(math.log2(sum(1 <= v < 2 for v in f.values))) if f.kind == "float" else 0


@rule("mx_floor")
def mx_floor(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """OCP MX v1.0: 2**(floor(log2 absmax) - emax); the largest elements may saturate."""
    exponent, _ = _exponent(_absmax(x, spec))
    return Params(_power_of_two(exponent - _element_exponent(spec)))


@rule("mx_ceil")
def mx_ceil(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """2**(ceil(log2 absmax) - emax): floor plus one unless absmax is a power of two."""
    amax = _absmax(x, spec)
    exponent, above = _exponent(amax)
    return Params(_power_of_two(exponent + (above & (amax > 0)) - _element_exponent(spec)))


@rule("mx_even")
def mx_even(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """As mx_floor, after rounding absmax to the element's mantissa width, so that it does not saturate."""
    amax = _absmax(x, spec).float()
    half = 1 << (23 - _mantissa_bits(spec) - 1)  # half a unit of the last kept mantissa bit of a float32
    rounded = ((amax.view(torch.int32) + half) & ~((half << 1) - 1)).view(torch.float32)
    exponent, _ = _exponent(rounded)
    exponent = torch.where(rounded.isinf(), 128, exponent)  # rounded up beyond float32
    return Params(_power_of_two(exponent - _element_exponent(spec)))


@rule("mx_rceil")
def mx_rceil(x: Tensor, spec: QuantSpec, eps: float) -> Params:
    """2**ceil(log2(absmax / hi)): the smallest power of two under which nothing saturates."""
    ratio = _absmax(x, spec).float() / _largest(spec)
    exponent, above = _exponent(ratio)
    return Params(_power_of_two(exponent + (above & (ratio > 0))))
