"""Checks the attributes of torchao's classes in a file before anything is built from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...core.formats import E4M3, E5M2
from ...core.spec import DTYPES
from ...planning.granularity import Granularity, MappingType
from .block_views import _ELEMENTS
from .enums import Float8MMConfig, KernelPreference, ScaleCalculationMode
from .int_views import IntxUnpackedToInt8TensorActivationQuantization, QuantizeTensorKwargs

__all__ = ["check_attributes"]

_FLOATS = tuple(DTYPES.values())
_INTS = tuple(getattr(torch, f"int{n}") for n in range(1, 9))
_FLOAT8 = (E4M3.code_dtype, E5M2.code_dtype)
_MAX_SIZE = (1 << 31) - 1
_PER_TOKEN = IntxUnpackedToInt8TensorActivationQuantization

Test = Callable[[Any], bool]


def _size(v: Any) -> bool:
    return type(v) is int and (v == -1 or 0 < v <= _MAX_SIZE)


def _sizes(v: Any) -> bool:
    return isinstance(v, (list, tuple)) and all(_size(n) for n in v)


def _one_of(*values: Any) -> Test:
    return lambda v: any(type(v) is type(known) and v == known for known in values)


def _is(*kinds: type) -> Test:
    return lambda v: type(v) in kinds or (isinstance(v, kinds) and type(v) not in (bool, str))


# name: (expected value, as text; check)
_ATTRIBUTES: dict[str, tuple[str, Test]] = {
    "block_size": ("a positive size, or a list of them", lambda v: _size(v) or _sizes(v)),
    "group_size": ("a positive size", _size),
    "shape": ("a list of sizes", _sizes),
    "axis": ("an integer", _is(int)),
    "dim": ("an integer", _is(int)),
    "dtype": ("the dtype of a float", _one_of(*_FLOATS)),
    "orig_dtype": ("the dtype of a float", _one_of(*_FLOATS)),
    "activation_dtype": ("the dtype of a float", _one_of(*_FLOATS)),
    "target_dtype": ("torch.int1 to torch.int8", _one_of(*_INTS)),
    "float8_dtype": ("a float8 dtype", _one_of(*_FLOAT8)),
    "elem_dtype": ("an element of MX", _one_of(*_ELEMENTS)),
    "act_quant_kwargs": ("how an activation is quantized", _is(QuantizeTensorKwargs)),
    "granularity": ("a granularity", _is(Granularity)),
    "mapping_type": ("a MappingType", _is(MappingType)),
    "act_mapping_type": ("a MappingType", _is(MappingType)),
    "scaling_mode": ("a ScaleCalculationMode", _is(ScaleCalculationMode)),
    "kernel_preference": ("a KernelPreference", _is(KernelPreference)),
    "mm_config": ("a Float8MMConfig", _is(Float8MMConfig)),
    "activation_quantization": ("a name", lambda v: isinstance(v, (str, _PER_TOKEN))),
    "hp_value_lb": ("a number", _is(int, float)),
    "hp_value_ub": ("a number", _is(int, float)),
    **dict.fromkeys(
        ("reduce_range", "is_swizzled_scales", "use_triton_kernel", "use_dynamic_per_tensor_scale", "emulate",
         "use_fast_accum", "pad_inner_dim"),
        ("true or false", _is(bool)),
    ),
}  # fmt: skip
# Attributes that may be null
_NEVER_NULL = (
    "block_size", "group_size", "shape", "dtype", "target_dtype", "elem_dtype", "orig_dtype", "granularity",
    "mapping_type",
)  # fmt: skip


def check_attributes(kind: str, attributes: Mapping[str, Any]) -> None:
    """Raise ValueError for an invalid attribute; null is checked by the class."""
    for name, value in attributes.items():
        if name not in _ATTRIBUTES or (value is None and name not in _NEVER_NULL):
            continue
        if value is None and kind == "Float8Tensor":
            continue  # a block follows from the scale's shape
        what, right = _ATTRIBUTES[name]
        if not right(value):
            raise ValueError(f"{kind}.{name} must be {what}, got {str(value)[:60]!r}")
