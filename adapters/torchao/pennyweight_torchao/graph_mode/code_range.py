"""Ranges of codes and quantization parameters per dtype and qscheme, for quantize and dequantize operators.

The parameters are those of :mod:`pennyweight.core.qparams` for integers, but from a recorded minimum and maximum, for
any range of codes of a dtype, and with the zero point that the ops expect for unsigned symmetric codes.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from pennyweight.core.qparams import range_scale, symmetric_scale, zero_point_of

EPS = torch.finfo(torch.float32).eps
_SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)
_INT8, _UINT8, _INT32 = (torch.int8, torch.qint8), (torch.uint8, torch.quint8), (torch.int32, torch.qint32)
_FULL = {
    **dict.fromkeys(_INT8, (-128, 127)),
    **dict.fromkeys(_UINT8, (0, 255)),
    **dict.fromkeys(_INT32, (-(2**31), 2**31 - 1)),
    torch.int16: (-(2**15), 2**15 - 1),
    torch.uint16: (0, 2**16 - 1),
}
_REDUCED = {**dict.fromkeys(_INT8, (-64, 63)), **dict.fromkeys(_UINT8, (0, 127))}
_MOST_CODES = {**dict.fromkeys(_INT8, 2**8), **dict.fromkeys(_INT32, 2**32)}
_UNDERLYING = {
    torch.quint8: torch.uint8, torch.qint8: torch.int8, torch.qint32: torch.int32, torch.quint4x2: torch.uint8,
    torch.quint2x4: torch.uint8,
    **{dtype: dtype for dtype in (
        torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.float8_e5m2, torch.float8_e4m3fn,
    )},
}  # fmt: skip


def is_per_tensor(qscheme: torch.qscheme | None) -> bool:
    return qscheme in (torch.per_tensor_affine, torch.per_tensor_symmetric)


def is_per_channel(qscheme: torch.qscheme | None) -> bool:
    return qscheme in (
        torch.per_channel_affine, torch.per_channel_affine_float_qparams, torch.per_channel_symmetric
    )  # fmt: skip


def to_underlying_dtype(qdtype: torch.dtype) -> torch.dtype:
    """The dtype of stored codes: ``torch.qint8`` -> ``torch.int8``. Raises AssertionError if there is none."""
    assert qdtype in _UNDERLYING, f"Unsupported dtype: {qdtype}"
    return _UNDERLYING[qdtype]


def validate_qmin_qmax(quant_min: int, quant_max: int) -> None:
    """Raise AssertionError unless quant_min < quant_max and zero is in the range."""
    assert quant_min <= 0 <= quant_max, f"the range of codes must include 0, got {quant_min} to {quant_max}"
    assert quant_min < quant_max, f"quant_min must be less than quant_max, got {quant_min} and {quant_max}"


def calculate_qmin_qmax(
    quant_min: int | None, quant_max: int | None, has_customized_qrange: bool, dtype: torch.dtype, reduce_range: bool
) -> tuple[int, int]:
    """(first, last) code: the given ones if ``has_customized_qrange``, else all of the dtype, 0 to 15 if it has none.

    reduce_range: half of them, for processors whose 8-bit products overflow 16 bits. Raises AssertionError if the range
    has no codes or more than the dtype.
    """
    if not has_customized_qrange:
        full = _FULL.get(dtype, (0, 15))
        return _REDUCED.get(dtype, full) if reduce_range else full
    low, high = (quant_min, quant_max) if quant_min is not None and quant_max is not None else (0, 255)
    most = _MOST_CODES.get(dtype)
    assert most is None or 0 < high - low + 1 <= most, (
        f"{dtype} has at most {most} codes, the range {low} to {high} has {high - low + 1}"
    )
    return (low // 2, high // 2) if reduce_range else (low, high)


def check_min_max_valid(min_val: Tensor, max_val: Tensor) -> bool:
    """False, with a warning, if an observer saw no data. Raises AssertionError if a minimum exceeds its maximum."""
    empty = min_val.numel() == 0 or max_val.numel() == 0
    scalar = min_val.dim() == 0 or max_val.dim() == 0
    if empty or (scalar and bool(min_val == torch.inf) and bool(max_val == -torch.inf)):
        warnings.warn("must run observer before calling calculate_qparams. Returning default values.", stacklevel=2)
        return False
    assert torch.all(min_val <= max_val), f"min {min_val} should be less than max {max_val}"
    return True


def range_qparams(
    low: Tensor, high: Tensor, quant_min: int, quant_max: int, dtype: torch.dtype, eps: Tensor, custom: bool,
    qscheme: torch.qscheme | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(scale, zero_point) of shape [channels] or [1] from the range of each channel or of the tensor.

    symmetric: scale = max(-low, high) / ((quant_max - quant_min) / 2), zero_point 0, the middle code if unsigned.
    affine: low and high are widened to include 0; scale = (high - low) / (quant_max - quant_min),
    zero_point = quant_min - round(low / scale), clamped. float_qparams: zero_point = -low / scale, real.
    A scale is at least ``eps``. If nothing was recorded: 1 and 0, with a warning.
    """
    if not check_min_max_valid(low, high):
        return torch.tensor([1.0], device=low.device), torch.tensor([0], device=low.device)
    down, up, least = low.clamp(max=0), high.clamp(min=0), float(eps)
    zero_point = torch.zeros(down.shape, dtype=torch.int64, device=low.device)
    if qscheme in _SYMMETRIC:
        scale = symmetric_scale(down, up, quant_min, quant_max, least)
        if dtype in _UINT8:
            zero_point.fill_((quant_min + quant_max) // 2 if custom else 128)
        elif dtype == torch.uint16:
            zero_point.fill_(2**15)
    elif qscheme == torch.per_channel_affine_float_qparams:
        scale = (high - low) / float(quant_max - quant_min)
        scale = torch.where(scale > least, scale, 1.0)  # core's floor is eps itself
        zero_point = -1 * low / scale
    else:
        scale = range_scale(down, up, float(quant_max - quant_min), least)
        zero_point = zero_point_of(down, scale, quant_min, quant_max).to(torch.int)
    return torch.atleast_1d(scale), torch.atleast_1d(zero_point)
