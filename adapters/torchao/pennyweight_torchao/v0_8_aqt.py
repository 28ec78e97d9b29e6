"""AffineQuantizedTensor of torchao 0.8 to 0.17 and its constructors, as views of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pennyweight.core.spec import ActivationSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs.torchao import affine_quantized as files
from pennyweight.io.codecs.torchao.affine_quantized import full_rank, weight_of
from pennyweight.io.codecs.torchao.tensor_class import FLOAT8, float_codes
from pennyweight.planning.configs.integer import INT8_EPS
from pennyweight.planning.granularity import MappingType

from .enums import ZeroPointDomain
from .format_primitives import _choose_scale_float8, _quantize_affine_float8
from .primitives import (
    _choose_qparams_affine_dont_preserve_zero,
    _choose_qparams_affine_tinygemm,
    _quantize_affine_no_zero_point,
    _quantize_affine_tinygemm,
    choose_qparams_affine,
    quantize_affine,
)
from .qparams import _get_and_check_qmin_qmax
from .v0_8_layouts import (
    Layout,
    Pieces,
    PlainLayout,
    get_tensor_impl_constructor,
)

__all__ = [
    "ACTIVATIONS", "AffineQuantizedTensor", "LinearActivationQuantizedTensor", "to_affine_quantized_floatx",
    "to_affine_quantized_floatx_static", "to_affine_quantized_intx", "to_affine_quantized_intx_static",
    "to_linear_activation_quantized",
]  # fmt: skip


class AffineQuantizedTensor(files.AffineQuantizedTensor):
    """Any quantized weight of ours without activation quantization."""

    @classmethod
    def build(
        cls, tensor_impl: Any, block_size: Any, shape: Any, quant_min: float | None = None,
        quant_max: float | None = None, zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT,
        dtype: torch.dtype | None = None, strides: Any = None,
    ) -> QT:  # fmt: skip
        if zero_point_domain is None:
            raise ValueError("please use ZeroPointDomain.NONE instead of None")
        data, scale, zero = tensor_impl.get_plain()
        dtype = dtype or scale.dtype
        return weight_of(data, scale, zero, block_size, shape, quant_min, quant_max, zero_point_domain, dtype)

    @classmethod
    def from_hp_to_intx(
        cls, input_float: Tensor, mapping_type: MappingType, block_size: tuple[int, ...], target_dtype: torch.dtype,
        quant_min: int | None = None, quant_max: int | None = None, eps: float | None = None,
        scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype | None = None, preserve_zero: bool = True,
        zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, _layout: Layout | None = None, use_hqq: bool = False,
    ) -> QT:  # fmt: skip
        """Round-to-nearest with a scale per block. Raises NotImplementedError for ``use_hqq``."""
        if use_hqq:
            raise NotImplementedError(
                "to_affine_quantized_intx rounds to nearest; Int4WeightOnlyConfig(use_hqq=True) quantizes by HQQ"
            )
        layout = _layout or PlainLayout()
        x = layout.pre_process(input_float)
        eps = torch.finfo(x.dtype).eps if eps is None else eps  # these releases' default
        lo, hi = _get_and_check_qmin_qmax(target_dtype, quant_min, quant_max)
        args = (block_size, target_dtype, lo, hi)
        choose: Any = choose_qparams_affine
        if not preserve_zero:
            tinygemm = zero_point_domain is ZeroPointDomain.FLOAT
            choose = _choose_qparams_affine_tinygemm if tinygemm else _choose_qparams_affine_dont_preserve_zero
        scale, zero = choose(x, mapping_type, *args, eps, scale_dtype, zero_point_dtype)
        return cls.from_hp_to_intx_static(
            x, scale, None if zero_point_domain is ZeroPointDomain.NONE else zero, block_size, target_dtype, lo, hi,
            zero_point_domain, layout,
        )  # fmt: skip

    @classmethod
    def from_hp_to_intx_static(
        cls, input_float: Tensor, scale: Tensor, zero_point: Tensor | None, block_size: tuple[int, ...],
        target_dtype: torch.dtype, quant_min: int | None = None, quant_max: int | None = None,
        zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, _layout: Layout | None = None,
    ) -> QT:  # fmt: skip
        """Codes of the nearest values under the scales and zero points given."""
        if zero_point_domain is None:
            raise ValueError("please use ZeroPointDomain.NONE instead of None")
        if zero_point_domain is ZeroPointDomain.NONE and zero_point is not None:
            raise ValueError("zero_point should be None when zero_point_domain is NONE")
        layout, shape = _layout or PlainLayout(), input_float.shape
        x, scale, zero_point = layout.pre_process_static(input_float, scale, zero_point, block_size)
        lo, hi = _get_and_check_qmin_qmax(target_dtype, quant_min, quant_max)
        quantize: Any = {
            ZeroPointDomain.NONE: _quantize_affine_no_zero_point, ZeroPointDomain.FLOAT: _quantize_affine_tinygemm,
        }.get(zero_point_domain, quantize_affine)  # fmt: skip
        data = quantize(x, block_size, scale, zero_point, target_dtype, lo, hi)
        pieces = _stored(layout, data, scale, zero_point, block_size)
        return cls.build(pieces, block_size, shape, lo, hi, zero_point_domain, input_float.dtype)

    @classmethod
    def from_hp_to_floatx(
        cls, input_float: Tensor, block_size: tuple[int, ...], target_dtype: torch.dtype, _layout: Layout | None = None,
        scale_dtype: torch.dtype | None = None,
    ) -> QT:  # fmt: skip
        """float8 with scale = absmax / float8 maximum of each block."""
        scale = _choose_scale_float8(input_float, block_size, target_dtype, scale_dtype or torch.float32)
        return cls.from_hp_to_floatx_static(input_float, scale, block_size, target_dtype, _layout)

    @classmethod
    def from_hp_to_floatx_static(
        cls, input_float: Tensor, scale: Tensor, block_size: tuple[int, ...], target_dtype: torch.dtype,
        _layout: Layout | None = None, scale_dtype: torch.dtype | None = None,
    ) -> QT:  # fmt: skip
        """float8 with the given scales."""
        if target_dtype not in FLOAT8:
            raise NotImplementedError(f"to_affine_quantized_floatx: {target_dtype} is not one of {[*map(str, FLOAT8)]}")
        scale = full_rank(scale, input_float)
        data = _quantize_affine_float8(input_float, scale, target_dtype)
        return float_codes(data, scale.float(), FLOAT8[target_dtype], tuple(block_size), input_float.dtype)


def _stored(layout: Layout, data: Tensor, scale: Tensor, zero: Tensor | None, block: tuple[int, ...]) -> Any:
    data, scale, zero = layout.post_process(data, scale, zero, block)
    if type(layout).__module__ == Layout.__module__:
        return Pieces(data, scale, zero, layout)
    return get_tensor_impl_constructor(type(layout))(data, scale, zero, layout)  # a user-defined layout


to_affine_quantized_intx = AffineQuantizedTensor.from_hp_to_intx
to_affine_quantized_intx_static = AffineQuantizedTensor.from_hp_to_intx_static
to_affine_quantized_floatx = AffineQuantizedTensor.from_hp_to_floatx
to_affine_quantized_floatx_static = AffineQuantizedTensor.from_hp_to_floatx_static


# -- activations -----------------------------------------------------------------------------------------------------


def _per_token(x: Tensor) -> tuple[int, ...]:
    return (1,) * (x.ndim - 1) + (x.shape[-1],)


def _int8_asymm_per_token_quant(x: Tensor) -> QT:
    """x in int8, asymmetric, one scale a token."""
    return to_affine_quantized_intx(
        x, MappingType.ASYMMETRIC, _per_token(x), torch.int8, eps=INT8_EPS, scale_dtype=torch.float32,
        zero_point_dtype=torch.int8,
    )  # fmt: skip


def _int8_symm_per_token_reduced_range_quant(x: Tensor) -> QT:
    """x in -127..127, one scale a token."""
    return to_affine_quantized_intx(
        x, MappingType.SYMMETRIC, _per_token(x), torch.int8, -127, 127, 1e-5,
        torch.float32 if x.dtype == torch.float16 else None,
    )  # fmt: skip


ACTIVATIONS: dict[Any, ActivationSpec] = {
    _int8_asymm_per_token_quant: files.ACTIVATIONS[files._int8_asymm_per_token_quant],
    _int8_symm_per_token_reduced_range_quant: files.ACTIVATIONS[files._int8_symm_per_token_reduced_range_quant],
}


class LinearActivationQuantizedTensor(files.LinearActivationQuantizedTensor):
    """A quantized weight with dynamic activation quantization."""

    activations = ACTIVATIONS

    @classmethod
    def build(
        cls, original_weight_tensor: Tensor, input_quant_func: Any, quant_kwargs: dict[str, Any] | None = None
    ) -> Any:
        """linear(x) = F.linear(input_quant_func(x, **quant_kwargs), original_weight_tensor).

        torchao's own functions become the activation of the weight; others are called.
        """
        act = None if quant_kwargs else ACTIVATIONS.get(input_quant_func)
        if act is None or not isinstance(original_weight_tensor, QT):
            from .input_function_weight import InputFunctionWeight

            return InputFunctionWeight(original_weight_tensor, input_quant_func, quant_kwargs or {})
        return original_weight_tensor.with_(act=act)

    @classmethod
    def from_float(cls, input_float: Tensor, input_quant_func: Any, quant_kwargs: dict[str, Any] | None = None) -> Any:
        return cls.build(input_float, input_quant_func, quant_kwargs)


to_linear_activation_quantized = LinearActivationQuantizedTensor.from_float
