"""Tuning: nearer to the float model on data that was not trained on, or everything as it was."""

import copy

import pytest
import torch

import pennyweight as pw
from pennyweight.algorithms.tuners import losses
from pennyweight.algorithms.tuners.distill import Distill, Tune
from pennyweight.algorithms.tuners.trainable_qparams import trainable_parameters
from pennyweight.core.spec import SPECS
from pennyweight.core.tensor import AffineQuantizedTensor
from tests.algorithms.models import blocks_only, inputs, llama, mlp, tokens


def quantized_bytes(model: torch.nn.Module) -> dict[str, int]:
    return {n: p.nbytes for n, p in model.named_parameters() if isinstance(p, AffineQuantizedTensor)}


@pytest.mark.parametrize("config", [pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(32)), pw.Int4WeightOnlyConfig(32)])
def test_it_lowers_the_divergence_and_adds_no_bytes(config) -> None:
    model, batches = llama(), tokens(8)
    q = copy.deepcopy(model)
    pw.quantize_(q, config, blocks_only)
    sizes, codes = quantized_bytes(q), {n: p.codes.clone() for n, p in q.named_parameters() if n in quantized_bytes(q)}
    fresh = tokens(3, seed=9)
    reference = losses.references(model, fresh)
    before = losses.mean_divergence(q, fresh, reference, losses.kl)
    notes = Tune(steps=40, rate=5e-3, batch=2).tune(q, model, batches)
    after = losses.mean_divergence(q, fresh, reference, losses.kl)
    assert after < 0.9 * before
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
    model = llama()
    teacher = copy.deepcopy(model)
    pw.quantize_(model, pw.Int4WeightOnlyConfig(48), blocks_only)  # 48 does not divide 64: padded
    for floats in (None, teacher):
        found = list(trainable_parameters(model, False, floats))
        assert len(found) == 14
        for trainable in found:
            assert torch.equal(trainable.value(), trainable.w.dequantize())
            assert len(trainable.codes) == (floats is not None)


@pytest.mark.parametrize(
    "config",
    [
        pw.SpecConfig(pw.QuantSpec(pw.get_format("uint3"), (32,), torch.float16, zero_point=True)),
        pw.SpecConfig(SPECS["nvfp4"]),
        pytest.param(pw.SpecConfig(pw.QuantSpec(pw.get_format("nf4"), (32,))), marks=pytest.mark.exhaustive),
        pytest.param(pw.SpecConfig(SPECS["mxfp4"]), marks=pytest.mark.exhaustive),
    ],
    ids=["uint3", "nvfp4", "nf4", "mxfp4"],
)
def test_codes_are_learned_for_any_numbers(config) -> None:
    model, batches = llama(), tokens(8)
    q = copy.deepcopy(model)
    pw.quantize_(q, config, blocks_only, calibration=batches, algorithm="gptq")
    before, fresh, sizes = copy.deepcopy(q), tokens(3, seed=9), quantized_bytes(q)
    reference = losses.references(model, fresh)
    only_scales = copy.deepcopy(q)
    notes = Distill(steps=60, rate=5e-3, codes=0.01, norms=False).tune(q, model, batches)
    assert notes[""].startswith("tuned")
    assert quantized_bytes(q) == sizes
    changed = [not torch.equal(p.dequantize(), before.get_parameter(n).dequantize()) for n, p in q.named_parameters()
               if isinstance(p, AffineQuantizedTensor)]  # fmt: skip
    assert all(changed)
    learned, was = (losses.mean_divergence(x, fresh, reference, losses.kl) for x in (q, before))
    assert learned < 0.95 * was
    if isinstance(config.weight.scale, torch.dtype):
        Tune(steps=40, rate=5e-3, norms=False).tune(only_scales, model, batches)
        assert learned < losses.mean_divergence(only_scales, fresh, reference, losses.kl)


def test_zeros_stay_zeros_while_codes_are_learned() -> None:
    model, batches = llama(), tokens(4)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if p.ndim == 2 and "layers" in n:
                p[:, ::2] = 0
    q = copy.deepcopy(model)
    pw.quantize_(q, pw.IntxWeightOnlyConfig(torch.int4, pw.PerGroup(32)), blocks_only)
    Distill(steps=10, codes=0.2).tune(q, model, batches)
    for p in q.parameters():
        if isinstance(p, AffineQuantizedTensor):
            assert not p.dequantize()[:, ::2].any()


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


def test_where_codes_learn_nothing_scales_are_tuned_alone() -> None:
    model, batches = llama(), tokens(8)
    q = copy.deepcopy(model)
    pw.quantize_(q, pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(32)), blocks_only)
    only = copy.deepcopy(q)
    note = Distill(steps=3, codes=30.0).tune(q, model, batches)[""]
    assert note.startswith("codes: tuning undone")
    assert "scales only: tuned" in note
    Tune(rate=Distill().rate).tune(only, model, batches)
    for n, p in q.named_parameters():
        if isinstance(p, AffineQuantizedTensor):
            assert torch.equal(p.dequantize(), only.get_parameter(n).dequantize())


def test_the_float_model_runs_once_for_each_batch() -> None:
    model, batches = llama(), tokens(4)
    q, calls = copy.deepcopy(model), []
    pw.quantize_(q, pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(32)), blocks_only)
    again = copy.deepcopy(q)
    model.register_forward_hook(lambda *_: calls.append(1))
    Tune(steps=12).tune(q, model, batches)
    assert len(calls) == 3 + 2  # what is trained on; what is held out, and once more to see what comes out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pennyweight.algorithms.tuners.distill.KEPT", 0)
        Tune(steps=12).tune(again, model, batches)
    assert len(calls) == 5 + 12 + 2
    for n, p in q.named_parameters():
        other = again.get_parameter(n)
        if isinstance(p, AffineQuantizedTensor):
            p, other = p.dequantize(), other.dequantize()
        assert torch.equal(p, other)
