"""quantize_(measure=...): what is timed, what is warned about, what is left float, and the clock."""

import copy
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.planning import layer_timing
from pennyweight.planning.plan import PlanRow
from pennyweight.quantize import Latency, Row

INT8 = pw.Int8WeightOnlyConfig()


class Times:
    """Stands in for the clock: narrow layers take four times as long quantized, wide ones a quarter."""

    def __init__(self) -> None:
        self.timed: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def __call__(self, row: PlanRow, w: Any, rows: tuple[int, ...], limit: Any) -> tuple[Latency, ...]:
        assert isinstance(w, AffineQuantizedTensor)
        assert w.spec.layout == row.layout
        assert not isinstance(row.tensor, AffineQuantizedTensor)
        self.timed.append((row.name, row.shape, rows))
        return tuple(Latency(m, 8.0 * m, (32.0 if min(row.shape) < 64 else 2.0) * m) for m in rows)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> Times:
    fake = Times()
    monkeypatch.setattr(layer_timing, "time_layer", fake)
    return fake


def wide_and_narrow() -> nn.Sequential:
    sizes = [(64, 64), (64, 32), (32, 64), (64, 64)]
    return nn.Sequential(*(nn.Linear(*size) for size in sizes), nn.Linear(64, 64, bias=False))


# -- what is timed ---------------------------------------------------------------------------------------------------


def test_each_shape_is_timed_once_and_a_bias_makes_another(times: Times) -> None:
    with pytest.warns(pw.PerformanceWarning):
        report = pw.quantize_(wide_and_narrow(), INT8, measure=(1, 7))
    assert times.timed == [
        ("0.weight", (64, 64), (1, 7)), ("1.weight", (32, 64), (1, 7)), ("2.weight", (64, 32), (1, 7)),
        ("4.weight", (64, 64), (1, 7)),
    ]  # fmt: skip
    first, again = (next(r for r in report.rows if r.name == name) for name in ("0.weight", "3.weight"))
    assert again.latency == first.latency == (Latency(1, 8.0, 2.0), Latency(7, 56.0, 14.0))
    assert [r.latency for r in report.rows if r.name.endswith("bias")] == [()] * 4


def test_other_schemes_of_one_shape_are_timed_apart(times: Times) -> None:
    config = pw.FqnToConfig({"0": INT8, "1": pw.Int4WeightOnlyConfig(32), "2": INT8})
    pw.quantize_(nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))), config, measure=True)
    assert [(name, rows) for name, _, rows in times.timed] == [("0.weight", (1, 64)), ("1.weight", (1, 64))]


def test_tied_weights_are_timed_once_and_what_is_not_linear_is_not(times: Times) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.conv = nn.Embedding(128, 64), nn.Conv1d(8, 8, 3)
            self.head, self.other = nn.Linear(64, 128, bias=False), nn.Embedding(9, 64)
            self.head.weight = self.embed.weight

    model = Tied()
    report = pw.quantize_(model, INT8, lambda m, fqn: True, measure=True)
    assert [name for name, _, _ in times.timed] == ["embed.weight"]
    assert model.head.weight is model.embed.weight
    assert {r.name: bool(r.latency) for r in report.quantized} == {
        "embed.weight": True, "conv.weight": False, "other.weight": False,
    }  # fmt: skip


def test_nothing_is_timed_unless_asked(times: Times) -> None:
    report = pw.quantize_(wide_and_narrow(), INT8)
    assert times.timed == []
    assert "speed" not in str(report)
    assert report.slower == []


def test_weights_that_have_the_scheme_already_are_not_timed(times: Times) -> None:
    model = nn.Sequential(nn.Linear(64, 64))
    pw.quantize_(model, INT8)
    assert pw.quantize_(model, INT8, measure=True).rows[0].latency == ()


