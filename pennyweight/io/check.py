"""The meaning of stored bytes: what a reader must find in the parts of a quantized tensor before it believes them.

scale       finite; not negative unless the file says ``signed_scale``; zero is allowed, for a scale rounds to zero
            where a block is (almost) all zero and scales are float16. The numbers of a scale that is itself quantized
            are not negative either, unless its own spec has an offset, around which rounding may pass zero.
offset      finite, quantized or not
zero_point  within the range of the codes, or of a format of their own; unused bits of a row's last byte are zero
table       finite; each code has its row
codes       numbers of the format: no NaN or infinity, no index past a table; unused bits of a row's last byte are zero
perm        each of the places of the contracted axis once
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core import blocks
from ..core.formats import E8M0, Format
from ..core.layouts import unpack_zero_point
from ..core.numerics import Parts, dequantize, is_order
from ..core.packing import unpack_bits
from ..core.spec import QuantSpec
from .manifest import KeyedError, Meta

_CHUNK = 4 << 20  # bytes looked at in one go, so that checking takes little memory

Get = Callable[[str], Tensor]


def check_data(name: str, meta: Meta, get: Get) -> None:
    """Raise KeyedError where stored parts ``get(stored name)`` mean nothing. dtypes and shapes are right already."""
    try:
        _check_value(name, meta.spec, meta.stored_shape, get, meta.signed_scale)
        if meta.act is not None and meta.act.mode == "static":
            scale = get(f"{name}.act_scale")
            _check_real(scale, f"{name}.act_scale", signed=False)
            if not float(scale) > 0:
                raise ValueError(f"{name}.act_scale is zero: no activation has that scale")
            if meta.act.spec.zero_point:
                check_range(get(f"{name}.act_zero_point"), meta.act.spec.format, f"{name}.act_zero_point")
        if meta.perm and not is_order(get(f"{name}.perm")):
            raise ValueError(f"{name}.perm: not the numbers 0 to {meta.stored_shape[-1] - 1}, each once")
    except ValueError as e:
        raise KeyedError(name, str(e)) from e


def check_plain(name: str, tensor: Tensor) -> None:
    """Raise KeyedError for bytes that are no value of a plain dtype: a bool is 0 or 1."""
    if tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise KeyedError(name, "a bool that is neither 0 nor 1")


def is_signed(scale: Tensor | Parts | None, spec: QuantSpec, part_shape: tuple[int, ...]) -> bool:
    """Whether a file must say ``signed_scale``: some scale is negative where none is expected to be."""
    if scale is None or _around_offset(spec):
        return False
    value = nested_value(scale, spec.scale, part_shape)
    return bool(value.numel()) and float(value.amin()) < 0


def nested_value(part: Tensor | Parts, kind: QuantSpec | torch.dtype | None, shape: tuple[int, ...]) -> Tensor:
    """Numbers of a part that may be quantized itself."""
    return dequantize(part, kind, shape) if isinstance(part, Parts) and isinstance(kind, QuantSpec) else part  # type: ignore[return-value]


def _around_offset(spec: QuantSpec) -> bool:
    return isinstance(spec.scale, QuantSpec) and spec.scale.offset is not None


def read_parts(name: str, spec: QuantSpec, shape: tuple[int, ...], get: Get) -> Parts:
    """Plain, unpacked parts of a value from its stored tensors."""
    codes = get(f"{name}.codes")
    if spec.format.bits < 8:
        n = spec.codes_shape(shape)[-1] if shape else 1
        codes = spec.format.from_unsigned(unpack_bits(codes, spec.format.bits, n))
    part_shape = blocks.counts(spec.block, shape)
    parts: dict[str, Any] = {}
    for slot, kind in spec.part_specs().items():
        full = f"{name}.{slot}"
        parts[slot] = read_parts(full, kind, part_shape, get) if isinstance(kind, QuantSpec) else get(full)
    if spec.zero_point:
        parts["zero_point"] = unpack_zero_point(parts["zero_point"], spec, shape)
    if spec.table_shape is not None:
        parts["table"] = get(f"{name}.table")
    return Parts(codes, **parts)


def _check_value(name: str, spec: QuantSpec, shape: tuple[int, ...], get: Get, signed: bool) -> None:
    n = spec.codes_shape(shape)[-1] if shape else 1
    if spec.table_shape is not None:
        _check_real(get(f"{name}.table"), f"{name}.table", signed=True)
    _check_codes(get(f"{name}.codes"), spec.format, n, f"{name}.codes")
    part_shape = blocks.counts(spec.block, shape)
    for slot, kind in spec.part_specs().items():
        full = f"{name}.{slot}"
        any_sign = slot == "offset" or signed
        if isinstance(kind, QuantSpec):
            _check_value(full, kind, part_shape, get, any_sign)
            value = dequantize(read_parts(full, kind, part_shape, get), kind, part_shape)
            _check_real(value, full, any_sign or kind.offset is not None)
        elif slot == "zero_point" and spec.zero_point_bits < 8:
            _check_codes(get(full), spec.zero_point_format, part_shape[-1] if part_shape else 1, full)
        elif slot == "zero_point":
            check_range(get(full), spec.zero_point_format, full)
        else:
            _check_real(get(full), full, any_sign)


def _check_real(values: Tensor, what: str, signed: bool) -> None:
    if values.numel() == 0:
        return
    lo, hi = (float(v) for v in values.aminmax())  # NaN propagates
    if not (np.isfinite(lo) and np.isfinite(hi)):
        bad = int((~torch.isfinite(values)).sum())
        raise ValueError(f"{what}: {bad} of {values.numel()} values are NaN or inf")
    if lo < 0 and not signed:
        raise ValueError(f"{what}: {int((values < 0).sum())} of {values.numel()} values are negative")


def check_range(values: Tensor, f: Format, what: str) -> None:
    """Raise ValueError where integers lie outside a format."""
    if values.numel() and (int(values.min()) < f.lo or int(values.max()) > f.hi):
        raise ValueError(f"{what}: values {int(values.min())}..{int(values.max())}, {f} goes from {f.lo} to {f.hi}")


def _check_codes(codes: Tensor, f: Format, n: int, what: str) -> None:
    """codes: as stored, with n of them in a row."""
    raw = codes.reshape(1, 1) if not codes.ndim else codes.reshape(-1, codes.shape[-1]) if codes.numel() else codes
    if raw.numel() == 0:
        return
    raw = raw.view(torch.uint8)
    used = n * f.bits % 8
    if used and int((raw[:, -1] >> used).max()):
        raise ValueError(f"{what}: unused bits at the end of a row are not zero")
    legal = _legal(f)
    if legal.all():
        return
    table = legal if f.bits == 8 else _legal_bytes(f) if 8 % f.bits == 0 else None
    for rows in _chunks(raw):
        fine = legal[unpack_bits(rows, f.bits, n).numpy()] if table is None else table[rows.numpy()]
        if not fine.all():
            raise ValueError(f"{what}: a code that is no number of {f}")


def _chunks(raw: Tensor) -> Iterator[Tensor]:
    step = max(1, _CHUNK // raw.shape[1])
    for start in range(0, raw.shape[0], step):
        yield raw[start : start + step]


@lru_cache(maxsize=64)
def _legal(f: Format) -> np.ndarray:
    """Which of the 2**bits stored codes are numbers of the format."""
    codes = np.arange(1 << f.bits)
    if f.kind == "table":
        return codes < len(f.values)
    if f.kind == "int":
        value = codes.astype(np.uint8).view(np.int8) if (f.bits, f.code_dtype) == (8, torch.int8) else codes
        lo, hi = (f.lo, f.hi) if f.bits == 8 else (0, f.hi - f.lo)
        return (value >= lo) & (value <= hi)
    if f.native_float:
        return torch.isfinite(torch.arange(256, dtype=torch.uint8, device="cpu").view(f.code_dtype).float()).numpy()
    return codes != 255 if f is E8M0 else np.ones(1 << f.bits, bool)


@lru_cache(maxsize=64)
def _legal_bytes(f: Format) -> np.ndarray:
    """Which bytes hold legal codes only, for 1, 2 and 4 bits."""
    mask = (1 << f.bits) - 1
    parts = [_legal(f)[(np.arange(256) >> shift) & mask] for shift in range(0, 8, f.bits)]
    return np.logical_and.reduce(parts)
