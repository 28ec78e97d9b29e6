"""Tuning: nearer to the float model on data that was not trained on, or everything as it was."""

import copy

import pytest
import torch

import pennyweight as pw
from pennyweight.algorithms import fidelity
from pennyweight.algorithms.tune import Tune
from pennyweight.core.tensor import AffineQuantizedTensor

from .models import blocks_only, inputs, llama, mlp, tokens


def quantized_bytes(model: torch.nn.Module) -> dict[str, int]:
    return {n: p.nbytes for n, p in model.named_parameters() if isinstance(p, AffineQuantizedTensor)}


@pytest.mark.parametrize("config", [pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(32)), pw.Int4WeightOnlyConfig(32)])
def test_it_lowers_the_divergence_and_adds_no_bytes(config) -> None:
    model, batches = llama(), tokens(8)
    q = copy.deepcopy(model)
    pw.quantize_(q, config, blocks_only)
    sizes, codes = quantized_bytes(q), {n: p.codes.clone() for n, p in q.named_parameters() if n in quantized_bytes(q)}
    fresh = tokens(3, seed=9)
    reference = fidelity.references(model, fresh)
    before = fidelity.mean(q, fresh, reference, fidelity.kl)
    notes = Tune(steps=40, rate=5e-3, batch=2).tune(q, model, batches)
    after = fidelity.mean(q, fresh, reference, fidelity.kl)
    assert after < 0.8 * before
    assert "tuned: held-out divergence" in notes[""]
    assert quantized_bytes(q) == sizes
    assert all(torch.equal(q.get_parameter(n).codes, c) for n, c in codes.items())
    assert not any(p.requires_grad for p in q.parameters() if isinstance(p, AffineQuantizedTensor))


def test_what_does_not_help_is_undone() -> None:
    model, batches = llama(), tokens(4)
    q = copy.deepcopy(model)
    pw.quantize_(q, pw.Int8WeightOnlyConfig(), blocks_only)
    before = {n: p.dequantize() if isinstance(p, AffineQuantizedTensor) else p.clone() for n, p in q.named_parameters()}
    notes = Tune(steps=3, rate=1.0).tune(q, model, batches)
    assert "undone" in notes[""]
    for n, p in q.named_parameters():
        assert torch.equal(p.dequantize() if isinstance(p, AffineQuantizedTensor) else p, before[n])


def test_its_function_of_the_scales_is_what_the_weight_stands_for() -> None:
    from pennyweight.algorithms.tune import _levers

    model = llama()
    pw.quantize_(model, pw.Int4WeightOnlyConfig(48), blocks_only)  # 48 does not divide 64: padded
    levers = list(_levers(model, False))
    assert len(levers) == 14
    for lever in levers:
        assert torch.equal(lever.value(), lever.w.dequantize())


def test_in_a_recipe_and_deterministic() -> None:
    model, x = mlp(), inputs(batches=4)
    outs = []
    for _ in range(2):
        q = copy.deepcopy(model)
        report = pw.quantize_(
            q, pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(32)), calibration=x,
            algorithm=["gptq", {"tune": {"steps": 10}}],
        )  # fmt: skip
        outs.append(q(x[0]))
    assert torch.equal(*outs)
    assert report.notes
    assert report.notes[0].startswith("tun")
    assert report.notes[0] in str(report)


def test_a_model_without_scales_to_tune_is_refused() -> None:
    with pytest.raises(ValueError, match="no quantized weight"):
        Tune(norms=False).tune(mlp(), mlp(), inputs())
