"""Weights with the same inputs share their statistics; with other inputs in any batch, each has its own."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pennyweight.algorithms.calibration.block_order import inference_mode
from pennyweight.algorithms.calibration.collect_statistics import CollectedStatistics
from pennyweight.algorithms.calibration.loop import CalibrationLoop
from pennyweight.algorithms.calibration.statistics import STATISTICS
from tests.algorithms.models import llama, tokens

NAMES = ["hessian", "second_moment", "drift"]


def collected(model: nn.Module, batches: list, only: str | None = None) -> dict[str, CollectedStatistics]:
    weights = {id(p): n for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n and only in (None, n)}
    with inference_mode(model):
        return {n: s for _, seen in CalibrationLoop(model, weights, batches, NAMES).stages() for n, s in seen.items()}


def same_as_alone(model: nn.Module, batches: list) -> dict[str, CollectedStatistics]:
    """Collected for all weights, after a comparison with each collected alone, to the bit."""
    together = collected(model, batches)
    for name, found in together.items():
        (alone,) = collected(model, batches, name).values()
        assert found.tokens == alone.tokens
        assert found.stats.keys() == alone.stats.keys()
        for statistic, value in alone.stats.items():
            assert torch.equal(found.stats[statistic], value), (name, statistic)
    return together


def test_a_decoder_has_one_hessian_of_each_input(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    hessian = STATISTICS["hessian"]
    update = lambda s, x: (calls.append(x.shape), hessian.update(s, x))[1]  # noqa: E731
    monkeypatch.setitem(STATISTICS, "hessian", replace(hessian, update=update))
    batches = tokens(3)
    found = collected(llama(), batches)
    assert len(calls) == 3 * (2 * 4 + 1)  # two blocks with four inputs, and the head
    of = {name.removesuffix(".weight").split(".")[-1]: s for name, s in found.items() if "layers.1" in name}
    for a, b in (("q_proj", "k_proj"), ("q_proj", "v_proj"), ("gate_proj", "up_proj")):
        assert of[a].stats["hessian"] is of[b].stats["hessian"]
    assert of["o_proj"].stats["hessian"] is not of["q_proj"].stats["hessian"]
    monkeypatch.undo()
    same_as_alone(llama(), batches)


class Two(nn.Module):
    """Two layers after a third, in the way that ``forward`` says."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.a, self.b, self.way = nn.Linear(24, 32), nn.Linear(32, 8), nn.Linear(32, 8), way

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.way == "written between":
            return self.a(h) + self.b(h.mul_(2))
        if self.way == "equal copies":
            return self.a(h) + self.b(h.clone())
        if self.way == "called twice":
            return self.a(h) + self.b(h) + self.a(h)
        if self.way == "routed" and bool(x[0, 0] > 0):
            return self.a(h[::2]).mean(0) + self.b(h[1::2]).mean(0)
        if self.way == "left out" and bool(x[0, 0] > 0):
            return self.b(h)
        return self.a(h) + self.b(h)


@pytest.mark.parametrize(
    ("way", "shared"),
    [
        ("plain", True), ("equal copies", True), ("written between", False), ("called twice", False), ("routed", False),
        ("left out", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("signs", ["-+-", "-++", "--+"])
def test_inputs_that_differ_are_kept_apart(way: str, shared: bool, signs: str) -> None:
    g = torch.Generator().manual_seed(1)
    batches = [torch.randn(10, 24, generator=g) for _ in signs]
    for x, sign in zip(batches, signs, strict=True):
        x[0, 0] = x[0, 0].abs() * (1 if sign == "+" else -1)
    found = same_as_alone(Two(way), batches)
    a, b = (found[name].stats["hessian"] for name in ("a.weight", "b.weight"))
    assert (a is b) == shared
