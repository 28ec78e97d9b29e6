"""Rewrites are kept where they help on data that they were not chosen on, pair by pair, and nowhere else."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.algorithms.calibration import batches as entering
from pennyweight.algorithms.rewrites import scale_search
from pennyweight.algorithms.rewrites.awq import AWQ
from pennyweight.algorithms.rewrites.smoothquant import Smooth
from pennyweight.algorithms.rewrites.verify_rewrite import HeldOutCheck
from pennyweight.core.formats import INT4, INT8
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.planning.plan import plan
from tests.algorithms import models

W4A8 = pw.SpecConfig(QuantSpec(INT4, (-1,)), ActivationSpec(QuantSpec(INT8, (-1,))))
CONFIGS = {
    "uint4": pw.UIntXWeightOnlyConfig(torch.uint4, 16),
    "8da4w": pw.Int8DynamicActivationIntxWeightConfig(torch.int4, pw.PerGroup(16)),
    "int8-dynamic": pw.Int8DynamicActivationInt8WeightConfig(),
}


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = (nn.LayerNorm(32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.LayerNorm(32), nn.Linear(32, 16))
    return nn.Sequential(*layers).eval()


def target(model: nn.Module, config: pw.AOBaseConfig) -> dict[str, Any]:
    return {row.name: row.scheme for row in plan(model, config).active}


def rows(count: int = 8, size: int = 24, seed: int = 0) -> list[Tensor]:
    return models.inputs(batches=count, rows=size, seed=seed)


def two_norms() -> nn.Sequential:
    """The first norm's gain has an outlier that its reader's column makes up for: scaling evens both. The second's has
    one under an ordinary column, which scaling would make an outlier among weights of four bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 16)).eval()
    with torch.no_grad():
        model[0].weight[3], model[2].weight[5] = 200.0, 6.0
        model[1].weight[:, 3] /= 200
        model[3].weight[:, 5] *= 4
    return model


@torch.no_grad()
def distance(model: nn.Module, other: nn.Module, data: list[Tensor]) -> float:
    return sum(float((other(x) - model(x)).square().sum() / model(x).square().sum()) for x in data) / len(data)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_trial_is_what_quantizing_gives(name: str) -> None:
    model, data = network(), entering.read(rows())
    before = models.state(model)
    found = HeldOutCheck(model, target(model, CONFIGS[name]), data).divergence()
    assert models.same_state(model, before)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    quantized = copy.deepcopy(model)
    pw.quantize_(quantized, CONFIGS[name])
    assert found == pytest.approx(distance(model, quantized, data), rel=1e-4)


def test_a_layer_with_two_names_is_restored_and_rotated() -> None:
    layer = nn.Linear(32, 32)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    check = HeldOutCheck(model, target(model, CONFIGS["uint4"]), entering.read(rows()))
    assert check.divergence() > 0
    assert type(layer.weight) is nn.Parameter
    with torch.no_grad():
        expected = model(rows()[0])
    step = {"rotate": {"online": True, "stream": False, "held_out": 0}}
    pw.quantize_(model, "int8", calibration=rows(), algorithm=[step, "nearest"])
    assert type(layer).__name__ == "RotatedLinear"
    with torch.no_grad():
        assert float((model(rows()[0]) - expected).norm() / expected.norm()) < 0.02


@pytest.mark.parametrize("step", [Smooth(), Smooth(alpha=0.5), AWQ()], ids=["smooth", "smooth-0.5", "awq"])
@pytest.mark.parametrize("name", CONFIGS)
def test_never_worse_on_what_was_held_out(name: str, step: Any) -> None:
    """Not within a tolerance: what does not help is undone, and nothing is left of it."""
    for seed in range(3):
        model, data = network(seed), entering.read(rows(seed=seed))
        exact, guard = copy.deepcopy(model), entering.held_out(data, 0.25)[1]
        plain = copy.deepcopy(model)
        pw.quantize_(plain, CONFIGS[name])
        notes = step.apply(model, target(model, CONFIGS[name]), data)
        pw.quantize_(model, CONFIGS[name])
        kept = any(text.startswith(f"{step.name} alpha") and "undone" not in text for text in notes.values())
        ours, nearest = distance(exact, model, guard), distance(exact, plain, guard)
        assert ours < nearest if kept else ours == nearest, (seed, notes)


