"""Checks the values of parts of a quantized tensor that come from a file or a pickle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from . import blocks
from .formats import E8M0, Format
from .packing import unpack_bits
from .spec import QuantSpec

_CHUNK = 4 << 20  # bytes checked at a time, which limits memory use


def check_values(parts: Mapping[str, Tensor], spec: QuantSpec, shape: Sequence[int], signed: bool) -> None:
    """Raise ValueError if parts in a portable layout hold invalid values. Dtypes and shapes have been checked before.

    parts   nested quantized parts are given dequantized
    shape   stored shape
    signed  whether scales may be negative
    """
    codes, f = parts["codes"], spec.format
    stream = spec.is_stream and len(shape) > 0
    if f.bits == 8 or stream:
        check_codes(codes, f, spec.row_length(spec.codes_shape(shape)), "codes")
    elif f.kind == "int":
        check_range(codes, f, "codes")
    elif codes.numel() and (int(codes.max()) >= 1 << f.bits or not _legal(f)[codes.cpu().long().numpy()].all()):
        raise ValueError(f"codes: a code is not valid for {f}")
    for slot in ("scale", "offset"):
        if slot in parts:
            check_real(parts[slot], slot, slot == "offset" or signed or around_offset(spec))
    if "zero_point" in parts and stream and spec.zero_point_bits < 8:
        n = spec.row_length(blocks.counts(spec.block, shape))
        check_codes(parts["zero_point"], spec.zero_point_format, n, "zero_point")
    elif "zero_point" in parts:
        check_range(parts["zero_point"], spec.zero_point_format, "zero_point")


def around_offset(spec: QuantSpec) -> bool:
    """Whether scales are quantized with an offset, in which case rounding may make them negative."""
    return isinstance(spec.scale, QuantSpec) and spec.scale.offset is not None


def check_real(values: Tensor, what: str, signed: bool) -> None:
    """Raise ValueError if values are NaN or inf, or negative while ``signed`` is False."""
    if values.numel() == 0:
        return
    lo, hi = (float(v) for v in values.aminmax())  # NaN propagates
    if not (np.isfinite(lo) and np.isfinite(hi)):
        bad = int((~torch.isfinite(values)).sum())
        raise ValueError(f"{what}: {bad} of {values.numel()} values are NaN or inf")
    if lo < 0 and not signed:
        raise ValueError(f"{what}: {int((values < 0).sum())} of {values.numel()} values are negative")


def check_range(values: Tensor, f: Format, what: str) -> None:
    """Raise ValueError if integers are outside the range of a format."""
    if values.numel() and (int(values.min()) < f.lo or int(values.max()) > f.hi):
        raise ValueError(f"{what}: values {int(values.min())}..{int(values.max())} are outside {f} ({f.lo} to {f.hi})")


def check_codes(codes: Tensor, f: Format, n: int, what: str) -> None:
    """Raise ValueError if codes are not valid for a format. codes: a bit stream or whole bytes, n per row."""
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
        fine = legal[unpack_bits(rows, f.bits, n).cpu().numpy()] if table is None else table[rows.cpu().numpy()]
        if not fine.all():
            raise ValueError(f"{what}: a code is not valid for {f}")


def _chunks(raw: Tensor) -> Iterator[Tensor]:
    step = max(1, _CHUNK // raw.shape[1])
    for start in range(0, raw.shape[0], step):
        yield raw[start : start + step]


@lru_cache(maxsize=64)
def _legal(f: Format) -> np.ndarray:
    """Which of the 2**bits stored codes are valid."""
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
    """Which bytes hold only valid codes, for 1, 2 and 4 bits."""
    mask = (1 << f.bits) - 1
    parts = [_legal(f)[(np.arange(256) >> shift) & mask] for shift in range(0, 8, f.bits)]
    return np.logical_and.reduce(parts)
