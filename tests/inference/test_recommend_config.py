"""recommend(): the choice, its bounds, what is measured, and that the model stays as it is."""

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.inference import Candidate, recommend_config
from pennyweight.inference.recommend_config import fastest_per_layer
from pennyweight.inference.recommendation import best, verdict
from pennyweight.kernels.cpu import library
from pennyweight.planning import layer_timing
from pennyweight.planning.configs.by_name import FASTEST
from pennyweight.planning.module_handlers import HANDLERS
from pennyweight.planning.plan import PlanRow
from pennyweight.quantize import Latency
from tests.inference.fuse_models import conv_config

INT8, DYNAMIC, INT4 = pw.Int8WeightOnlyConfig(), pw.Int8DynamicActivationInt8WeightConfig(), pw.Int4WeightOnlyConfig(32)


class Net(nn.Module):
    """Two wide layers, a narrow one that is called for three times as many rows, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.narrow = nn.Linear(64, 128), nn.Linear(128, 64), nn.Linear(64, 32)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("table", torch.zeros(10))

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.down(self.drop(torch.relu(self.up(x))))
        return {"y": self.narrow(torch.cat([x, x, x])), "count": torch.tensor(3), "name": "net"}


NAMES = ("up", "down", "narrow")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """True times, of few calls."""
    monkeypatch.setattr(
        recommend_config,
        "least_seconds",
        lambda calls, seconds, wait, turn: layer_timing.least_seconds(calls, 0.001, wait),
    )
    monkeypatch.setattr(layer_timing, "SECONDS", 0.001)


class Clock:
    """Decides how long things take: each candidate's whole model, and each layer under each scheme."""

    def __init__(self) -> None:
        self.models: dict[str, float] = {}  # milliseconds by the kinds of the layers, "now" those of the last; float: 8
        self.layers: dict[tuple[str, str], float] = {}  # speed by (layer, scheme), default 1
        self.timed: list[tuple[str, str, tuple[int, ...]]] = []

    def least(self, calls: list[Callable[[], Any]], seconds: float, wait: Any, turn: float) -> list[float]:
        for call in calls:
            assert call()["y"].isfinite().all()
        return [8e-3] if len(calls) == 1 else [8e-3, self.models["now"] * 1e-3]

    def layer(self, row: PlanRow, w: Any, rows: tuple[int, ...], limit: Any) -> tuple[Latency, ...]:
        assert isinstance(w, AffineQuantizedTensor)
        self.timed.append((row.name, str(row.scheme), rows))
        speed = self.layers.get((row.name, kind_of(w)), 1.0)
        return tuple(Latency(m, 10.0 * m, 10.0 * m / speed) for m in rows)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake, quantize_ = Clock(), pw.quantize_

    def quantized(model: nn.Module, config: Any) -> Any:
        report = quantize_(model, config)
        kinds = [kind_of(getattr(model, n).weight) for n in NAMES if hasattr(model, n)]
        fake.models["now"] = fake.models.get(",".join(kinds), 8.0)
        return report

    monkeypatch.setattr(recommend_config, "quantize_", quantized)
    monkeypatch.setattr(recommend_config, "least_seconds", fake.least)
    monkeypatch.setattr(layer_timing, "time_layer", fake.layer)
    return fake


def kind_of(w: Any) -> str:
    if not isinstance(w, AffineQuantizedTensor):
        return "float"
    return "dynamic" if w.act is not None else "int8" if w.spec.format.bits == 8 else "int4"


def uniform(kind: str) -> str:
    return ",".join([kind] * 3)


X = torch.randn(4, 64)


# -- the choice ------------------------------------------------------------------------------------------------------


def test_the_fastest_that_fits(clock: Clock) -> None:
    clock.models |= {uniform("int8"): 4.0, uniform("dynamic"): 2.0, uniform("int4"): 1.0}
    free = pw.recommend(Net(), X, candidates=[INT8, DYNAMIC, INT4])
    assert free.config is INT4
    assert free.chosen is not None
    assert free.chosen.speed == pytest.approx(8)
    by_error = {c.name: c.error for c in free.candidates}
    assert 0 < by_error[str(INT8)] < by_error[str(DYNAMIC)] < by_error[str(INT4)] < 0.5
    exact = pw.recommend(Net(), X, candidates=[INT8, DYNAMIC, INT4], max_error=0.04)
    assert exact.config is DYNAMIC
    assert "error" in next(c.why for c in exact.candidates if c.config is INT4)
    assert next(c for c in exact.candidates if c.config is INT4).seconds is None


