"""Conversion between equivalent specs without requantizing.

int4 and uint4 with ``mid`` 8 have the same numbers, a scale per row equals repeated scales per group, and
(q - z) s = q s + (-z s). Requantizing such a weight would change its codes. Conversion keeps the codes and at most
rounds scales and offsets to the dtypes of the other spec.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import blocks
from .numerics import Parts, part_value
from .spec import QuantSpec


def conversion_kind(spec: QuantSpec, shape: Sequence[int], to: QuantSpec) -> str | None:
    """How values under ``spec`` can be represented under ``to``: "exact", "rounded" (scales or offsets may lose bits),
    or None. shape: stored shape."""
    shift, times = _shift(spec, to), _repeats(spec, shape, to)
    if shift is None or times is None or not _zeros_fit(spec, to, shift):
        return None
    if (spec.scale is None) != (to.scale is None) or (spec.offset is not None and to.offset is None):
        return None
    if any(isinstance(kind, QuantSpec) for kind in (to.scale, to.offset)):
        alike = (spec.scale, spec.offset, spec.mid + shift) == (to.scale, to.offset, to.mid)
        return "exact" if alike and max(times, default=1) == 1 else None
    shifted = to.offset is not None and (spec.zero_point or to.mid - shift - spec.mid != 0)
    fits = _holds(to.scale, spec.scale) and _holds(to.offset, spec.offset)
    return "exact" if fits and not shifted else "rounded"


def convert_parts(parts: Parts, spec: QuantSpec, shape: Sequence[int], to: QuantSpec) -> Parts | None:
    """Plain parts under ``to`` with the values of plain ``parts``, or None if ``to`` cannot represent them.

    shape: stored shape. Scales and offsets are rounded to the dtypes of ``to``. A quantized scale is converted if both
    specs quantize it equally, or if ``to`` stores it as float. Activation parameters are kept.
    """
    if conversion_kind(spec, shape, to) is None:
        return None
    shift, times = _shift(spec, to), _repeats(spec, shape, to)
    assert shift is not None
    assert times is not None
    part_shape = blocks.counts(spec.block, shape)
    wide = torch.float64 if torch.float64 in (to.scale, to.offset) else torch.float32

    def real(part: Any, kind: Any) -> Tensor:
        return _repeat(part_value(part, kind, part_shape, wide), times)

    codes = parts.codes if shift == 0 else (parts.codes.to(torch.int16) + shift)
    out = parts._replace(codes=codes.to(to.format.code_dtype))
    if to.zero_point:
        given = spec.mid if parts.zero_point is None else _repeat(parts.zero_point, times).to(torch.int16)
        size = [n * m for n, m in zip(part_shape, times, strict=True)]
        zero = torch.full(size, shift, dtype=torch.int16, device=parts.codes.device) + given
        out = out._replace(zero_point=zero.to(to.zero_point_dtype))
    elif out.zero_point is not None:  # it becomes an offset
        out = out._replace(zero_point=None)
    if to.scale is None or isinstance(to.scale, QuantSpec) or isinstance(to.offset, QuantSpec):
        return out
    scale = real(parts.scale, spec.scale)
    out = out._replace(scale=_as(scale, to.scale))
    if to.offset is None:
        return out
    # (c - zero) s + o with c = c' - shift
    was: Any = spec.mid if parts.zero_point is None else _repeat(parts.zero_point, times).float()
    shifted = (to.mid - shift - was) * scale
    offset = shifted if parts.offset is None else real(parts.offset, spec.offset) + shifted
    return out._replace(offset=_as(offset, to.offset))


def _holds(wide: Any, narrow: Any) -> bool:
    """Whether dtype ``wide`` represents all values of a part stored as ``narrow``; quantized parts count as float32."""
    if narrow is None:
        return True
    narrow = torch.float32 if isinstance(narrow, QuantSpec) else narrow
    return wide is narrow or wide is torch.float64 or (wide is torch.float32 and narrow is not torch.float64)


def _shift(spec: QuantSpec, to: QuantSpec) -> int | None:
    """The constant to add to codes; None if the formats have different numbers."""
    f, g = spec.format, to.format
    if f.kind != "int" or g.kind != "int":
        same = f is g and (spec.mid, bool(spec.zero_point)) == (to.mid, bool(to.zero_point))
        return 0 if same else None
    if spec.zero_point and not to.zero_point and not isinstance(to.offset, torch.dtype):
        return None
    # A zero point or offset can absorb a shift of the codes; without a shift it is not rounded
    moves = (to.mid - spec.mid, int(g.lo - f.lo)) if to.offset is not None else (int(g.lo - f.lo),)
    for shift in moves if to.zero_point or to.offset is not None else (to.mid - spec.mid,):
        fits = f.lo + shift >= g.lo and f.hi + shift <= g.hi
        if fits and (not to.zero_point or spec.zero_point or g.lo <= spec.mid + shift <= g.hi):
            return shift
    return None


def _zeros_fit(spec: QuantSpec, to: QuantSpec, shift: int) -> bool:
    """Whether ``to`` can represent all zero points of ``spec``, if both store zero points."""
    z, y = spec.zero_point_format, to.zero_point_format
    return not (spec.zero_point and to.zero_point) or (z.lo + shift >= y.lo and z.hi + shift <= y.hi)


def _repeats(spec: QuantSpec, shape: Sequence[int], to: QuantSpec) -> list[int] | None:
    """Repeats of each part on each axis; None if blocks of ``to`` do not divide those of ``spec``."""
    try:
        old, new = blocks.resolve(spec.block, shape), blocks.resolve(to.block, shape)
    except ValueError:
        return None
    if old == new:
        return [1] * len(old)
    whole = all(n % m == 0 and m % b == 0 for n, m, b in zip(shape, old, new, strict=True))
    return [m // b for m, b in zip(old, new, strict=True)] if whole else None


def _repeat(part: Tensor, times: Sequence[int]) -> Tensor:
    for axis, count in enumerate(times):
        if count > 1:
            part = part.repeat_interleave(count, axis)
    return part


def _as(value: Tensor, dtype: Any) -> Tensor:
    limit = torch.finfo(dtype).max
    return value.clamp(-limit, limit).to(dtype).contiguous()
