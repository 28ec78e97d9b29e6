"""float <-> MX and NVFP4 codes and scales on plain tensors, bit-equal to torchao 0.18 on a CPU.

MX      scale 2**e of each block, in e8m0: byte e + 127, byte 255 is NaN. The largest magnitude of a block and the
        element's greatest number decide e (:func:`scale_bytes`); the rules "mx_.." of :mod:`pennyweight.core.qparams`
        choose the same e for finite blocks
NVFP4   e4m3 scale of each block: absmax / 6, divided by the scale per tensor if there is one

torchao's choices that ours do not make: a block whose byte is 0 (2**-127) is divided by 2**-126, or by 1 under RCEIL;
NVFP4's block scales are at least 2**-6; its elements are multiplied by a rounded reciprocal. ``quantize_`` uses ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pennyweight.core.formats import E2M1, E2M3, E3M2, E4M3, Format

from ..enums import ScaleCalculationMode
from .constants import (
    E8M0_EXPONENT_BIAS,
    E8M0_EXPONENT_NAN_VAL,
    F4_E2M1_MAX,
    F8E4M3_MAX,
    F32_MIN_NORMAL,
    element,
    max_exponent,
)
from .element_codes import _BITS, get_fp_scale, pack_uint4, pack_uint6, to_codes, unpack_uint4, unpack_uint6
from .scale_layout import (
    hp_data_dims_to_swizzled_scale_dims_mx,
    hp_data_dims_to_swizzled_scale_dims_nvfp4,
    to_blocked,
)

__all__ = [
    "E4M3_EPS", "_to_mx_rceil", "get_fp_scale", "mslk_calculate_group_max", "mslk_quantize_nvfp4",
    "mslk_quantize_nvfp4_stacked", "mxfp8_quantize_cuda", "nvfp4_quantize", "per_tensor_amax_to_scale",
    "tensor_size_fp4x2_to_hp", "tensor_size_fp6x4_to_hpx3", "tensor_size_hp_to_fp4x2", "tensor_size_hpx3_to_fp6x4",
    "to_dtype", "to_mx", "triton_mxfp8_dequant_dim0", "triton_to_mxfp8_dim0", "triton_to_mxfp8_dim1",
    "triton_to_mxfp8_dim1_reference",
]  # fmt: skip
E4M3_EPS = torch.finfo(torch.float8_e4m3fn).tiny

# -- MX ----------------------------------------------------------------------------------------------------------------


def _need(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)


def scale_bytes(max_abs: Tensor, fmt: Format, mode: ScaleCalculationMode) -> Tensor:
    """e8m0 byte of blocks with that largest magnitude, float32. FLOOR, CEIL or EVEN; see ScaleCalculationMode.

    NaN gives 255. An infinity counts as 2**128, so its block has the greatest scale of all, and saturates.
    """
    nan, bits = max_abs.isnan(), max_abs.view(torch.int32)
    if mode == ScaleCalculationMode.EVEN:
        half = 1 << (22 - (3 if fmt is E4M3 else 2 if fmt.native_float else _BITS[fmt][1]))
        bits = bits + half
    exponent = (bits >> 23) & 0xFF
    if mode == ScaleCalculationMode.CEIL:
        exponent = exponent + (bits & 0x7FFFFF > 0)
    code = (exponent - max_exponent(fmt)).clamp(0, E8M0_EXPONENT_NAN_VAL)
    return torch.where(nan, E8M0_EXPONENT_NAN_VAL, code).to(torch.uint8)


def _to_mx_rceil(data_hp: Tensor, max_abs: Tensor, max_pos: float) -> tuple[Tensor, Tensor]:
    """(e8m0 bytes, data / scale clamped to +-max_pos) under the smallest power of two >= max_abs / max_pos.

    max_abs broadcasts against the data. An infinite maximum gives byte 254 and NaN byte 255. The division by the scale
    is a multiplication by 2**-e, which is 1 for byte 0.
    """
    descale = max_abs / max_pos
    exponent = descale.float().log2().ceil().clamp(-E8M0_EXPONENT_BIAS, E8M0_EXPONENT_BIAS) + E8M0_EXPONENT_BIAS
    exponent = torch.where(descale.isnan(), E8M0_EXPONENT_NAN_VAL, exponent).to(torch.uint8)
    down = torch.exp2(E8M0_EXPONENT_BIAS - exponent.float())
    down = torch.where(exponent == 0, 1.0, torch.where(exponent == E8M0_EXPONENT_NAN_VAL, descale, down))
    return exponent, (data_hp * down).clamp(-max_pos, max_pos)


def to_mx(
    data_hp: Tensor, elem_dtype: Any, block_size: int, scaling_mode: ScaleCalculationMode = ScaleCalculationMode.FLOOR,
    is_swizzled_scales: bool = False, *, pack_fp6: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(scales, codes) of float32 or bfloat16 data in blocks along its last axis.

    scales  float8_e8m0fnu, one per block; with ``is_swizzled_scales`` in tensor-core order (scale_layout.py)
    codes   in the element's dtype; uint8 for fp4 with two codes in a byte, and for fp6, with ``pack_fp6`` packed block
            by block

    Raises AssertionError for another dtype, strides that are not contiguous, and blocks that do not divide the axis.
    """
    _need(
        data_hp.dtype in (torch.bfloat16, torch.float32),
        f"to_mx: data must be bfloat16 or float32, got {data_hp.dtype}",
    )
    _need(
        data_hp.ndim > 0 and data_hp.shape[-1] % block_size == 0,
        f"to_mx: the last axis of {list(data_hp.shape)} is not a multiple of the block size {block_size}",
    )
    _need(data_hp.is_contiguous(), "to_mx: data must be contiguous; call .contiguous()")
    fmt = element(elem_dtype)
    view = data_hp.reshape(*data_hp.shape[:-1], -1, block_size)
    max_abs = view.abs().amax(-1, keepdim=True).float()
    if scaling_mode == ScaleCalculationMode.RCEIL:
        scale, scaled = _to_mx_rceil(view.float(), max_abs, fmt.hi)
    else:
        scale = scale_bytes(max_abs, fmt, scaling_mode)
        divisor = (scale.to(torch.int32) << 23).view(torch.float32).clamp(min=F32_MIN_NORMAL)
        scaled = (view.float() / divisor).clamp(-fmt.hi, fmt.hi)
    scaled = scaled.reshape(data_hp.shape)
    codes = scaled.to(fmt.code_dtype) if fmt.native_float else to_codes(scaled, fmt)
    scale = scale.squeeze(-1).view(torch.float8_e8m0fnu)
    if is_swizzled_scales:
        dims = hp_data_dims_to_swizzled_scale_dims_mx(data_hp.shape[-2], data_hp.shape[-1])
        scale = _swizzled(scale, (*data_hp.shape[:-2], *dims))
    if pack_fp6 and fmt in (E2M3, E3M2):
        packed = pack_uint6(codes.reshape(-1, block_size))
        codes = packed.reshape(*codes.shape[:-1], codes.shape[-1] // 4 * 3)
    return scale, pack_uint4(codes) if fmt is E2M1 else codes


def _swizzled(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """Scales in tensor-core order. Raises AssertionError if the matrices of a batch do not fill whole tiles of rows."""
    flat = to_blocked(scale.reshape(-1, scale.shape[-1]).view(torch.uint8)).view(scale.dtype)
    _need(
        flat.numel() == math.prod(shape),
        f"swizzled scales of a batch need matrices whose rows are a multiple of 128, got {list(scale.shape)}",
    )
    return flat.view(*shape)


def to_dtype(
    data_lp: Tensor, scale_e8m0: Tensor, elem_dtype: Any, block_size: int, target_dtype: torch.dtype,
    use_fp4_custom_triton_dequant_kernel: bool = False, pack_fp6: bool = False,
) -> Tensor:  # fmt: skip
    """The values code * scale in ``target_dtype``. Codes and scales: as :func:`to_mx` returns them, not swizzled; or
    both transposed. ``pack_fp6``: fp6 codes are packed block by block."""
    if not data_lp.is_contiguous():
        return to_dtype(data_lp.t(), scale_e8m0.t(), elem_dtype, block_size, target_dtype, False, pack_fp6).t()
    fmt = element(elem_dtype)
    if fmt is E2M1:
        data_lp = unpack_uint4(data_lp)
    elif pack_fp6 and fmt in (E2M3, E3M2):
        codes = unpack_uint6(data_lp.reshape(-1, block_size // 4 * 3))
        data_lp = codes.reshape(*data_lp.shape[:-1], data_lp.shape[-1] // 3 * 4)
    numbers = fmt.decode(data_lp, target_dtype)
    scale = get_fp_scale(scale_e8m0).reshape(-1, 1).to(target_dtype)
    return (numbers.reshape(-1, block_size) * scale).reshape(numbers.shape)


def triton_to_mxfp8_dim0(x: Tensor, inner_block_size: int = 32, scaling_mode: str = "rceil") -> tuple[Tensor, Tensor]:
    """(e4m3 codes, scales) of blocks along the rows of a matrix."""
    scale, codes = to_mx(x, torch.float8_e4m3fn, inner_block_size, ScaleCalculationMode(scaling_mode))
    return codes, scale


def triton_to_mxfp8_dim1(x: Tensor, inner_block_size: int = 32, scaling_mode: str = "rceil") -> tuple[Tensor, Tensor]:
    """(e4m3 codes, scales) of blocks along the columns of a matrix [M, K]. The codes [M, K] have the strides of a
    transposed matrix; scales are [K, M / block]."""
    codes, scale = triton_to_mxfp8_dim0(x.t().contiguous(), inner_block_size, scaling_mode)
    return codes.t(), scale


def triton_to_mxfp8_dim1_reference(
    x_hp: Tensor, block_size: int = 32, scaling_mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL
) -> tuple[Tensor, Tensor]:
    """As :func:`triton_to_mxfp8_dim1`, with the mode as an enum."""
    return triton_to_mxfp8_dim1(x_hp, block_size, scaling_mode.value)


def triton_mxfp8_dequant_dim0(
    e4m3_data: Tensor, e8m0_scales: Tensor, out_dtype: torch.dtype, scale_block_size: int = 32
) -> Tensor:
    """Values of e4m3 codes in blocks along the last axis."""
    return to_dtype(e4m3_data, e8m0_scales, torch.float8_e4m3fn, scale_block_size, out_dtype)


def mxfp8_quantize_cuda(
    x: Tensor, rowwise: bool = False, colwise: bool = True, scaling_mode: str = "rceil"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(row codes, column codes, row scales [M, K / 32, 1], column scales) in e4m3; what was not asked for is empty."""
    _need(
        x.ndim == 2 and x.shape[0] % 32 == 0 and x.shape[1] % 32 == 0,
        f"mxfp8_quantize_cuda: x must be a matrix whose sizes are multiples of 32, got {list(x.shape)}",
    )
    codes, scale = x.new_empty(0, dtype=torch.float8_e4m3fn), x.new_empty(0, dtype=torch.float8_e8m0fnu)
    rows = triton_to_mxfp8_dim0(x, 32, scaling_mode) if rowwise else (codes, scale)
    columns = triton_to_mxfp8_dim1(x, 32, scaling_mode) if colwise else (codes, scale)
    return rows[0], columns[0], rows[1].unsqueeze(-1) if rowwise else rows[1], columns[1]


# -- sizes of packed tensors -------------------------------------------------------------------------------------------


def _resized(size: Sequence[int], is_contiguous: bool, numerator: int, denominator: int) -> list[int]:
    """The size with its packed axis multiplied: the last one, or the second last of a transposed tensor."""
    _need(is_contiguous or len(size) in (2, 3), f"a transposed packed tensor has 2 or 3 axes, got {list(size)}")
    new, axis = list(size), -1 if is_contiguous else -2
    new[axis] = new[axis] * numerator // denominator
    return new


def tensor_size_hp_to_fp4x2(orig_size: Sequence[int], is_contiguous: bool) -> list[int]:
    """Size of packed fp4. ``is_contiguous`` False: of a transposed tensor, packed along its second last axis."""
    return _resized(orig_size, is_contiguous, 1, 2)


def tensor_size_fp4x2_to_hp(orig_size: Sequence[int], is_contiguous: bool) -> list[int]:
    """Size of unpacked fp4; see :func:`tensor_size_hp_to_fp4x2`."""
    return _resized(orig_size, is_contiguous, 2, 1)


def tensor_size_hpx3_to_fp6x4(orig_size: Sequence[int], is_contiguous: bool) -> list[int]:
    """Size of packed fp6: four codes in three bytes."""
    return _resized(orig_size, is_contiguous, 3, 4)


def tensor_size_fp6x4_to_hpx3(orig_size: Sequence[int], is_contiguous: bool) -> list[int]:
    """Size of unpacked fp6."""
    return _resized(orig_size, is_contiguous, 4, 3)


# -- NVFP4 -------------------------------------------------------------------------------------------------------------


def per_tensor_amax_to_scale(amax: Tensor) -> Tensor:
    """amax / (6 * 448), float32: the scale under which the block scale of ``amax`` is the greatest e4m3 number."""
    return amax.to(torch.float32) / (F8E4M3_MAX * F4_E2M1_MAX)


def nvfp4_quantize(
    data_hp: Tensor, block_size: int = 16, per_tensor_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(e4m3 scales, codes with two in a byte) of float32 or bfloat16 data in blocks of 16 along its last axis.

    scale = clamp(absmax / 6 / per_tensor_scale, 2**-6, 448). Scales are [first axis, blocks of all other axes].
    ``per_tensor_scale``: one number, or [E, 1, 1], one for each entry of the first axis.
    """
    _need(
        data_hp.dtype in (torch.bfloat16, torch.float32),
        f"nvfp4_quantize: data must be bfloat16 or float32, got {data_hp.dtype}",
    )
    _need(block_size == 16, f"nvfp4_quantize: NVFP4 has blocks of 16, got block_size={block_size}")
    _need(
        data_hp.shape[-1] % block_size == 0,
        f"nvfp4_quantize: the last axis of {list(data_hp.shape)} is not a multiple of {block_size}",
    )
    _need(data_hp.is_contiguous(), "nvfp4_quantize: data must be contiguous; call .contiguous()")
    view = data_hp.float().reshape(data_hp.shape[0], -1, block_size)
    wanted = view.abs().amax(-1) / F4_E2M1_MAX
    if per_tensor_scale is None:
        scale = wanted.clamp(E4M3_EPS, F8E4M3_MAX).to(torch.float8_e4m3fn)
        up = 1.0 / scale.float()
    else:
        outer = per_tensor_scale.squeeze(-1) if per_tensor_scale.ndim == 3 else per_tensor_scale
        scale = (wanted / outer).clamp(E4M3_EPS, F8E4M3_MAX).to(torch.float8_e4m3fn)
        up = (1.0 / outer) / scale.float()
    scaled = (view * up.unsqueeze(-1)).clamp(-F4_E2M1_MAX, F4_E2M1_MAX)
    return scale, pack_uint4(to_codes(scaled.view(data_hp.shape), E2M1))


def swizzled_nvfp4(scale: Tensor, shape: Sequence[int]) -> Tensor:
    """The scales of :func:`nvfp4_quantize` of a matrix or a batch of them in tensor-core order."""
    rows = scale.reshape(math.prod(shape[:-1]), shape[-1] // 16)
    return _swizzled(rows, (*shape[:-2], *hp_data_dims_to_swizzled_scale_dims_nvfp4(shape[-2], shape[-1])))


def mslk_quantize_nvfp4(x: Tensor, per_tensor_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(scales in tensor-core order, codes with two in a byte), of a matrix or a batch of matrices."""
    scale, codes = nvfp4_quantize(x, 16, per_tensor_scale)
    return swizzled_nvfp4(scale, x.shape), codes


def _by_expert(x: Tensor, m_sizes: Tensor) -> list[Tensor]:
    sizes = m_sizes.tolist()
    _need(sum(sizes) <= x.shape[0], f"m_sizes has {sum(sizes)} rows, the activation {x.shape[0]}")
    return list(x[: sum(sizes)].split(sizes))


def mslk_calculate_group_max(x: Tensor, m_sizes: Tensor) -> Tensor:
    """6 * 448 / absmax of the rows of each expert, float32: the inverse of its scale per tensor.

    x: [M, K], the rows of all experts; m_sizes: [E], rows of each. An expert without rows, or with only zeros: 1.
    """
    top = [
        part.abs().amax().float() if part.numel() else x.new_zeros((), dtype=torch.float32)
        for part in _by_expert(x, m_sizes)
    ]
    amax = torch.stack(top)
    return torch.where(amax > 0, F8E4M3_MAX * F4_E2M1_MAX / amax, 1.0)


def mslk_quantize_nvfp4_stacked(m_sizes: Tensor, x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """(codes [M, K / 2], scales in tensor-core order) of the rows of all experts, each under its ``global_scale``. The
    scales of each expert are padded to whole tiles of 128 rows."""
    scales, codes = [], []
    for part, up in zip(_by_expert(x, m_sizes), global_scale, strict=True):
        if part.shape[0]:
            scale, code = mslk_quantize_nvfp4(part.float().contiguous(), 1.0 / up)
            columns = -(-x.shape[-1] // 64) * 4
            scales.append(scale.reshape(-1, columns).view(torch.uint8))
            codes.append(code)
    width = x.shape[-1] // 2
    packed = torch.cat(codes) if codes else x.new_zeros((0, width), dtype=torch.uint8)
    laid = torch.cat(scales) if scales else x.new_zeros((0, -(-x.shape[-1] // 64) * 4), dtype=torch.uint8)
    return packed.view(torch.float4_e2m1fn_x2), laid.view(torch.float8_e4m3fn)
