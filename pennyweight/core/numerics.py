"""Quantize and dequantize on plain parts: the reference of everything else.

    x = (decode(codes) - mid - zero_point) * scale + offset

Nothing here knows of tensor subclasses, layouts or kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import blocks, codebook, stochastic_rounding
from .qparams import Params, choose, default_rule
from .spec import QuantSpec


class Parts(NamedTuple):
    """What is stored of a tensor. ``scale`` and ``offset`` are Parts themselves where the spec says they are quantized.

    ``act_scale`` and ``act_zero_point`` are the stored parameters of a static activation, not of the tensor's value.
    ``perm`` [K] is the order of the last stored axis: stored entry j is entry perm[j] of the value. None: their own.
    ``table`` [codes, dim] has the numbers of a learned format.
    """

    codes: Tensor
    scale: Any = None
    zero_point: Tensor | None = None
    offset: Any = None
    act_scale: Tensor | None = None
    act_zero_point: Tensor | None = None
    perm: Tensor | None = None
    table: Tensor | None = None

    def map(self, fn: Callable[[Tensor], Tensor]) -> Parts:
        """fn over every tensor, nested ones too."""
        mapped: list[Any] = [None if p is None else p.map(fn) if isinstance(p, Parts) else fn(p) for p in self]
        return Parts(*mapped)


def quantize(
    x: Tensor, spec: QuantSpec, rule: str | None = None, eps: float | None = None, params: Params | None = None,
    words: Tensor | None = None, of_whole: Callable[[Tensor, str], Tensor] | None = None,
) -> Parts:  # fmt: skip
    """Plain parts of x. x: float, any strides; block sizes that do not divide the shape are padded.

    ``params`` given (a static scale, a solver's choice): used as they are; else :func:`choose`. ``words`` given, 32
    random bits an element: stochastic rounding (:func:`~.stochastic_rounding.encode_stochastic`), not to nearest.
    ``of_whole`` given: x is a part of a tensor. A scale, or scale of scales, of which it has one in all is chosen from
    ``of_whole(part, rule)`` [1, n], which has the range or the mean of all parts.
    Codes are computed from the parameters as stored, so that rounding of the scale is seen by the codes.
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
    parts, seen = store_qparams(params, spec, of_whole)
    if words is None:
        codes = encode(view, spec, seen)
    else:
        view_words = blocks.split(blocks.pad(words, spec.block), blocks.counts(spec.block, x.shape))
        codes = stochastic_rounding.encode_stochastic(scaled_values(view, spec, seen), spec.format, view_words)
    return Parts(codes.reshape(codes_shape).contiguous(), *parts, table=seen.table)


def store_qparams(
    params: Params, spec: QuantSpec, of_whole: Callable[[Tensor, str], Tensor] | None = None
) -> tuple[tuple[Any, Tensor | None, Any], Params]:
    """scale, zero_point and offset as ``spec`` stores them, and the numbers that they then stand for."""
    given = {"scale": params.scale, "zero_point": params.zero_point, "offset": params.offset}
    if {name for name, value in given.items() if value is not None} != spec.part_specs().keys():
        raise ValueError(f"{spec} stores {[*spec.part_specs()]}; the parameters given have other parts")
    scale = _store(params.scale, spec.scale, of_whole)
    offset = _store_offset(params.offset, spec.offset)
    zero_point = None if params.zero_point is None else params.zero_point.to(spec.zero_point_dtype).contiguous()
    table = None if params.table is None else codebook.stored(params.table)
    seen = Params(
        _value(scale, spec.scale, params.scale), zero_point, _value(offset, spec.offset, params.offset), table
    )
    return (scale, zero_point, offset), seen


def dequantize(parts: Parts, spec: QuantSpec, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """The tensor of ``shape`` that plain parts stand for, its last axis in the order of the value. Computed in float32,
    or in float64 where that is asked for or is what the scale is stored as; rounded once.

    Saturates: the least code of a block may stand for a little more than its largest element, so beyond the dtype.
    """
    compute = torch.float64 if torch.float64 in (dtype, spec.scale) else torch.float32
    part_shape = blocks.counts(spec.block, shape)
    seen = Params(
        None if parts.scale is None else part_value(parts.scale, spec.scale, part_shape, compute),
        parts.zero_point,
        None if parts.offset is None else part_value(parts.offset, spec.offset, part_shape, compute),
        parts.table,
    )
    view = blocks.split(parts.codes, part_shape) if parts.codes.ndim else parts.codes
    x = stored_value(view, spec, seen, compute)
    if shape:
        x = x.reshape(*parts.codes.shape[:-1], parts.codes.shape[-1] * spec.format.dim)
    for axis, n in enumerate(shape):
        if x.shape[axis] != n:
            x = x.narrow(axis, 0, n)
    limit = torch.finfo(dtype).max
    x = x.to(dtype).clamp_(-limit, limit)
    return x.contiguous() if parts.perm is None else unpermute_last_axis(x, parts.perm)


def permute_last_axis(x: Tensor, perm: Tensor | None) -> Tensor:
    """x with its last axis in the order in which parts with that ``perm`` are stored."""
    return x if perm is None else x.index_select(-1, perm)


def unpermute_last_axis(x: Tensor, perm: Tensor | None) -> Tensor:
    """Inverse of :func:`permute_last_axis`."""
    return x if perm is None else x.index_select(-1, perm.argsort())


def is_permutation(perm: Tensor) -> bool:
    """Whether these are the numbers 0 .. n-1, each once, in any order."""
    n = perm.shape[0]
    return torch.equal(perm.sort().values, torch.arange(n, dtype=perm.dtype, device=perm.device))


def encode(view: Tensor, spec: QuantSpec, p: Params) -> Tensor:
    """Codes of a block view [g0, b0, ..] under parameters of shape [g0, ..]."""
    f = spec.format
    if f.kind == "learned":
        if p.table is None:
            raise ValueError(f"{spec}: no codes without a table; choose parameters by the default rule, or give one")
        return codebook.nearest(table_vectors(view, spec, p), p.table)
    if p.scale is None:
        return f.encode(view)
    scale = blocks.spread(p.scale)
    if f.kind != "int":  # a scale that underflowed to zero sends everything to zero
        wide = view if view.dtype is torch.float64 else view.float()
        centred = wide if p.offset is None else wide - blocks.spread(p.offset)
        return f.encode(centred / torch.where(scale == 0, torch.inf, scale))
    if p.offset is not None:
        # A block whose range is beyond the dtype is brought down by a power of two; 1 changes no bit of the others.
        limit = torch.finfo(torch.promote_types(view.dtype, scale.dtype)).max
        down = 1 - 0.75 * (scale > limit / (4 * (f.hi - f.lo))).to(scale.dtype)
        scale = scale * down
        least = blocks.spread(p.offset) * down - scale * (spec.mid - f.lo)
        steps = ((view * down - least) / torch.where(scale == 0, torch.inf, scale)).round()
        return (steps + f.lo if f.lo else steps).clamp(f.lo, f.hi).to(f.code_dtype)
    # Multiply by the reciprocal and round before adding the zero point: bit for bit what torchao does.
    steps = (view * _reciprocal(scale)).to(torch.promote_types(view.dtype, scale.dtype)).round()
    if p.zero_point is not None:
        steps = steps + blocks.spread(p.zero_point)
    return (steps + spec.mid if spec.mid else steps).clamp(f.lo, f.hi).to(f.code_dtype)


def scaled_values(view: Tensor, spec: QuantSpec, p: Params) -> Tensor:
    """The real number that a code would have to stand for: (x - offset) / scale + zero_point + mid, of a block view."""
    x = view if view.dtype is torch.float64 else view.float()
    if p.offset is not None:
        x = x - blocks.spread(p.offset)
    if p.scale is not None:  # a scale that underflowed to zero sends everything to zero
        scale = blocks.spread(p.scale).to(x.dtype)
        x = x / torch.where(scale == 0, torch.inf, scale)
    if p.zero_point is not None:
        x = x + blocks.spread(p.zero_point)
    return x + spec.mid if spec.mid else x


def table_vectors(view: Tensor, spec: QuantSpec, p: Params) -> Tensor:
    """What a learned table is of: (x - offset) / scale of a block view [.., n], as [.., ceil(n / dim), dim]."""
    x = scaled_values(view, spec, p)  # learned numbers have neither zero point nor mid
    return codebook.vectors(x, spec.format.dim) if x.ndim else x.reshape(1)


def _reciprocal(scale: Tensor) -> Tensor:
    """1 / scale in its dtype, and 0 where that overflows: a scale of zero or next to it sends everything to zero.

    Returns float32 for float16, whose reciprocals overflow below 2**-16. A product of two float16 numbers is exact
    there, so that rounding it gives the float16 product.
    """
    reciprocal = 1.0 / scale
    if scale.dtype is torch.float16:
        reciprocal = torch.where(reciprocal.isfinite(), reciprocal.float(), 1.0 / scale.float())
    return torch.where(reciprocal.isfinite(), reciprocal, 0.0)


def stored_value(view: Tensor, spec: QuantSpec, p: Params, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of codes in a block view [g0, b0, ..] under parameters of shape [g0, ..]."""
    if spec.format.kind == "learned":
        assert p.table is not None
        x = codebook.numbers(view, p.table, dtype)
    else:
        x = spec.format.decode(view, dtype)
    if spec.mid:
        x = x - spec.mid
    if p.zero_point is not None:
        x = x - blocks.spread(p.zero_point).to(dtype)
    if p.scale is not None:
        x = x * blocks.spread(p.scale).to(dtype)
    if p.offset is not None:
        x = x + blocks.spread(p.offset).to(dtype)
    return x


def part_value(part: Any, kind: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Numbers of a scale or offset of that shape, whether it is a plain tensor or Parts under a QuantSpec."""
    return dequantize(part, kind, shape, dtype) if isinstance(part, Parts) else part.to(dtype)


def _store(value: Tensor | None, kind: QuantSpec | torch.dtype | None, of_whole: Any = None) -> Any:
    """value under ``kind``, saturating where its dtype is the narrower one."""
    if value is None or kind is None:
        return None
    if isinstance(kind, QuantSpec):
        return quantize(value.float(), kind, of_whole=of_whole)
    stored = value.to(kind).contiguous()
    limit = torch.finfo(kind).max
    return stored.clamp(-limit, limit) if limit < torch.finfo(value.dtype).max else stored


def _store_offset(value: Tensor | None, kind: QuantSpec | torch.dtype | None) -> Any:
    """As _store; numbers of one sign are those of -offset, and their scale is turned round: offsets are the least of
    blocks that reach below zero."""
    if value is None or not isinstance(kind, QuantSpec) or not kind.one_sided or kind.scale is None:
        return _store(value, kind)
    params = choose(blocks.pad(-value.float(), kind.block), kind)
    assert params.scale is not None
    return quantize(value.float(), kind, params=params._replace(scale=-params.scale))


def _value(part: Any, kind: Any, chosen: Tensor | None) -> Tensor | None:
    return dequantize(part, kind, chosen.shape) if isinstance(part, Parts) and chosen is not None else part


def fake_quantize(x: Tensor, spec: QuantSpec, rule: str | None = None, eps: float | None = None) -> Tensor:
    """dequantize(quantize(x)) in x's dtype, as in deployment.

    The gradient passes unchanged (straight-through, Bengio et al. 2013); parameters are treated as constants.
    """
    return _FakeQuantize.apply(x, spec, rule, eps)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, spec: QuantSpec, rule: str | None, eps: float | None) -> Tensor:
        return dequantize(quantize(x, spec, rule, eps), spec, x.shape, x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad, None, None, None


def sqnr(reference: Tensor, approximation: Tensor) -> float:
    """Signal to quantization noise in dB: 20 log10(|reference| / |reference - approximation|); inf where equal."""
    reference, approximation = reference.double(), approximation.double()
    noise = torch.linalg.vector_norm(reference - approximation)
    signal = torch.linalg.vector_norm(reference)
    return float(20 * torch.log10(signal / noise)) if noise > 0 else float("inf")
