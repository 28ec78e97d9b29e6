"""Quantize and dequantize on plain parts: the reference implementation.

    x = (decode(codes) - mid - zero_point) * scale + offset

Independent of tensor subclasses, layouts and kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import blocks, codebook, stochastic_rounding
from .formats import Format, decision_levels
from .qparams import Params, choose, default_rule
from .spec import QuantSpec


class Parts(NamedTuple):
    """The stored parts of a tensor. ``scale`` and ``offset`` are Parts themselves if the spec quantizes them.

    ``act_scale`` and ``act_zero_point`` are the stored parameters of a static activation, not of the tensor's value.
    ``perm`` [K] permutes the last stored axis: stored entry j is entry perm[j] of the value. None: not permuted.
    ``table`` [codes, dim] holds the numbers of a learned format.
    ``pre_scale`` [K], float32: entry [.., k] of the value is the decoded one times pre_scale[k]. Products scale their
    input by it instead (AWQ, SmoothQuant).
    """

    codes: Tensor
    scale: Any = None
    zero_point: Tensor | None = None
    offset: Any = None
    act_scale: Tensor | None = None
    act_zero_point: Tensor | None = None
    perm: Tensor | None = None
    table: Tensor | None = None
    pre_scale: Tensor | None = None

    def map(self, fn: Callable[[Tensor], Tensor]) -> Parts:
        """Apply fn to every tensor, including nested ones."""
        mapped: list[Any] = [None if p is None else p.map(fn) if isinstance(p, Parts) else fn(p) for p in self]
        return Parts(*mapped)


def quantize(
    x: Tensor, spec: QuantSpec, rule: str | None = None, eps: float | None = None, params: Params | None = None,
    words: Tensor | None = None, of_whole: Callable[[Tensor, str], Tensor] | None = None,
) -> Parts:  # fmt: skip
    """Plain parts of x. x: float, any strides; axes that blocks do not divide are padded.

    ``params``: used unchanged (a static scale, qparams from a solver); default: :func:`choose`. ``words``: 32 random
    bits per element for stochastic rounding (:func:`~.stochastic_rounding.encode_stochastic`); default: to nearest.
    ``of_whole``: x is a shard of a tensor, and per-tensor scales (or scales of scales) are chosen from
    ``of_whole(part, rule)`` [1, n], which has the range or the mean of all shards.
    Codes are computed from the parameters as stored, which accounts for the rounding of the scale.
    """
    x = blocks.pad(x, spec.block)
    codes_shape = spec.codes_shape(x.shape)
    if params is None:
        looked_at = x
        if of_whole is not None and spec.block is None and spec.scale is not None:
            looked_at, of_whole = of_whole(x, rule or default_rule(spec)), None
        params = choose(looked_at, spec, rule, eps)
    view = blocks.split(x, blocks.counts(spec.block, x.shape))
    if spec.table_shape is not None and params.table is None:
        unit = table_vectors(view, spec, store_qparams(params, spec)[1])
        params = params._replace(table=codebook.fit(unit.reshape(-1, spec.format.dim), spec.table_shape[0]))
    parts, decoded = store_qparams(params, spec, of_whole)
    if words is None:
        codes = encode(view, spec, decoded)
    else:
        view_words = blocks.split(blocks.pad(words, spec.block), blocks.counts(spec.block, x.shape))
        codes = stochastic_rounding.encode_stochastic(scaled_values(view, spec, decoded), spec.format, view_words)
    return Parts(codes.reshape(codes_shape).contiguous(), *parts, table=decoded.table)


def quantize_under(
    x: Tensor, spec: QuantSpec, scale: Tensor, rule: str | None = None, eps: float | None = None
) -> Parts:
    """Plain parts of x under a spec with quantized scales, whose own scale is given: one number, of the rank of x.

    Block scales are chosen from x and saturate where they exceed the greatest code times ``scale``.
    """
    kind = spec.scale
    assert isinstance(kind, QuantSpec)
    x = blocks.pad(x, spec.block)
    chosen = choose(x, spec, rule, eps).scale
    assert chosen is not None
    inner = quantize(chosen.float(), kind, params=Params(scale))
    view = blocks.split(x, blocks.counts(spec.block, x.shape))
    codes = encode(view, spec, Params(dequantize(inner, kind, chosen.shape)))
    return Parts(codes.reshape(spec.codes_shape(x.shape)).contiguous(), inner)


def store_qparams(
    params: Params, spec: QuantSpec, of_whole: Callable[[Tensor, str], Tensor] | None = None
) -> tuple[tuple[Any, Tensor | None, Any], Params]:
    """scale, zero_point and offset as stored under ``spec``, and their dequantized values."""
    given = {"scale": params.scale, "zero_point": params.zero_point, "offset": params.offset}
    if {name for name, value in given.items() if value is not None} != set(spec.part_specs()):
        raise ValueError(f"{spec} stores {[*spec.part_specs()]}; the given parameters have other parts")
    scale = _store(params.scale, spec.scale, of_whole)
    offset = _store_offset(params.offset, spec.offset)
    zero_point = None if params.zero_point is None else params.zero_point.to(spec.zero_point_dtype).contiguous()
    table = None if params.table is None else codebook.stored(params.table)
    decoded = Params(
        _value(scale, spec.scale, params.scale), zero_point, _value(offset, spec.offset, params.offset), table
    )
    return (scale, zero_point, offset), decoded


def dequantize(parts: Parts, spec: QuantSpec, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """The tensor of ``shape`` from plain parts, with ``perm`` undone and ``pre_scale`` applied. Computed in float32, or
    in float64 if that is ``dtype`` or the dtype of the scale; rounded once.

    Saturates, because an extreme code may represent a value slightly beyond the block's range and so beyond the dtype.
    """
    compute = torch.float64 if torch.float64 in (dtype, spec.scale) else torch.float32
    part_shape = blocks.counts(spec.block, shape)
    decoded = Params(
        None if parts.scale is None else scale_value(parts.scale, spec, part_shape, compute),
        parts.zero_point,
        None if parts.offset is None else part_value(parts.offset, spec.offset, part_shape, compute),
        parts.table,
    )
    view = blocks.split(parts.codes, part_shape) if parts.codes.ndim else parts.codes
    x = stored_value(view, spec, decoded, compute)
    if shape:
        x = x.reshape(*parts.codes.shape[:-1], parts.codes.shape[-1] * spec.format.dim)
    for axis, n in enumerate(shape):
        if x.shape[axis] != n:
            x = x.narrow(axis, 0, n)
    if parts.pre_scale is not None:
        x = x * permute_last_axis(parts.pre_scale, parts.perm).to(compute)
    limit = torch.finfo(dtype).max
    x = x.to(dtype).clamp_(-limit, limit)
    return x.contiguous() if parts.perm is None else unpermute_last_axis(x, parts.perm)


def permute_last_axis(x: Tensor, perm: Tensor | None) -> Tensor:
    """x with its last axis permuted to the stored order of ``perm``."""
    return x if perm is None else x.index_select(-1, perm)


def unpermute_last_axis(x: Tensor, perm: Tensor | None) -> Tensor:
    """Inverse of :func:`permute_last_axis`."""
    return x if perm is None else x.index_select(-1, perm.argsort())


def to_stored(x: Tensor, perm: Tensor | None, pre_scale: Tensor | None) -> Tensor:
    """x [.., K] as it is quantized: divided by ``pre_scale`` (0 where that is 0), in the stored order of ``perm``."""
    if pre_scale is not None:
        x = torch.where(pre_scale == 0, 0, x / pre_scale)
    return permute_last_axis(x, perm)


def is_permutation(perm: Tensor) -> bool:
    """Whether perm is a permutation of 0 .. n-1."""
    n = perm.shape[0]
    return torch.equal(perm.sort().values, torch.arange(n, dtype=perm.dtype, device=perm.device))


def encode(view: Tensor, spec: QuantSpec, p: Params) -> Tensor:
    """Codes of a block view [g0, b0, ..] under parameters of shape [g0, ..]."""
    f = spec.format
    if f.kind == "learned":
        if p.table is None:
            raise ValueError(f"{spec}: encoding needs a table; use the default rule, or pass params with a table")
        return codebook.nearest(table_vectors(view, spec, p), p.table)
    if p.scale is None:
        return f.encode(view)
    scale = blocks.expand(p.scale)
    if f.kind != "int":  # a scale that underflowed to zero maps every value to zero
        wide = view if view.dtype is torch.float64 else view.float()
        centred = wide if p.offset is None else wide - blocks.expand(p.offset)
        return f.encode(centred / torch.where(scale == 0, torch.inf, scale))
    if p.offset is not None:
        steps = offset_steps(view, scale, blocks.expand(p.offset), spec.mid - f.lo, f.hi - f.lo)
        return (steps + f.lo if f.lo else steps).clamp(f.lo, f.hi).to(f.code_dtype)
    steps = zero_point_steps(view, scale, None if p.zero_point is None else blocks.expand(p.zero_point))
    return (steps + spec.mid if spec.mid else steps).clamp(f.lo, f.hi).to(f.code_dtype)


def zero_point_steps(
    x: Tensor, scale: Tensor, zero_point: Tensor | None, rounding: Callable[[Tensor], Tensor] = torch.round
) -> Tensor:
    """round(x / scale) + zero_point, unclamped, of parameters that broadcast.

    Multiplies by the reciprocal and rounds before adding the zero point, bit-identical to torchao.
    """
    steps = rounding((x * reciprocal(scale)).to(torch.promote_types(x.dtype, scale.dtype)))
    return steps if zero_point is None else steps + zero_point


def offset_steps(
    x: Tensor, scale: Tensor, offset: Tensor, depth: float, span: float,
    rounding: Callable[[Tensor], Tensor] = torch.round,
) -> Tensor:  # fmt: skip
    """round((x - offset) / scale + depth): steps above the first of span + 1 codes, unclamped."""
    down, least, divisor = offset_terms(x.dtype, scale, offset, depth, span)
    return rounding((x * down - least) / divisor)


def offset_terms(
    dtype: torch.dtype, scale: Tensor, offset: Tensor, depth: float, span: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(factor, least, divisor) of :func:`offset_steps` = round((x factor - least) / divisor), for x of ``dtype``."""
    # A block whose range overflows the dtype is scaled by a power of two; the factor 1 leaves others unchanged.
    limit = torch.finfo(torch.promote_types(dtype, scale.dtype)).max
    down = 1 - 0.75 * (scale > limit / (4 * span)).to(scale.dtype)
    scale = scale * down
    return down, offset * down - scale * depth, torch.where(scale == 0, torch.inf, scale)


