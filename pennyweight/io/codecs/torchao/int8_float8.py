"""torchao's weights with one code per byte: Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ....core.formats import E4M3, E5M2, HALF_INTS, INT7, INT8, TERNARY
from ....core.numerics import Parts
from ....core.spec import DTYPES, ActivationSpec, QuantSpec
from ....core.tensor import AffineQuantizedTensor as QT
from ....planning.configs.integer import INT8_EPS
from ....planning.granularity import Granularity, MappingType, PerBlock, PerRow, PerTensor
from .enums import Float8MMConfig, KernelPreference
from .tensor_class import (
    FLOAT8,
    View,
    act_pre_scale_of,
    block_of,
    block_size,
    float_codes,
    int_codes,
    part,
    plain_codes,
    whole,
    with_pre_scale,
    zero_points,
)

# -- integers ----------------------------------------------------------------------------------------------------------


class QuantizeTensorKwargs:
    """Base of the activation quantization kwargs."""


@dataclass
class QuantizeTensorToInt8Kwargs(QuantizeTensorKwargs):
    """An int8 activation with a scale per row (PerRow) or per tensor (PerTensor); ``reduce_range``: only 7 bits."""

    granularity: Granularity
    mapping_type: MappingType = MappingType.SYMMETRIC
    reduce_range: bool = False


class IntxUnpackedToInt8TensorActivationQuantization(str, Enum):  # noqa: UP042 - torchao's own kind
    """int8, asymmetric, one scale and zero point per token."""

    INT8_ASYM_PER_TOKEN = "int8_asym_per_token"


def _plain_integers(w: QT) -> bool:
    """Whole blocks of integer codes with plain scales, without a real offset."""
    spec = w.spec
    return (
        spec.format.kind == "int" and spec.format is not TERNARY and isinstance(spec.scale, torch.dtype)
        and spec.offset is None and spec.mid == 0 and whole(w)
    )  # fmt: skip


def _half_integers(w: QT) -> bool:
    """Whole blocks of codes plus a half, with plain scales: integers with the zero point -1/2 in torchao."""
    spec = w.spec
    return spec.format in HALF_INTS and isinstance(spec.scale, torch.dtype) and spec.offset is None and whole(w)


def _int8_activation(act: ActivationSpec | None) -> bool:
    """Whether an Int8Tensor can represent this activation."""
    if act is None:
        return True
    spec = act.spec
    blocks_ = spec.block in ((-1,), None)
    plain = spec.scale is torch.float32 and spec.offset is None and spec.mid == 0
    return blocks_ and plain and spec.format in (INT7, INT8) and act.rule in (None, "symmetric", "asymmetric")


def _settled(scale: Tensor | None, what: str) -> Tensor | None:
    """A static activation's numbers: [1] for the whole input, or [rows, 1]."""
    if scale is None:
        return None
    rows = scale.numel() > 1 and scale.numel() == scale.shape[0]
    if scale.numel() != 1 and not rows:
        raise ValueError(f"{what} of shape {tuple(scale.shape)}: a static activation has one per tensor or one per row")
    return scale.detach().reshape((-1, 1) if rows else (1,))


def _one(static: Tensor | None) -> bool:
    """Whether this is a static activation's scale for the whole input."""
    return static is not None and static.numel() == 1


