"""Every kind of module: prepared it computes what will be deployed, and stays the module that it was."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pennyweight as pw
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.training import FakeQuantizedLinear, remove_fake_quant
from pennyweight.training.qat.modules import fake_modules
from tests.training.modules import KINDS, Attention, encoder

W4 = pw.Int4WeightOnlyConfig(group_size=32)
A8 = pw.Int8DynamicActivationInt8WeightConfig()
STATIC = pw.Int8StaticActivationInt8WeightConfig(0.02)
CONFIGS = {"w4": W4, "a8": A8, "static": STATIC}


def run(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)


def train(model: nn.Module, x: Tensor, steps: int = 2, rate: float = 1e-2) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)
    for _ in range(steps):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def everything(module: nn.Module, fqn: str) -> bool:
    return True


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_prepared_trained_copied_saved_converted(kind: str, config: str) -> None:
    make, shape, whole = KINDS[kind]
    model = make()
    x = torch.randint(50, (2, 7)) if shape is None else torch.randn(shape)
    chosen: pw.AOBaseConfig = CONFIGS[config]
    if kind == "experts":
        chosen = pw.FqnToConfig({"w": W4, "linear": chosen})
    pick = everything if whole else None
    deployed, identity = copy.deepcopy(model), {n: id(p) for n, p in model.named_parameters()}
    state, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    pw.quantize_(deployed, chosen, pick)
    report = pw.quantize_(model, pw.QATConfig(chosen), pick)
    assert report.verb == "prepared"
    assert report.quantized
    assert list(model.state_dict()) == state
    assert {n: id(p) for n, p in model.named_parameters()} == identity
    for mode in (True, False):
        assert torch.equal(run(model.train(mode), x), run(deployed.train(mode), x))
    train(model.train(), x)
    model.eval()
    y = run(model, x)
    assert not torch.equal(y, run(deployed.eval(), x))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(run(twin, x), y)
        assert [type(m) for m in twin.modules()] == [type(m) for m in model.modules()]
    fresh = make()
    pw.quantize_(fresh, pw.QATConfig(chosen), pick)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(run(fresh.eval(), x), y)
    pw.quantize_(model, pw.QATConfig(step="convert"))
    assert torch.equal(run(model, x), y)
    assert [type(m) for m in model.modules()] == classes
    assert list(model.state_dict()) == state
    quantized = {n for n, p in model.named_parameters() if isinstance(p, AffineQuantizedTensor)}
    assert quantized == {n for n, p in deployed.named_parameters() if isinstance(p, AffineQuantizedTensor)}
    if kind.startswith("tied"):
        assert model[0].weight is model[1].weight
    if kind == "encoder":
        assert model.layers[0].activation_relu_or_gelu == 1
        assert model.use_nested_tensor


def test_fused_attention_does_not_go_past_the_quantized_weights() -> None:
    """torch's fast paths read weights off modules whose forward never runs."""
    model, x = encoder().eval(), torch.randn(2, 5, 64)
    deployed = copy.deepcopy(model)
    exact = run(model, x)
    pw.quantize_(deployed, W4)
    pw.quantize_(model, pw.QATConfig(W4))
    assert not torch.equal(run(model, x), exact)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        got, expected = model(x, src_key_padding_mask=mask), deployed(x, src_key_padding_mask=mask)
    kept = ~mask
    assert torch.equal(got[kept], expected[kept])


def test_attention_whose_output_layer_alone_is_asked_for() -> None:
    model, x = Attention(), torch.randn(2, 5, 64)
    deployed = copy.deepcopy(model)
    chosen = pw.FqnToConfig({"attention.out_proj": W4})
    pw.quantize_(deployed, chosen)
    pw.quantize_(model, pw.QATConfig(chosen))
    assert torch.equal(run(model, x), run(deployed, x))
    model(x).sum().backward()
    assert model.attention.out_proj.weight.grad.abs().sum() > 0
    pw.quantize_(model, pw.QATConfig(step="convert"))
    assert type(model.attention) is nn.MultiheadAttention
    assert torch.equal(run(model, x), run(deployed, x))


@pytest.mark.parametrize("config", CONFIGS)
def test_autocast(config: str) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(3, 64)
    deployed = copy.deepcopy(model)
    pw.quantize_(deployed, CONFIGS[config])
    pw.quantize_(model, pw.QATConfig(CONFIGS[config]))
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x)
        assert torch.equal(y, deployed(x))
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert model[0].weight.grad.dtype == torch.float32
    assert model[0].weight.grad.abs().sum() > 0


def test_gradient_checkpointing() -> None:
    model, x = nn.Linear(64, 64), torch.randn(3, 64, requires_grad=True)
    pw.quantize_(model, pw.QATConfig(A8, learn="all"))
    grads = []
    for forward in (model, lambda x: checkpoint(model, x, use_reentrant=False)):
        forward(x).square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert len(grads[0]) == 3


@pytest.mark.parametrize(
    ("config", "learn"),
    [
        (W4, "all"), (A8, "none"), pytest.param(STATIC, "all", marks=pytest.mark.exhaustive),
        pytest.param(pw.NVFP4WeightOnlyConfig(), "none", marks=pytest.mark.exhaustive),
    ],
    ids=str,
)  # fmt: skip
def test_a_compiled_model_has_the_same_values_and_gradients(config: pw.AOBaseConfig, learn: str) -> None:
    """Compiled, products are those of float kernels on the same numbers: equal up to the order of sums."""
    model, x = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)), torch.randn(3, 64)
    pw.quantize_(model, pw.QATConfig(config, learn=learn))
    eager = copy.deepcopy(model)
    y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    y.square().sum().backward()
    expected = eager(x)
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    for (name, p), q in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-4, msg=name)
    torch._dynamo.reset()


def test_a_module_of_another_dtype_keeps_what_is_held() -> None:
    model = nn.Sequential(nn.Linear(64, 32))
    pw.quantize_(model, pw.QATConfig(W4, learn="scale"))
    scale = model[0].weight_scale
    model.half()
    assert model[0].weight.dtype == torch.float16
    assert model[0].weight_scale is scale
    assert model[0].weight_scale.dtype == torch.float32
    assert model[0].weight_offset.dtype == torch.float32
    assert model(torch.randn(2, 64).half()).dtype == torch.float16


def test_switching_off_and_on() -> None:
    model, x = nn.Sequential(nn.Linear(64, 32)), torch.randn(2, 64)
    exact = run(model, x)
    with pytest.raises(ValueError, match="no prepared module"):
        pw.training.enable_fake_quant(model)
    pw.quantize_(model, pw.QATConfig(W4))
    rounded = run(model, x)
    pw.training.enable_fake_quant(model, False)
    assert torch.equal(run(model, x), exact)
    pw.training.enable_fake_quant(model)
    assert torch.equal(run(model, x), rounded)
    assert isinstance(model[0], FakeQuantizedLinear)
    assert "fake-quantized weight=uint4" in repr(model)
    remove_fake_quant(model)
    assert torch.equal(run(model, x), exact)
    assert not fake_modules(model)
    with pytest.raises(ValueError, match="no prepared module"):
        remove_fake_quant(model)
