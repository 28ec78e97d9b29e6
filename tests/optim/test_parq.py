"""Optimizers that draw weights to a grid or to zeros around another one."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.core.numerics import fake_quantize
from pennyweight.core.spec import SPECS
from pennyweight.optim import AdamW8bit, PruneOptimizer, QuantOptimizer
from pennyweight.optim.parq import proximal_map
from pennyweight.planning.config_resolution import PlanError
from tests.optim.models import Net, losses

INT2 = pw.IntxWeightOnlyConfig(torch.int2, pw.PerGroup(32))
CONFIGS = [
    INT2,
    pw.Int4WeightOnlyConfig(group_size=32),
    pw.UIntXWeightOnlyConfig("uint3", group_size=32),
    pw.NF4WeightOnlyConfig(),
    pw.NVFP4WeightOnlyConfig(),
    pw.MXWeightOnlyConfig(weight_dtype="e2m1"),
    pw.Int8DynamicActivationInt4WeightConfig(group_size=32),
]
GRIDS = {name: spec for name, spec in SPECS.items() if spec.scale is not None}


@pytest.mark.parametrize("name", GRIDS)
def test_weights_go_from_where_they_are_to_the_grid(name: str) -> None:
    """At t = 0 nothing has moved, at t = 1 all is rounded; between, each weight has moved towards its number, further
    the larger t is, and never past it."""
    spec = GRIDS[name].with_(layout="plain")
    x = torch.randn(6, 512)
    rounded = fake_quantize(x, spec)
    assert torch.equal(proximal_map(x, spec, 0.0), x)
    assert torch.equal(proximal_map(x, spec, 1.0), rounded)
    last = (x - rounded).abs()
    slack = 1e-5 * x.abs().max()
    inside = (x >= rounded.amin()) & (x <= rounded.amax())
    for t in (0.25, 0.5, 0.75, 0.99):
        y = proximal_map(x, spec, t)
        left = (y - rounded).abs()
        assert bool((left <= last + slack).all())
        assert bool((((y - rounded) * (x - rounded) >= -slack) | ~inside).all())
        last = left
    assert float((last > slack).float().mean()) < 0.05  # hardly any is still on its way


def test_the_map_of_an_integer_grid_is_the_formula() -> None:
    spec = pw.QuantSpec(pw.get_format("int4"), (-1,))
    x = torch.linspace(-1, 1, 401).reshape(1, -1)
    scale = float(pw.AffineQuantizedTensor.from_float(x, spec).scale)
    low = (x / scale).floor()
    middle = low + 0.5
    t = 0.4
    expected = scale * (middle + 0.5 * ((x / scale - middle) / (0.5 * (1 - t))).clamp(-1, 1)).clamp(-8, 7)
    torch.testing.assert_close(proximal_map(x, spec, t), expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_what_is_trained_is_what_is_deployed(config: Any) -> None:
    model = Net()
    optimizer = QuantOptimizer(torch.optim.AdamW(model.parameters(), lr=2e-3), model, config, start=2, end=6)
    losses(model, optimizer, range(5))
    with pytest.raises(ValueError, match="on the grid from step 6 on; this is step 5"):
        optimizer.quantize_()
    losses(model, optimizer, range(5, 8))
    seen = {name: p.detach().clone() for name, p in model.named_parameters()}
    report = optimizer.quantize_()
    assert len(report.quantized) == 2
    for name, p in model.named_parameters():
        assert torch.equal(p.dequantize() if isinstance(p, pw.AffineQuantizedTensor) else p, seen[name]), name


def decayed(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        losses(model, optimizer, range(step, step + 1))
        schedule.step()


def test_training_towards_two_bits_beats_rounding_to_them() -> None:
    model = Net()
    rounded = copy.deepcopy(model)
    decayed(rounded, torch.optim.AdamW(rounded.parameters(), lr=1e-2), 200)
    pw.quantize_(rounded, INT2)
    optimizer = QuantOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model, INT2, start=20, end=160)
    decayed(model, optimizer, 200)
    optimizer.quantize_()
    x = torch.randn(256, 64)
    ours, theirs = ((m(x) - x.roll(1, -1)).square().mean().item() for m in (model, rounded))
    assert ours < 0.7 * theirs, (ours, theirs)


@pytest.mark.parametrize("pattern", ["2:4", "1:8", 0.75])
def test_pruned_weights_have_the_pattern(pattern: Any) -> None:
    model = Net()
    optimizer = PruneOptimizer(AdamW8bit(model.parameters(), lr=2e-3), model, pattern, start=2, end=6)
    found = losses(model, optimizer, range(8))
    assert found[-1] < found[0]
    for p, latent in optimizer.latents.items():
        of, zeros = {"2:4": (4, 2), "1:8": (8, 7)}.get(pattern, (p.shape[1], round(0.75 * p.shape[1])))
        runs = p.detach().unflatten(1, (-1, of))
        assert bool(((runs == 0).sum(-1) == zeros).all())
        kept = runs != 0
        assert torch.equal(p[p != 0], latent[p != 0])
        sizes = latent.abs().unflatten(1, (-1, of))
        assert bool((sizes.where(kept, torch.inf).amin(-1) >= sizes.where(~kept, 0.0).amax(-1)).all())
    pw.quantize_(model, pw.Int8WeightOnlyConfig())
    assert all(bool((p.dequantize() == 0).any()) for p in model.parameters() if isinstance(p, pw.AffineQuantizedTensor))


def test_convolutions_are_pruned_over_all_their_inputs() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 4))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = PruneOptimizer(base, model, "2:4", end=1, filter_fn=lambda m, name: isinstance(m, nn.Conv2d))
    model(torch.randn(2, 4, 4, 4)).square().sum().backward()
    optimizer.step()
    assert bool(((model[0].weight.flatten(1).unflatten(1, (-1, 4)) == 0).sum(-1) == 2).all())
    assert not bool((model[2].weight == 0).any())


@pytest.mark.parametrize("make", [torch.optim.AdamW, AdamW8bit])
def test_a_checkpoint_resumes_bit_for_bit(make: Any) -> None:
    def optimizer(model: nn.Module) -> QuantOptimizer:
        return QuantOptimizer(make(model.parameters(), lr=2e-3), model, INT2, start=1, end=9)

    model = Net()
    whole = optimizer(model)
    losses(model, whole, range(5))
    saved = copy.deepcopy({"model": model.state_dict(), "optimizer": whole.state_dict()})
    wanted = losses(model, whole, range(5, 12))
    torch.manual_seed(3)
    model = Net()
    again = optimizer(model)
    model.load_state_dict(saved["model"])
    again.load_state_dict(saved["optimizer"])
    assert losses(model, again, range(5, 12)) == wanted
    with pytest.raises(ValueError, match="expects steps and latents"):
        again.load_state_dict(make(Net().parameters()).state_dict())


def test_schedules_and_groups_are_the_base_s() -> None:
    model = Net()
    base = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = QuantOptimizer(base, model, INT2, end=10)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    losses(model, optimizer, range(1))
    schedule.step()
    assert base.param_groups[0]["lr"] == 0.5
    extra = nn.Parameter(torch.ones(3))
    optimizer.add_param_group({"params": [extra]})
    assert base.param_groups[1]["params"][0] is extra
    assert optimizer.param_groups is base.param_groups


def test_weights_over_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pennyweight.optim.parq.is_dtensor", lambda t: t.shape == (64, 128))
    model = Net()
    with pytest.raises(PlanError, match=r"down.weight is sharded over ranks"):
        QuantOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, INT2, end=10)


def test_what_cannot_be_drawn_is_refused() -> None:
    model = Net()
    with pytest.raises(ValueError, match=r"up.weight.*not among the parameters of SGD, 2 in total"):
        QuantOptimizer(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), model, INT2, end=10)
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="0 <= start < end; got 5, 5"):
        QuantOptimizer(base, model, INT2, start=5, end=5)
    with pytest.raises(PlanError, match="not divisible by 7"):
        PruneOptimizer(base, model, "3:7", end=10)
    with pytest.raises(PlanError, match="a pattern must be like '2:4'"):
        PruneOptimizer(base, model, "4:2", end=10)
    with pytest.raises(ValueError, match="a learned format has no fixed grid"):
        proximal_map(torch.ones(4, 8), pw.QuantSpec(pw.core.formats.learned(2), (8,)), 0.5)
    pw.quantize_(model, pw.Int8WeightOnlyConfig())
    with pytest.raises(PlanError, match="already quantized"):
        PruneOptimizer(base, model, "2:4", end=10)
