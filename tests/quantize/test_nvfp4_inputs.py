"""NVFP4 inputs: block scales per call, under a scale per tensor that is chosen per call or stored."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pennyweight as pw
from pennyweight.core.formats import E2M1, E4M3
from pennyweight.core.numerics import fake_quantize, quantize_under, sqnr
from pennyweight.core.spec import NVFP4, ActivationSpec, QuantSpec
from pennyweight.kernels.activation import encode_activation, quantize_activation

CONFIG = pw.NVFP4DynamicActivationNVFP4WeightConfig


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32))


@torch.no_grad()
def test_dynamic_is_the_product_of_both_quantized() -> None:
    m, x = model(), torch.randn(5, 64)
    pw.quantize_(m, CONFIG())
    w = m[0].weight
    assert torch.equal(m(x), F.linear(fake_quantize(x, NVFP4), w.dequantize(), m[0].bias))
    assert "inputs nvfp4" in str(m)
    pw.quantize_(m, pw.NVFP4WeightOnlyConfig())  # the same weight
    assert torch.equal(m[0].weight.dequantize(), w.dequantize())


@torch.no_grad()
def test_under_a_stored_scale_a_row_does_not_depend_on_its_batch() -> None:
    """By hand: the block's scale is e4m3(absmax / 6 / s) * s, saturating at 448 s."""
    m, x = model(), torch.randn(6, 64)
    x[3] *= 50  # beyond the calibrated range
    s = 3.0 / (6 * 448)
    pw.quantize_(m, CONFIG(act_scale=s))
    w = m[0].weight
    assert w.act.mode == "static"
    assert float(w.act_scale) == pytest.approx(s)
    view = x.view(6, 4, 16)
    block = view.abs().amax(-1, keepdim=True) / 6
    inner = (block / torch.tensor(s)).clamp(max=448).to(torch.float8_e4m3fn).float() * torch.tensor(s)
    codes = E2M1.decode(E2M1.encode(view / inner))
    want = (codes * inner).view(6, 64)
    assert torch.equal(quantize_activation(x, w.act, w.act_scale, None), want)
    assert float(want[3].abs().max()) == pytest.approx(3.0, rel=1e-6)  # saturated
    assert torch.equal(quantize_activation(x[:1], w.act, w.act_scale, None), want[:1])
    assert torch.equal(m(x), F.linear(want, w.dequantize(), m[0].bias))
    parts = encode_activation(x, w.act, w.act_scale, None)
    assert parts.scale.codes.dtype is torch.float8_e4m3fn
    assert parts.codes.shape == (6, 64)


@torch.no_grad()
def test_odd_sizes_and_zero_blocks() -> None:
    x = torch.randn(3, 37)
    x[1] = 0
    parts = quantize_under(x, NVFP4, torch.full((1, 1), 0.001))
    assert parts.codes.shape == (3, 48)
    act = ActivationSpec(NVFP4, "static")
    y = quantize_activation(x, act, torch.tensor([0.001]), None)
    assert y.shape == x.shape
    assert not y[1].any()
    assert y.isfinite().all()


@torch.no_grad()
def test_calibrated() -> None:
    m = model()
    data = [torch.randn(8, 64) for _ in range(4)]
    config = pw.calibrate(m, data, CONFIG)
    (layer,) = config.fqn_to_config.values()
    top = float(torch.cat(data).abs().max())
    assert layer.act_scale == pytest.approx(top / (6 * 448), rel=1e-3)
    pw.quantize_(m, config)
    exact = model()(data[0])
    assert sqnr(exact, m(data[0])) > 13


@torch.no_grad()
def test_saved(tmp_path) -> None:
    m, x = model(), torch.randn(4, 64)
    pw.quantize_(m, CONFIG(act_scale=0.002))
    pw.save(m, tmp_path / "m")
    again = model()
    again.load_state_dict(pw.load(tmp_path / "m"), assign=True)
    assert torch.equal(again(x), m(x))
    assert again[0].weight.act == m[0].weight.act
    assert torch.equal(torch.export.export(m, (x,)).module()(x), m(x))


def test_trained() -> None:
    m, x = model(), torch.randn(5, 64, requires_grad=True)
    config = CONFIG(act_scale=0.002)
    pw.quantize_(m, pw.QATConfig(config))
    y = m(x)
    y.sum().backward()
    assert x.grad is not None
    assert m[0].weight.grad is not None
    pw.quantize_(m, pw.QATConfig(config, step="convert"))
    assert torch.equal(m(x), y)


def test_static_needs_one_number_above() -> None:
    alone = QuantSpec(E2M1, (16,), scale=QuantSpec(E4M3, (1,), scale=None))
    with pytest.raises(ValueError, match=r'the scale of the scales.*Use mode "dynamic"'):
        ActivationSpec(alone, "static")
    with pytest.raises(ValueError, match="act_scale must be a positive number"):
        CONFIG(act_scale=float("inf"))
    assert pw.AOBaseConfig.from_json(CONFIG(act_scale=0.5).to_json()) == CONFIG(act_scale=0.5)
