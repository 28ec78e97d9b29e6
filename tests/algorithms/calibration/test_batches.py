"""NaN and inf in calibration data are refused by name wherever data enters."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.algorithms.calibration import batches as entering
from pennyweight.algorithms.calibration.statistics import collect
from tests.algorithms import models

INT4 = pw.Int4WeightOnlyConfig(16)


def data(bad: float | None = None) -> list[Tensor]:
    found = models.inputs(batches=4, rows=8)
    if bad is not None:
        found[2][5, 3] = bad
    return found


def improved(model: nn.Module, given: Any) -> None:
    quantized = copy.deepcopy(model)
    pw.quantize_(quantized, INT4)
    pw.algorithms.improve(quantized, model, given)


ENTRANCES: dict[str, Callable[[nn.Module, Any], Any]] = {
    **{
        name: lambda m, x, name=name: pw.quantize_(m, INT4, calibration=x, algorithm=name)
        for name in ("gptq", "auto", "imatrix", "gptaq", "smooth", "awq")
    },
    **{
        name: lambda m, x, name=name: pw.quantize_(m, INT4, calibration=x, algorithm=["nearest", name])
        for name in ("tune", "distill", "reconstruct", "bias")
    },
    "rotate": lambda m, x: pw.quantize_(m, INT4, calibration=x, algorithm=[{"rotate": {"stream": False}}]),
    "search": lambda m, x: pw.search(m, x, "4 bpw"),
    "improve": improved,
    "sparsify": lambda m, x: pw.sparsify_(m, calibration=x),
    "calibrate": lambda m, x: pw.calibrate(m, x, pw.Int8StaticActivationInt8WeightConfig),
}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ENTRANCES)
def test_every_entrance_names_the_batch(name: str, bad: float) -> None:
    model = models.mlp()
    before = models.state(model)
    with pytest.raises(pw.PlanError, match=r"batch 2 \(8, 32\) has (1 NaN and 0|0 NaN and 1) infinite values of 256"):
        ENTRANCES[name](model, data(bad))
    assert models.same_state(model, before)


@pytest.mark.parametrize("name", sorted(ENTRANCES.keys() - {"calibrate"}))  # it reads its data once, a batch at a time
def test_zeros_alone_say_nothing(name: str) -> None:
    model = models.mlp()
    before = models.state(model)
    with pytest.raises(pw.PlanError, match=r"all values of all 4 batches are zero, .*pass inputs such as the model"):
        ENTRANCES[name](model, [torch.zeros(8, 32)] * 4)
    assert models.same_state(model, before)
    assert entering.read([torch.zeros(1, 4, dtype=torch.int64), (torch.zeros(2, 4), torch.ones(2, 4))])


def test_a_statistic_by_hand() -> None:
    with pytest.raises(ValueError, match=r"hessian: batch 2 \(8, 32\) has 1 NaN or infinite"):
        collect("hessian", data(torch.nan))


def test_the_argument_is_named_and_masks_may_be_infinite() -> None:
    x, mask = torch.randn(2, 4), torch.tensor([[0.0, -torch.inf]])
    assert entering.read([{"x": x, "attention_mask": mask}, (x, mask), {"position_bias": mask}, {"ids": torch.ones(2)}])
    for batch, where in (
        ({"x": mask}, r"batch 1\['x'\]"),
        ((mask, x), r"batch 1\[0\]"),
        ({"attention_mask": -mask}, r"batch 1\['attention_mask'\]"),
        ((x, mask / 0), r"batch 1\[1\]"),
        ({"deep": [x, {"er": x / 0}]}, r"batch 1\['deep'\]\[1\]\['er'\]"),
    ):
        with pytest.raises(pw.PlanError, match=where):
            entering.read([x, batch])


def test_outputs_that_are_not_finite_are_told_as_what_they_are() -> None:
    """Not as a model without blocks, nor as learning that came to nothing."""

    class Overflows(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 0

    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), Overflows(32, 32))
    for name in ("reconstruct", "tune", "distill"):
        before = models.state(model)
        with pytest.raises(
            ValueError, match=r"Sequential returns \d+ NaN or infinite values of \d+ on the calibration"
        ):
            pw.quantize_(model, INT4, calibration=data(), algorithm=["nearest", name])
        assert models.same_state(model, before)


@pytest.mark.parametrize("step", ["smooth", "awq", {"rotate": {"stream": False, "online": True, "held_out": 0}}])
def test_a_rewrite_says_that_the_model_returned_nan_before(step: Any) -> None:
    """Not that it changed the outputs by inf."""

    class Undefined(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.nan

    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), Undefined(32, 32))
    before = models.state(model)
    with pytest.raises(ValueError, match=r"Sequential returns \d+ NaN of \d+ values .* before quantization"):
        pw.quantize_(model, INT4, calibration=data(), algorithm=[step, "nearest"])
    assert models.same_state(model, before)


@pytest.mark.parametrize("count", [2, 3, 4, 8, 30])
def test_what_is_held_out_is_a_share_and_never_all(count: int) -> None:
    given = entering.read([torch.full((1, 1), float(i)) for i in range(count)])
    rest, aside = entering.held_out(given, 0.25)
    assert len(aside) == max(1, round(count / 4))
    assert sorted(float(b) for b in (*rest, *aside)) == list(range(count))
    one = entering.read([{"x": torch.arange(float(count)), "mask": torch.ones(count, 3)}])
    rest, aside = entering.held_out(one, 0.25)
    assert torch.cat([rest[0]["x"], aside[0]["x"]]).sort().values.tolist() == list(range(count))
    assert entering.held_out(entering.read([torch.ones(1, 5)]), 0.25)[1] == []
    assert entering.held_out(given, 0)[1] == []
