"""sample(): the model's own distribution, reproducible, and good enough to calibrate on."""

import copy

import pytest
import torch

import pennyweight as pw
from pennyweight.algorithms.tuners import losses
from pennyweight.planning.config_resolution import PlanError
from tests.algorithms.models import blocks_only, llama, mlp, tokens


def test_it_writes_what_is_likely_and_the_same_twice() -> None:
    model = llama()
    state = torch.random.get_rng_state()
    batches = pw.algorithms.sample(model, 6, 20, batch=4)
    assert torch.equal(state, torch.random.get_rng_state())
    assert [tuple(b["input_ids"].shape) for b in batches] == [(4, 20), (2, 20)]
    assert all(
        torch.equal(a["input_ids"], b["input_ids"])
        for a, b in zip(batches, pw.algorithms.sample(model, 6, 20, batch=4), strict=True)
    )
    assert not torch.equal(batches[0]["input_ids"], pw.algorithms.sample(model, 6, 20, batch=4, seed=1)[0]["input_ids"])

    def likelihood(ids: torch.Tensor) -> float:
        with torch.no_grad():
            return float(model(ids, labels=ids).loss)

    assert likelihood(batches[0]["input_ids"]) < likelihood(tokens(1)[0]) - 0.3


def test_calibration_without_data_beats_none() -> None:
    model, fresh = llama(), tokens(3, seed=8)
    reference = losses.references(model, fresh)
    config, found = pw.IntxWeightOnlyConfig(torch.int3, pw.PerGroup(32)), {}
    for name, how in (
        ("nearest", {}),
        ("gptq", {"calibration": pw.algorithms.sample(model, 16, 24), "algorithm": "gptq"}),
    ):
        q = copy.deepcopy(model)
        pw.quantize_(q, config, blocks_only, **how)
        found[name] = losses.mean_divergence(q, fresh, reference, losses.kl)
    assert found["gptq"] < 0.9 * found["nearest"]


def test_what_writes_nothing_is_refused() -> None:
    with pytest.raises(PlanError, match="Sequential cannot generate text"):
        pw.algorithms.sample(mlp())
    with pytest.raises(ValueError, match="length must be an integer of at least 2, got 1"):
        pw.algorithms.sample(llama(), length=1)
