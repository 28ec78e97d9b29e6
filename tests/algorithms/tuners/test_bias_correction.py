"""Bias correction: the mean error of each layer's output goes to zero."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight import Int8DynamicActivationInt8WeightConfig, QuantSpec, SpecConfig, quantize_
from pennyweight.algorithms.rewrites.verify_rewrite import float_outputs, relative_difference
from pennyweight.algorithms.tuners.bias_correction import Bias, mean_errors
from pennyweight.core.formats import INT2, INT4
from tests.algorithms import models

W2 = SpecConfig(QuantSpec(INT2, (16,)))
W4 = SpecConfig(QuantSpec(INT4, (16,)))


def left(model: nn.Module, teacher: nn.Module, batches: Any) -> dict[str, float]:
    """Length of the mean error of each layer with a bias."""
    exact = dict(teacher.named_modules())
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and m.bias is not None}
    return {n: float(e.norm()) for n, e in mean_errors(model, layers, exact, batches).items()}


@pytest.mark.parametrize("family", ["Qwen2", "vit", "gpt2"])
def test_mean_errors_go_to_zero(family: str) -> None:
    model = {"vit": models.vit, "gpt2": models.gpt2}.get(family, lambda: models.decoder(family))()
    batches = models.images() if family == "vit" else models.ids()
    teacher, plain = copy.deepcopy(model), copy.deepcopy(model)
    quantize_(plain, W4)
    before = left(plain, teacher, batches)
    quantize_(model, W4, calibration=batches, algorithm=["nearest", {"bias": {"at_once": 1}}])
    after = left(model, teacher, batches)
    assert list(before) == list(after)
    assert all(after[n] < 1e-5 + 1e-4 * before[n] for n in after)
    assert all(torch.equal(a.codes, b.codes) for a, b in zip(_weights(model), _weights(plain), strict=True))


def _weights(model: nn.Module) -> list[Any]:
    return [p for p in model.parameters() if isinstance(p, pw.AffineQuantizedTensor)]


def test_outputs_are_nearer_at_two_bits() -> None:
    model, batches = models.shaken_mlp(nn.ReLU()), [torch.rand(64, 16) + 1 for _ in range(2)]  # inputs with a mean
    exact, plain = float_outputs(model, batches[0]), copy.deepcopy(model)
    quantize_(plain, W2)
    quantize_(model, W2, calibration=batches, algorithm="bias")
    assert relative_difference(exact, float_outputs(model, batches[0])) < 0.8 * relative_difference(
        exact, float_outputs(plain, batches[0])
    )


def test_a_correction_is_the_mean_error_of_the_weight() -> None:
    model, x = nn.Sequential(nn.Linear(16, 4)), torch.randn(50, 16) + 0.5
    w, b = model[0].weight.detach().clone(), model[0].bias.detach().clone()
    quantize_(model, W4, calibration=[x], algorithm="bias")
    off = w - model[0].weight.dequantize()  # type: ignore[operator]
    torch.testing.assert_close(model[0].bias, b + off @ x.mean(0), rtol=1e-4, atol=1e-6)


def test_layers_without_a_bias_get_one_only_if_asked() -> None:
    batches = models.ids()
    model, made = models.decoder("Llama"), models.decoder("Llama")
    report = quantize_(model, W4, calibration=batches, algorithm="bias")
    assert "no bias to correct" in next(r.note for r in report.rows if r.name == "lm_head.weight")
    assert all(m.bias is None for m in model.modules() if isinstance(m, nn.Linear))
    teacher = copy.deepcopy(made)
    report = quantize_(made, W4, calibration=batches, algorithm=["nearest", {"bias": {"create": True, "at_once": 1}}])
    assert "bias created and corrected" in next(r.note for r in report.rows if r.name == "lm_head.weight")
    assert max(left(made, teacher, batches).values()) < 1e-4
    assert set(made.state_dict()) - set(model.state_dict()) == {
        f"{n}.bias" for n, m in made.named_modules() if isinstance(m, nn.Linear)
    }


def test_after_rewrites_the_teacher_is_the_rewritten_model() -> None:
    model, batches = models.decoder("Qwen2"), models.ids()
    exact, plain = float_outputs(model, batches[0]), copy.deepcopy(model)
    config = Int8DynamicActivationInt8WeightConfig()
    quantize_(plain, config, calibration=batches, algorithm=["smooth", "rotate", "nearest"])
    quantize_(model, config, calibration=batches, algorithm=["smooth", "rotate", "nearest", "bias"])
    assert relative_difference(exact, float_outputs(model, batches[0])) < 1.1 * relative_difference(
        exact, float_outputs(plain, batches[0])
    )


def test_layers_without_data_and_padding() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.a(x)

    mask = torch.tensor([[1, 1, 0]])
    x = torch.randn(1, 3, 16)
    other = torch.cat([x[:, :2], torch.full((1, 1, 16), 99.0)], 1)
    models = [Half()]
    models.append(copy.deepcopy(models[0]))
    for model, data in zip(models, (x, other), strict=True):
        batch = {"x": data, "attention_mask": mask}
        report = quantize_(model, W4, calibration=[batch], algorithm="bias")
        assert "no calibration data" in next(r.note for r in report.rows if r.name == "b.weight")
    assert torch.equal(models[0].a.bias, models[1].a.bias)


def test_a_convolution_is_corrected_per_channel() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))
    batches = [torch.rand(2, 4, 5, 5)]
    teacher = copy.deepcopy(model)
    quantize_(model, SpecConfig(QuantSpec(INT4, (-1, -1, -1))), lambda m, n: isinstance(m, nn.Conv2d),
              calibration=batches, algorithm=["nearest", {"bias": {"at_once": 1}}])  # fmt: skip
    layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Conv2d)}
    errors = mean_errors(model, layers, dict(teacher.named_modules()), batches)
    assert {n: e.shape[0] for n, e in errors.items()} == {"0": 8, "2": 2}
    assert all(float(e.norm()) < 1e-5 for e in errors.values())


def test_saved_and_loaded(tmp_path: Any) -> None:
    model, batches = models.decoder("Qwen2"), models.ids()
    quantize_(model, W4, calibration=batches, algorithm=["gptq", "bias"])
    pw.save(model, tmp_path / "q")
    fresh = models.decoder("Qwen2")
    pw.load(tmp_path / "q", fresh)
    assert relative_difference(float_outputs(model, batches[0]), float_outputs(fresh, batches[0])) == 0


def test_an_option_without_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="bias: at_once must be at least 1, got 0"):
        Bias(at_once=0)
