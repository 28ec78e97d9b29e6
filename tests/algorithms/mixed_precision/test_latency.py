"""search() within a budget of time: what is timed, what is chosen, and what is said where it cannot be met."""

import copy
import json
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.algorithms.mixed_precision import budget
from pennyweight.algorithms.mixed_precision.budget import Base, Limits, Option
from pennyweight.algorithms.mixed_precision.latency import CallTimer, layer_times
from pennyweight.algorithms.mixed_precision.search import allocate, search
from pennyweight.core.spec import QuantSpec
from pennyweight.planning import layer_timing
from pennyweight.planning.config_resolution import PlanError
from pennyweight.planning.plan import PlanRow, plan
from pennyweight.quantize import Latency
from tests.algorithms.models import inputs

BITS = (2, 4, 8)
FEW = [pw.SpecConfig(QuantSpec(pw.get_format(f"int{b}"), (32,), torch.float16)) for b in BITS]


class Net(nn.Module):
    """Two layers, of which one is called twice with fewer rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.relu(self.up(x)))
        half = len(x) // 2
        return torch.cat([self.up(y[:half]), self.up(y[half:])])


class Fake:
    """A float layer takes 1 ms a row, and so many times that under each format; the whole model takes ``whole`` s."""

    def __init__(self, whole: float, **cost: float) -> None:
        self.whole, self.cost, self.timed = whole, cost, []  # type: ignore[var-annotated]
        self.busy, self.slow = 1.0, 2.0

    def call(self, run: Any, device: torch.device) -> float:
        assert isinstance(run(), torch.Tensor)
        self.slow -= 0.5 if self.slow > 1 else 0  # two of the visits are disturbed
        return self.whole * self.slow

    def layer(self, row: PlanRow, w: Any, rows: tuple[int, ...], limit: Any) -> tuple[Latency, ...]:
        assert w.spec.layout == row.layout
        self.timed.append((row.name, str(w.spec.format), rows))
        ratio = self.cost[str(w.spec.format)]
        self.busy *= 2  # a machine that gets slower and slower
        return tuple(Latency(m, 1e3 * m * self.busy, 1e3 * m * ratio * self.busy) for m in rows)

    @property
    def clock(self) -> CallTimer:
        return CallTimer(self.call, self.layer)


def found_within(some: Any, fake: Fake, **how: Any) -> Any:
    how.setdefault("candidates", FEW)
    return search(Net().eval(), inputs(rows=8, batches=4), some, clock=fake.clock, **how)


def test_layers_are_timed_at_the_rows_that_a_call_gives_them() -> None:
    fake = Fake(1.0, int2=0.5, int4=0.5, int8=0.5)
    model = Net().eval()
    took = layer_times(model, torch.randn(8, 32), [plan(model, c) for c in FEW], fake.clock)
    assert fake.timed[:2] == [("up.weight", "int2", (4, 8)), ("down.weight", "int2", (8,))]
    # up: 2 calls of 4 rows and one of 8, down: one of 8, at 1 ms a row, times how busy the machine was when first timed
    assert took.floats == {"up.weight": pytest.approx(0.032), "down.weight": pytest.approx(0.032)}
    assert took.rest == pytest.approx(1.0 - 0.064)
    assert took.options["up.weight"] == pytest.approx([0.016] * 3)  # however busy it was with one of the plans


def test_time_that_the_layers_take_beyond_the_whole_is_the_whole() -> None:
    model = Net().eval()
    took = layer_times(model, torch.randn(8, 32), [plan(model, FEW[0])], Fake(1e-3, int2=0.5).clock)
    assert took.rest == 0
    assert took.whole == pytest.approx(0.064)


def test_a_speed_is_kept_at_the_least_loss() -> None:
    fake = Fake(0.1, int2=0.25, int4=0.5, int8=2.0)
    found = found_within("1.3x latency", fake)
    assert found.speed >= 1.3
    assert found.seconds == pytest.approx(0.1 / found.speed)
    # by trying all: 0.1 s of which 0.064 are the layers
    table = found.table
    ways = []
    for way in product(range(4), repeat=2):
        picked = [options[i] for options, i in zip(table.values(), way, strict=True)]
        if sum(o.seconds for o in picked) + 0.036 <= 0.1 / 1.3 + 1e-12:
            ways.append(sum(o.loss for o in picked))
    assert sum(table[n][i].loss for n, i in found.chosen.items()) == pytest.approx(min(ways))
    assert [o.scheme for o in table["up.weight"]][-1] == "as it is"
    assert all(o.nbytes == table["up.weight"][i].nbytes for i, o in enumerate(table["up.weight"]))


def test_what_is_slower_is_left_as_it_is() -> None:
    found = found_within("1.05x latency", Fake(0.1, int2=0.25, int4=1.5, int8=2.0))
    assert sorted(found.chosen.values()) == [0, 3]
    model = Net().eval()
    report = pw.quantize_(model, found.config)
    (quantized,) = report.quantized
    assert found.chosen[quantized.name] == 0
    data = json.loads(found.to_json())
    assert data["float_seconds"] == pytest.approx(0.1)
    assert data["table"]["up.weight"][3]["scheme"] == "as it is"
    assert "faster than float" in str(found)


def test_budgets_combine() -> None:
    cost = {"int2": 0.9, "int4": 0.2, "int8": 0.1}
    fast = found_within("2x latency", Fake(0.1, **cost))
    assert fast.bits > 5
    small = found_within(["4.6 bpw", "2x latency"], Fake(0.1, **cost))
    assert small.bits <= 4.6
    assert small.speed >= 2
    assert small.predicted >= fast.predicted
    assert found_within(["9 bpw", "4.6 bpw", "2x latency"], Fake(0.1, **cost)).chosen == small.chosen
    assert found_within("50 ms", Fake(0.1, **cost)).chosen == fast.chosen
    assert small.within("2x latency").chosen == fast.chosen
    assert fast.within(["4.6 bpw", "2x latency"]).chosen == small.chosen


def test_the_best_there_is_is_told_before_anything_is_solved() -> None:
    with pytest.raises(PlanError, match=r"leaves 50 ms per call; .* takes 68 ms per call, 1.47x .* of which 36 ms"):
        found_within("2x latency", Fake(0.1, int2=0.5, int4=0.6, int8=0.7), algorithm="nearest")
    # 5 bits do for int4, but that is slow; int2 and a mixture are not fast enough within them
    with pytest.raises(PlanError, match=r"leaves 50 ms per call; the fastest allocation within 2.56 kB .* takes 68 ms"):
        found_within(["5 bpw", "50 ms"], Fake(0.1, int2=0.5, int4=0.5, int8=0.1))


def test_the_sizes_that_are_told_before_are_those_after() -> None:
    found = found_within("1x latency", Fake(0.1, int2=0.5, int4=0.6, int8=0.7))
    for name, options in found.table.items():
        model = Net().eval()
        for option in options[:-1]:
            again = copy.deepcopy(model)
            pw.quantize_(again, pw.FqnToConfig({name: option.config}))
            packed = again.get_parameter(name).to_layout("bits" if "int8" not in option.scheme else "plain")
            assert packed.nbytes == option.nbytes


def test_a_search_without_a_clock_says_so() -> None:
    found = search(Net().eval(), inputs(), "5 bpw", candidates=FEW, algorithm="nearest")
    assert found.seconds is None
    assert found.speed is None
    assert "speed" not in str(found)
    with pytest.raises(PlanError, match="no layer was timed"):
        found.within("1.3x latency")


def test_the_example_is_the_call_that_counts() -> None:
    fake = Fake(0.1, int2=0.5, int4=0.6, int8=0.7)
    found_within("1x latency", fake, example=torch.randn(2, 32), algorithm="nearest")
    assert {rows for name, _, rows in fake.timed if name == "down.weight"} == {(2,)}


def test_the_machine_is_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_timing, "SECONDS", 1e-4)
    monkeypatch.setattr("pennyweight.algorithms.mixed_precision.latency.SECONDS", 1e-4)
    found = search(Net().eval(), inputs(rows=8), "0.0001x latency", algorithm="nearest")
    assert found.base.seconds > 0
    assert len(found.table["up.weight"]) == 12  # of bits and of speed, and as it is
    assert all(o.seconds > 0 for o in found.table["up.weight"])


def option(nbytes: int, loss: float, seconds: float) -> Option:
    return Option(None, "", nbytes, loss, seconds)


def test_allocation_under_both_limits_is_the_best_of_all() -> None:
    g = torch.Generator().manual_seed(5)
    table = {}
    for name in "abcde":
        sizes, slow = torch.randint(1, 30, (2, 3), generator=g).tolist()
        losses = torch.rand(3, generator=g).tolist()
        table[name] = [option(*o) for o in zip(sizes, losses, slow, strict=True)]
    tried = 0
    for nbytes, seconds in product((40, 60, 80), (40, 60, 80)):
        limit = Limits(nbytes, seconds)
        ways = [
            (sum(o.loss for o in way))
            for way in product(*table.values())
            if sum(o.nbytes for o in way) <= nbytes and sum(o.seconds or 0 for o in way) <= seconds
        ]
        if not ways:
            with pytest.raises(PlanError, match="the budget leaves"):
                budget.check(table, limit, Base(1, 0, 1.0))
            continue
        tried += 1
        budget.check(table, limit, Base(1, 0, 1.0))
        chosen = allocate(table, limit)
        assert sum(table[n][i].nbytes for n, i in chosen.items()) <= nbytes
        assert sum(table[n][i].seconds or 0 for n, i in chosen.items()) <= seconds
        assert sum(table[n][i].loss for n, i in chosen.items()) == pytest.approx(min(ways), rel=1e-3)
    assert 1 < tried < 9


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2x latency", 0.4), ("1.25 x latency", 0.7), ("300 ms", 0.2), ("0.5s", 0.4), ("400000 us", 0.3)],
)
def test_what_a_budget_of_time_leaves(text: str, seconds: float) -> None:
    assert budget.limits(text, Base(1, 0, 1.0, 0.1)).seconds == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["1.3x", "latency", "1.3x latencies", "-2 ms", "20 min", "", [], ["20 ms", 3], None])
def test_what_is_no_budget(text: Any) -> None:
    with pytest.raises(PlanError, match="budget must be"):
        budget.limits(text, Base(1, 0, 1.0))


def test_no_time_is_no_budget() -> None:
    with pytest.raises(PlanError, match="must be positive"):
        budget.limits("0 ms", Base(1, 0, 1.0))


def test_inputs_are_quantized_in_the_measured_loss() -> None:
    """Of configs whose products are integers, under the layouts of their kernels."""
    configs = [pw.Int8DynamicActivationInt8WeightConfig(), pw.Int8WeightOnlyConfig()]
    cost = {"int8": 0.5}
    found = found_within("2x latency", Fake(0.064, **cost), candidates=configs, algorithm="nearest")
    with torch.no_grad():
        for name, (dynamic, weight_only, as_is) in found.table.items():
            assert dynamic.loss > weight_only.loss > as_is.loss == 0, name