class Int8Tensor(View):
    """int8 codes, a float32 scale per row, group or tensor, optionally zero points and an int8 activation."""

    tensor_data_names = ["qdata", "scale"]  # noqa: RUF012
    tensor_attribute_names = ["block_size", "dtype"]  # noqa: RUF012
    optional_tensor_data_names = ["zero_point", "act_quant_scale", "act_quant_zero_point", "act_pre_scale"]  # noqa: RUF012
    optional_tensor_attribute_names = ["act_quant_kwargs", "reduce_range"]  # noqa: RUF012

    @staticmethod
    def holds(w: QT) -> bool:
        spec = w.spec
        return (
            _plain_integers(w)
            and spec.format in (INT7, INT8)
            and spec.scale is torch.float32
            and _int8_activation(w.act)
        )

    @classmethod
    def build(
        cls, qdata: Tensor, scale: Tensor, block_size: Any, dtype: torch.dtype, zero_point: Tensor | None = None,
        act_quant_scale: Tensor | None = None, act_quant_zero_point: Tensor | None = None,
        act_pre_scale: Tensor | None = None, act_quant_kwargs: QuantizeTensorToInt8Kwargs | None = None,
        reduce_range: bool | None = False,
    ) -> QT:  # fmt: skip
        if qdata.dtype != torch.int8:
            raise AssertionError(f"qdata must be int8, got {qdata.dtype}")
        lo, hi = (-64, 63) if reduce_range else (-128, 127)
        act, static, zero = None, None, None
        if act_quant_kwargs is not None:
            static = _settled(act_quant_scale, "act_quant_scale")
            asymmetric = act_quant_kwargs.mapping_type is MappingType.ASYMMETRIC
            spec = QuantSpec(
                INT7 if act_quant_kwargs.reduce_range else INT8,
                None if _one(static) or isinstance(act_quant_kwargs.granularity, PerTensor) else (-1,),
                zero_point=asymmetric,
            )
            act = ActivationSpec(spec, "dynamic" if static is None else "static", None, INT8_EPS)
            if static is not None and asymmetric:
                given = _settled(act_quant_zero_point, "act_quant_zero_point")
                zero = torch.zeros(1, dtype=torch.int8, device=qdata.device) if given is None else given.to(torch.int8)
            static = None if static is None else static.float()
        w = int_codes(
            qdata, scale, zero_point, block_size, dtype, lo, hi, act=act, act_scale=static, act_zero_point=zero
        )
        return with_pre_scale(w, act_pre_scale)

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        kwargs = None
        if w.act is not None:
            spec = w.act.spec
            mapping = MappingType.ASYMMETRIC if spec.zero_point else MappingType.SYMMETRIC
            granularity = PerTensor() if spec.block is None else PerRow()
            kwargs = QuantizeTensorToInt8Kwargs(granularity, mapping, spec.format is INT7)
        ones = (1,) * w.ndim
        return {
            "qdata": plain_codes(w), "scale": part(w, "scale"), "zero_point": zero_points(w),
            "block_size": block_size(w),
            "dtype": w.dtype, "act_quant_scale": None if w.act_scale is None else w.act_scale.reshape(-1, *ones[1:]),
            "act_quant_zero_point": None if w.act_zero_point is None else w.act_zero_point.reshape(ones),
            "act_pre_scale": act_pre_scale_of(w), "act_quant_kwargs": kwargs, "reduce_range": w.spec.format is INT7,
        }  # fmt: skip


_PER_TOKEN = IntxUnpackedToInt8TensorActivationQuantization.INT8_ASYM_PER_TOKEN