def test_bounds_of_size(clock: Clock) -> None:
    clock.models |= {uniform("int8"): 1.0, uniform("int4"): 2.0}
    model = Net()
    whole = sum(p.nbytes for p in model.parameters()) + model.table.nbytes
    free = pw.recommend(model, X, candidates=[INT8, INT4])
    assert free.config is INT8
    sizes = {c.name: c.nbytes for c in free.candidates}
    assert sizes["as it is"] == whole
    quantized = copy.deepcopy(model)
    pw.quantize_(quantized, INT4)
    assert sizes[str(INT4)] == sum(p.nbytes for p in quantized.parameters()) + model.table.nbytes
    small = pw.recommend(model, X, candidates=[INT8, INT4], max_bytes=sizes[str(INT4)])
    assert small.config is INT4
    assert not small.candidates[0].fits


def test_float_is_kept_where_nothing_is_faster_by_more_than_the_noise(clock: Clock) -> None:
    clock.models |= {uniform("int8"): 7.8, uniform("dynamic"): 20.0}
    found = pw.recommend(Net(), X, candidates=[INT8, DYNAMIC])
    assert found.config is None
    assert found.chosen is found.candidates[0]
    assert found.verdict == "leave the model as it is: nothing else that fits is more than 5% faster here"


def test_nothing_fits(clock: Clock) -> None:
    found = pw.recommend(Net(), X, candidates=[INT8, INT4], max_bytes=100, max_error=0.5)
    assert found.chosen is None
    assert found.config is None
    nbytes = next(c for c in found.candidates if c.config is INT4).nbytes
    assert found.verdict.startswith("nothing fits max_bytes=100 and max_error=0.5; nearest is ")
    assert f"nearest is {INT4}: {nbytes} bytes, error 0." in found.verdict
    assert all(c.seconds is None for c in found.candidates)


def row(name: str, speed: float, error: float, why: str = "", base: float = 1.0) -> Candidate:
    config = None if name == "float" else INT8
    return Candidate(name, config, 10, error, base / speed, base, why)


def test_of_those_as_fast_the_most_exact() -> None:
    rows = [row("float", 1.0, 0.0), row("a", 3.0, 0.3), row("b", 2.9, 0.1), row("c", 2.0, 0.01), row("d", 9, 0, "no")]
    assert best(rows) is rows[2]
    assert best(rows[4:]) is None
    assert best([]) is None


def test_a_busy_machine_is_told() -> None:
    rows = [row("float", 1.0, 0.0), row("a", 3.0, 0.3, base=1.4)]
    assert "busy" not in verdict(rows[1], rows, None, None)
    rows.append(row("b", 1.0, 0.3, base=1.6))
    assert verdict(rows[1], rows, None, None).endswith(
        ". The machine was busy (the same model took 1e+03 ms, then 1.6e+03 ms): measure again"
    )


def test_a_busy_moment_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([[2.0], [9.0, 9.0], [2.1, 1.0], [8.0, 9.0], [7.0, 6.0], [7.5, 9.0]])
    monkeypatch.setattr(recommend_config, "least_seconds", lambda *args: next(times))
    monkeypatch.setattr(recommend_config._Trial, "mixtures", lambda self, tried: [])
    found = pw.recommend(Net(), X, candidates=[INT8, DYNAMIC])
    assert [(c.float_seconds, c.seconds) for c in found.candidates] == [(2.0, 2.0), (2.1, 1.0), (7.0, 6.0)]
    assert "The machine was busy (the same model took 2e+03 ms, then 7e+03 ms): measure again" in found.verdict


# -- mixtures --------------------------------------------------------------------------------------------------------


