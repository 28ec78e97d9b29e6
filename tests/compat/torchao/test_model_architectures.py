"""torchao.testing.model_architectures: the models compute what they say."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pennyweight as pw
from pennyweight.compat.torchao import model_architectures as models


@pytest.mark.parametrize("bias", [False, True])
def test_toy_models(bias: bool) -> None:
    one = models.ToySingleLinearModel(8, 4, torch.float64, "cpu", has_bias=bias)
    two = models.ToyTwoLinearModel(8, 6, 4, dtype=torch.float64, device="cpu", has_bias=bias)
    (x,) = two.example_inputs(batch_size=3)
    assert (x.shape, x.dtype) == ((3, 8), torch.float64)
    assert torch.equal(one(x), F.linear(x, one.linear1.weight, one.linear1.bias))
    assert torch.equal(two(x), two.linear2(two.linear1(x)))
    assert (one.linear1.bias is None) != bias
    assert [name for name, _ in two.named_modules()] == ["", "linear1", "linear2"]
    old = models.ToyLinearModel()
    assert (old.linear1.weight.shape, old.linear1.weight.dtype) == ((32, 64), torch.bfloat16)
    assert old.example_inputs()[0].shape == (1, 64)


def test_shared_convolution() -> None:
    model = models.ConvWithSharedWeightInExportedModel(2, 3, 5).eval()
    x = torch.randn(2, 6, 7, 7)
    want = [F.relu(model.bn(model.conv(part))) for part in (x[:, :3], x[:, 3:])]
    assert torch.equal(model(x), torch.cat(want, 1))


@pytest.mark.parametrize("activation", models.ACTIVATIONS)
def test_ln_linear(activation: str) -> None:
    model = models.LNLinearActivationModel(8, 4, torch.float32, activation=activation.upper())
    x = torch.randn(3, 8)
    want = models.ACTIVATIONS[activation]()(F.layer_norm(x, (8,)) @ model.fc.weight.t())
    torch.testing.assert_close(model(x), want)
    with pytest.raises(ValueError, match="unknown activation 'tanh'; it is one of gelu"):
        models.LNLinearActivationModel(8, 4, activation="tanh")


def test_rms_norm() -> None:
    norm, x = models.RMSNorm(8), torch.randn(3, 8)
    with torch.no_grad():
        norm.weight.uniform_()
    torch.testing.assert_close(norm(x), F.rms_norm(x, (8,), norm.weight, 1e-5))
    half = norm.bfloat16()(x.bfloat16())
    assert half.dtype is torch.bfloat16


def test_transformer_block() -> None:
    block, x = models.TransformerBlock(32, num_heads=4, mlp_ratio=2, dtype=torch.float32), torch.randn(2, 5, 32)
    y = x + block.proj(attention(block, block.norm1(x)))
    want = y + block.mlp_fc2(F.gelu(block.mlp_fc1(block.norm2(y))))
    torch.testing.assert_close(block(x), want)
    assert block.mlp_fc1.weight.shape == (64, 32)


def attention(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Head by head."""
    out = []
    for sample in x:
        q, k, v = block.qkv(sample).chunk(3, dim=-1)
        heads = [
            torch.softmax(q[:, h] @ k[:, h].t() / 8**0.5, -1) @ v[:, h]
            for h in (slice(8 * i, 8 * i + 8) for i in range(4))
        ]
        out.append(torch.cat(heads, -1))
    return torch.stack(out)


def test_experts() -> None:
    moe = models.LlamaModelsLlama4Experts(2, 8, 6, torch.float32, "cpu")
    x = torch.randn(4, 5, 8)
    rows = x.reshape(2, 10, 8)
    want = [(F.silu(r @ a) * (r @ c)) @ b for r, a, b, c in zip(rows, moe.w1, moe.w2, moe.w3, strict=True)]
    torch.testing.assert_close(moe(x), torch.cat(want))


@pytest.mark.parametrize(
    ("model_type", "cls", "shape"),
    [
        ("linear", models.ToySingleLinearModel, (3, 24)),
        ("ln_linear", models.LNLinearActivationModel, (3, 24)),
        ("ln_linear_gelu", models.LNLinearActivationModel, (3, 24)),
        ("transformer_block", models.TransformerBlock, (3, 16, 32)),
    ],
)
def test_create_model_and_input_data(model_type: str, cls: type, shape: tuple[int, ...]) -> None:
    model, x = models.create_model_and_input_data(model_type, 3, 32, 24, torch.float32, device="cpu")
    assert type(model) is cls
    assert model(x).shape == shape
    if "ln_linear" in model_type:
        assert type(model.activation) is (nn.GELU if model_type.endswith("gelu") else nn.ReLU)
    model, x = models.create_model_and_input_data(model_type, 3, 32, 24)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert (x.dtype, x.device.type) == (torch.bfloat16, device)
    pw.quantize_(model, pw.Int8WeightOnlyConfig())
    assert model(x).dtype is torch.bfloat16


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown model type 'conv'"):
        models.create_model_and_input_data("conv", 1, 8, 8)
    model, _ = models.create_model_and_input_data("ln_linear", 1, 8, 8, device="cpu", activation="silu")
    assert type(model.activation) is nn.SiLU