def test_one_couple_is_kept_and_another_undone() -> None:
    data = [torch.randn(16, 32, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    model = two_norms()
    before = models.state(model)
    report = pw.quantize_(copy.deepcopy(model), W4A8, calibration=data, algorithm=[{"smooth": {"alpha": 1.0}}])
    notes = {row.name: row.note for row in report.rows}
    assert notes["1.weight"] == "smooth alpha=1 with 0"
    assert "not scaled by smooth: no scale reduces its error on held-out data" in notes["3.weight"]
    assert report.notes[0].startswith("smooth kept for 1 of 1 inputs: held-out divergence with RTN")
    Smooth(alpha=1.0).apply(model, target(model, W4A8), data)
    now = models.state(model)
    assert [n for n in now if not torch.equal(now[n], before[n])] == ["0.weight", "1.weight"]


def test_what_hurts_the_whole_model_is_found_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where each layer by itself seems to gain."""

    def candidates(self: Smooth, pair: Any, seen: Any, weights: Tensor) -> Any:
        wild = 10 ** torch.randn(32, generator=torch.Generator().manual_seed(0)).double()
        yield "alpha=1", pair.gather(seen.largest) if pair.writer.name == "0" else wild

    monkeypatch.setattr(Smooth, "candidates", candidates)
    monkeypatch.setattr(scale_search.ScaleSearch, "_why_not", lambda *_: "")
    data = [torch.randn(16, 32, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    model = two_norms()
    before = models.state(model)
    notes = Smooth(alpha=1.0).apply(model, target(model, W4A8), data)
    assert notes["1.weight"] == "smooth alpha=1 with 0"
    assert notes["3.weight"] == "smooth alpha=1 with 2 undone: the model's held-out divergence did not decrease"
    assert notes[""].startswith("smooth kept for 1 of 2 inputs")
    now = models.state(model)
    assert [n for n in now if not torch.equal(now[n], before[n])] == ["0.weight", "1.weight"]


@pytest.mark.parametrize("name", ["smooth", "awq"])
def test_one_row_of_data_scales_nothing_and_says_so(name: str) -> None:
    model, row = network(), [rows(1, 1)[0]]
    plain = copy.deepcopy(model)
    pw.quantize_(plain, CONFIGS["uint4"])
    report = pw.quantize_(model, CONFIGS["uint4"], calibration=row, algorithm=name)
    assert all(f"not scaled by {name}: only one row of data" in r.note for r in report.quantized)
    assert distance(plain, model, rows()) == 0


def test_rows_of_a_single_batch_are_held_out() -> None:
    report = pw.quantize_(two_norms(), W4A8, calibration=[torch.randn(64, 32)], algorithm=["smooth", "gptq"])
    assert report.notes[0].startswith("smooth kept for ")


def test_a_rotation_that_does_not_help_is_taken_back() -> None:
    model, data = models.decoder("Llama"), models.ids()
    with torch.no_grad():  # weights that are on the grid as they are lose by any rotation
        for _, p in model.named_parameters():
            if p.ndim == 2:
                p.copy_((p / p.abs().amax(-1, keepdim=True).clamp(min=1e-9) * 7).round() / 64)
    config = pw.SpecConfig(QuantSpec(INT4, (-1,)), rule="absmax")
    before = models.state(model)
    report = pw.quantize_(
        copy.deepcopy(model), config, models.blocks_only, calibration=data, algorithm=["rotate", "nearest"]
    )
    assert report.notes[0].startswith("rotation undone: held-out divergence with RTN ")
    assert all("not rotated: it did not help" in r.note for r in report.quantized)
    goal = {r.name: s for r in plan(model, config, models.blocks_only).active if (s := r.scheme)}
    pw.algorithms.Rotate().apply(model, goal, data)
    assert models.same_state(model, before)
