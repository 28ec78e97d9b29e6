"""HQQ, SINQ, QQQ and GGUF primitives: better than rounding, right on constant groups, errors."""

import pytest
import torch

from pennyweight_torchao.enums import MappingType
from pennyweight_torchao.groupwise import compute_error
from pennyweight_torchao.hqq import (
    _choose_qparams_and_quantize_affine_hqq,
    _choose_qparams_and_quantize_affine_qqq,
    _choose_qparams_and_quantize_scale_only_hqq,
    _choose_qparams_and_quantize_scale_only_sinq,
    _shrink_lp_op,
)
from pennyweight_torchao.primitives import (
    _choose_qparams_affine_tinygemm,
    _dequantize_affine_tinygemm,
    _quantize_affine_tinygemm,
    choose_qparams_affine,
    dequantize_affine,
    quantize_affine,
)


@pytest.fixture
def w() -> torch.Tensor:
    return torch.randn(16, 256, generator=torch.Generator().manual_seed(1))


def lp_error(w: torch.Tensor, other: torch.Tensor) -> float:
    """What HQQ lessens."""
    return float((w - other).abs().pow(0.7).mean())


def test_hqq_lessens_its_error(w: torch.Tensor) -> None:
    codes, scale, zero, shape = _choose_qparams_and_quantize_affine_hqq(w, 4, 64, compute_dtype=torch.float32)
    assert (codes.dtype, codes.shape, shape) == (torch.uint8, w.shape, w.shape)
    assert int(codes.max()) <= 15
    hqq = _dequantize_affine_tinygemm(codes, (1, 64), scale, zero, torch.uint8, 0, 15)
    plain = _choose_qparams_affine_tinygemm(w, MappingType.ASYMMETRIC, (1, 64), torch.uint8, 0, 15)
    rtn = _quantize_affine_tinygemm(w, (1, 64), *plain, torch.uint8, 0, 15)
    rtn = _dequantize_affine_tinygemm(rtn, (1, 64), *plain, torch.uint8, 0, 15)
    assert lp_error(w, hqq) < lp_error(w, rtn)
    raw = _choose_qparams_and_quantize_affine_hqq(w, 4, 64, compute_dtype=torch.float32, raw_output=True)
    assert raw[1].shape == raw[2].shape == (16, 4)
    back = (raw[0].float().reshape(16, 4, 64) - raw[2].unsqueeze(-1)) * raw[1].unsqueeze(-1)
    torch.testing.assert_close(back.reshape(w.shape), hqq, rtol=1e-4, atol=1e-5)


def test_hqq_of_constant_groups_and_errors(w: torch.Tensor) -> None:
    codes, scale, zero, _ = _choose_qparams_and_quantize_affine_hqq(torch.full((2, 64), 0.5), 4, 64)
    back = _dequantize_affine_tinygemm(codes, (1, 64), scale, zero, torch.uint8, 0, 15)
    assert back.isfinite().all()
    with pytest.raises(AssertionError, match="axis should be"):
        _choose_qparams_and_quantize_affine_hqq(w, axis=2)
    with pytest.raises(AssertionError, match="does not divide"):
        _choose_qparams_and_quantize_affine_hqq(w, group_size=100)
    assert _shrink_lp_op(torch.tensor([0.05, -2.0]), 10.0, 1).tolist() == [0.0, pytest.approx(-1.9)]


def test_hqq_writes_its_errors(w: torch.Tensor, capsys: pytest.CaptureFixture[str]) -> None:
    _choose_qparams_and_quantize_affine_hqq(w, verbose=True)
    assert "Iter 1 | Error: 0." in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_only_hqq(w: torch.Tensor, dtype: torch.dtype) -> None:
    w = w.to(dtype)
    w[3, :32] = 0
    codes, scale = _choose_qparams_and_quantize_scale_only_hqq(w, [1, 32], -8, 7)
    assert (codes.dtype, scale.dtype, scale.shape) == (torch.int32, dtype, (16, 8))
    assert (int(codes.min()), int(codes.max())) == (-8, 7)
    hqq = dequantize_affine(codes, (1, 32), scale, None, torch.int32)
    plain = choose_qparams_affine(w, MappingType.SYMMETRIC, (1, 32), torch.int8, -8, 7)
    rtn = quantize_affine(w, (1, 32), *plain, torch.int8, -8, 7)
    rtn = dequantize_affine(rtn, (1, 32), *plain, torch.int8, -8, 7)
    assert compute_error(w.float(), hqq) > compute_error(w.float(), rtn)
    assert (hqq[3, :32] == 0).all()
    up, _ = _choose_qparams_and_quantize_scale_only_hqq(w, [1, 32], -8, 7, stochastic=True)
    assert (up - codes).abs().max() <= 2


def test_scale_only_hqq_errors(w: torch.Tensor) -> None:
    for tensor, block, low, high in (
        (w[0], [1, 32], -8, 7), (w, [2, 32], -8, 7), (w, [32], -8, 7), (w, [1, 100], -8, 7), (w, [1, 32], 7, -8),
    ):  # fmt: skip
        with pytest.raises(AssertionError):
            _choose_qparams_and_quantize_scale_only_hqq(tensor, block, low, high)


def test_sinq(w: torch.Tensor) -> None:
    skewed = w * torch.linspace(0.2, 5, 64).repeat(4) * torch.linspace(0.5, 3, 16).unsqueeze(1)
    codes, row, col = _choose_qparams_and_quantize_scale_only_sinq(skewed, compute_dtype=torch.float32)
    assert (codes.dtype, row.shape, col.shape) == (torch.int8, (16, 4), (256,))
    sinq = codes * row.repeat_interleave(64, 1) * col
    plain = choose_qparams_affine(skewed, MappingType.SYMMETRIC, (1, 64), torch.int8, -8, 7)
    rtn = dequantize_affine(
        quantize_affine(skewed, (1, 64), *plain, torch.int8, -8, 7), (1, 64), *plain, torch.int8, -8, 7
    )
    assert compute_error(skewed, sinq) > compute_error(skewed, rtn) + 1
    with pytest.raises(AssertionError, match="must divide the last axis"):
        _choose_qparams_and_quantize_scale_only_sinq(w, group_size=60)


def test_qqq_errors(w: torch.Tensor) -> None:
    with pytest.raises(AssertionError, match="num_bits"):
        _choose_qparams_and_quantize_affine_qqq(w, 8, 128)
    with pytest.raises(AssertionError, match="groupsize"):
        _choose_qparams_and_quantize_affine_qqq(w, 4, 64)
