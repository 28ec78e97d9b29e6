"""Products of 16-bit dtypes that the processor has no instructions for: computed in float32, rounded once."""

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.algorithms.calibration import float32_products
from pennyweight.algorithms.calibration.float32_products import products_in_float32, run_batch
from pennyweight.algorithms.calibration.input_hooks import InputHooks


@pytest.fixture(params=[torch.bfloat16, torch.float16])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """A dtype that the processor is said to have no instructions for."""
    monkeypatch.setattr(float32_products, "slow_dtypes", lambda: frozenset({request.param}))
    dtype: torch.dtype = request.param
    return dtype


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2)) + torch.bmm(x, x.mT) @ x


def test_values_and_gradients_are_those_of_the_dtype_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Attention().to(dtype), torch.randn(2, 40, 32).to(dtype).requires_grad_()
    exact = Attention().double()
    exact.load_state_dict(model.state_dict())
    wide = x.detach().double().requires_grad_()
    wanted = exact(wide)
    (grad_wanted,) = torch.autograd.grad(wanted.square().sum(), wide)

    def errors() -> tuple[float, float]:
        got = model(x)
        assert got.dtype is dtype
        (grad,) = torch.autograd.grad(got.square().sum(), x)
        assert grad.dtype is dtype
        off, far = (got.detach() - wanted.detach()).norm(), (grad - grad_wanted).norm()
        return float(off / wanted.detach().norm()), float(far / grad_wanted.norm())

    plain = errors()
    with products_in_float32(model.parameters()):
        ours = errors()
    assert all(a <= 1.2 * b for a, b in zip(ours, plain, strict=True))


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_of_transformers_is_calibrated(padded: bool, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(dtype)
    batch = {"input_ids": torch.randint(128, (2, 40)), "attention_mask": torch.ones(2, 40, dtype=torch.long)}
    batch["attention_mask"][0, :7] = 0 if padded else 1
    with torch.no_grad():
        plain, ours = model(**batch).logits, run_batch(model, batch).logits
    assert ours.dtype is dtype
    torch.testing.assert_close(
        ours[batch["attention_mask"] > 0], plain[batch["attention_mask"] > 0], rtol=0.1, atol=0.02
    )
    report = pw.quantize_(model, pw.Int4WeightOnlyConfig(group_size=32), calibration=[batch] * 2, algorithm="gptq")
    assert all(row.error is not None and row.error < 1 for row in report.quantized)


def test_a_compiled_layer_is_calibrated(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).to(dtype)
    whole = nn.Sequential(torch.compile(model, backend="eager"), nn.Linear(64, 32).to(dtype))
    x = torch.randn(40, 64).to(dtype)
    with torch.no_grad():
        torch.testing.assert_close(run_batch(whole, x), whole(x), rtol=0.1, atol=0.02)


def test_a_product_is_that_of_float32(dtype: torch.dtype) -> None:
    layer, x = nn.Linear(64, 48).to(dtype), torch.randn(33, 64).to(dtype)
    assert layer.bias is not None
    want = nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float()).to(dtype)
    assert torch.equal(run_batch(layer, x), want)
    few, other = x[:31], nn.Linear(64, 48)
    assert torch.equal(run_batch(layer, few), layer(few))  # converting the weight would take longer
    assert torch.equal(run_batch(other, x.float()), other(x.float()))
    with pytest.raises(ValueError, match="pass inputs of that kind"):
        run_batch(layer, x.float())


def test_modes_that_watch_weights_see_the_model_s_own(dtype: torch.dtype) -> None:
    layer, x, seen = nn.Linear(64, 48).to(dtype), torch.randn(40, 64).to(dtype), []
    with InputHooks({id(layer.weight): "w"}, lambda name, x: seen.append((name, x.shape))):
        run_batch(layer, x)
    assert seen == [("w", (1, 40, 64))]


def test_quantized_weights_keep_their_kernels(dtype: torch.dtype) -> None:
    model, x = nn.Sequential(nn.Linear(64, 48)).to(dtype), torch.randn(40, 64).to(dtype)
    pw.quantize_(model, pw.Int8WeightOnlyConfig())
    with torch.no_grad():
        assert torch.equal(run_batch(model, x), model(x))


def test_nothing_is_converted_where_it_is_not_needed() -> None:
    assert float32_products.slow_dtypes() <= {torch.bfloat16, torch.float16}
    with products_in_float32(nn.Linear(4, 4).parameters()) as mode:
        assert mode is None