def test_a_dry_run_measures_and_changes_nothing(times: Times) -> None:
    model = wide_and_narrow()
    before = [id(p) for p in model.parameters()]
    report = pw.quantize_(model, INT8, dry_run=True, measure=True, on_slower="skip")
    assert [id(p) for p in model.parameters()] == before
    assert [r.name for r in report.quantized] == ["0.weight", "3.weight", "4.weight"]
    with pytest.raises(pw.PlanError, match="on the meta device"):
        pw.quantize_(wide_and_narrow().to("meta"), INT8, dry_run=True, measure=True)


# -- what is slower --------------------------------------------------------------------------------------------------


def test_one_warning_for_each_slow_shape_before_anything_changes(times: Times) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(5)), nn.Linear(64, 64), nn.Linear(32, 64))
    with pytest.warns(pw.PerformanceWarning) as caught:
        report = pw.quantize_(copy.deepcopy(model), INT8, measure=(1, 64))
    assert len(caught) == 2
    text = str(caught[0].message)
    assert text.startswith("0.weight, 1.weight, 2.weight and 2 more: [32, 32] as int8 per row with ")
    assert "4x slower at 1 row, 4x slower at 64 rows; on_slower='skip'" in text
    assert caught[0].filename == __file__
    assert len(report.slower) == 6
    assert "6 are slower than float here" in report.summary()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(pw.PerformanceWarning):
            pw.quantize_(model, INT8, measure=True)
    assert not any(isinstance(p, AffineQuantizedTensor) for p in model.parameters())


def test_skip_leaves_slow_layers_as_they_were_and_says_so(times: Times) -> None:
    model, x = wide_and_narrow(), torch.randn(3, 64)
    floats = [m.weight for m in model]
    report = pw.quantize_(model, INT8, measure=(1, 64), on_slower="skip")
    assert [isinstance(m.weight, AffineQuantizedTensor) for m in model] == [True, False, False, True, True]
    assert model[1].weight is floats[1]
    assert model[2].weight.requires_grad
    row = next(r for r in report.skipped if r.name == "1.weight")
    assert row.note.startswith("left unquantized: int8 per row with ")
    assert row.note.endswith("is 4x slower at 1 row, 4x slower at 64 rows here")
    assert (row.bytes_after, row.bytes_before, row.kernel) == (32 * 64 * 4, 32 * 64 * 4, "")
    assert row.latency[0].speed == 0.25
    assert report.bytes_after == sum(int(p.nbytes) for p in model.parameters())
    assert model(x).isfinite().all()


def test_skip_may_leave_all(times: Times) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    report = pw.quantize_(model, INT8, measure=True, on_slower="skip")
    assert report.quantized == []
    assert type(model[0].weight) is nn.Parameter


def test_within_the_noise_is_not_slower() -> None:
    assert not Latency(1, 100.0, 104.9).slower
    assert Latency(1, 100.0, 105.1).slower
    assert Latency(1, 100.0, 50.0).speed == 2


def test_rows() -> None:
    assert layer_timing.row_counts(False) == ()
    assert layer_timing.row_counts(True) == (1, 64)
    assert layer_timing.row_counts([8, 2, 8]) == (8, 2)


@pytest.mark.parametrize("rows", [(), (0,), (1, -2), (1.5,), (True,), "1", 64, 0])
def test_rows_that_mean_nothing(rows: Any) -> None:
    with pytest.raises(pw.PlanError, match="measure must be True, or positive numbers of rows"):
        pw.quantize_(nn.Linear(8, 8), INT8, measure=rows)


def test_arguments_that_need_each_other() -> None:
    with pytest.raises(pw.PlanError, match=r"on_slower must be one of keep, skip, got 'drop'"):
        pw.quantize_(nn.Linear(8, 8), INT8, measure=True, on_slower="drop")
    with pytest.raises(pw.PlanError, match="needs measure=True"):
        pw.quantize_(nn.Linear(8, 8), INT8, on_slower="skip")
    with pytest.raises(pw.PlanError, match="need a config"):
        pw.quantize_(nn.Linear(8, 8), lambda m: m, measure=True)


# -- the report ------------------------------------------------------------------------------------------------------