class LookupTable(NamedTuple):
    """A format of few numbers. The code of a number is the count of the levels below it; if sign > 0 of those below its
    magnitude, and bit ``sign`` of the code is its sign.

    levels  float32, ascending
    numbers float32, of all codes
    """

    levels: Tensor
    numbers: Tensor
    sign: int


class RoundingTerms(NamedTuple):
    """What rounding float32 numbers to a format needs of parameters as stored, in float32: for integers

        code = clamp(round((x factor - least) / divisor) + zero_point + shift, lo, hi)  without offsets round(x factor)
        value = (code - mid - zero_point) scale + offset

    and for a format of few numbers, by its table

        code = that of (x - offset) / factor
        value = number of the code * scale + offset
    """

    factor: Tensor
    scale: Tensor
    zero_point: Tensor | None
    least: Tensor | None
    divisor: Tensor | None
    offset: Tensor | None
    shift: float
    lo: float
    hi: float
    mid: float
    table: LookupTable | None = None


def rounding_terms(spec: QuantSpec, p: Params) -> RoundingTerms | None:
    """The terms of :func:`encode` and :func:`stored_value`; None for formats that are not rounded with them."""
    f, mid = spec.format, spec.mid
    if p.scale is None or torch.float64 in (p.scale.dtype, None if p.offset is None else p.offset.dtype):
        return None
    if f.kind in ("float", "table") and 2 <= len(f.values) <= 64 and not mid and p.zero_point is None:
        scale, offset = p.scale.float(), None if p.offset is None else p.offset.float()
        divisor = torch.where(scale == 0, torch.inf, scale)
        return RoundingTerms(divisor, scale, None, None, None, offset, 0.0, 0.0, 255.0, 0.0, _lookup(f, scale.device))
    if f.kind != "int":
        return None
    scale, zero_point = p.scale.float(), None if p.zero_point is None else p.zero_point.float()
    if p.offset is None:
        factor = reciprocal(p.scale).float()
        return RoundingTerms(factor, scale, zero_point, None, None, None, mid, f.lo, f.hi, mid)
    terms = offset_terms(torch.float32, p.scale, p.offset, mid - f.lo, f.hi - f.lo)
    factor, least, divisor = (term.float() for term in terms)
    return RoundingTerms(factor, scale, zero_point, least, divisor, p.offset.float(), f.lo, f.lo, f.hi, mid)


