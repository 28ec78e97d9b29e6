"""AffineQuantizedTensor of torchao 0.8 to 0.17 and its constructors, as views of ours."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pennyweight.core.formats import E2M1, E2M2, E2M3, E3M1, E3M2, Format
from pennyweight.core.spec import ActivationSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs.torchao import affine_quantized as files
from pennyweight.io.codecs.torchao.affine_quantized import full_rank, weight_of
from pennyweight.io.codecs.torchao.tensor_class import FLOAT8, float_codes
from pennyweight.planning.configs.integer import INT8_EPS
from pennyweight.planning.granularity import MappingType

from .enums import ZeroPointDomain
from .format_primitives import _choose_qparams_affine_floatx, _quantize_affine_floatx
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
    FloatxTensorCoreLayout,
    Layout,
    Pieces,
    PlainLayout,
    get_tensor_impl_constructor,
)

__all__ = [
    "ACTIVATIONS", "AffineQuantizedTensor", "LinearActivationQuantizedTensor", "to_affine_quantized_floatx",
    "to_affine_quantized_floatx_static", "to_affine_quantized_fpx", "to_affine_quantized_intx",
    "to_affine_quantized_intx_static", "to_linear_activation_quantized",
]  # fmt: skip

_SMALL = {(3, 2): E3M2, (2, 3): E2M3, (3, 1): E3M1, (2, 2): E2M2, (2, 1): E2M1}


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
        layout = tensor_impl.get_layout()
        if data.dtype not in FLOAT8 and isinstance(layout, FloatxTensorCoreLayout):
            return float_codes(data, full_rank(scale, data), _small_float(layout), (1, data.shape[-1]), dtype)
        return weight_of(data, scale, zero, block_size, shape, quant_min, quant_max, zero_point_domain, dtype)

    @classmethod
    def from_hp_to_intx(
        cls, input_float: Tensor, mapping_type: MappingType, block_size: tuple[int, ...], target_dtype: torch.dtype,
        quant_min: int | None = None, quant_max: int | None = None, eps: float | None = None,
        scale_dtype: torch.dtype | None = None, zero_point_dtype: torch.dtype | None = None, preserve_zero: bool = True,
        zero_point_domain: ZeroPointDomain = ZeroPointDomain.INT, _layout: Layout | None = None, use_hqq: bool = False,
    ) -> QT:  # fmt: skip
        """Round-to-nearest with a scale per block; ``use_hqq``: half-quadratic quantization, for uint4 codes."""
        layout = _layout or PlainLayout()
        x, shape = layout.pre_process(input_float), input_float.shape
        eps = torch.finfo(x.dtype).eps if eps is None else eps  # these releases' default
        lo, hi = _get_and_check_qmin_qmax(target_dtype, quant_min, quant_max)
        args = (block_size, target_dtype, lo, hi)
        if use_hqq:
            data, scale, zero = _hqq(x, mapping_type, block_size, lo, hi, zero_point_dtype, zero_point_domain)
            return cls.build(_stored(layout, data.to(torch.uint8), scale, zero, block_size), block_size, shape, lo, hi,
                             zero_point_domain, input_float.dtype)  # fmt: skip
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
        from .format_primitives import _choose_scale_float8

        scale = _choose_scale_float8(input_float, block_size, target_dtype, scale_dtype or torch.float32)
        return cls.from_hp_to_floatx_static(input_float, scale, block_size, target_dtype, _layout)

    @classmethod
    def from_hp_to_floatx_static(
        cls, input_float: Tensor, scale: Tensor, block_size: tuple[int, ...], target_dtype: torch.dtype,
        _layout: Layout | None = None, scale_dtype: torch.dtype | None = None,
    ) -> QT:  # fmt: skip
        """float8 with the given scales."""
        from .format_primitives import _quantize_affine_float8

        if target_dtype not in FLOAT8:
            raise NotImplementedError(f"to_affine_quantized_floatx: {target_dtype} is not one of {[*map(str, FLOAT8)]}")
        scale = full_rank(scale, input_float)
        data = _quantize_affine_float8(input_float, scale, target_dtype)
        return float_codes(data, scale.float(), FLOAT8[target_dtype], tuple(block_size), input_float.dtype)

    @classmethod
    def from_hp_to_fpx(cls, input_float: Tensor, _layout: Any) -> QT:
        """A small float of ``ebits`` and ``mbits`` with scale = absmax of the row / format maximum."""
        codes_of = (_layout.ebits, _layout.mbits)
        fmt, scale = _small_float(_layout), _choose_qparams_affine_floatx(input_float, *codes_of)
        codes = _quantize_affine_floatx(input_float, scale, *codes_of)
        return float_codes(codes, scale.unsqueeze(1), fmt, (1, input_float.shape[1]), input_float.dtype)


def _small_float(layout: Any) -> Format:
    """Our format of a layout. Raises NotImplementedError if there is none."""
    fmt = _SMALL.get((layout.ebits, layout.mbits))
    if fmt is None:
        raise NotImplementedError(f"floats of {layout.ebits} and {layout.mbits} bits; supported: {sorted(_SMALL)}")
    return fmt


def _stored(layout: Layout, data: Tensor, scale: Tensor, zero: Tensor | None, block: tuple[int, ...]) -> Any:
    data, scale, zero = layout.post_process(data, scale, zero, block)
    if type(layout).__module__ == Layout.__module__:
        return Pieces(data, scale, zero, layout)
    return get_tensor_impl_constructor(type(layout))(data, scale, zero, layout)  # a user-defined layout


def _hqq(
    x: Tensor, mapping: MappingType, block: tuple[int, ...], lo: int, hi: int, dtype: torch.dtype | None,
    domain: ZeroPointDomain,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from .hqq import _choose_qparams_and_quantize_affine_hqq

    if domain is not ZeroPointDomain.FLOAT or mapping is not MappingType.ASYMMETRIC or lo != 0:
        raise AssertionError("use_hqq needs ZeroPointDomain.FLOAT, MappingType.ASYMMETRIC and quant_min 0")
    data, scale, zero, _ = _choose_qparams_and_quantize_affine_hqq(
        x, nbits=int(math.log2(hi + 1)), group_size=max(block), axis=1 if block[0] == 1 else 0,
        compute_dtype=dtype or x.dtype, device=x.device, raw_output=False,
    )  # fmt: skip
    return data, scale, zero


to_affine_quantized_intx = AffineQuantizedTensor.from_hp_to_intx
to_affine_quantized_intx_static = AffineQuantizedTensor.from_hp_to_intx_static
to_affine_quantized_floatx = AffineQuantizedTensor.from_hp_to_floatx
to_affine_quantized_floatx_static = AffineQuantizedTensor.from_hp_to_floatx_static
to_affine_quantized_fpx = AffineQuantizedTensor.from_hp_to_fpx


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
