"""What a dry run says of a calibration, for models in memory; tests/io has those whose weights stay in files."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.algorithms import ALGORITHMS
from pennyweight.algorithms.calibration.estimate_cost import CalibrationCost
from pennyweight.planning.config_resolution import PlanError
from pennyweight.planning.quantize_report import duration, size
from tests.algorithms.models import padded_tokens, small_llama

CONFIG = pw.SpecConfig(pw.QuantSpec(pw.get_format("int4"), (-1,), torch.float32))


class Net(nn.Module):
    """A grouped convolution, one that no data reaches, and a layer behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(4, 6, 3, groups=2)
        self.unused = nn.Conv2d(4, 6, 3)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.grouped(x).relu().mean((2, 3)))


def dry(model: nn.Module, batches: Any, **how: Any) -> list[str]:
    kinds = (nn.Linear, nn.Conv2d)
    return pw.quantize_(
        model, CONFIG, lambda module, name: isinstance(module, kinds), calibration=batches, dry_run=True, **how
    ).notes


@pytest.mark.parametrize("algorithm", ["gptq", "auto", "imatrix", "hqq", "nearest"])
def test_layers_of_every_kind(algorithm: str) -> None:
    model, batches = Net().eval(), [torch.randn(2, 4, 6, 6)] * 3
    before, state = {n: p.clone() for n, p in model.named_parameters()}, torch.get_rng_state()
    time, memory = dry(model, batches, algorithm=algorithm)
    assert time.startswith("calibration with 96 tokens: about ")  # 2 images of 4 x 4 positions, three times
    assert "processes" not in time
    statistics = {"gptq": 4 * (2 * 18**2 + 6**2), "auto": 4 * (2 * 18**2 + 6**2), "imatrix": 4 * (2 * 18 + 6)}
    needed = statistics.get(algorithm, 0) + (7 + 4 * ALGORITHMS[algorithm]().copies) * 6 * 4 * 3 * 3
    needed += 12 * 36**2 if algorithm in ("gptq", "auto") else 0  # Hessians are factored in float64
    assert memory == f"memory beside the model: about {size(needed)}, with 0 B of hidden states"
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_what_the_run_would_refuse_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises((PlanError, ValueError)) as run:
        pw.quantize_(model, CONFIG, calibration=[torch.randn(2, 8)], algorithm=["rotate", "gptq"])
    with pytest.raises((PlanError, ValueError)) as said:
        dry(model, [torch.randn(2, 8)], algorithm=["rotate", "gptq"])
    assert str(said.value) == str(run.value)


def test_without_values_or_data_nothing_is_run() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    assert dry(model, [torch.randn(2, 8)], algorithm="gptq") == []
    assert pw.quantize_(nn.Sequential(nn.Linear(8, 8)), CONFIG, algorithm="nearest", dry_run=True).notes == []


def test_blocks_behind_the_last_one_do_not_run() -> None:
    model = small_llama()
    calls = dict.fromkeys(range(len(model.model.layers)), 0)  # type: ignore[union-attr, arg-type]
    for i, block in enumerate(model.model.layers):  # type: ignore[union-attr, arg-type]

        def count(*args: Any, i: int = i) -> None:
            calls[i] += 1

        block.register_forward_pre_hook(count)
    batches = padded_tokens()
    pw.quantize_(model, CONFIG, lambda module, name: name.startswith("model.layers.0."), calibration=batches,
                 algorithm="gptq")  # fmt: skip
    assert calls[0] > len(batches)
    assert max(calls[i] for i in calls if i) <= 2  # to find the blocks, and how they are called


def test_time_of_several_processes() -> None:
    cost = CalibrationCost(1000, inputs=60.0, outputs=30.0, statistics=10.0, solving=200.0, statistics_bytes=0,
                           hidden_bytes=0, untimed=("smooth", "tune"))  # fmt: skip
    assert [cost.seconds(n) for n in (1, 2, 4)] == [300, 180, 120]
    assert cost.notes(largest=0, finished=0)[0] == (
        "calibration with 1,000 tokens: about 5 min (running the model 90 s, statistics 10 s, solving 3 min); 2 "
        "processes 3 min; 4 processes 2 min; without the time of smooth and tune"
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0 µs"), (0.0008, "800 µs"), (0.02, "20 ms"), (1.5, "1.5 s"), (99, "99 s"), (100, "2 min"), (9000, "2.5 h")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
