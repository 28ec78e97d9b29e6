"""quantize_ and dequantize_: what changes, what does not, memory, handlers, and the report."""

import copy
import gc
import json
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.algorithms.solvers.rtn import _CHUNK, quantize_weight
from pennyweight.core.formats import INT8 as INT8_FORMAT
from pennyweight.core.numerics import sqnr
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.planning.module_handlers import HANDLERS
from pennyweight.planning.parameters import Site
from pennyweight.planning.quantize_report import size
from pennyweight.quantize import Row, Scheme

INT8, INT4_32 = pw.Int8WeightOnlyConfig(), pw.Int4WeightOnlyConfig(group_size=32)


def mlp(depth: int = 3, width: int = 64) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


# -- what changes and what does not ----------------------------------------------------------------------------------


def test_dry_run_changes_nothing() -> None:
    model = mlp()
    before = [id(p) for p in model.parameters()]
    state = copy.deepcopy(model.state_dict())
    report = pw.quantize_(model, INT8, dry_run=True)
    assert len(report.quantized) == 3
    assert all(r.sqnr is None for r in report.rows)
    assert [id(p) for p in model.parameters()] == before
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_modes_flags_and_other_parameters_stay() -> None:
    model = mlp().train()
    model[0].bias.requires_grad_(False)
    model[2].eval()
    types = [type(m) for m in model]
    pw.quantize_(model, INT8, lambda m, fqn: fqn != "1")
    assert [type(m) for m in model] == types
    assert [m.training for m in model] == [True, True, False]
    flags = {n: p.requires_grad for n, p in model.named_parameters()}
    assert flags == {"0.weight": False, "0.bias": False, "1.weight": True, "1.bias": True,
                     "2.weight": False, "2.bias": True}  # fmt: skip


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_is_quantized_without_gradients_can_have_them_later(mode: Any) -> None:
    model = mlp()
    with mode():
        pw.quantize_(model, INT8)
    x = torch.randn(2, 64, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert model[0].bias.grad is not None
    with mode():
        pw.dequantize_(model)
    model(x).sum().backward()


def test_a_fine_tuning_step_on_top_of_quantized_weights() -> None:
    model = mlp(2)
    pw.quantize_(model, INT8)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    x, target, losses = torch.randn(16, 64), torch.randn(16, 64), []
    for _ in range(5):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


def test_the_device_argument_moves_the_layer_with_its_weight() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, x = mlp(2), torch.randn(3, 64)
    model[0].register_buffer("extra", torch.zeros(3))
    exact, bias = model[0](x).detach(), model[0].bias
    pw.quantize_(model, INT8, lambda m, fqn: fqn == "0", device)
    layer = model[0]
    assert {t.device.type for t in (layer.weight, layer.bias, layer.extra)} == {device}
    assert layer.bias is bias
    assert model[1].weight.device.type == "cpu"
    assert sqnr(exact, layer(x.to(device)).cpu().detach()) > 35
    with pytest.raises(pw.PlanError, match="leave device out"):
        pw.quantize_(model, INT8, device="meta")


def test_a_large_weight_in_rows_gives_the_same_bits() -> None:
    x = torch.randn(40, 64)
    for scheme in (Scheme(QuantSpec(INT8_FORMAT, (-1,))), Scheme(QuantSpec(INT8_FORMAT, None)),
                   Scheme(QuantSpec(INT8_FORMAT, (4, 32)))):  # fmt: skip
        whole, decibels = quantize_weight(x, scheme)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("pennyweight.algorithms.solvers.rtn._CHUNK", 64 * 7)
            pieces, same = quantize_weight(x, scheme)
        assert torch.equal(whole.codes, pieces.codes)
        assert torch.equal(whole.scale, pieces.scale)
        assert decibels == pytest.approx(same, abs=1e-6)
    assert _CHUNK == 1 << 24


def test_each_float_weight_is_freed_before_the_next() -> None:
    model = mlp(4)
    alive = [weakref.ref(m.weight) for m in model]
    seen: list[list[bool]] = []

    def progress(done: int, total: int, name: str) -> None:
        assert (total, name) == (4, f"{done - 1}.weight")
        gc.collect()
        seen.append([ref() is not None for ref in alive])

    pw.quantize_(model, INT8, progress=progress)
    assert len(seen) == 4
    assert seen == [[i >= done for i in range(4)] for done in range(1, 5)]


def test_a_weight_that_the_caller_holds_is_left_to_him() -> None:
    model = mlp(1)
    held, value = model[0].weight, model[0].weight.detach().clone()
    pw.quantize_(model, INT8)
    assert torch.equal(held, value)


# -- dequantize_ -----------------------------------------------------------------------------------------------------


def test_dequantize_of_a_model_without_quantized_weights_says_nothing() -> None:
    assert pw.dequantize_(mlp()).rows == []


def test_dequantize_keeps_the_flag_of_the_weight() -> None:
    model = mlp(1)
    pw.quantize_(model, INT8)
    model[0].weight.requires_grad_(True)
    report = pw.dequantize_(model)
    assert model[0].weight.requires_grad
    assert "dequantized" in report.summary()
    assert report.rows[0].note == "was int8 per row"


# -- handlers and configs of one's own -------------------------------------------------------------------------------


@dataclass(frozen=True)
class OwnScheme(pw.AOBaseConfig):
    """An own config that is a scheme: three lines."""

    def scheme(self, site: Site, on_indivisible: str = "pad") -> Scheme:
        return Scheme(QuantSpec(INT8_FORMAT, None))


@dataclass(frozen=True)
class Halve(pw.AOBaseConfig):
    """An own config that has a handler."""


@dataclass(frozen=True)
class Neither(pw.AOBaseConfig):
    """An own config that has nothing."""


class Halved(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / 2


@pytest.fixture
def calls() -> Iterator[list[tuple[str, Any]]]:
    """Register a handler for Halve that records its calls."""
    seen: list[tuple[str, Any]] = []

    @pw.register_quantize_module_handler(Halve)
    def halve(module: nn.Module, config: Halve) -> nn.Module:
        seen.append((type(module).__name__, config))
        return Halved(module)

    yield seen
    del HANDLERS[Halve]


def test_an_own_scheme() -> None:
    model = mlp(1)
    assert pw.quantize_(model, OwnScheme()).quantized[0].scheme == "int8[tensor] scale=f32"


def test_a_config_with_neither_scheme_nor_handler() -> None:
    with pytest.raises(pw.PlanError, match=r"^0\.weight: Neither has neither.*@register_quantize_module_handler"):
        pw.quantize_(mlp(1), Neither())


def test_an_own_handler_returns_another_module(calls: list[tuple[str, Any]]) -> None:
    model, x = mlp(2), torch.randn(3, 64)
    exact = model[0](x) / 2
    assert [r.name for r in pw.plan(model, Halve(), lambda m, fqn: fqn == "0").active] == ["0"]
    report = pw.quantize_(model, Halve(), lambda m, fqn: fqn == "0")
    assert calls == [("Linear", Halve())]
    assert torch.equal(model[0](x), exact)
    assert isinstance(model[1], nn.Linear)
    (row,) = report.quantized
    assert (row.name, row.type, row.scheme, row.note) == ("0", "Halved", "Halve", "by halve")
    assert report.bytes_after == sum(p.nbytes for p in model.parameters())


def test_a_handler_runs_on_linear_layers_by_default(calls: list[tuple[str, Any]]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.MultiheadAttention(8, 2))
    pw.quantize_(model, Halve())
    assert [name for name, _ in calls] == ["Linear", "NonDynamicallyQuantizableLinear"]


def test_a_handler_of_a_container_is_not_run_inside_it(calls: list[tuple[str, Any]]) -> None:
    model = nn.ModuleDict({"a": mlp(2), "b": mlp(1)})
    report = pw.quantize_(model, Halve(), lambda m, fqn: fqn.startswith("a"))
    assert [name for name, _ in calls] == ["Sequential"]
    assert report.bytes_after == sum(p.nbytes for p in model.parameters())


def test_handlers_by_name_beside_configs(calls: list[tuple[str, Any]]) -> None:
    model = mlp(3)
    report = pw.quantize_(model, pw.FqnToConfig({"0": Halve(), "re:[12]": INT8}))
    assert [r.name for r in report.quantized] == ["0", "1.weight", "2.weight"]
    assert isinstance(model[0], Halved)


def test_a_handler_cannot_replace_the_root(calls: list[tuple[str, Any]]) -> None:
    with pytest.raises(pw.PlanError, match=r"root; wrap the model in nn\.Sequential"):
        pw.quantize_(nn.Linear(8, 8), Halve())


def test_a_handler_that_takes_the_name_of_a_parameter() -> None:
    seen = []

    @dataclass(frozen=True)
    class Config(pw.AOBaseConfig):
        pass

    @pw.register_quantize_module_handler(Config)
    def handler(module: nn.Module, config: Config, *, parameter_name: str = "weight") -> nn.Module:
        seen.append(parameter_name)
        setattr(module, parameter_name, nn.Parameter(getattr(module, parameter_name).bfloat16()))
        return module

    try:
        model = nn.Sequential(nn.Linear(8, 8))
        model[0].experts = nn.Parameter(torch.randn(2, 8, 8))
        report = pw.quantize_(model, pw.FqnToConfig({"0.experts": Config()}))
        assert seen == ["experts"]
        assert (report.quantized[0].name, report.quantized[0].bytes_after) == ("0.experts", 2 * 8 * 8 * 2)
        assert report.bytes_after == sum(p.nbytes for p in model.parameters())
        pw.quantize_(model, Config())
        assert seen == ["experts", "weight"]
    finally:
        del HANDLERS[Config]


def test_a_handler_for_a_parameter_must_take_its_name(calls: list[tuple[str, Any]]) -> None:
    with pytest.raises(pw.PlanError, match=r"0\.weight: the handler of Halve takes no parameter_name"):
        pw.quantize_(mlp(1), pw.FqnToConfig({"0.weight": Halve()}))


def test_a_second_handler_for_a_config_is_an_error(calls: list[tuple[str, Any]]) -> None:
    with pytest.raises(ValueError, match="Halve already has a handler: halve"):
        pw.register_quantize_module_handler(Halve)(lambda module, config: module)


def test_the_old_callable_second_argument() -> None:
    model, x = mlp(2), torch.randn(3, 64)
    exact = model[1](x) / 2
    with pytest.warns(DeprecationWarning, match="register_quantize_module_handler"):
        report = pw.quantize_(model, Halved, lambda m, fqn: fqn == "1")
    assert torch.equal(model[1](x), exact)
    assert [r.name for r in report.rows] == ["1"]
    with pytest.warns(DeprecationWarning, match="0.10"), pytest.raises(pw.PlanError, match="root"):
        pw.quantize_(nn.Linear(4, 4), Halved)
    with pytest.warns(DeprecationWarning, match="0.10"), pytest.raises(pw.PlanError, match="no module"):
        pw.quantize_(model, Halved, lambda m, fqn: False)
    with pytest.warns(DeprecationWarning, match="0.10"), pytest.raises(pw.PlanError, match="must return a module"):
        pw.quantize_(model, lambda m: None)


# -- the report ------------------------------------------------------------------------------------------------------


def test_check() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Embedding(100, 64))
    report = pw.quantize_(model, INT4_32)
    assert report.check(min_sqnr=15, min_fraction=0.3) is report
    with pytest.raises(ValueError, match=r"1 weights are below 40 dB: 0\.weight \(\d+\.\d dB\); give them more bits"):
        report.check(min_sqnr=40)
    with pytest.raises(
        ValueError, match=r"only 3\d% of the bytes were quantized, 90% required; largest left .*: 1\.weight"
    ):
        report.check(min_fraction=0.9)


def test_the_table_describes_schemes_in_words_and_folds_what_was_left_alone() -> None:
    report = pw.quantize_(mlp(3), pw.NF4WeightOnlyConfig())
    text = str(report)
    assert report.rows[0].scheme_text == "nf4, groups of 64, int8 scales (groups of 256, f32 scales)"
    assert "nf4, groups of 64" in text
    assert "0.bias and 2 more" in text
    assert "bias of Linear is not quantized" in text


def test_json_of_an_exact_weight() -> None:
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.zero_()
    report = pw.quantize_(layer, INT8)
    assert report.rows[0].sqnr == float("inf")
    data = json.loads(report.to_json())
    assert data["rows"][0]["sqnr"] == "inf"
    assert data["rows"][0]["shape"] == [4, 4]
    assert data["bytes_after"] == report.bytes_after


def test_an_empty_report() -> None:
    report = pw.Report("nothing")
    assert report.fraction == 0
    assert "0 parameters" in report.summary()
    assert json.loads(report.to_json())["rows"] == []
    assert not Row("a", "Linear", (1,), "", "", 4, 4).quantized


def test_through_float_once_loses_no_more_than_it_must() -> None:
    model = mlp(1)
    floats = model[0].weight.detach().clone()
    pw.quantize_(model, INT8)
    pw.quantize_(model, INT4_32)
    straight = mlp(1)
    straight[0].weight = nn.Parameter(floats.clone())
    pw.quantize_(straight, INT4_32)
    assert isinstance(model[0].weight, AffineQuantizedTensor)
    assert sqnr(floats, model[0].weight.dequantize()) > sqnr(floats, straight[0].weight.dequantize()) - 0.5


def test_a_long_table_folds_layers_that_differ_in_a_number():
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(26)), nn.Linear(16, 8))
    report = pw.quantize_(model, pw.Int8WeightOnlyConfig())
    folded, full = str(report), report.table()
    assert "*.weight (26)" in folded
    assert "26.weight" in folded
    worst = min(r.sqnr for r in report.quantized[:26])
    assert f"{worst:.1f} to " in folded
    assert size(26 * 16 * 16 * 4) in folded
    assert all(f"{i}.weight" in full for i in range(27))
    assert "*" not in full.replace("int8[*]", "")
