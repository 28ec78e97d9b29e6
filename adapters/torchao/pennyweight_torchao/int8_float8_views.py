"""torchao's weights with one code per byte: Int8Tensor, IntxUnpackedToInt8Tensor, Float8Tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs.torchao import int8_float8 as files
from pennyweight.io.codecs.torchao.int8_float8 import (
    IntxUnpackedToInt8TensorActivationQuantization,
    QuantizeTensorKwargs,
    QuantizeTensorToFloat8Kwargs,
    QuantizeTensorToInt8Kwargs,
)
from pennyweight.planning.granularity import Granularity, MappingType, PerRow

from .enums import Float8MMConfig, IntxChooseQParamsAlgorithm, KernelPreference
from .primitives import choose_qparams_affine, quantize_affine
from .qparams import get_block_size

__all__ = [
    "Float8Tensor", "Int8Tensor", "IntxUnpackedToInt8Tensor", "IntxUnpackedToInt8TensorActivationQuantization",
    "QuantizeTensorKwargs", "QuantizeTensorToFloat8Kwargs", "QuantizeTensorToInt8Kwargs",
    "_choose_quant_func_and_quantize_tensor",
]  # fmt: skip


class Int8Tensor(files.Int8Tensor):
    """int8 codes, a float32 scale per row, group or tensor, optionally zero points and an int8 activation."""

    @classmethod
    def from_hp(
        cls, hp_tensor: Tensor, granularity: Granularity, mapping_type: MappingType = MappingType.SYMMETRIC,
        scale: Tensor | None = None, zero_point: Tensor | None = None,
        act_quant_kwargs: QuantizeTensorToInt8Kwargs | None = None, act_quant_scale: Tensor | None = None,
        act_quant_zero_point: Tensor | None = None, act_pre_scale: Tensor | None = None,
        reduce_range: bool | None = False,
    ) -> QT:  # fmt: skip
        """Round-to-nearest of a float tensor; ``scale`` and ``zero_point`` are used unchanged if given."""
        block = list(get_block_size(tuple(hp_tensor.shape), granularity))
        lo, hi = (-64, 63) if reduce_range else (-128, 127)
        if scale is None:
            scale, zero_point = choose_qparams_affine(
                hp_tensor, mapping_type, block, torch.int8, lo, hi, eps=torch.finfo(torch.float32).eps,
                scale_dtype=torch.float32, zero_point_dtype=torch.int8, keepdim=True,
            )  # fmt: skip
        else:
            counts = [n // b for n, b in zip(hp_tensor.shape, block, strict=True)]
            assert scale.ndim == hp_tensor.ndim, f"scale has {scale.ndim} axes, the tensor {hp_tensor.ndim}"
            assert list(scale.shape) == counts, f"scale is {list(scale.shape)}, blocks are {counts}"
            zero_point = torch.zeros_like(scale, dtype=torch.int8) if zero_point is None else zero_point
        qdata = quantize_affine(hp_tensor, block, scale, zero_point, torch.int8, lo, hi)
        return cls.build(
            qdata, scale, block, hp_tensor.dtype, zero_point, act_quant_scale, act_quant_zero_point, act_pre_scale,
            act_quant_kwargs, reduce_range,
        )  # fmt: skip

    @classmethod
    def _normalize_granularity(cls, granularity: Any) -> tuple[Granularity, Granularity]:
        """(activation's, weight's) of none, one or a list of two. Raises ValueError for anything else."""
        if granularity is None or isinstance(granularity, Granularity):
            return (granularity or PerRow(),) * 2
        if not isinstance(granularity, list):
            raise ValueError(f"Invalid granularity type: {granularity}. Expected None, one, or a list of two")
        if len(granularity) != 2:
            raise ValueError(f"Granularity list must have exactly 2 elements, got {len(granularity)}: {granularity}")
        return tuple(granularity)


class IntxUnpackedToInt8Tensor(files.IntxUnpackedToInt8Tensor):
    """int1 to int8 codes, one per int8, with a scale and zero point per block; optionally int8 activations per
    token."""

    @classmethod
    def from_hp(
        cls, hp_tensor: Tensor, block_size: Any, target_dtype: torch.dtype, *,
        mapping_type: MappingType = MappingType.SYMMETRIC, activation_quantization: Any = None,
        intx_choose_qparams_algorithm: Any = IntxChooseQParamsAlgorithm.AFFINE, custom_scale: Tensor | None = None,
        custom_zero_point: Tensor | None = None,
    ) -> QT:  # fmt: skip
        """Round-to-nearest of a float tensor. With the algorithm None the custom scale and zero point are used."""
        half = 1 << (int(str(target_dtype).removeprefix("torch.int")) - 1)
        custom = custom_scale is not None or custom_zero_point is not None
        if intx_choose_qparams_algorithm is None:
            assert custom_scale is not None, "custom_scale must be given"
            assert custom_zero_point is not None, "custom_zero_point must be given"
            scale, zero = custom_scale, custom_zero_point
        else:
            assert not custom, "custom_scale and custom_zero_point need intx_choose_qparams_algorithm=None"
            if intx_choose_qparams_algorithm != IntxChooseQParamsAlgorithm.AFFINE:
                raise ValueError(
                    f"from_hp chooses scales by AFFINE, got {intx_choose_qparams_algorithm!r}; quantize_ with "
                    'IntxWeightOnlyConfig(intx_choose_qparams_algorithm="hqq_scale_only") chooses them by HQQ'
                )
            scale, zero = choose_qparams_affine(
                hp_tensor, mapping_type, block_size, torch.int8, -half, half - 1, zero_point_dtype=torch.int8,
                keepdim=True,
            )  # fmt: skip
        qdata = quantize_affine(hp_tensor, block_size, scale, zero, torch.int8, -half, half - 1)
        return cls.build(qdata, scale, zero, target_dtype, block_size, hp_tensor.dtype, activation_quantization)


class Float8Tensor(files.Float8Tensor):
    """float8 codes with a float32 scale per row, block or tensor; optionally float8 activations."""

    @classmethod
    def from_hp(
        cls, hp_tensor: Tensor, float8_dtype: torch.dtype = torch.float8_e4m3fn, granularity: Granularity | None = None,
        mm_config: Float8MMConfig | None = None, hp_value_lb: float | None = None, hp_value_ub: float | None = None,
        kernel_preference: Any = KernelPreference.AUTO, act_quant_kwargs: QuantizeTensorToFloat8Kwargs | None = None,
    ) -> QT:  # fmt: skip
        """scale = absmax of the block, clamped to the bounds, / the float8 maximum. A zero block gets the smallest
        normal scale, not zero, so its values are zeros and not NaN."""
        from .format_primitives import _choose_scale_float8, _quantize_affine_float8

        block = list(get_block_size(tuple(hp_tensor.shape), granularity or PerRow()))
        scale = _choose_scale_float8(
            hp_tensor, block, float8_dtype, hp_value_lb=hp_value_lb, hp_value_ub=hp_value_ub
        )  # fmt: skip
        qdata = _quantize_affine_float8(hp_tensor, scale, float8_dtype)
        return cls.build(qdata, scale, block, mm_config, act_quant_kwargs, kernel_preference, hp_tensor.dtype)


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
