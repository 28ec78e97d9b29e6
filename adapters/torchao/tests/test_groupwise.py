"""Groupwise and per-token helpers: shapes, errors, n_bit, zero-point domains, settings left alone."""

import pytest
import torch

from pennyweight_torchao.enums import MappingType, ZeroPointDomain
from pennyweight_torchao.groupwise import (
    compute_error,
    get_group_qparams_symmetric,
    get_groupwise_affine_qparams,
    group_quantize_tensor_symmetric,
    groupwise_affine_dequantize_tensor,
    groupwise_affine_dequantize_tensor_from_qparams,
    groupwise_affine_quantize_tensor,
    groupwise_affine_quantize_tensor_from_qparams,
    pack_tinygemm_scales_and_zeros,
    recommended_inductor_config_setter,
    unpack_tinygemm_scales_and_zeros,
)
from pennyweight_torchao.int8_matmul import (
    _get_per_token_block_size,
    dynamically_quantize_per_channel,
    per_token_dynamic_quant,
)

INT, FLOAT, NONE = ZeroPointDomain.INT, ZeroPointDomain.FLOAT, ZeroPointDomain.NONE


@pytest.fixture
def w() -> torch.Tensor:
    return torch.randn(8, 96, generator=torch.Generator().manual_seed(7))


def test_error_in_decibels() -> None:
    x = torch.tensor([3.0, 4.0])
    assert float(compute_error(x, x * 0.9)) == pytest.approx(20.0, abs=1e-4)
    assert compute_error(x, x) == torch.inf