def test_each_layer_gets_what_is_fastest_for_it(clock: Clock) -> None:
    clock.layers = {
        ("up.weight", "dynamic"): 3.0, ("up.weight", "int8"): 2.0,
        ("down.weight", "int8"): 1.5, ("down.weight", "dynamic"): 1.04,
        ("narrow.weight", "int8"): 0.5, ("narrow.weight", "dynamic"): 0.7,
    }  # fmt: skip
    clock.models |= {uniform("int8"): 6.0, uniform("dynamic"): 5.0, "dynamic,int8,float": 3.0}
    model = Net()
    found = pw.recommend(model, X, candidates=[INT8, DYNAMIC])
    assert found.config == pw.FqnToConfig({"up.weight": DYNAMIC, "down.weight": INT8})
    assert found.chosen is found.candidates[-1]
    assert found.chosen.name == f"mixed: 1 × {DYNAMIC}, 1 × {INT8}, 1 × float"
    pw.quantize_(model, found.config)
    assert [kind_of(getattr(model, n).weight) for n in NAMES] == ["dynamic", "int8", "float"]
    rows = {(name, rows) for name, _, rows in clock.timed}
    assert rows == {("up.weight", (4,)), ("down.weight", (4,)), ("narrow.weight", (12,))}


def test_a_mixture_too_large_with_float_is_tried_without(clock: Clock) -> None:
    clock.layers = {("up.weight", "int8"): 2.0, ("narrow.weight", "int4"): 0.9, ("narrow.weight", "int8"): 0.5}
    clock.models |= {uniform("int8"): 6.0, "int8,int8,int4": 4.0, uniform("int4"): 7.0}
    sizes = {c.name: c.nbytes for c in pw.recommend(Net(), X, candidates=[INT8, INT4]).candidates}
    found = pw.recommend(Net(), X, candidates=[INT8, INT4], max_bytes=sizes[str(INT8)])
    assert [c.name.split(", ")[-1] for c in found.candidates[3:]] == ["2 × float", f"1 × {INT4}"]
    assert "kB > " in found.candidates[3].why
    assert found.chosen is found.candidates[-1]
    assert found.config == pw.FqnToConfig({"up.weight": INT8, "down.weight": INT8, "narrow.weight": INT4})


def test_a_mixture_that_is_one_of_the_candidates_is_not_tried_again(clock: Clock) -> None:
    clock.layers = {(f"{n}.weight", "int8"): 2.0 for n in NAMES}
    assert len(pw.recommend(Net(), X, candidates=[INT8, DYNAMIC]).candidates) == 3
    clock.layers = {(f"{n}.weight", "int8"): 0.5 for n in NAMES}
    assert len(pw.recommend(Net(), X, candidates=[INT8], max_bytes=10**9).candidates) == 2


def test_mix() -> None:
    a: Any = {"x": (INT8, 2.0), "y": (INT8, 0.5), "table": (INT8, None)}
    b: Any = {"x": (INT4, 3.0), "y": (INT4, 0.7), "z": (INT4, 1.2), "other": (INT4, None)}
    assert fastest_per_layer([a, b], 1.05) == {"x": INT4, "table": INT8, "z": INT4}
    assert fastest_per_layer([b, a], 0.0) == {"x": INT4, "y": INT4, "z": INT4, "other": INT4}
    assert fastest_per_layer([], 1.05) == {}


def test_candidates_that_are_not_exact_enough_take_no_part_in_mixtures(clock: Clock) -> None:
    clock.layers = {("up.weight", "int4"): 9.0, ("up.weight", "int8"): 2.0}
    found = pw.recommend(Net(), X, candidates=[INT8, INT4], max_error=0.04)
    assert found.candidates[-1].config == pw.FqnToConfig({"up.weight": INT8})
    assert "int4" not in {scheme.split("[")[0].removeprefix("u") for _, scheme, _ in clock.timed}


# -- the model stays as it is ----------------------------------------------------------------------------------------


def test_the_model_is_not_changed_and_not_copied(clock: Clock) -> None:
    model = Net().train()
    model.drop.eval()
    before = [(n, id(p), p.detach().clone(), p.requires_grad) for n, p in model.named_parameters()]
    modes, hooks = [m.training for m in model.modules()], [len(m._forward_pre_hooks) for m in model.modules()]
    seen: list[set[int]] = []
    model.up.register_forward_pre_hook(lambda module, args: seen.append({p.data_ptr() for p in module.parameters()}))
    pw.recommend(model, X, candidates=[INT8, INT4])
    assert [m.training for m in model.modules()] == modes
    assert [len(m._forward_pre_hooks) for m in model.modules()][2:] == hooks[2:]
    for name, identity, value, trains in before:
        p = model.get_parameter(name)
        assert (id(p), p.requires_grad) == (identity, trains)
        assert torch.equal(p, value)
    own = {p.data_ptr() for p in model.up.parameters()}
    assert all(pointers & own for pointers in seen)  # the bias at least; nothing else is a copy