def test_the_table_and_the_json_tell_the_speed(times: Times) -> None:
    with pytest.warns(pw.PerformanceWarning):
        report = pw.quantize_(wide_and_narrow(), INT8, measure=(1, 64))
    text = str(report)
    assert "1 row: 4x faster" in text
    assert "64 rows: 4x slower" in text
    assert "1 row: 4x faster\n64 rows: 4x faster" in report._repr_html_()
    rows = {r["name"]: r for r in json.loads(report.to_json())["rows"]}
    assert rows["0.weight"]["latency"] == [
        {"rows": 1, "float_us": 8.0, "quantized_us": 2.0}, {"rows": 64, "float_us": 512.0, "quantized_us": 128.0},
    ]  # fmt: skip
    assert rows["0.bias"]["latency"] == []
    assert json.loads(report.to_json()) == report.to_dict()


def test_layers_of_other_speed_do_not_fold_into_one_line() -> None:
    fast, slow = (Latency(1, 8.0, 4.0),), (Latency(1, 8.0, 16.0),)
    rows = [
        Row(f"layers.{i}.weight", "Linear", (8, 8), "int8", "k", 256, 64, 40.0, "", fast if i % 2 else slow)
        for i in range(30)
    ]
    text = str(pw.Report("config", rows))
    assert text.count("layers.*.weight (15)") == 2
    assert "1 row: 2x faster" in text
    assert "1 row: 2x slower" in text


# -- the clock -------------------------------------------------------------------------------------------------------


