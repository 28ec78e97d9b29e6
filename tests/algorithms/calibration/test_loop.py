"""Statistics block by block: those of whole runs in which the blocks before are quantized."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pennyweight.algorithms.calibration.batches import Batches, held_out
from pennyweight.algorithms.calibration.block_order import inference_mode
from pennyweight.algorithms.calibration.collect_statistics import CollectedStatistics
from pennyweight.algorithms.calibration.input_hooks import InputHooks
from pennyweight.algorithms.calibration.loop import HELD_OUT, CalibrationLoop
from pennyweight.planning.run_batch import run_batch, token_mask
from tests.algorithms.models import bert, linear_weights, t5
from tests.algorithms.models import deep_mlp as mlp
from tests.algorithms.models import padded_tokens as tokens
from tests.algorithms.models import small_llama as llama

MODELS = {
    "llama": (llama, tokens),
    "bert": (bert, tokens),
    "t5": (t5, lambda: [{**b, "decoder_input_ids": torch.randint(0, 40, (2, 5))} for b in tokens()]),
    "mlp": (mlp, lambda: [torch.randn(6, 32), torch.randn(3, 32)]),
    "sliding": (lambda: llama(3), lambda: tokens(mask=False)),
}


def spoiled(model: nn.Module, name: str) -> None:
    """As a solver would: the weight is another afterwards."""
    w = model.get_parameter(name)
    w.data = (w.data * 8).round() / 8


def run(
    model: nn.Module, batches: Sequence[Any], needs: Sequence[str], **options: Any
) -> Iterator[tuple[str, CollectedStatistics]]:
    """Every weight's statistics, each weight spoiled after its stage."""
    for names, seen in CalibrationLoop(model, linear_weights(model), batches, needs, **options).stages():
        for name in names:
            yield name, seen.get(name, CollectedStatistics())
        for name in names:
            spoiled(model, name)


def whole(model: nn.Module, batches: Sequence[Any], names: Sequence[str]) -> dict[str, list[Tensor]]:
    """Inputs of some weights in whole runs."""
    ids = {i: n for i, n in linear_weights(model).items() if n in names}
    seen: dict[str, list[Tensor]] = {}
    with inference_mode(model):
        for batch in batches:
            with InputHooks(ids, lambda n, x: seen.setdefault(n, []).append(x), token_mask(batch)):
                run_batch(model, batch)
    return seen


def assert_statistics(seen: CollectedStatistics | None, x: Tensor) -> None:
    """They are those of inputs [groups, tokens, width]."""
    assert seen is not None
    assert seen.tokens == x.shape[1]
    expected = {"hessian": x.mT @ x / x.shape[1], "second_moment": x.square().mean(1), "absmax": x.abs().amax(1)}
    for what, value in expected.items():
        torch.testing.assert_close(seen.stats[what], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_block_by_block_equals_whole_runs(kind: str) -> None:
    make, data = MODELS[kind]
    model, batches = make(), data()
    reference, needs = copy.deepcopy(model), ("hessian", "second_moment", "absmax")
    names: set[str] = set()
    for stage, seen in CalibrationLoop(model, linear_weights(model), batches, needs).stages():
        # of a table that is looked up too, a part of the data is for comparisons
        used = held_out(Batches(batches), HELD_OUT)[0] if any(s.looked_up for s in seen.values()) else batches
        assert (len(used) < len(batches)) == (kind == "t5" and stage == ["lm_head.weight"])
        inputs = whole(reference, used, stage)
        for name in stage:
            assert_statistics(seen[name], torch.cat(inputs[name], 1))
            if seen[name].looked_up:
                assert_statistics(seen[name].everything, torch.cat(whole(reference, batches, stage)[name], 1))
        for name in stage:
            spoiled(model, name)
            spoiled(reference, name)
        names |= set(stage)
    assert names == set(linear_weights(model).values())


@pytest.mark.parametrize("kind", ["llama", "t5", "mlp"])
def test_on_disk_is_as_in_memory(kind: str, tmp_path: Path) -> None:
    make, data = MODELS[kind]
    model, batches, needs = make(), data(), ("hessian", "drift")
    memory = dict(run(copy.deepcopy(model), batches, needs))
    disk = dict(run(copy.deepcopy(model), batches, needs, spill=tmp_path))
    assert memory.keys() == disk.keys()
    for name, seen in memory.items():
        assert seen.tokens == disk[name].tokens
        assert seen.stats.keys() == disk[name].stats.keys()
        assert all(torch.equal(v, disk[name].stats[k]) for k, v in seen.stats.items())
    assert list(tmp_path.iterdir()) == []  # nothing is left behind


def test_paired_statistics_follow_the_float_model() -> None:
    model, batches = mlp(), [torch.randn(40, 32), torch.randn(20, 32)]
    exact = copy.deepcopy(model)
    found = {}
    for stage, seen in CalibrationLoop(model, linear_weights(model), batches, ("hessian", "drift")).stages():
        for name in stage:
            x = torch.cat(whole(model, batches, [name])[name], 1)
            twin = torch.cat(whole(exact, batches, [name])[name], 1)
            torch.testing.assert_close(seen[name].stats["drift"], (twin - x).mT @ x / x.shape[1], rtol=1e-4, atol=1e-5)
            found[name] = float(seen[name].stats["drift"].abs().max())
            spoiled(model, name)
    assert found["0.weight"] < 1e-6 < found["2.weight"] < found["4.weight"] * 1e3


def test_weights_that_are_known_are_not_seen_again() -> None:
    model, batches = mlp(), [torch.randn(8, 32)]
    known = frozenset({"0.weight", "2.weight"})
    seen = {
        name: s
        for names, found in CalibrationLoop(model, linear_weights(model), batches, ("hessian",), known=known).stages()
        for name, s in found.items()
    }
    assert seen.keys() == {"4.weight"}
    assert seen["4.weight"].stats.keys() == {"hessian"}


def test_values_that_are_not_finite_are_named() -> None:
    model, bad = mlp(), torch.randn(4, 32)
    bad[1, 2] = torch.nan
    with pytest.raises(ValueError, match=r"0\.weight: its inputs on the calibration data have 1 NaN"):
        list(run(model, [torch.randn(4, 32), bad], ("hessian",)))
    assert model.training is False
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_order_of_calls_and_determinism() -> None:
    model, batches = llama(), tokens()
    first = [(name, s.stats["hessian"]) for name, s in run(copy.deepcopy(model), batches, ("hessian",))]
    second = [(name, s.stats["hessian"]) for name, s in run(copy.deepcopy(model), batches, ("hessian",))]
    assert [n for n, _ in first] == [n for n, _ in second]
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True))
    assert first[-1][0] == "lm_head.weight"
