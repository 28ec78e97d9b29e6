"""float <-> MX and NVFP4 codes and scales on plain tensors, bit-equal to torchao 0.18 on a CPU.

MX      scale 2**e of each block, in e8m0: byte e + 127, byte 255 is NaN. The largest magnitude of a block and the
        element's greatest number decide e, by the rules "mx_.." of :mod:`pennyweight.core.qparams`;
        :func:`scale_bytes` and :func:`_to_mx_rceil` say what torchao chooses otherwise
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

from pennyweight.core.formats import E2M1, E2M3, E3M2, E4M3, E8M0, Format
from pennyweight.core.qparams import choose
from pennyweight.core.spec import QuantSpec
from pennyweight.io.codecs.torchao.mx import E8M0_SCALE, element, pack_uint4, unpack_uint4, unpack_uint6

from ..enums import ScaleCalculationMode
from .scale_layout import hp_data_dims_to_swizzled_scale_dims_mx, to_blocked

__all__ = [
    "E4M3_EPS", "_to_mx_rceil", "get_fp_scale", "nvfp4_quantize", "per_tensor_amax_to_scale", "to_dtype", "to_mx",
]  # fmt: skip
E4M3_EPS = torch.finfo(torch.float8_e4m3fn).tiny
_NAN = 255  # the byte of NaN in e8m0

# -- MX ----------------------------------------------------------------------------------------------------------------


def _need(condition: bool, text: str) -> None:
    if not condition:
        raise AssertionError(text)


def get_fp_scale(scale_e8m0: Tensor) -> Tensor:
    """2**(byte - 127) in float32; byte 255 is NaN. scale_e8m0: uint8 or float8_e8m0fnu."""
    return E8M0.decode(scale_e8m0.view(torch.uint8))


def scale_bytes(max_abs: Tensor, fmt: Format, mode: ScaleCalculationMode) -> Tensor:
    """e8m0 byte of blocks with that largest magnitude [.., 1], float32, by core's rule. FLOOR, CEIL or EVEN.

    Other than core's: NaN gives 255, and an infinity counts as 2**128 under FLOOR, too.
    """
    scale = choose(max_abs, QuantSpec(fmt, (1,), E8M0_SCALE), f"mx_{mode.value}").scale
    assert scale is not None
    code = E8M0.encode(scale)
    if mode == ScaleCalculationMode.FLOOR:
        code = code + max_abs.isinf()
    return torch.where(max_abs.isnan(), _NAN, code).to(torch.uint8)


def _to_mx_rceil(data_hp: Tensor, max_abs: Tensor, max_pos: float) -> tuple[Tensor, Tensor]:
    """(e8m0 bytes, data / scale clamped to +-max_pos) under the smallest power of two >= max_abs / max_pos.

    max_abs broadcasts against the data. The division by the scale is a multiplication by 2**-e, which is 1 for byte 0.
    Other than core's "mx_rceil": the logarithm is rounded to float32, so that a ratio just above a power of two counts
    as that power; an infinite maximum gives byte 254 and NaN byte 255.
    """
    descale = max_abs / max_pos
    exponent = descale.float().log2().ceil().clamp(-127, 127) + 127
    exponent = torch.where(descale.isnan(), _NAN, exponent).to(torch.uint8)
    down = torch.where(exponent == 0, 1.0, torch.exp2(127 - exponent.float()))
    down = torch.where(exponent == _NAN, descale, down)
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
        divisor = (scale.to(torch.int32) << 23).view(torch.float32).clamp(min=2.0**-126)
        scaled = (view.float() / divisor).clamp(-fmt.hi, fmt.hi)
    codes = fmt.encode(scaled.reshape(data_hp.shape))
    scale = scale.squeeze(-1).view(torch.float8_e8m0fnu)
    if is_swizzled_scales:
        dims = hp_data_dims_to_swizzled_scale_dims_mx(data_hp.shape[-2], data_hp.shape[-1])
        scale = _swizzled(scale, (*data_hp.shape[:-2], *dims))
    if pack_fp6 and fmt in (E2M3, E3M2):
        packed = pack_uint6(codes.reshape(-1, block_size))
        codes = packed.reshape(*codes.shape[:-1], codes.shape[-1] // 4 * 3)
    return scale, pack_uint4(codes) if fmt is E2M1 else codes


def pack_uint6(codes: Tensor) -> Tensor:
    """Four codes a, b, c, d in three bytes. The last axis is one block: all first bytes (high 4 bits of a, of b), then
    all second (of c, of d), then all third ones (low 2 bits of a, b, c, d)."""
    a, b, c, d = (codes[..., i::4] for i in range(4))
    low = a << 6 | (b & 3) << 4 | (c & 3) << 2 | d & 3
    return torch.cat([(a & 0x3C) << 2 | b >> 2, (c & 0x3C) << 2 | d >> 2, low], -1)


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


# -- NVFP4 -------------------------------------------------------------------------------------------------------------


def per_tensor_amax_to_scale(amax: Tensor) -> Tensor:
    """amax / (6 * 448), float32: the scale under which the block scale of ``amax`` is the greatest e4m3 number."""
    return amax.to(torch.float32) / (E4M3.hi * E2M1.hi)


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
    wanted = view.abs().amax(-1) / E2M1.hi
    if per_tensor_scale is None:
        scale = wanted.clamp(E4M3_EPS, E4M3.hi).to(torch.float8_e4m3fn)
        up = 1.0 / scale.float()
    else:
        outer = per_tensor_scale.squeeze(-1) if per_tensor_scale.ndim == 3 else per_tensor_scale
        scale = (wanted / outer).clamp(E4M3_EPS, E4M3.hi).to(torch.float8_e4m3fn)
        up = (1.0 / outer) / scale.float()
    scaled = (view * up.unsqueeze(-1)).clamp(-E2M1.hi, E2M1.hi)
    return scale, pack_uint4(E2M1.encode(scaled.view(data_hp.shape)))
