"""Learned rotations of the residual stream."""

import copy

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.algorithms.rewrites.quarot import Rotate, _Change
from pennyweight.algorithms.rewrites.residual_stream import find_stream
from pennyweight.algorithms.rewrites.spinquant import Student, cayley, learn_rotation
from pennyweight.algorithms.rewrites.verify_rewrite import TOLERANCE, float_outputs, relative_difference
from pennyweight.planning.plan import plan
from pennyweight.planning.scheme import Scheme
from tests.algorithms import models

INPUTS = pw.QuantSpec(pw.get_format("int4"), (-1,))
W4A4 = pw.SpecConfig(pw.QuantSpec(pw.get_format("int4"), (-1,)), pw.ActivationSpec(INPUTS))
W2 = pw.IntxWeightOnlyConfig(torch.int2, pw.PerGroup(32))


def target(model: nn.Module, config: pw.AOBaseConfig) -> dict[str, Scheme | None]:
    return {row.name: row.scheme for row in plan(model, config, models.blocks_only).active}


def with_outliers() -> nn.Module:
    """Two channels of the stream are thirty times the others, so that a row's scale is theirs."""
    model = models.llama()
    with torch.no_grad():
        model.model.embed_tokens.weight[:, [3, 40]] *= 30
    return model


@pytest.mark.parametrize("centred", [False, True])
def test_the_transform_is_orthogonal_and_may_keep_the_mean(centred: bool) -> None:
    q = cayley(torch.randn(7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), centred)
    n = len(q)
    assert n == 7 + centred
    torch.testing.assert_close(q @ q.t(), torch.eye(n, dtype=torch.float64))
    assert bool((q.sum(0) - 1).abs().max() < 1e-12) == centred


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_student_without_quantization_is_the_model(family: str) -> None:
    """Under any rotation: so that what it differs by is quantization, and nothing else."""
    model = with_outliers() if family == "llama" else models.gpt2()
    batch = models.tokens()[0] if family == "llama" else models.ids()[0]
    stream = find_stream(model, batch)
    expected = float_outputs(model, batch)
    change = _Change(model, stream, [])
    with torch.no_grad():
        change._untie(Rotate())
        for gain, readers in stream.norms:
            change._fold(gain, readers, True, {})
    n = stream.width - stream.centred
    free = torch.randn(n, n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got = Student(model, stream, {})(cayley(free, stream.centred), batch)
    assert relative_difference(expected[:1], [got]) < 10 * TOLERANCE


@pytest.mark.parametrize("config", [W4A4, W2], ids=["inputs", "weights"])
def test_from_no_rotation_it_finds_one_that_helps(config: pw.AOBaseConfig) -> None:
    model, batches = with_outliers(), models.tokens(8)
    stream = find_stream(model, batches[0])
    start = torch.eye(stream.width, dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    q, told = learn_rotation(model, stream, start, target(model, config), batches, 40, 0.1)
    torch.testing.assert_close(q @ q.t(), start)
    was, now = (float(x) for x in told.removeprefix("rotation learned: held-out divergence ").split(" -> "))
    assert now < was  # by how much depends on rounding: 0.61 to 0.87 of it on the processors tried
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())  # nothing is rotated yet


def test_what_does_not_help_is_undone() -> None:
    model, batches = with_outliers(), models.tokens(4)
    stream = find_stream(model, batches[0])
    start = torch.eye(stream.width, dtype=torch.float64)
    q, told = learn_rotation(model, stream, start, target(model, W2), batches, 1, 1e-12)  # nothing moves at such a rate
    assert q is start
    assert "learned rotation undone" in told


def test_it_is_a_step_of_a_recipe() -> None:
    batches = models.tokens(4)
    found = []
    for _ in range(2):
        model = with_outliers()
        report = pw.quantize_(
            model, W4A4, models.blocks_only, calibration=batches,
            algorithm=[{"rotate": {"learn": 5, "rate": 0.05}}],
        )  # fmt: skip
        assert any("rotation" in note and "held-out divergence" in note for note in report.notes)
        found.append(float_outputs(model, batches[0]))
    assert relative_difference(*found) == 0  # the same each time


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="learn must not be negative and rate must be positive, got learn=-1"):
        Rotate(learn=-1)
    with pytest.raises(ValueError, match="it needs stream=True"):
        Rotate(learn=3, stream=False)
