"""Validates stored data: checks on the parts of a quantized tensor before it is built.

scale       finite; not negative unless the file says ``signed_scale``; zero is allowed, since a scale rounds to zero
            if a block is (almost) all zero and scales are float16. The values of a scale that is itself quantized
            are not negative either, unless its spec has an offset, where rounding may cross zero.
offset      finite, quantized or not
zero_point  within the range of the codes, or of its own format; unused bits of a row's last byte are zero
table       finite; has a row for each code
codes       valid in the format: no NaN or infinity, no index past a table; unused bits of a row's last byte are zero
perm        a permutation of the contracted axis
pre_scale   finite
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core import blocks
from ..core.layouts import unpack_zero_point
from ..core.numerics import Parts, dequantize, is_permutation
from ..core.packing import flat_rows, unpack_bits
from ..core.spec import QuantSpec
from ..core.value_checks import around_offset, check_codes, check_range, check_real
from .file import KeyedError
from .manifest import Meta

Get = Callable[[str], Tensor]


def check_data(name: str, meta: Meta, get: Get) -> None:
    """Raise KeyedError if stored parts ``get(stored name)`` are invalid. dtypes and shapes are already checked."""
    try:
        _check_value(name, meta.spec, meta.stored_shape, get, meta.signed_scale, meta.flat)
        if meta.act is not None and meta.act.mode == "static":
            scale = get(f"{name}.act_scale")
            check_real(scale, f"{name}.act_scale", signed=False)
            if not float(scale) > 0:
                raise ValueError(f"{name}.act_scale is zero; an activation scale must be positive")
            if meta.act.spec.zero_point:
                check_range(get(f"{name}.act_zero_point"), meta.act.spec.format, f"{name}.act_zero_point")
        if meta.perm and not is_permutation(get(f"{name}.perm")):
            raise ValueError(f"{name}.perm: not a permutation of 0 to {meta.stored_shape[-1] - 1}")
        if meta.pre_scale:
            check_real(get(f"{name}.pre_scale"), f"{name}.pre_scale", signed=True)
    except ValueError as e:
        raise KeyedError(name, str(e)) from e


def check_plain(name: str, tensor: Tensor) -> None:
    """Raise KeyedError for bytes that are invalid in a plain dtype: a bool must be 0 or 1."""
    if tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise KeyedError(name, "a bool that is neither 0 nor 1")


def is_signed(scale: Tensor | Parts | None, spec: QuantSpec, part_shape: tuple[int, ...]) -> bool:
    """Whether a file needs ``signed_scale``: a scale is negative where the spec does not imply it."""
    if scale is None or around_offset(spec):
        return False
    value = nested_value(scale, spec.scale, part_shape)
    return bool(value.numel()) and float(value.amin()) < 0


def nested_value(part: Tensor | Parts, kind: QuantSpec | torch.dtype | None, shape: tuple[int, ...]) -> Tensor:
    """Values of a part, which may itself be quantized."""
    return dequantize(part, kind, shape) if isinstance(part, Parts) and isinstance(kind, QuantSpec) else part  # type: ignore[return-value]


def read_parts(name: str, spec: QuantSpec, shape: tuple[int, ...], get: Get) -> Parts:
    """Plain, unpacked parts of a tensor from its stored tensors."""
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


def _check_value(
    name: str, spec: QuantSpec, shape: tuple[int, ...], get: Get, signed: bool, flat: bool = False
) -> None:
    part_shape = blocks.counts(spec.block, shape)
    n, zeros = ((flat_rows(s) if flat else s)[-1] if s else 1 for s in (spec.codes_shape(shape), part_shape))
    if spec.table_shape is not None:
        check_real(get(f"{name}.table"), f"{name}.table", signed=True)
    check_codes(get(f"{name}.codes"), spec.format, n, f"{name}.codes")
    for slot, kind in spec.part_specs().items():
        full = f"{name}.{slot}"
        any_sign = slot == "offset" or signed
        if isinstance(kind, QuantSpec):
            _check_value(full, kind, part_shape, get, any_sign)
            if any_sign and kind.format.kind == "int" and kind.scale is torch.float16:
                continue  # at most 255 times 65504: finite
            value = dequantize(read_parts(full, kind, part_shape, get), kind, part_shape)
            check_real(value, full, any_sign or kind.offset is not None)
        elif slot == "zero_point" and spec.zero_point_bits < 8:
            check_codes(get(full), spec.zero_point_format, zeros, full)
        elif slot == "zero_point":
            check_range(get(full), spec.zero_point_format, full)
        else:
            check_real(get(full), full, any_sign)