@pytest.mark.parametrize("n_bit", [2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tinygemm_round_trip(w: torch.Tensor, n_bit: int, dtype: torch.dtype) -> None:
    codes, packed = groupwise_affine_quantize_tensor(w, n_bit, 32, dtype)
    assert (codes.dtype, codes.shape, int(codes.max())) == (torch.int32, w.shape, 2**n_bit - 1)
    assert (packed.dtype, packed.shape) == (dtype, (3, 8, 2))
    back = groupwise_affine_dequantize_tensor(codes, packed, n_bit, 32)
    assert back.dtype is dtype
    assert compute_error(w, back.float()) > 6.02 * n_bit - (6 if dtype is torch.float32 else 16)


@pytest.mark.parametrize("preserve_zero", [False, True])
@pytest.mark.parametrize("domain", [INT, FLOAT])
def test_zero_point_domains(w: torch.Tensor, domain: ZeroPointDomain, preserve_zero: bool) -> None:
    w = w + 8  # zero lies outside of the groups
    scale, zero = get_groupwise_affine_qparams(w, 4, 32, torch.float32, domain, preserve_zero)
    assert scale.shape == zero.shape == (8, 3)
    assert zero.dtype is (torch.int32 if domain is INT else torch.float32)
    codes = groupwise_affine_quantize_tensor_from_qparams(w, scale, zero, 4, 32, domain)
    back = groupwise_affine_dequantize_tensor_from_qparams(codes, scale, zero, 4, 32, domain)
    held = domain is FLOAT or preserve_zero  # an integer zero point within the codes cannot shift the range so far
    assert (compute_error(w, back) > 24) == held


def test_no_zero_point(w: torch.Tensor) -> None:
    """torchao refuses this domain by a slip of the pen."""
    positive = w.abs()
    scale = positive.reshape(8, 3, 32).amax(2) / 15
    codes = groupwise_affine_quantize_tensor_from_qparams(positive, scale, None, 4, 32, NONE)
    back = groupwise_affine_dequantize_tensor_from_qparams(codes, scale, None, 4, 32, NONE)
    assert compute_error(positive, back) > 20


def test_short_rows_are_one_group() -> None:
    w = torch.randn(4, 16)
    codes, packed = groupwise_affine_quantize_tensor(w, 4, 128, torch.float32)
    assert packed.shape == (1, 4, 2)
    assert compute_error(w, groupwise_affine_dequantize_tensor(codes, packed, 4, 128)) > 20
    column = groupwise_affine_quantize_tensor_from_qparams(w[:, :1], packed[0, :, :1], packed[0, :, 1:], 4, 128)
    assert torch.equal(column, codes[:, :1])


def test_errors_of_groups(w: torch.Tensor) -> None:
    for bad in ({"groupsize": 36}, {"groupsize": 1}, {"n_bit": 9}):
        with pytest.raises(AssertionError):
            get_groupwise_affine_qparams(w, **bad)
        with pytest.raises(AssertionError):
            get_group_qparams_symmetric(w, **bad)
    with pytest.raises(AssertionError, match="expected a matrix"):
        get_groupwise_affine_qparams(w[0])
    scale, zero = get_groupwise_affine_qparams(w, 4, 32)
    with pytest.raises(AssertionError, match="does not divide"):
        groupwise_affine_quantize_tensor_from_qparams(w, scale, zero, 4, 128)
    with pytest.raises(ValueError, match="zeros to have dtype"):
        groupwise_affine_quantize_tensor(w, 4, 32, torch.float32, INT)
    with pytest.raises(ValueError, match=r"scales to have dtype torch\.float32, but got torch\.bfloat16"):
        pack_tinygemm_scales_and_zeros(scale, zero, torch.float32)
    with pytest.raises(ValueError, match="scales to have size"):
        pack_tinygemm_scales_and_zeros(scale, zero[:, :2])
    with pytest.raises(AssertionError, match=r"expected scales and zeros"):
        unpack_tinygemm_scales_and_zeros(scale)


def test_tinygemm_packing() -> None:
    scale, zero = torch.arange(12.0).reshape(2, 2, 3), -torch.arange(12.0).reshape(2, 2, 3)
    packed = pack_tinygemm_scales_and_zeros(scale, zero, torch.float32)
    assert packed.shape == (2, 3, 2, 2)
    assert packed[1, 2, 0].tolist() == [8.0, -8.0]
    for part, want in zip(unpack_tinygemm_scales_and_zeros(packed), (scale, zero), strict=True):
        assert torch.equal(part, want.unsqueeze(-1))


@pytest.mark.parametrize("n_bit", range(2, 9))
@pytest.mark.parametrize("mapping", [MappingType.SYMMETRIC, MappingType.SYMMETRIC_NO_CLIPPING_ERR])
def test_group_symmetric_obeys_n_bit(w: torch.Tensor, n_bit: int, mapping: MappingType) -> None:
    """torchao has four bits whatever is asked for."""
    codes, scale, zero = group_quantize_tensor_symmetric(w, n_bit, 32, mapping_type=mapping)
    assert codes.dtype is torch.int8
    assert not zero.any()
    low, high = -(2 ** (n_bit - 1)), 2 ** (n_bit - 1) - 1
    assert low <= int(codes.min()) <= low + 1
    assert int(codes.max()) == high
    assert compute_error(w, codes * scale.repeat_interleave(32, 1)) > 6.02 * n_bit - 9


def test_group_symmetric_refuses_nan(w: torch.Tensor) -> None:
    w[0, 0] = torch.nan
    with pytest.raises(AssertionError, match="NaN"):
        group_quantize_tensor_symmetric(w, 4, 32)


# -- tokens and channels -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_by_token(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 33).to(dtype)
    x[0, 0] = 0
    assert _get_per_token_block_size(x) == [1, 1, 33]
    back = per_token_dynamic_quant(x)
    assert back.dtype is dtype
    assert not back[0, 0].any()
    assert compute_error(x.float(), back.float()) > 38


def test_by_channel() -> None:
    w = torch.randn(7, 40)
    codes, scale, zero = dynamically_quantize_per_channel(w, -128, 127, torch.int8)
    assert (scale.shape, zero.dtype) == ((7,), torch.int64)
    assert compute_error(w, codes * scale.unsqueeze(1)) > 38
    with pytest.raises(AssertionError, match="2d"):
        dynamically_quantize_per_channel(torch.randn(2, 5, 40), -128, 127, torch.int8)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_inductor_settings_leave_float32_products_alone() -> None:
    from torch._inductor import config

    before = torch.get_float32_matmul_precision()
    with config.patch(coordinate_descent_tuning=False, force_fuse_int_mm_with_mul=False):
        recommended_inductor_config_setter()
        assert config.coordinate_descent_tuning
        assert config.force_fuse_int_mm_with_mul
        assert config.triton.unique_kernel_names
    assert torch.get_float32_matmul_precision() == before
