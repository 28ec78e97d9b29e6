"""Groupwise quantization of weights with torchao's packings, errors in decibels, and inductor's settings."""

from __future__ import annotations

import torch
from torch import Tensor

from .enums import MappingType, ZeroPointDomain
from .primitives import (
    _choose_qparams_affine_dont_preserve_zero,
    _choose_qparams_affine_tinygemm,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)
from .qparams import get_block_size, require

__all__ = [
    "_guard_dtype_size", "compute_error", "get_block_size", "get_group_qparams_symmetric",
    "get_groupwise_affine_qparams", "group_quantize_tensor_symmetric", "groupwise_affine_dequantize_tensor",
    "groupwise_affine_dequantize_tensor_from_qparams", "groupwise_affine_quantize_tensor",
    "groupwise_affine_quantize_tensor_from_qparams", "guard_dtype_size", "pack_tinygemm_scales_and_zeros",
    "recommended_inductor_config_setter", "unpack_tinygemm_scales_and_zeros",
]  # fmt: skip


def compute_error(x: Tensor, y: Tensor) -> Tensor:
    """Signal to noise in dB: 20 log10(|x| / |x - y|), a tensor without axes; inf where equal."""
    return 20 * torch.log10(torch.linalg.norm(x) / torch.linalg.norm(x - y))


def _guard_dtype_size(
    tensor_arg: Tensor, arg_name: str, dtype: torch.dtype | None = None, size: torch.Size | None = None
) -> None:
    """Raises ValueError where the tensor has another dtype or size."""
    for what, wanted, got in (("dtype", dtype, tensor_arg.dtype), ("size", size, tensor_arg.size())):
        if wanted is not None and got != wanted:
            raise ValueError(f"Expected Tensor argument {arg_name} to have {what} {wanted}, but got {got} instead.")


guard_dtype_size = _guard_dtype_size


# -- float and integer zero points -------------------------------------------------------------------------------------


def _groups(w: Tensor, groupsize: int, scales: Tensor | None = None) -> tuple[int, int]:
    """block_size of groups in the rows of w; one group a row where the row is shorter.

    With ``scales``, for parameters that exist: only a single one a row may stand for a longer group.
    """
    require(w.dim() == 2, f"expected a matrix, got a tensor of shape {list(w.shape)}")
    columns = w.shape[-1]
    whole = groupsize > columns and (scales is None or scales.numel() == w.shape[0])
    size = columns if whole else groupsize
    least = size if scales is None else groupsize
    require(least > 1, f"groupsize must be greater than 1, got {least}")
    require(columns % size == 0, f"groupsize {size} does not divide the {columns} columns")
    return 1, size


