"""Every config, prepared for training: what is trained is what will be deployed, bit for bit; gradients go through."""

import copy

import pytest
import torch

import pennyweight as pw
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.kernels.activation import quantize_activation
from tests.every.test_configs import CASES, build, small, weights

every = pytest.mark.parametrize("text", CASES)


def step(model: torch.nn.Module, x: torch.Tensor, rate: float = 1e-3) -> None:
    optimizer = torch.optim.Adam(model.parameters(), rate)
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("learn", ["none", "all"])
@every
def test_fake_quantization_is_deployment_bit_for_bit(text: str, learn: str) -> None:
    model, x = small(), torch.randn(11, 96)
    deployed, names = copy.deepcopy(model), list(model.state_dict())
    pw.quantize_(deployed, build(text))
    parameters = [model[0].weight, model[2].weight]
    pw.quantize_(model, pw.QATConfig(build(text), learn=learn))
    assert [n for n in model.state_dict() if n in names] == names
    assert model[0].weight is parameters[0]
    assert torch.equal(model(x), deployed(x))
    for _ in range(2):
        step(model, x)
    trained = model(x)
    pw.quantize_(model, pw.QATConfig(build(text), step="convert"))
    assert [name for name, _ in weights(model)] == ["0.weight", "2.weight"]
    assert list(model.state_dict()) == names
    assert type(model[0]) is torch.nn.Linear
    assert torch.equal(model(x), trained)
    assert not torch.equal(model(x), deployed(x))
    for (_, w), (_, before) in zip(weights(model), weights(deployed), strict=True):
        assert (w.spec, w.act, w.shape, w.dtype) == (before.spec, before.act, before.shape, before.dtype)


@every
def test_gradients_are_straight_through(text: str) -> None:
    model, x, grad = small()[0], torch.randn(7, 96, requires_grad=True), torch.randn(7, 64)
    deployed = copy.deepcopy(model)
    config = build(text)
    if isinstance(config, pw.FqnToConfig):
        config = config.fqn_to_config["0"]
    pw.quantize_(deployed, config)
    pw.quantize_(model, pw.QATConfig(config))
    model(x).backward(grad)
    w = deployed.weight
    assert isinstance(w, AffineQuantizedTensor)
    seen = quantize_activation(x.detach(), w.act, w.act_scale, w.act_zero_point)
    static = w.act is not None and w.act.has_fixed_range
    inside = _within(x.detach(), w) if static else torch.ones_like(x)
    torch.testing.assert_close(x.grad, grad @ w.dequantize() * inside)
    torch.testing.assert_close(model.weight.grad, grad.t() @ seen)
    torch.testing.assert_close(model.bias.grad, grad.sum(0))


def _within(x: torch.Tensor, w: AffineQuantizedTensor) -> torch.Tensor:
    f, zero = w.act.spec.format, 0.0 if w.act_zero_point is None else w.act_zero_point.float()
    u, half = x / w.act_scale + zero, 0.5 if f.kind == "int" else 0.0
    return ((u >= f.lo - half) & (u <= f.hi + half)).float()
