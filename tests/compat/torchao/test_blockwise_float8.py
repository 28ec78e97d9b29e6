"""float8 with scales per block: casts, products, layers."""

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("torchao")
E4M3 = torch.float8_e4m3fn


def error(got: Tensor, told: Tensor) -> float:
    got, told = got.detach().float(), told.detach().float()
    return float((got - told).norm() / told.norm())


def spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    return scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)


@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
def test_casts_of_inference(dtype: torch.dtype) -> None:
    from torchao.kernel.blockwise_quantization import (
        fp8_blockwise_act_quant,
        fp8_blockwise_weight_dequant,
        fp8_blockwise_weight_quant,
    )

    x = torch.randn(2, 3, 64)
    codes, scale = fp8_blockwise_act_quant(x, 16, dtype)
    told = x.view(2, 3, 4, 16).abs().amax(-1) / 448
    assert torch.equal(scale, told)
    assert torch.equal(codes.float(), (x / scale.repeat_interleave(16, -1)).to(dtype).float())
    w = torch.randn(32, 48)
    codes, scale = fp8_blockwise_weight_quant(w, 16, dtype)
    assert torch.equal(scale, w.view(2, 16, 3, 16).abs().amax((1, 3)) / 448)
    assert torch.equal(codes.float(), (w / spread(scale, 16, 16)).to(dtype).float())
    assert torch.equal(fp8_blockwise_weight_dequant(codes, scale, 16), codes.float() * spread(scale, 16, 16))
    part = fp8_blockwise_weight_dequant(codes[:20, :40], scale, 16)  # incomplete blocks at the ends
    assert torch.equal(part, (codes.float() * spread(scale, 16, 16))[:20, :40])
    zeros, scale = fp8_blockwise_act_quant(torch.zeros(1, 16), 16)
    assert torch.equal(zeros.float() * scale, torch.zeros(1, 16))
    with pytest.raises(AssertionError, match=r"\[2, 3, 64\] must be divisible by block_size 48"):
        fp8_blockwise_act_quant(x, 48)
    with pytest.raises(AssertionError, match=r"got torch\.bfloat16"):
        fp8_blockwise_act_quant(x, 16, torch.bfloat16)


def test_products_of_inference() -> None:
    from torchao.prototype.blockwise_fp8_inference import (
        BlockwiseQuantLinear,
        blockwise_fp8_gemm,
        fp8_blockwise_act_quant,
        fp8_blockwise_weight_quant,
    )

    x, w = torch.randn(2, 5, 256), torch.randn(128, 256)
    a, a_s = fp8_blockwise_act_quant(x)
    b, b_s = fp8_blockwise_weight_quant(w)
    y = blockwise_fp8_gemm(a, a_s, b, b_s)
    told = (a.float() * a_s.repeat_interleave(128, -1)) @ (b.float() * spread(b_s, 128, 128)).t()
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, told.bfloat16())
    assert error(y, x @ w.t()) < 0.06
    narrow = blockwise_fp8_gemm(a, a_s, b[:100], b_s)  # an incomplete block
    assert torch.equal(narrow, y[..., :100])
    layer = BlockwiseQuantLinear(256, 100, bias=True)
    assert {k: tuple(v.shape) for k, v in layer.state_dict().items()} == {
        "weight": (100, 256), "scale": (1, 2), "bias": (100,)
    }  # fmt: skip
    layer.load_state_dict({"weight": b[:100], "scale": b_s, "bias": torch.ones(100)})
    assert torch.equal(layer(x), narrow + 1)
    assert layer.weight.scale is layer.scale
    with pytest.raises(AssertionError, match="Unsupported dtype"):
        BlockwiseQuantLinear(16, 16, dtype=torch.int8)


def test_reference_casts_of_training() -> None:
    from torchao.prototype.blockwise_fp8_training.kernels import (
        torch_blockwise_scale_act_quant_lhs,
        torch_blockwise_scale_act_quant_rhs,
        torch_blockwise_scale_weight_quant,
    )

    x = torch.randn(64, 96).bfloat16()
    for cast, sizes, shape in (
        (torch_blockwise_scale_act_quant_lhs, (1, 32), (64, 3)),
        (torch_blockwise_scale_act_quant_rhs, (32, 1), (2, 96)),
        (torch_blockwise_scale_weight_quant, (32, 32), (2, 3)),
    ):
        codes, scale = cast(x, 32)
        tiles = x.float().view(64 // sizes[0], sizes[0], 96 // sizes[1], sizes[1])
        factor = (448 / tiles.abs().amax((1, 3)).double()).float()
        assert tuple(scale.shape) == shape
        assert torch.equal(scale, 1 / factor)
        assert torch.equal(codes.float(), (x.float() * spread(factor, *sizes)).clamp(-448, 448).to(E4M3).float())
    assert torch_blockwise_scale_act_quant_rhs(x, 32)[0].stride() == (1, 64)
    assert torch_blockwise_scale_act_quant_lhs(x, 32)[1].stride() == (1, 64)
    with pytest.raises(AssertionError, match="contiguous"):
        torch_blockwise_scale_weight_quant(x.t(), 32)


def test_training() -> None:
    from torchao.prototype.blockwise_fp8_training.linear import (
        Float8BlockwiseLinear,
        Float8BlockwiseLinearConfig,
        fp8_blockwise_mm,
    )
    from torchao.quantization import quantize_

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.ReLU(), nn.Linear(256, 64)).bfloat16()
    weights = [model[0].weight, model[2].weight]
    x = torch.randn(4, 8, 128).bfloat16()
    plain = model(x)
    quantize_(model, Float8BlockwiseLinearConfig())
    assert [type(m) for m in model] == [Float8BlockwiseLinear, nn.ReLU, Float8BlockwiseLinear]
    assert [model[0].weight, model[2].weight] == weights
    assert 0.01 < error(model(x), plain) < 0.1
    a, b = x.clone().requires_grad_(), weights[0].detach().clone().requires_grad_()
    y = fp8_blockwise_mm.apply(a, b, 128, torch.bfloat16)
    assert torch.equal(y, model[0](x))
    g = torch.randn_like(y)
    y.backward(g)
    assert error(a.grad, g @ b) < 0.06
    assert error(b.grad, g.flatten(0, 1).t() @ x.flatten(0, 1)) < 0.06
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(15):
        loss = (model(x) - x[..., :64]).float().square().mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.5 * losses[0]
    with pytest.raises(AssertionError, match="Unsupported dtype"):
        Float8BlockwiseLinear(16, 16, dtype=torch.float32)
