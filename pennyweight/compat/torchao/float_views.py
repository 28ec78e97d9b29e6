"""torchao's float8 weights, and activation quantization by torchao's kwargs objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...core.formats import E4M3, E5M2
from ...core.spec import DTYPES, ActivationSpec, QuantSpec
from ...core.tensor import AffineQuantizedTensor
from ...planning.granularity import Granularity, PerBlock, PerRow, PerTensor
from .class_view import View
from .enums import Float8MMConfig, KernelPreference
from .int_views import Int8Tensor, QuantizeTensorKwargs, QuantizeTensorToInt8Kwargs
from .integer_ranges import get_block_size
from .part_conversion import FLOAT8, block_size, float_codes, part, plain_codes, whole

QT = AffineQuantizedTensor
__all__ = [
    "Float8Tensor", "QuantizeTensorToFloat8Kwargs", "_choose_quant_func_and_quantize_tensor",
]  # fmt: skip


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

    @classmethod
    def from_hp(
        cls, hp_tensor: Tensor, float8_dtype: torch.dtype = torch.float8_e4m3fn, granularity: Granularity | None = None,
        mm_config: Float8MMConfig | None = None, hp_value_lb: float | None = None, hp_value_ub: float | None = None,
        kernel_preference: Any = KernelPreference.AUTO, act_quant_kwargs: QuantizeTensorToFloat8Kwargs | None = None,
    ) -> QT:  # fmt: skip
        """scale = absmax of the block, clamped to the bounds, / the float8 maximum. A zero block gets the smallest
        normal scale, not zero, so its values are zeros and not NaN."""
        from .float8_primitives import _choose_scale_float8, _quantize_affine_float8

        block = list(get_block_size(tuple(hp_tensor.shape), granularity or PerRow()))
        scale = _choose_scale_float8(
            hp_tensor, block, float8_dtype, hp_value_lb=hp_value_lb, hp_value_ub=hp_value_ub
        )  # fmt: skip
        qdata = _quantize_affine_float8(hp_tensor, scale, float8_dtype)
        return cls.build(qdata, scale, block, mm_config, act_quant_kwargs, kernel_preference, hp_tensor.dtype)

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


def _choose_quant_func_and_quantize_tensor(
    tensor: Tensor, quant_kwargs: QuantizeTensorKwargs, scale: Tensor | None = None, zero_point: Tensor | None = None
) -> QT:
    """``tensor`` quantized according to the kwargs. Raises NotImplementedError for unknown kwargs."""
    k: Any = quant_kwargs
    if isinstance(k, QuantizeTensorToFloat8Kwargs):
        return Float8Tensor.from_hp(
            tensor, k.float8_dtype, k.granularity, k.mm_config, k.hp_value_lb, k.hp_value_ub, k.kernel_preference
        )
    if isinstance(k, QuantizeTensorToInt8Kwargs):
        return Int8Tensor.from_hp(
            tensor, k.granularity, k.mapping_type, scale, zero_point, reduce_range=k.reduce_range
        )  # fmt: skip
    raise NotImplementedError(f"Quant kwargs not supported: {k}")