def _lookup(f: Format, device: torch.device) -> LookupTable:
    signed = f.kind == "float"
    ascending = f.values[: len(f.values) // 2] if signed else f.values
    numbers = torch.tensor(f.values, dtype=torch.float32, device=device)
    return LookupTable(decision_levels(ascending, device, even=signed), numbers, f.bits - 1 if signed else 0)


def scaled_values(view: Tensor, spec: QuantSpec, p: Params) -> Tensor:
    """x in code units before rounding: (x - offset) / scale + zero_point + mid, of a block view."""
    x = view if view.dtype is torch.float64 else view.float()
    if p.offset is not None:
        x = x - blocks.expand(p.offset)
    if p.scale is not None:  # a scale that underflowed to zero maps every value to zero
        scale = blocks.expand(p.scale).to(x.dtype)
        x = x / torch.where(scale == 0, torch.inf, scale)
    if p.zero_point is not None:
        x = x + blocks.expand(p.zero_point)
    return x + spec.mid if spec.mid else x


def table_vectors(view: Tensor, spec: QuantSpec, p: Params) -> Tensor:
    """The vectors that a learned table encodes: (x - offset) / scale of a view [.., n], as [.., ceil(n / dim), dim]."""
    x = scaled_values(view, spec, p)  # learned formats have neither zero point nor mid
    return codebook.vectors(x, spec.format.dim) if x.ndim else x.reshape(1)


def reciprocal(scale: Tensor) -> Tensor:
    """1 / scale in its dtype, or 0 if that overflows: a (nearly) zero scale maps every value to zero.

    Returns float32 for float16, whose reciprocals overflow below 2**-16. The product of two float16 numbers is exact
    in float32, so rounding it gives the float16 product.
    """
    found = 1.0 / scale
    if scale.dtype is torch.float16:
        found = torch.where(found.isfinite(), found.float(), 1.0 / scale.float())
    return torch.where(found.isfinite(), found, 0.0)


def stored_value(view: Tensor, spec: QuantSpec, p: Params, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantized values of codes in a block view [g0, b0, ..] under parameters of shape [g0, ..]."""
    if spec.format.kind == "learned":
        assert p.table is not None
        x = codebook.numbers(view, p.table, dtype)
    else:
        x = spec.format.decode(view, dtype)
    if spec.mid:
        x = x - spec.mid
    if p.zero_point is not None:
        x = x - blocks.expand(p.zero_point).to(dtype)
    if p.scale is not None:
        x = x * blocks.expand(p.scale).to(dtype)
    if p.offset is not None:
        x = x + blocks.expand(p.offset).to(dtype)
    return x


def part_value(part: Any, kind: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Values of a scale or offset of that shape, stored as a plain tensor or as Parts under a QuantSpec."""
    return dequantize(part, kind, shape, dtype) if isinstance(part, Parts) else part.to(dtype)


def scale_value(part: Any, spec: QuantSpec, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Values of the scale of ``spec``, one per block of the stored shape. Quantized scales of a format with
    ``rounding`` are codes / factor + offset, rounded to that dtype after each operation, where factor = 1 / scale."""
    step, kind = spec.format.rounding, spec.scale
    if step is None or not isinstance(kind, QuantSpec) or not isinstance(part, Parts) or kind.format.kind != "int":
        return part_value(part, kind, shape, dtype)
    if not isinstance(kind.scale, torch.dtype) or isinstance(kind.offset, QuantSpec) or kind.zero_point or kind.mid:
        return part_value(part, kind, shape, dtype)
    if kind.scale is torch.float64:
        step = torch.float64
    x = blocks.split(part.codes, blocks.counts(kind.block, shape)) / blocks.expand((1.0 / part.scale).to(step))
    if part.offset is not None:
        x = x + blocks.expand(part.offset.to(step))
    x = x.reshape(part.codes.shape)
    for axis, n in enumerate(shape):
        x = x.narrow(axis, 0, n)
    return x.to(dtype)


def _store(value: Tensor | None, kind: QuantSpec | torch.dtype | None, of_whole: Any = None) -> Any:
    """value stored as ``kind``, saturating if the stored dtype has a smaller range."""
    if value is None or kind is None:
        return None
    if isinstance(kind, QuantSpec):
        return quantize(value.float(), kind, of_whole=of_whole)
    stored = value.to(kind).contiguous()
    limit = torch.finfo(kind).max
    return stored.clamp(-limit, limit) if limit < torch.finfo(value.dtype).max else stored


def _store_offset(value: Tensor | None, kind: QuantSpec | torch.dtype | None) -> Any:
    """As _store. One-sided formats store -offset with a negated scale, because offsets are the minima of blocks that
    reach below zero."""
    if value is None or not isinstance(kind, QuantSpec) or not kind.one_sided or kind.scale is None:
        return _store(value, kind)
    params = choose(blocks.pad(-value.float(), kind.block), kind)
    assert params.scale is not None
    return quantize(value.float(), kind, params=params._replace(scale=-params.scale))


def _value(part: Any, kind: Any, chosen: Tensor | None) -> Tensor | None:
    return dequantize(part, kind, chosen.shape) if isinstance(part, Parts) and chosen is not None else part


def fake_quantize(x: Tensor, spec: QuantSpec, rule: str | None = None, eps: float | None = None) -> Tensor:
    """dequantize(quantize(x)) in x's dtype, as in deployment.

    Straight-through gradient (Bengio et al. 2013); the quantization parameters are treated as constants.
    """
    return _FakeQuantize.apply(x, spec, rule, eps)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: QuantSpec, rule: str | None, eps: float | None) -> Tensor:
        return dequantize(quantize(x, spec, rule, eps), spec, x.shape, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad, None, None, None


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise) of two sums of squares; inf where either is zero."""
    return 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else math.inf


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB: 20 log10(|reference| / |reference - approximation|); inf if equal."""
    reference, approximation = reference.double(), approximation.double()
    noise = torch.linalg.vector_norm(reference - approximation)
    signal = torch.linalg.vector_norm(reference)
    return float(20 * torch.log10(signal / noise)) if noise > 0 else float("inf")