@dataclass(frozen=True)
class Wreck(pw.AOBaseConfig):
    """A config whose handler writes to the weights it is given."""


@pytest.fixture
def wrecking() -> Iterator[None]:
    @pw.register_quantize_module_handler(Wreck)
    def wreck(module: nn.Module, config: Wreck) -> nn.Module:
        with torch.no_grad():
            module.weight.zero_()
        return module

    yield
    del HANDLERS[Wreck]


@pytest.mark.parametrize("config", [Wreck(), pw.FqnToConfig({"up": Wreck()})])
def test_a_handler_gets_a_copy_of_its_own(config: Any, clock: Clock, wrecking: None) -> None:
    model = Net()
    before = model.up.weight.detach().clone()
    found = pw.recommend(model, X, candidates=[config], max_error=1e-9)
    assert torch.equal(model.up.weight, before)
    assert found.candidates[1].error is not None
    assert found.candidates[1].error > 0.1


def test_what_cannot_be_applied_is_a_row_with_the_reason(clock: Clock) -> None:
    wrong = pw.FqnToConfig({"upp": INT8})
    found = pw.recommend(Net(), X, candidates=[wrong, INT8])
    assert found.candidates[1].why.startswith("cannot be applied: 'upp' matches no module")
    assert found.candidates[1].error is None
    embedding = nn.Sequential(nn.Embedding(8, 8))
    found = recommend_config.recommend(Wrapped(embedding), torch.tensor([1]), candidates=[INT8])
    assert "nothing would be quantized" in found.candidates[1].why
    assert found.config is None


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.inner(x)}


# -- inputs and outputs ----------------------------------------------------------------------------------------------


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> tuple[Tensor, dict[str, list[Tensor]]]:
        y = self.layer(x) * scale
        return y, {"more": [y.sum(-1), y.masked_fill(torch.arange(64) % 7 == 0, -math.inf)]}


@pytest.mark.parametrize("inputs", [X, (X,), [X], {"x": X, "scale": 2.0}], ids=["tensor", "tuple", "list", "mapping"])
def test_inputs_of_every_form_and_outputs_in_a_tree(inputs: Any, quick: None) -> None:
    found = pw.recommend(Two(), inputs, candidates=[INT8])
    assert found.candidates[0].error == 0
    error = found.candidates[1].error
    assert error is not None
    assert 0.001 < error < 0.02
    assert found.candidates[1].sqnr == pytest.approx(-20 * math.log10(error))


def test_inputs_and_bounds_that_mean_nothing() -> None:
    with pytest.raises(ValueError, match="returns no floating-point tensor for these inputs, got Tensor"):
        pw.recommend(nn.Identity(), torch.tensor([1]))
    for bounds in ({"max_bytes": 0}, {"max_error": -1.0}, {"max_error": math.nan}):
        with pytest.raises(ValueError, match="must be a positive number"):
            pw.recommend(Two(), X, **bounds)
    with pytest.raises(ValueError, match=r"candidates\[0\] must be a config"):
        pw.recommend(Two(), X, candidates=[8])
    with pytest.raises(ValueError, match="unknown config 'int88'"):
        pw.recommend(Two(), X, candidates=["int88"])


def test_the_error() -> None:
    a, b = torch.tensor([3.0, 4.0, -math.inf]), torch.tensor([3.0, 4.5, -math.inf])
    assert recommend_config._error([a], [b]) == pytest.approx(0.1)
    assert recommend_config._error([a], [a]) == 0
    assert recommend_config._error([a], [b[:2]]) == math.inf
    assert recommend_config._error([a], [b * math.nan]) == math.inf
    assert recommend_config._error([torch.zeros(2)], [torch.zeros(2)]) == 0
    assert recommend_config._error([torch.zeros(2)], [torch.ones(2)]) == math.inf


def test_rows_that_layers_are_called_with() -> None:
    model = Net().eval()
    seen, _ = layer_timing.layer_calls(model, lambda: model(torch.randn(2, 5, 64).flatten(0, 1)))
    assert {n: seen[id(getattr(model, n))] for n in NAMES} == {
        "up": Counter({10: 1}), "down": Counter({10: 1}), "narrow": Counter({30: 1}),
    }  # fmt: skip
    assert not model.up._forward_pre_hooks


