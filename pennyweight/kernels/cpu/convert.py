"""Native conversions between floats and codes on a CPU; see core/quantize_backends.py.

The arithmetic is in src/dequantize.h and src/quantize.h. Only integer formats are quantized here; the reference
quantizes the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.layouts import READABLE, get_layout, pack_zero_point
from ...core.numerics import Parts, rounding_terms, scale_value, store_qparams
from ...core.qparams import Params, choose, default_rule, scale_floor
from ...core.quantize_backends import CONVERSIONS, QuantizeBackend, QuantizeResult
from ...core.spec import QuantSpec
from ...core.tensor import AffineQuantizedTensor
from ..native import convert as native_convert
from .abi import BITS, E8M0, GIVEN, MINMAX, NO_CLIP, RULE_ASYMMETRIC, RULE_SYMMETRIC, TILES, Rounding
from .int_linear import fits, map_groups, tile_rows
from .library import KINDS, usable
from .matrix_view import FLOATS, Affine, affine, part_kind, threads_for

_RULES = {
    "symmetric": RULE_SYMMETRIC, "symmetric_no_clip": NO_CLIP, "asymmetric": RULE_ASYMMETRIC, "minmax": MINMAX,
}  # fmt: skip
# Rules that depend only on the minimum and maximum of a block, so that they can be computed from those.
_BY_RANGE = (*_RULES, "mx_floor", "mx_ceil", "mx_even", "mx_rceil")

# -- codes to floats -------------------------------------------------------------------------------------------------


def _number_part(part: Any, kind: Any) -> Tensor | None:
    """A scale or offset in the form that native code reads."""
    if part is None:
        return None
    if isinstance(kind, QuantSpec):
        if part_kind(kind) == E8M0:
            return part.codes.contiguous()
        return part._dequantize(torch.float32).contiguous()
    return part.contiguous() if part.dtype in FLOATS else part.float().contiguous()


def floats_of(parts: Any, spec: QuantSpec, a: Affine, index: Tensor | None, out: Tensor) -> Tensor:
    """Dequantize rows ``index`` (None: all) of a matrix into ``out``. Raises IndexError if out of range."""
    codes, zero = parts.codes.contiguous(), parts.zero_point
    zero = None if zero is None else zero.contiguous()
    scale, offset = _number_part(parts.scale, spec.scale), _number_part(parts.offset, spec.offset)
    if spec.format.rounding is not None and isinstance(parts.scale, AffineQuantizedTensor):
        scale = scale_value(parts.scale.plain_parts(), spec, parts.scale.shape, torch.float32).contiguous()
    native_convert.dequantize(a, (codes, scale, zero, offset), index, out, threads_for(out.numel()))
    return out


def dequantize(parts: Parts, spec: QuantSpec, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """Bit-identical to core.numerics.dequantize, directly from packed codes."""
    if usable() is not True:
        return NotImplemented
    shape = tuple(map(int, shape))
    a = affine(spec, shape, dtype)
    if a is None and spec.layout not in READABLE:  # unpack layouts that cannot be read directly
        plain = get_layout(spec.layout).unpack(parts, spec, shape)
        spec = spec.with_(layout="plain")
        parts, a = AffineQuantizedTensor(plain, spec, shape, dtype).parts, affine(spec, shape, dtype)
    if a is None:
        return NotImplemented
    return floats_of(parts, spec, a, None, torch.empty(shape, dtype=dtype, device="cpu"))


# -- floats to codes -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def rounding_of(
    spec: QuantSpec, shape: tuple[int, ...], dtype: torch.dtype, rule: str, eps: float | None
) -> Rounding | None:
    """Parameters for quantizing x in one pass, or (rule GIVEN) with given qparams; None: use the reference."""
    a = affine(spec, shape, dtype)
    f, scale = spec.format, torch.float32 if isinstance(spec.scale, QuantSpec) else spec.scale
    offset = torch.float32 if isinstance(spec.offset, QuantSpec) else spec.offset
    if (
        a is None or f.kind != "int" or scale not in FLOATS or offset not in (None, *FLOATS) or rule not in _BY_RANGE
        or (eps is not None and not eps > 0) or blocks.padded(spec.block, shape)[:-1] != shape[:-1]
        or (rule == "asymmetric" and not spec.zero_point) or (rule == "minmax" and offset is None)
        or (a.store == TILES and fits(spec, shape) is not True)
    ):  # fmt: skip
        return None
    a = a.copy()
    a.scale, a.offset, a.zero_bits = KINDS[scale], KINDS[offset], 0  # zero points are packed afterwards
    direct = spec.scale in FLOATS and spec.offset in (None, *FLOATS) and a.row_block == 1
    part = (spec.mid - f.lo) / (f.hi - f.lo)
    wide = torch.finfo(torch.promote_types(dtype, scale)).max
    large = torch.tensor(wide / (4 * (f.hi - f.lo)), dtype=torch.float64, device="cpu").to(scale)
    return Rounding(
        a, _RULES.get(rule, GIVEN) if direct else GIVEN, f.lo, f.hi, spec.mid,
        float(torch.tensor(scale_floor(dtype, spec, eps), dtype=torch.float64, device="cpu").to(dtype)), float(large),
        part, 1 - part,
    )  # fmt: skip


def quantize(x: Tensor, spec: QuantSpec, rule: str | None, eps: float | None) -> Any:
    """Bit-identical to core.numerics.quantize, packed in the layout of ``spec``, in one pass over x.

    If scales are quantized or shared by rows, there are two passes: for the ranges of blocks, and for the codes.
    """
    name, shape = rule or default_rule(spec), tuple(x.shape)
    q = rounding_of(spec, shape, x.dtype, name, eps) if usable() is True else None
    if q is None:
        return NotImplemented
    a = q.to
    flat = x if x.ndim == 2 and x.stride(1) == 1 and (a.n, a.k) == shape else x.contiguous()
    threads, direct = threads_for(x.numel()), q.rule != GIVEN
    given, parts = (None, _room(spec, shape)) if direct else _chosen(flat, spec, shape, name, eps, a, threads)
    codes = torch.empty(_codes_shape(spec, shape, a), dtype=_code_dtype(spec), device="cpu")
    sums = torch.empty(2 + 2 * a.n, dtype=torch.float64, device="cpu")
    qparams = parts if given is None else given
    native_convert.quantize(q, flat, (codes, qparams.scale, qparams.zero_point, qparams.offset), sums, threads)
    if spec.layout == "bits":
        parts = parts._replace(zero_point=pack_zero_point(parts.zero_point, spec))
    return QuantizeResult(parts._replace(codes=codes), float(sums[0]), float(sums[1]))


def _code_dtype(spec: QuantSpec) -> torch.dtype:
    return spec.format.code_dtype if spec.layout == "plain" else torch.uint8


def _codes_shape(spec: QuantSpec, shape: tuple[int, ...], a: Affine) -> tuple[int, ...]:
    if a.store == TILES:
        return (-(-shape[0] // 16), a.stride)
    *rows, width = blocks.padded(spec.block, shape)
    return (*rows, -(-width * a.bits // 8) if a.store == BITS else width)


def _room(spec: QuantSpec, shape: tuple[int, ...]) -> Parts:
    """Allocate the parts except codes; in tiles, padding rows are zero."""
    counts = blocks.counts(spec.block, shape)
    tiled = spec.layout == "cpu" and spec.block is not None
    sizes = (-(-counts[0] // 16), counts[1], 16) if tiled else counts
    new = torch.zeros if tiled else torch.empty
    kinds: dict[str, Any] = spec.part_specs()
    return Parts(
        torch.empty(0, dtype=torch.uint8, device="cpu"),
        **{name: new(sizes, dtype=kind, device="cpu") for name, kind in kinds.items()},
    )


def _chosen(
    x: Tensor, spec: QuantSpec, shape: tuple[int, ...], rule: str, eps: float | None, a: Affine, threads: int
) -> tuple[Params, Parts]:
    """(dequantized parameters, parts without codes), chosen from the ranges of the blocks of x."""
    ends = torch.empty((a.n, a.groups, 2), dtype=x.dtype, device="cpu")
    native_convert.ranges(a, x, ends, threads)
    if a.row_block > 1:
        ends = ends.unflatten(0, (-1, a.row_block))
        ends = torch.stack([ends[..., 0].amin(1), ends[..., 1].amax(1)], -1)
    params = choose(ends.flatten(1), spec.with_(block=(2,)), rule, eps)
    counts = blocks.counts(spec.block, shape)
    params = Params(*(None if p is None else p.reshape(counts) for p in params))
    kept, qparams = store_qparams(params, spec)
    parts = Parts(torch.empty(0, dtype=torch.uint8, device="cpu"), *kept)
    return Params(*(None if p is None else p.contiguous() for p in qparams)), (
        map_groups(parts, spec, tile_rows) if a.store == TILES else parts
    )


# -- checks ----------------------------------------------------------------------------------------------------------


def finite(x: Tensor) -> Any:
    """Whether x is free of NaN and inf, in one pass."""
    if (
        usable() is not True
        or x.dtype not in FLOATS
        or not (x.is_contiguous() or (x.ndim >= 2 and x.mT.is_contiguous()))
    ):
        return NotImplemented
    return native_convert.finite(x, threads_for(x.numel()))


def squared_errors(x: Tensor, spec: QuantSpec, p: Params, weight: Tensor | None) -> Any:
    """As :func:`.qparams_search.squared_errors`, of blocks [count, size]; NotImplemented for what is not native."""
    terms = rounding_terms(spec, p) if x.dtype is torch.float32 and x.numel() and usable() is True else None
    if terms is None:
        return NotImplemented
    found = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    weight = None if weight is None else weight.float().contiguous()
    threads = threads_for(x.numel())
    native_convert.squared_errors(x.contiguous(), weight, terms[:6], terms[6:10], found, threads, terms.table)
    return found


CONVERSIONS["cpu"] = QuantizeBackend(dequantize, quantize, finite, squared_errors)
