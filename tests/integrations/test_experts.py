"""Experts that transformers keeps in one parameter: quantized by default, however their products are run."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import pennyweight as pw
from pennyweight.core.numerics import sqnr
from tests.integrations.mixtures import MIXTURES, mixture
from tests.integrations.small import assert_same_weights

QT = pw.AffineQuantizedTensor
CONFIGS = {"int8-dynamic": pw.Int8DynamicActivationInt8WeightConfig(), "int4": pw.Int4WeightOnlyConfig(32)}
IDS = torch.arange(24).view(2, 12)
each = pytest.mark.parametrize("name", MIXTURES)


def experts(model: nn.Module) -> dict[str, Any]:
    return {n: p for n, p in model.named_parameters() if p.ndim == 3}


@torch.no_grad()
def logits(model: Any, way: str = "grouped_mm") -> torch.Tensor:
    model.set_experts_implementation(way)
    return model(IDS).logits


@pytest.mark.parametrize("config", CONFIGS)
@each
def test_they_are_quantized_by_default_and_their_outputs_are_right(name: str, config: str) -> None:
    model = mixture(name)
    small, dense = copy.deepcopy(model), copy.deepcopy(model)
    report = {row.name: row for row in pw.quantize_(small, CONFIGS[config]).rows}
    assert experts(model)
    for parameter, w in experts(small).items():
        assert isinstance(w, QT)
        assert (report[parameter].kernel, w.spec.layout) == ("cpu_experts", "cpu_experts")
        assert w.axes == ((0, 2, 1) if name == "GptOss" else None)  # gpt-oss has [experts, in, out]
        assert w.error(experts(model)[parameter]) == pytest.approx(report[parameter].sqnr, abs=0.01)
    assert not any(
        isinstance(p, QT) for n, p in small.named_parameters() if "bias" in n or ".gate." in n or "router" in n
    )
    pw.quantize_(dense, CONFIGS[config], lambda m, fqn: isinstance(m, nn.Linear))
    floor = sqnr(logits(model), logits(dense)) - 8
    pw.reset_fallbacks()
    for way in ("eager", "grouped_mm"):
        assert sqnr(logits(model, way), logits(small, way)) > max(floor, 12)
    assert not {op for op in pw.fallbacks() if "bmm" in op or "index" in op or "grouped" in op}
    exact = copy.deepcopy(small)  # weights alone, and not inputs, as floats
    pw.dequantize_(exact)
    if config == "int4":
        for way in ("eager", "grouped_mm"):
            assert sqnr(logits(exact, way), logits(small, way)) > 60


@each
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model = mixture(name)
    model.save_pretrained(tmp_path / "float")
    quick = AutoModelForCausalLM.from_pretrained(
        tmp_path / "float", quantization_config=pw.PennyweightConfig(CONFIGS["int4"], ["lm_head"])
    )
    pw.quantize_(model.model, CONFIGS["int4"])
    assert all(isinstance(w, QT) for w in experts(quick).values())
    assert_same_weights(quick, model)
    quick.save_pretrained(tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert_same_weights(again, model)
    assert torch.equal(logits(again), logits(model))
    pw.save(model, tmp_path / "ours")
    assert_same_weights(pw.load(tmp_path / "ours", mixture(name)), model)
    fresh = mixture(name)
    fresh.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(logits(fresh), logits(model))


def test_what_no_kernel_multiplies_stays_float_and_the_report_says_how_to_ask() -> None:
    model, config = mixture("Mixtral"), pw.Float8DynamicActivationFloat8WeightConfig()
    report = pw.quantize_(model, config)
    names = list(experts(model))
    notes = {row.name: row.note for row in report.rows}
    assert not any(isinstance(w, QT) for w in experts(model).values())
    told = f"experts stay float: no batched kernel supports this scheme; FqnToConfig({{{names[0]!r}: config}})"
    assert notes[names[0]].startswith(told)
    pw.quantize_(model, pw.FqnToConfig(dict.fromkeys(names, config)))
    assert all(isinstance(w, QT) for w in experts(model).values())
    assert logits(model, "eager").isfinite().all()


def test_filters_and_names_choose_as_ever() -> None:
    linear, named = mixture("GptOss"), mixture("GptOss")
    pw.quantize_(linear, CONFIGS["int4"], lambda m, fqn: isinstance(m, nn.Linear))
    assert not any(isinstance(w, QT) for w in experts(linear).values())
    table = {"*.experts.gate_up_proj": pw.ContractedAxis(CONFIGS["int4"]), "*.experts.down_proj": None}
    pw.quantize_(named, pw.FqnToConfig(table))
    assert [isinstance(w, QT) for w in experts(named).values()] == [True, False] * 2
    with pytest.raises(pw.PlanError, match=r"ContractedAxis\(-1\): GptOssExperts is contracted along the other axis"):
        pw.quantize_(mixture("GptOss"), pw.FqnToConfig({"*.experts.*_proj": pw.ContractedAxis(CONFIGS["int4"], -1)}))


class Dense(nn.Module):
    """Parameters of the same names and sizes that are no experts of anybody."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Parameter(torch.randn(4, 32, 64)), nn.Parameter(torch.randn(4, 64, 32))
        self.position, self.last = nn.Parameter(torch.randn(2, 8, 64)), nn.Linear(64, 64)
        self.is_transposed = True


def test_other_parameters_of_three_axes_are_left_alone() -> None:
    model = Dense()
    before = {n: p.clone() for n, p in model.named_parameters()}
    report = pw.quantize_(model, CONFIGS["int4"])
    assert [row.name for row in report.quantized] == ["last.weight"]
    for name in ("gate_up_proj", "down_proj", "position"):
        assert torch.equal(getattr(model, name), before[name])
