"""improve(): no layer worse, same bytes, whoever made the weights."""

import copy

import pytest
import torch

import pennyweight as pw
from pennyweight.algorithms.tuners import losses
from pennyweight.algorithms.tuners.finetune import improve
from pennyweight.core.spec import SPECS
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.planning.config_resolution import PlanError
from tests.algorithms.models import blocks_only, inputs, llama, mlp, tokens


@torch.no_grad()
def error(model, q, x) -> float:
    return float((q(x) - model(x)).square().sum() / model(x).square().sum())


@pytest.mark.parametrize("name", sorted(SPECS))
def test_every_spec(name) -> None:
    model, x = mlp(256), inputs(256)
    q = copy.deepcopy(model)
    pw.quantize_(q, pw.SpecConfig(SPECS[name]))
    before = error(model, q, x[0])
    specs = {n: (p.spec, p.nbytes) for n, p in q.named_parameters() if isinstance(p, AffineQuantizedTensor)}
    report = improve(q, model, x)
    assert {n: (q.get_parameter(n).spec, q.get_parameter(n).nbytes) for n in specs} == specs
    assert all(r.error <= 1 + 1e-5 for r in report.rows)
    # the first layer's inputs are the float model's, so its gain is the output's
    assert error(model[:1], q[:1], x[0]) <= 1.0001 * error(model[:1], pw_copy(model, SPECS[name])[:1], x[0])
    assert error(model, q, x[0]) < 1.05 * before


def pw_copy(model, spec):
    q = copy.deepcopy(model)
    pw.quantize_(q, pw.SpecConfig(spec))
    return q


def test_a_model_with_sorted_channels_keeps_their_order() -> None:
    """As act-order GPTQ files have them."""
    model, x = mlp(64), inputs(64)
    q = copy.deepcopy(model)
    spec = pw.QuantSpec(pw.get_format("int3"), (16,), torch.float16)
    perm = torch.randperm(64, generator=torch.Generator().manual_seed(5))
    w = model[0].weight.detach()
    sorted_w = AffineQuantizedTensor.from_float(w[:, perm], spec)
    stored = AffineQuantizedTensor(sorted_w.parts._replace(perm=perm), spec, w.shape, w.dtype)
    q[0].weight = torch.nn.Parameter(stored, requires_grad=False)
    before = error(model[:1], q[:1], x[0])
    improve(q, model, x)
    assert torch.equal(q[0].weight.perm, perm)
    assert error(model[:1], q[:1], x[0]) < 0.7 * before


def test_a_language_model_gets_nearer_and_files_keep_their_format(tmp_path) -> None:
    model, batches, fresh = llama(), tokens(6), tokens(3, seed=8)
    q = copy.deepcopy(model)
    pw.quantize_(q, pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(32)), blocks_only)
    reference = losses.references(model, fresh)
    before = losses.mean_divergence(q, fresh, reference, losses.kl)
    report = improve(q, model, batches)
    assert losses.mean_divergence(q, fresh, reference, losses.kl) < 0.9 * before
    assert len(report.rows) == 14
    pw.save(q, tmp_path)
    again = pw.load(tmp_path, llama())
    assert torch.equal(again(fresh[0]).logits, q(fresh[0]).logits)


def test_what_has_no_original_is_refused() -> None:
    q = mlp()
    with pytest.raises(PlanError, match="no quantized weight"):
        improve(q, mlp(), inputs())
    pw.quantize_(q, pw.Int8WeightOnlyConfig())
    with pytest.raises(PlanError, match=r"0\.weight \[48, 32\]: float_model has Parameter \[48, 16\]"):
        improve(q, mlp(16), inputs())
    with pytest.raises(PlanError, match="pass batches"):
        improve(q, mlp(), [])


def test_a_weight_that_saw_no_data_stays() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(32, 8), torch.nn.Linear(32, 8)

        def forward(self, x):
            return self.used(x)

    model = Two()
    q = copy.deepcopy(model)
    pw.quantize_(q, pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(32)))
    codes = q.unused.weight.codes.clone()
    report = improve(q, model, inputs())
    assert torch.equal(q.unused.weight.codes, codes)
    notes = {r.name: r.note for r in report.rows}
    assert notes == {"used.weight": "", "unused.weight": "no calibration data; unchanged"}