def get_groupwise_affine_qparams(
    w: Tensor, n_bit: int = 4, groupsize: int = 128, dtype: torch.dtype = torch.bfloat16,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.FLOAT, preserve_zero: bool = False, eps: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scales and zeros [N, K / groupsize] of unsigned codes, asymmetric; eps: floor of the scale, default 1e-6.

    Float domain: both in ``dtype``, computed in that of w; zeros are values of the middle code. Integer domain: zeros
    are int32 codes. Raises AssertionError where the group size does not divide a row, or for more than 8 bits.
    """
    block = _groups(w, groupsize)
    require(n_bit <= 8, f"only n_bit up to 8 is supported, got: {n_bit}")
    options = {
        "mapping_type": MappingType.ASYMMETRIC,
        "block_size": block,
        "target_dtype": torch.int32,
        "quant_min": 0,
        "quant_max": 2**n_bit - 1,
        "eps": 1e-6 if eps is None else eps,
        "scale_dtype": dtype,
        "zero_point_dtype": torch.int32 if zero_point_domain is ZeroPointDomain.INT else dtype,
    }
    if preserve_zero:
        domain = ZeroPointDomain.INT if zero_point_domain is ZeroPointDomain.NONE else zero_point_domain
        scale, zero = choose_qparams_affine(w, **options, zero_point_domain=domain)
    elif zero_point_domain is ZeroPointDomain.FLOAT:
        scale, zero = _choose_qparams_affine_tinygemm(w, **options)
    else:
        scale, zero = _choose_qparams_affine_dont_preserve_zero(w, **options)
    return scale.reshape(w.shape[0], -1), zero.reshape(w.shape[0], -1)


def pack_tinygemm_scales_and_zeros(scales: Tensor, zeros: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """[.., N, G] and [.., N, G] -> [.., G, N, 2], scale before zero. Raises ValueError for another dtype or size."""
    _guard_dtype_size(scales, "scales", dtype=dtype, size=zeros.size())
    _guard_dtype_size(zeros, "zeros", dtype=dtype)
    return torch.stack([scales, zeros], -1).transpose(-3, -2).contiguous()


def unpack_tinygemm_scales_and_zeros(scales_and_zeros: Tensor) -> tuple[Tensor, Tensor]:
    """[.., G, N, 2] -> scales and zeros [.., N, G, 1]. Raises AssertionError for another last axis."""
    require(
        scales_and_zeros.shape[-1] == 2, f"expected scales and zeros [.., G, N, 2], got {list(scales_and_zeros.shape)}"
    )
    scales, zeros = torch.split(scales_and_zeros.transpose(-3, -2), 1, -1)
    return scales, zeros


def groupwise_affine_quantize_tensor_from_qparams(
    w: Tensor, scales: Tensor, zeros: Tensor | None, n_bit: int = 4, groupsize: int = 128,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.FLOAT,
) -> Tensor:  # fmt: skip
    """Unsigned codes of w under given parameters.

    On a CPU int32 [N, K]. On other devices, unless K is 1, uint8 [N, K / 2]: two codes a byte, the even column in the
    high nibble, on XPU in the low one. Raises AssertionError where the group size does not divide a row.
    """
    block = _groups(w, groupsize, scales)
    zeros = None if zero_point_domain is ZeroPointDomain.NONE else zeros
    codes = quantize_affine(w, block, scales, zeros, torch.int32, 0, 2**n_bit - 1, zero_point_domain)
    if codes.device.type == "cpu" or w.shape[-1] == 1:
        return codes
    even, odd = codes[:, ::2], codes[:, 1::2]
    return (odd << 4 | even if codes.device.type == "xpu" else even << 4 | odd).to(torch.uint8)


def groupwise_affine_dequantize_tensor_from_qparams(
    w_int4x8: Tensor, scales: Tensor, zeros: Tensor | None, n_bit: int = 4, groupsize: int = 128,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.FLOAT,
) -> Tensor:  # fmt: skip
    """Values, in the dtype of the scales, of what :func:`groupwise_affine_quantize_tensor_from_qparams` gives."""
    require(w_int4x8.dim() == 2, f"expected a matrix of codes, got a tensor of shape {list(w_int4x8.shape)}")
    codes = w_int4x8
    if codes.device.type != "cpu" and (codes.dtype is torch.uint8 or codes.shape[-1] > 1):
        high, low = codes.to(torch.int32) >> 4, codes.to(torch.int32) & 15
        codes = torch.stack([low, high] if codes.device.type == "xpu" else [high, low], -1).flatten(-2)
    block = _groups(codes, groupsize, scales)
    zeros = None if zero_point_domain is ZeroPointDomain.NONE else zeros
    return dequantize_affine(
        codes, block, scales, zeros, torch.int32, 0, 2**n_bit - 1, zero_point_domain, output_dtype=scales.dtype
    )


def groupwise_affine_quantize_tensor(
    w: Tensor, n_bit: int = 4, groupsize: int = 128, dtype: torch.dtype = torch.bfloat16,
    zero_point_domain: ZeroPointDomain = ZeroPointDomain.FLOAT, preserve_zero: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Codes of w and its packed scales and zeros [K / groupsize, N, 2].

    Raises ValueError for integer zeros, which are not of the dtype that they would be packed in.
    """
    scales, zeros = get_groupwise_affine_qparams(
        w, n_bit, groupsize, dtype, zero_point_domain=zero_point_domain, preserve_zero=preserve_zero
    )
    codes = groupwise_affine_quantize_tensor_from_qparams(w, scales, zeros, n_bit, groupsize, zero_point_domain)
    return codes, pack_tinygemm_scales_and_zeros(scales, zeros, dtype)


def groupwise_affine_dequantize_tensor(
    w_int4x8: Tensor, scales_and_zeros: Tensor, n_bit: int = 4, groupsize: int = 128
) -> Tensor:
    """Values of :func:`groupwise_affine_quantize_tensor`'s results, float domain."""
    scales, zeros = unpack_tinygemm_scales_and_zeros(scales_and_zeros)
    return groupwise_affine_dequantize_tensor_from_qparams(w_int4x8, scales, zeros, n_bit, groupsize)


# -- symmetric ---------------------------------------------------------------------------------------------------------


def get_group_qparams_symmetric(
    w: Tensor, n_bit: int = 4, groupsize: int = 128, precision: torch.dtype = torch.float32,
    mapping_type: MappingType = MappingType.SYMMETRIC, eps: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Scales and zeros [N, K / groupsize] of signed codes, in ``precision``. Raises as the asymmetric one does."""
    block = _groups(w, groupsize)
    require(n_bit <= 8, f"unsupported n_bit: {n_bit}")
    half = 2 ** (n_bit - 1)
    scale, zero = choose_qparams_affine(w, mapping_type, block, torch.int8, -half, half - 1, eps, precision, precision)
    return scale.reshape(w.shape[0], -1), zero.reshape(w.shape[0], -1)


def group_quantize_tensor_symmetric(
    w: Tensor, n_bit: int = 4, group_size: int = 128, precision: torch.dtype = torch.float32,
    mapping_type: MappingType = MappingType.SYMMETRIC,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(codes int8 [N, K] of ``n_bit`` bits, scales, zeros). Raises AssertionError for NaN, and as above."""
    scales, zeros = get_group_qparams_symmetric(w, n_bit, group_size, precision, mapping_type)
    require(not bool(w.isnan().any()), "the tensor to quantize has NaN")
    half = 2 ** (n_bit - 1)
    codes = quantize_affine(w, _groups(w, group_size), scales, zeros, torch.int8, -half, half - 1)
    return codes, scales, zeros


# -- settings ----------------------------------------------------------------------------------------------------------


def recommended_inductor_config_setter() -> None:
    """Let torch.compile search longer for fast kernels in this process: five settings of inductor.

    They change how code is compiled, not what it computes. Unlike torchao's before 0.18 this leaves
    ``torch.set_float32_matmul_precision`` alone, which would change float32 products everywhere in the process.
    """
    from torch._inductor import config

    config.coordinate_descent_tuning = True
    config.coordinate_descent_check_all_directions = True
    config.force_fuse_int_mm_with_mul = True
    config.fx_graph_cache = True
    config.triton.unique_kernel_names = True
