"""Block reconstruction: each block nearer to the float one, on data that was not learned from, or as it was."""

import copy

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.algorithms.tuners import losses
from pennyweight.algorithms.tuners.reconstruct import Reconstruct
from pennyweight.core.spec import SPECS
from pennyweight.core.tensor import AffineQuantizedTensor
from tests.algorithms.models import bert, blocks_only, inputs, llama, tokens

INT3 = pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(32))


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        n: p.dequantize() if isinstance(p, AffineQuantizedTensor) else p.clone() for n, p in model.named_parameters()
    }


@pytest.mark.parametrize("config", [INT3, pw.SpecConfig(SPECS["mxfp4"])], ids=["int3", "mxfp4"])
def test_outputs_come_nearer_and_no_byte_is_added(config) -> None:
    model, batches, fresh = llama(), tokens(16), tokens(3, seed=9)
    q = copy.deepcopy(model)
    pw.quantize_(q, config, blocks_only, calibration=batches, algorithm="gptq")
    gptq = copy.deepcopy(q)
    notes = Reconstruct(rate=2e-3, codes=0.01).tune(q, model, batches)
    assert notes[""].startswith("2 of 2 blocks reconstructed: held-out divergence")
    reference = losses.references(model, fresh)
    before, after = (losses.mean_divergence(x, fresh, reference, losses.kl) for x in (gptq, q))
    assert after < 0.75 * before
    for name, p in q.named_parameters():
        if isinstance(p, AffineQuantizedTensor):
            assert p.nbytes == gptq.get_parameter(name).nbytes
            assert not p.requires_grad


def test_in_a_recipe_by_name_and_deterministic() -> None:
    model, batches, outs = llama(), tokens(4), []
    for _ in range(2):
        q = copy.deepcopy(model)
        recipe = ["gptq", {"reconstruct": {"steps": 10, "codes": 0.01}}]
        report = pw.quantize_(q, INT3, blocks_only, calibration=batches, algorithm=recipe)
        outs.append(q(batches[0]).logits)
    assert torch.equal(*outs)
    assert "reconstruct" in report.notes[0]


def test_what_stands_under_the_mask_counts_nothing() -> None:
    model, found = bert(), []
    for padding in (0, 5):
        g = torch.Generator().manual_seed(0)
        batches = []
        for length in (9, 5, 12, 7):
            ids, mask = torch.randint(1, 64, (3, length), generator=g), torch.ones(3, length, dtype=torch.int64)
            mask[0, length // 2 :] = 0
            batches.append({"input_ids": torch.where(mask.bool(), ids, padding), "attention_mask": mask})
        q = copy.deepcopy(model)
        pw.quantize_(q, INT3)
        assert Reconstruct(steps=20).tune(q, model, batches)[""].startswith("2 of 2 blocks reconstructed")
        found.append(state(q))
    for name, x in found[0].items():
        torch.testing.assert_close(x, found[1][name], rtol=1e-4, atol=1e-6)


def test_what_does_not_help_is_undone() -> None:
    model, batches = llama(), tokens(4)
    q = copy.deepcopy(model)
    pw.quantize_(q, pw.Int8WeightOnlyConfig(), blocks_only)
    before = state(q)
    notes = Reconstruct(steps=3, rate=1.0, codes=20.0).tune(q, model, batches)
    assert "undone" in notes[""]
    assert all(torch.equal(x, before[n]) for n, x in state(q).items())


def test_all_is_put_back_where_the_whole_got_no_better(monkeypatch) -> None:
    model, batches = llama(), tokens(4)
    q = copy.deepcopy(model)
    pw.quantize_(q, INT3, blocks_only)
    before, found = state(q), iter((1.0, 2.0))
    monkeypatch.setattr(losses, "mean_divergence", lambda *_: next(found))
    note = Reconstruct(steps=5).tune(q, model, batches)[""]
    assert note == "reconstruction undone: held-out divergence 1 -> 2"
    assert all(torch.equal(x, before[n]) for n, x in state(q).items())


def test_what_two_blocks_share_stays() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 32)
    model = nn.Sequential(nn.Sequential(layer, nn.Linear(32, 32)), nn.Sequential(layer, nn.Linear(32, 32))).eval()
    q = copy.deepcopy(model)
    pw.quantize_(q, INT3)
    shared, own = q[0][0].weight.dequantize(), q[0][1].weight.dequantize()
    Reconstruct(steps=30, codes=0.05).tune(q, model, inputs(batches=4))
    assert q[0][0].weight is q[1][0].weight
    assert torch.equal(q[0][0].weight.dequantize(), shared)
    assert not torch.equal(q[0][1].weight.dequantize(), own)


def test_a_model_that_is_no_chain_is_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(32, 32), nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.one(x) + self.two(x)

    model = Net().eval()
    q = copy.deepcopy(model)
    pw.quantize_(q, INT3)
    with pytest.raises(ValueError, match=r"Net is not a chain of blocks with quantized weights.*use distill"):
        Reconstruct().tune(q, model, inputs())


def test_weights_outside_of_blocks_are_told() -> None:
    model, batches = llama(), tokens(16)
    q = copy.deepcopy(model)
    pw.quantize_(q, INT3)
    head = q.lm_head.weight.dequantize()
    note = Reconstruct(steps=60).tune(q, model, batches)[""]
    assert note.endswith("; weights outside blocks, unchanged: 1")
    assert torch.equal(q.lm_head.weight.dequantize(), head)
