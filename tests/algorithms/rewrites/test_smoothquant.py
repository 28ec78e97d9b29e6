"""SmoothQuant: the same function, less error of quantized activations."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight import Int8DynamicActivationInt8WeightConfig, Int8StaticActivationInt8WeightConfig, quantize_
from pennyweight.algorithms.rewrites.equalization import find_pairs
from pennyweight.algorithms.rewrites.graph import Matrix
from pennyweight.algorithms.rewrites.scale_search import collect_inputs, group_error, normalize_scales
from pennyweight.algorithms.rewrites.smoothquant import Smooth
from pennyweight.algorithms.rewrites.verify_rewrite import TOLERANCE, float_outputs, relative_difference
from pennyweight.core.formats import INT8
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.planning.config_resolution import PlanError
from pennyweight.planning.scheme import Scheme
from tests.algorithms import models

W8A8 = Scheme(QuantSpec(INT8, (-1,)), ActivationSpec(QuantSpec(INT8, (-1,))))


def target(model: nn.Module, scheme: Scheme | None = W8A8) -> dict[str, Scheme | None]:
    return {f"{n}.weight": scheme for n, m in model.named_modules() if isinstance(m, nn.Linear)}


def error(model: nn.Module, algorithm: Any, batches: Any) -> float:
    exact = float_outputs(model, batches[0])
    quantized = copy.deepcopy(model)
    quantize_(quantized, Int8DynamicActivationInt8WeightConfig(), calibration=batches, algorithm=algorithm)
    return relative_difference(exact, float_outputs(quantized, batches[0]))


@pytest.mark.parametrize("alpha", ["search", 0.0, 0.5, 1.0])
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
def test_it_keeps_function_and_names(family: str, alpha: float | str) -> None:
    model, batches = models.decoder(family), models.ids()
    reference, before = float_outputs(model, batches[0]), models.state(model)
    notes = Smooth(alpha=alpha, held_out=0).apply(model, target(model), batches)
    assert relative_difference(reference, float_outputs(model, batches[0])) < TOLERANCE
    assert list(model.state_dict()) == list(before)
    assert not models.same_state(model, before)
    assert "with model.layers.0.input_layernorm" in notes["model.layers.0.self_attn.q_proj.weight"]
    assert notes["model.layers.0.self_attn.q_proj.weight"] == notes["model.layers.0.self_attn.k_proj.weight"]


@pytest.mark.parametrize("make", [models.vit, models.gpt2, models.bert], ids=["vit", "gpt2", "bert"])
def test_other_families_keep_their_function(make: Any) -> None:
    model = make()
    batches = models.images() if make is models.vit else models.ids()
    reference = float_outputs(model, batches[0])
    schemes: dict[str, Scheme | None] = {n: W8A8 for n, p in model.named_parameters() if p.ndim == 2}
    notes = Smooth(alpha=0.5, held_out=0).apply(model, schemes, batches)
    assert relative_difference(reference, float_outputs(model, batches[0])) < TOLERANCE
    assert any(text.startswith("smooth alpha=0.5") for text in notes.values())
    assert any("not scaled by smooth" in text for text in notes.values())


def test_scales_are_the_papers() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    x = torch.randn(50, 8) * torch.tensor([1, 1, 20.0, 1, 1, 1, 1, 1])
    with torch.no_grad():
        model[0].weight[3] = 7.0  # type: ignore[index]
        seen, w = model[0](x).abs().amax(0).double(), model[1].weight.detach().double()
    Smooth(alpha=0.7, held_out=0).apply(model, {"1.weight": None}, [x])
    s = seen**0.7 / w.abs().amax(0) ** 0.3
    s = s / s.log().mean().exp()
    torch.testing.assert_close(model[1].weight.double(), w * s, rtol=1e-6, atol=0.0)


def test_outlier_channels_cost_less_than_a_fifth() -> None:
    model, batches = models.planted(models.decoder("Llama"), size=150.0), models.ids()
    assert error(model, "smooth", batches) < error(model, "nearest", batches) / 5


def test_search_is_no_worse_than_any_alpha_nor_than_nothing() -> None:
    model, batches = models.planted(models.decoder("Llama")), models.ids()
    for pair in find_pairs(model, batches[0]).pairs:
        seen = collect_inputs(model, [pair], batches, 64)[0]
        goal, step = target(model), Smooth()
        weights = torch.stack([r.view.double().abs().amax(0) for r in pair.readers]).amax(0)

        def err(s: torch.Tensor, pair: Any = pair, seen: Any = seen, goal: Any = goal) -> float:
            return group_error(pair.readers, seen.tokens, pair.scale_of_readers(normalize_scales(s)), goal)

        found = err(step._choose(pair, seen, goal)[1])
        assert found <= min(err(s) for _, s in step.candidates(pair, seen, weights))
        assert found <= err(torch.ones(pair.writer.width, dtype=torch.float64))


def test_group_error_is_of_weights_and_inputs_as_they_will_be() -> None:
    model, batches = models.decoder("Llama"), models.ids(1)
    layer = model.model.layers[0].self_attn.q_proj  # type: ignore[union-attr]
    x = torch.randn(10, 32)
    one = torch.ones(32, dtype=torch.float64)
    found = group_error([Matrix("q.weight", layer, "weight", False)], x, one, {"q.weight": W8A8})
    quantized = nn.Sequential(copy.deepcopy(layer))
    quantize_(quantized, pw.SpecConfig(W8A8.weight, W8A8.act))
    with torch.no_grad():
        off = quantized(x) - layer(x)
        want = off.square().sum() / (x @ layer.weight.t()).square().sum()
    assert found == pytest.approx(float(want), rel=1e-3)
    assert group_error([Matrix("q.weight", layer, "weight", False)], x, one, {}) == 0.0
    assert batches


def test_dead_channels_and_constant_inputs_stay_finite() -> None:
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 4))
    with torch.no_grad():
        model[0].weight[2], model[0].bias[2] = 0.0, 0.0  # type: ignore[index]
        model[1].weight[:, 3] = 0.0  # type: ignore[index]
    x = torch.ones(1, 8)  # constant: the norm's output is its bias alone
    x[0, 0] = 1.5
    reference = float_outputs(model, x)
    for alpha in ("search", 0.5):
        Smooth(alpha=alpha, samples=1, held_out=0).apply(model, {"1.weight": W8A8}, [x])
        assert all(bool(p.isfinite().all()) for p in model.parameters())
        assert relative_difference(reference, float_outputs(model, x)) < TOLERANCE


def test_tame_bounds_scales_and_leaves_unknown_ones() -> None:
    s = normalize_scales(torch.tensor([torch.nan, 0.0, torch.inf, 1e-12, 1.0, 1e12], dtype=torch.float64))
    assert s.tolist() == pytest.approx([1.0, 1.0, 1.0, 1e-4, 1.0, 1e4])
    assert torch.equal(normalize_scales(torch.zeros(3)), torch.ones(3))


def test_two_runs_are_the_same_bits() -> None:
    both = [models.planted(models.decoder("Llama")) for _ in range(2)]
    both[1].load_state_dict(both[0].state_dict())
    for model in both:
        Smooth().apply(model, target(model), models.ids())
    assert models.same_state(both[0], models.state(both[1]))


def test_padding_does_not_count() -> None:
    model, ids = models.decoder("Llama"), models.ids(1)[0]
    mask = torch.ones_like(ids)
    mask[:, 6:] = 0
    other = ids.clone()
    other[:, 6:] = 1
    both = [copy.deepcopy(model) for _ in range(2)]
    for m, x in zip(both, (ids, other), strict=True):
        Smooth(alpha=0.5, held_out=0).apply(m, target(m), [{"input_ids": x, "attention_mask": mask}])
    assert models.same_state(both[0], models.state(both[1]))


def test_a_static_activation_keeps_its_scale_and_its_input() -> None:
    model, batches = models.decoder("Llama"), models.ids()
    before = models.state(model)
    static = Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor(0.05))
    report = quantize_(copy.deepcopy(model), static, calibration=batches, algorithm="smooth")
    assert "has a static scale" in next(r.note for r in report.rows if r.name.endswith("0.self_attn.q_proj.weight"))
    assert models.same_state(model, before)


def test_what_changes_the_outputs_is_taken_back_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = models.decoder("Llama"), models.ids()
    before = models.state(model)
    monkeypatch.setattr("pennyweight.algorithms.rewrites.scale_search.tolerance", lambda model: 1e-12)
    with pytest.raises(PlanError, match="smooth: the model's outputs changed by"):
        Smooth(alpha=0.5, held_out=0).apply(model, target(model), batches)
    assert models.same_state(model, before)


def test_it_composes_with_gptq_and_loads_into_a_fresh_model(tmp_path: Any) -> None:
    model, batches = models.planted(models.decoder("Llama"), size=150.0), models.ids()
    exact = float_outputs(model, batches[0])
    plain = copy.deepcopy(model)
    quantize_(plain, Int8DynamicActivationInt8WeightConfig(), calibration=batches, algorithm="gptq")
    report = quantize_(
        model, Int8DynamicActivationInt8WeightConfig(), calibration=batches, algorithm=["smooth", "gptq"]
    )
    assert (
        relative_difference(exact, float_outputs(model, batches[0]))
        < relative_difference(exact, float_outputs(plain, batches[0])) / 5
    )
    assert any("smooth alpha=" in row.note for row in report.rows)
    assert str(report.config).endswith("smooth + gptq")
    pw.save(model, tmp_path / "q")
    fresh = models.decoder("Llama")
    pw.load(tmp_path / "q", fresh)
    assert relative_difference(float_outputs(model, batches[0]), float_outputs(fresh, batches[0])) == 0


@pytest.mark.parametrize("options", [{"alpha": 1.5}, {"alpha": "half"}, {"samples": 0}])
def test_options_without_meaning_are_refused(options: Any) -> None:
    with pytest.raises(ValueError, match=r"smooth: (alpha|samples) must be"):
        Smooth(**options)


def test_no_data_is_refused() -> None:
    with pytest.raises(PlanError, match="smooth needs calibration data"):
        Smooth().apply(models.decoder("Llama"), {}, [])
