"""AWQ: scales by the size of inputs, chosen by the error of the outputs."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight import QuantSpec, SpecConfig, quantize_
from pennyweight.algorithms.rewrites.awq import AWQ
from pennyweight.algorithms.rewrites.equalization import find_pairs
from pennyweight.algorithms.rewrites.scale_search import collect_inputs, normalize_scales
from pennyweight.algorithms.rewrites.verify_rewrite import TOLERANCE, float_outputs, relative_difference
from pennyweight.core.formats import INT4
from pennyweight.planning.scheme import Scheme
from tests.algorithms import models

W4 = QuantSpec(INT4, (16,))


def error(model: nn.Module, algorithm: Any, batches: Any) -> float:
    exact = float_outputs(model, batches[0])
    quantized = copy.deepcopy(model)
    quantize_(quantized, SpecConfig(W4), calibration=batches, algorithm=algorithm)
    return relative_difference(exact, float_outputs(quantized, batches[0]))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Mistral"])
def test_it_keeps_function_and_names(family: str) -> None:
    model, batches = models.planted(models.decoder(family)), models.ids()
    reference, names = float_outputs(model, batches[0]), list(model.state_dict())
    goal: dict[str, Scheme | None] = {
        n: Scheme(W4) for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n
    }
    notes = AWQ().apply(model, goal, batches)
    assert 0 < relative_difference(reference, float_outputs(model, batches[0])) < TOLERANCE
    assert list(model.state_dict()) == names
    assert any(text.startswith("awq alpha=") for text in notes.values())


def test_scales_are_the_papers_up_to_a_factor() -> None:
    model, batches = models.decoder("Llama"), models.ids()
    pair = find_pairs(model, batches[0], ["model.layers.0.mlp.up_proj.weight"]).pairs[0]
    seen = collect_inputs(model, [pair], batches, 8)[0]
    assert seen.tokens.shape == (9, 32)  # 3 batches, 8 / 3 rounded up each
    options = dict(AWQ(grid=4).candidates(pair, seen, torch.empty(0)))
    assert list(options) == ["", "alpha=0.25", "alpha=0.5", "alpha=0.75"]
    x = torch.cat([couple_input(model, b) for b in batches])
    want = normalize_scales(x.abs().double().mean(0) ** 0.5)
    torch.testing.assert_close(normalize_scales(options["alpha=0.5"]), want, rtol=1e-6, atol=0.0)


def couple_input(model: nn.Module, batch: Any) -> torch.Tensor:
    got = []
    hook = model.get_submodule("model.layers.0.mlp.up_proj").register_forward_pre_hook(lambda m, a: got.append(a[0]))
    float_outputs(model, batch)
    hook.remove()
    return got[0].flatten(0, 1)


def test_inputs_of_one_scale_gain_from_it() -> None:
    model, batches = models.planted(models.decoder("Llama")), models.ids()
    assert error(model, "awq", batches) < 0.8 * error(model, "nearest", batches)


def test_dead_inputs_and_one_token() -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 4))
    x = torch.full((1, 4), 1e-6)
    with torch.no_grad():
        model[0].bias[:8] = -1.0  # dead after ReLU
        model[0].bias[8:] = 1.0
    reference = float_outputs(model, x)
    AWQ(samples=1, held_out=0).apply(model, {"2.weight": Scheme(W4)}, [x])
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert relative_difference(reference, float_outputs(model, x)) < TOLERANCE


def test_it_composes_with_gptq_and_loads_into_a_fresh_model(tmp_path: Any) -> None:
    model, batches = models.decoder("Llama"), models.ids()
    quantize_(model, SpecConfig(W4), calibration=batches, algorithm=["awq", "gptq"])
    pw.save(model, tmp_path / "q")
    fresh = models.decoder("Llama")
    pw.load(tmp_path / "q", fresh)
    assert relative_difference(float_outputs(model, batches[0]), float_outputs(fresh, batches[0])) == 0


def test_an_option_without_meaning_is_refused() -> None:
    with pytest.raises(ValueError, match="awq: grid must be at least 1, got 0"):
        AWQ(grid=0)