class Clock:
    """Time passes only where a call says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.order = 0.0, ""
        monkeypatch.setattr(layer_timing, "perf_counter", lambda: self.now)

    def takes(self, name: str, *seconds: float) -> Callable[[], None]:
        """A call that takes these seconds in turn, the last from then on."""
        left = list(seconds)

        def call() -> None:
            self.order += name
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def test_the_least_time_of_turns_taken_alternately(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    best = layer_timing.least_seconds([clock.takes("a", 9e-3, 5e-3, 4e-3, 3e-3, 8e-3), clock.takes("b", 1e-3)], 0.03)
    assert best == pytest.approx([3e-3, 1e-3])
    assert clock.order == "aabb" + "ab" * 5  # 5, 4, 9, 9 ms leave some of the 30 ms


def test_slow_calls_get_three_turns_and_quick_ones_many_calls_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert layer_timing.least_seconds([clock.takes("a", 10.0), clock.takes("b", 20.0)], 0.01) == pytest.approx([10, 20])
    assert clock.order == "aabb" + "ab" * 3
    clock.order = ""
    layer_timing.least_seconds([clock.takes("a", 1e-6), clock.takes("b", 4e-6)], 1e-4)
    assert clock.order == "aabb" + ("a" * 20 + "b" * 5) * 3


def test_a_turn_is_many_samples_and_a_device_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    assert layer_timing.least_seconds(
        [clock.takes("a", 1e-2, 1e-2, 1e-2, 2e-3, 1e-2)], 0.01, turn=0.05
    ) == pytest.approx([2e-3])
    assert clock.order == "aa" + "a" * 15
    clock.order = ""
    best = layer_timing.least_seconds([clock.takes("a", 1e-4)], 0.01, wait=clock.takes("w", 9e-4))
    assert clock.order.startswith("awawaw")
    assert best == pytest.approx([1e-3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_real_measurement(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_timing, "SECONDS", 0.001)
    model = nn.Sequential(nn.Linear(96, 32), nn.MultiheadAttention(32, 2)).to(dtype)
    state = torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pw.PerformanceWarning)
        report = pw.quantize_(model, INT8, measure=(1, 3))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert [r.name for r in report.quantized] == ["0.weight", "1.in_proj_weight", "1.out_proj.weight"]
    for row in report.quantized:
        assert [t.rows for t in row.latency] == [1, 3]
        assert all(0 < t.quantized_us < 1e6 and 0 < t.float_us < 1e6 for t in row.latency)


CONVOLUTIONS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Conv1d(16, 8, 3, padding_mode="circular", padding=1), (2, 16, 9)),
    (lambda: nn.Conv2d(16, 8, 3, stride=2, groups=2), (2, 16, 9, 8)),
    (lambda: nn.ConvTranspose1d(64, 8, 3, 2), (2, 64, 9)),
    (lambda: nn.ConvTranspose2d(64, 8, 4, 2, 1, output_padding=1), (2, 64, 9, 8)),
]


@pytest.mark.parametrize(("make", "shape"), CONVOLUTIONS)
def test_convolutions_are_timed_at_the_shapes_of_their_inputs(
    make: Callable[[], nn.Module], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_timing, "SECONDS", 0.001)
    model, x = nn.Sequential(make()), torch.randn(shape)
    seen, _ = layer_timing.layer_calls(model, lambda: (model(x), model(x[0]), model(x)))
    todo = pw.plan(model, INT8, lambda m, name: True)
    (row,) = todo.active
    calls = layer_timing.calls_of_weight(row, seen)
    assert calls == {shape: 2, (1, *shape[1:]): 1}
    w = copy.deepcopy(model)
    pw.quantize_(w, INT8, lambda m, name: True)
    layer_timing.measure_(todo, lambda row: [size for size, _ in calls.most_common()], lambda row: w[0].weight)
    assert [t.size for t in row.latency] == [shape, (1, *shape[1:])]
    assert [t.rows for t in row.latency] == [x.numel() // shape[1], x.numel() // shape[1] // 2]
    assert row.latency[0].label == "×".join(map(str, shape))
    assert row.latency[0].to_dict()["shape"] == list(shape)
    call = layer_timing._convolution(row)
    assert torch.equal(call(x, model[0].weight, model[0].bias), model(x))


def test_a_convolution_whose_input_is_unknown_is_not_timed_and_says_so(times: Times) -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3), nn.Linear(64, 64))
    conv, linear = pw.quantize_(model, INT8, lambda m, name: True, measure=True).quantized
    assert [name for name, _, _ in times.timed] == ["1.weight"]
    assert (conv.latency, conv.note) == ((), layer_timing.UNKNOWN_SIZE)
    assert (len(linear.latency), linear.note) == (2, "")


@pytest.mark.parametrize("packed", [False, True])
def test_recurrent_networks_are_called_once_with_all_inputs_and_at_each_step_with_a_state(packed: bool) -> None:
    model, x = nn.GRU(8, 8, 2, batch_first=True), torch.randn(3, 7, 8)
    given: Any = nn.utils.rnn.pack_sequence([torch.randn(n, 8) for n in (4, 3, 1)]) if packed else x
    seen, _ = layer_timing.layer_calls(model, lambda: model(given))
    calls = {row.name: layer_timing.calls_of_weight(row, seen) for row in pw.plan(model, INT8).active}
    steps = {3: 1, 2: 2, 1: 1} if packed else {3: 7}
    inputs = {8: 1} if packed else {21: 1}
    for layer in (0, 1):
        assert calls[f"weight_ih_l{layer}"] == inputs
        assert calls[f"weight_hh_l{layer}"] == steps


def test_a_transposed_weight_is_called_as_its_module_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    seen = []
    product = layer_timing._product

    def spy(x: Any, w: Any, bias: Any) -> Any:
        seen.append((tuple(x.shape), tuple(w.shape), bias is not None))
        return product(x, w, bias)

    monkeypatch.setattr(layer_timing, "_product", spy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", pw.PerformanceWarning)
        pw.quantize_(nn.Sequential(conv1d(48, 32)), INT8, measure=(2,))
    assert set(seen) == {((2, 32), (32, 48), True)}


def test_copies_hold_as_many_bytes_as_asked_and_are_others() -> None:
    w = torch.zeros(16, 16)
    copies = layer_timing._copies(w, 5 * w.nbytes)
    assert len(copies) == len({c.data_ptr() for c in copies}) == 5
    assert copies[0] is w
    assert len(layer_timing._copies(w, 10)) == 1
    assert len(layer_timing._copies(w, 1 << 40)) == layer_timing.COPIES