# -- what is printed -------------------------------------------------------------------------------------------------


def test_the_table_and_the_json(clock: Clock) -> None:
    clock.models |= {uniform("int8"): 4.0}
    found = pw.recommend(Net(), X, candidates=[INT8, INT4], max_error=0.04)
    text = str(found)
    assert "→" in text
    assert "2x faster" in text
    assert "error 0." in text
    data = json.loads(found.to_json())
    assert data["chosen"] == str(INT8)
    assert data["verdict"] == found.verdict
    assert [c["name"] for c in data["candidates"]] == [c.name for c in found.candidates]
    assert data["candidates"][0]["config"] is None
    assert data["candidates"][1]["seconds"] == pytest.approx(4e-3)
    assert found.verdict.startswith(f"{INT8}: 2x faster, ")


def test_for_real(quick: None) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256, bias=False))
    found = pw.recommend(model, torch.randn(2, 256), max_error=0.05)
    assert [c.name for c in found.candidates[: 1 + len(FASTEST)]] == ["as it is", *map(str, FASTEST)]
    assert found.chosen is not None
    assert found.chosen.error is not None
    assert found.chosen.error <= 0.05
    if found.config is not None:
        pw.quantize_(model, found.config)


@pytest.mark.skipif(library.available() is not True, reason=str(library.available()))
def test_candidates_are_timed_with_fused_blocks(quick: None) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 5, 64)
    plain, fused = (pw.recommend(model, x, candidates=[DYNAMIC], fuse=fuse).candidates[1] for fuse in (False, True))
    assert (plain.fused, fused.fused) == (0, 2)
    assert fused.speed
    assert fused.note == "2 blocks fused"
    assert (fused.error or math.inf) < 1.5 * (plain.error or 0)
    assert not any(isinstance(p, AffineQuantizedTensor) for p in model.parameters())


@pytest.mark.skipif(library.available() is not True, reason=str(library.available()))
def test_candidates_are_timed_with_fused_convolution_nets(quick: None) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval(), torch.randn(2, 3, 12, 11)
    static, dynamic = conv_config(model), pw.FqnToConfig({"0.weight": DYNAMIC, "2.weight": DYNAMIC})
    found = pw.recommend(model, x, candidates=[static, dynamic], fuse=True).candidates
    assert (found[1].fused, found[1].fused_nets, found[1].note) == (0, 1, "1 net fused")
    assert found[1].speed
    assert found[2].fused_nets == 0
    assert found[2].note.startswith("1 net not fused: ")


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 32, 3), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)).mean((2, 3)))


def test_a_filter_selects_convolutions_and_the_config_names_what_it_selects(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed, time_layer = [], layer_timing.time_layer

    def spy(row: PlanRow, w: Any, rows: Any, limit: Any) -> Any:
        timed.append((row.name, rows))
        return time_layer(row, w, rows, limit)

    monkeypatch.setattr(layer_timing, "time_layer", spy)
    model, x = Convolutions(), torch.randn(2, 3, 10, 10)
    found = pw.recommend(model, x, candidates=[INT8, "int8-dynamic"], filter_fn=lambda m, name: name != "first")
    config = found.candidates[1].config
    assert isinstance(config, pw.FqnToConfig)
    assert config.fqn_to_config == {"second.weight": INT8, "head.weight": INT8}
    assert found.candidates[1].name == str(INT8)
    assert set(timed) == {("second.weight", ((2, 16, 8, 8),)), ("head.weight", (2,))}
    assert [r.name for r in pw.quantize_(model, config).quantized] == ["second.weight", "head.weight"]
    none = pw.recommend(Convolutions(), x, candidates=[INT8], filter_fn=lambda m, name: False).candidates[1]
    assert none.why.startswith("cannot be applied: ")


def test_the_reason_why_blocks_are_not_fused(quick: None) -> None:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    found = pw.recommend(model, torch.randn(2, 5, 64), candidates=["nf4"], fuse=True).candidates[1]
    assert found.fused == 0
    assert found.note.startswith("2 blocks not fused: ")
    plain = pw.recommend(nn.Sequential(nn.Linear(64, 64)), X, candidates=[INT8], fuse=True).candidates[1]
    assert plain.note == "no transformer blocks with quantized layers were found"