class IntxUnpackedToInt8Tensor(View):
    """int1 to int8 codes, one per int8, with a scale and zero point per block; optionally int8 activations per
    token."""

    tensor_data_names = ["qdata", "scale", "zero_point"]  # noqa: RUF012
    tensor_attribute_names = ["target_dtype", "block_size", "dtype", "activation_quantization"]  # noqa: RUF012

    @staticmethod
    def holds(w: QT) -> bool:
        stored = (_plain_integers(w) and w.spec.format.lo < 0) or _half_integers(w)
        return stored and (w.act is None or _per_token(w.act, w.dtype))

    @classmethod
    def build(
        cls, qdata: Tensor, scale: Tensor, zero_point: Tensor, target_dtype: torch.dtype, block_size: Any,
        dtype: torch.dtype, activation_quantization: Any,
    ) -> QT:  # fmt: skip
        floats = (torch.float32, torch.bfloat16, torch.float16)
        assert qdata.dtype == torch.int8, f"qdata must be int8, got {qdata.dtype}"
        assert scale.dtype in floats, f"scale must be one of {floats}, got {scale.dtype}"
        assert zero_point.dtype in (*floats, torch.int8), f"zero_point must be int8 or a float, got {zero_point.dtype}"
        assert dtype in floats, f"dtype must be one of {floats}, got {dtype}"
        names = [f"torch.int{n}" for n in range(1, 9)]
        assert str(target_dtype) in names, f"target_dtype must be one of {', '.join(names)}, got {target_dtype}"
        counts = [n // b for n, b in zip(qdata.shape, block_size, strict=True)]
        block_of(block_size, qdata.shape)
        for name, given in (("scale", scale), ("zero_point", zero_point)):
            assert list(given.shape) == counts, f"{name} must be {counts} under {block_size}, is {list(given.shape)}"
        act = None
        if activation_quantization is not None:
            assert activation_quantization == _PER_TOKEN.value, f"unknown activation {activation_quantization!r}"
            act = ActivationSpec(QuantSpec(INT8, (-1,), dtype, zero_point=True))
        bits = int(str(target_dtype).removeprefix("torch.int"))
        half = 1 << (bits - 1)
        w = int_codes(qdata, scale, zero_point, block_size, dtype, -half, half - 1, act=act)
        if zero_point.dtype is torch.int8 or zero_point.is_meta or not bool((zero_point == -0.5).all()):
            return w
        # As an offset scale / 2 the same numbers would be rounded twice.
        spec = w.spec.with_(format=HALF_INTS[bits - 1], offset=None)
        return QT(Parts((qdata + half).to(torch.uint8), w.parts.scale), spec, tuple(w.shape), dtype, act)

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        codes, zero, bits = plain_codes(w), zero_points(w), w.spec.format.bits
        if _half_integers(w):
            scale = part(w, "scale")
            assert scale is not None
            codes, zero = (codes.int() - (1 << (bits - 1))).to(torch.int8), torch.full_like(scale, -0.5)
        return {
            "qdata": codes, "scale": part(w, "scale"), "zero_point": zero,
            "target_dtype": getattr(torch, f"int{bits}"), "block_size": tuple(block_size(w)), "dtype": w.dtype,
            "activation_quantization": None if w.act is None else _PER_TOKEN,
        }  # fmt: skip


def _per_token(act: ActivationSpec, dtype: torch.dtype) -> bool:
    spec = act.spec
    return (
        act.mode == "dynamic" and spec.format is INT8 and spec.zero_point and spec.block == (-1,)
        and spec.scale in (dtype, torch.float32) and act.rule in (None, "asymmetric")
    )  # fmt: skip


# -- float8 ------------------------------------------------------------------------------------------------------------


@dataclass
class QuantizeTensorToFloat8Kwargs(QuantizeTensorKwargs):
    """A float8 activation."""

    float8_dtype: torch.dtype = torch.float8_e4m3fn
    granularity: Granularity = field(default_factory=PerRow)
    mm_config: Float8MMConfig | None = None
    hp_value_lb: float | None = None
    hp_value_ub: float | None = None
    kernel_preference: KernelPreference = KernelPreference.AUTO


class Float8Tensor(View):
    """float8 codes with a float32 scale per row, block or tensor; optionally float8 activations."""

    tensor_data_names = ["qdata", "scale"]  # noqa: RUF012
    optional_tensor_attribute_names = ["block_size", "mm_config", "act_quant_kwargs", "kernel_preference", "dtype"]  # noqa: RUF012

    @staticmethod
    def holds(w: QT) -> bool:
        spec, act = w.spec, w.act
        plain = spec.format in (E4M3, E5M2) and spec.scale is torch.float32 and spec.offset is None
        if not plain or not whole(w):
            return False
        return act is None or (
            act.mode == "dynamic" and act.spec.format in (E4M3, E5M2) and act.spec.scale is torch.float32
        )

    @classmethod
    def build(
        cls, qdata: Tensor, scale: Tensor, block_size: Any = None, mm_config: Float8MMConfig | None = None,
        act_quant_kwargs: QuantizeTensorToFloat8Kwargs | None = None, kernel_preference: Any = KernelPreference.AUTO,
        dtype: torch.dtype | None = None,
    ) -> QT:  # fmt: skip
        if qdata.dtype not in FLOAT8:
            raise AssertionError(f"qdata must be float8_e4m3fn or float8_e5m2, got {qdata.dtype}")
        act = None
        if act_quant_kwargs is not None:
            if act_quant_kwargs.hp_value_lb is not None or act_quant_kwargs.hp_value_ub is not None:
                raise NotImplementedError("activation bounds (hp_value_lb, hp_value_ub) are not supported")
            fmt = FLOAT8[act_quant_kwargs.float8_dtype]
            act = ActivationSpec(QuantSpec(fmt, _activation_block(act_quant_kwargs.granularity)))
        if scale.dtype not in DTYPES.values():
            raise ValueError(f"scale must be one of {', '.join(DTYPES)}, got {scale.dtype}")
        if scale.ndim not in (0, qdata.ndim) and scale.numel() != 1:
            scale = scale.reshape(*scale.shape, *(1,) * (qdata.ndim - scale.ndim))
        if not block_size and scale.numel() > 1:
            block_size = [n // c for n, c in zip(qdata.shape, scale.shape, strict=True)]
        return float_codes(
            qdata, scale.float(), FLOAT8[qdata.dtype], block_size, dtype or torch.get_default_dtype(), act
        )

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        kwargs = None
        if w.act is not None:
            block, fmt = w.act.spec.block, w.act.spec.format
            granularity = PerTensor() if block is None else PerRow() if block == (-1,) else PerBlock(block)
            kwargs = QuantizeTensorToFloat8Kwargs(fmt.code_dtype, granularity)
        return {
            "qdata": plain_codes(w), "scale": part(w, "scale"), "block_size": block_size(w), "mm_config": None,
            "act_quant_kwargs": kwargs, "kernel_preference": KernelPreference.AUTO, "dtype": w.dtype,
        }  # fmt: skip


def _activation_block(granularity: Granularity) -> tuple[int, ...] | None:
    if isinstance(granularity, PerTensor):
        return None
    if isinstance(granularity, PerBlock):
        return granularity.block_size
    size = getattr(granularity, "group_size", None)
    return (-1,) if size is None else (size,)
