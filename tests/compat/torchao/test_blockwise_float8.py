"""Float8 in blocks of 128: the formulas of torchao's kernels."""

from types import ModuleType

import pytest
import torch


def test_inputs(torchao: ModuleType) -> None:
    from torchao.kernel.blockwise_quantization import fp8_blockwise_act_quant

    x = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    x[1, 2, :32] = 0
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        codes, scale = fp8_blockwise_act_quant(x, 32, dtype)
        blocks = x.float().reshape(2, 3, 2, 32)
        assert torch.equal(scale, (blocks.abs().amax(-1) / 448).clamp(min=torch.finfo(torch.float32).tiny))
        divided = blocks / scale[..., None]
        assert torch.equal(codes.float(), divided.reshape(x.shape).to(dtype).float())
        assert codes.dtype is dtype


def test_weights_there_and_back(torchao: ModuleType) -> None:
    from torchao.kernel.blockwise_quantization import fp8_blockwise_weight_dequant, fp8_blockwise_weight_quant

    w = torch.randn(64, 96)
    codes, scale = fp8_blockwise_weight_quant(w, 32)
    tiles = w.reshape(2, 32, 3, 32)
    assert torch.equal(scale, tiles.abs().amax((1, 3)) / 448)
    back = fp8_blockwise_weight_dequant(codes, scale, 32)
    assert torch.equal(back, (codes.float().reshape(2, 32, 3, 32) * scale[:, None, :, None]).reshape(64, 96))
    assert (back - w).abs().max() <= 2**-4 * w.abs().max()
    ends = fp8_blockwise_weight_dequant(codes[:50, :70].contiguous(), scale, 32)  # blocks at the ends are smaller
    assert torch.equal(ends, back[:50, :70])


def test_products(torchao: ModuleType) -> None:
    from torchao.kernel.blockwise_quantization import (
        blockwise_fp8_gemm,
        fp8_blockwise_act_quant,
        fp8_blockwise_weight_quant,
    )

    a, a_s = fp8_blockwise_act_quant(torch.randn(2, 5, 64), 32)
    b, b_s = fp8_blockwise_weight_quant(torch.randn(96, 64), 32)
    want = torch.zeros(2, 5, 96)
    for k in range(2):
        part = a[..., 32 * k : 32 * k + 32].float() @ b[:, 32 * k : 32 * k + 32].float().T
        want += part * a_s[..., k, None] * b_s[:, k].repeat_interleave(32)
    got = blockwise_fp8_gemm(a, a_s, b, b_s, 32)
    assert got.dtype is torch.bfloat16
    assert (got.float() - want).abs().max() <= 2**-8 * want.abs().max()


def test_wrong_arguments(torchao: ModuleType) -> None:
    from torchao.kernel.blockwise_quantization import fp8_blockwise_act_quant, fp8_blockwise_weight_quant

    with pytest.raises(AssertionError, match=r"blocks \[1, 32\] must divide the shape \[3, 40\]"):
        fp8_blockwise_act_quant(torch.randn(3, 40), 32)
    with pytest.raises(AssertionError, match="contiguous"):
        fp8_blockwise_act_quant(torch.randn(32, 32).T, 32)
    with pytest.raises(AssertionError, match="dtype must be"):
        fp8_blockwise_act_quant(torch.randn(32, 32), 32, torch.float16)
    with pytest.raises(AssertionError, match="2 dimensions"):
        fp8_blockwise_weight_quant(torch.randn(2, 32, 32), 32)
