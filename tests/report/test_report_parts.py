"""The parts of a report page: grades, kinds, errors of weights and their sources, leaderboard, speed, verdict."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

import pennyweight as pw
from pennyweight.planning.layer_kinds import kind_of_layer
from pennyweight.planning.quantize_report import Latency
from pennyweight.report.bytes_by_kind import KindBytes, model_kinds
from pennyweight.report.error_sources import error_sources
from pennyweight.report.grades import KL, LAYER, OUTPUT, relative_error_of
from pennyweight.report.heat_map import heat_map
from pennyweight.report.layers import model_bytes, pairs
from pennyweight.report.leaderboard import Standing, letters, ranked, summary
from pennyweight.report.metrics import decibels
from pennyweight.report.model_speed import model_speeds, processor, timed_batches
from pennyweight.report.verdict import verdict
from pennyweight.report.weight_errors import weight_errors
from tests.report.small import bert, llama, mlp, prompts, quantized

# -- grades ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale", "value", "grade"),
    [
        (LAYER, math.inf, "good"), (LAYER, 40, "good"), (LAYER, 30, "good"), (LAYER, 29.9, "fine"), (LAYER, 25, "fine"),
        (LAYER, 24.9, "watch"), (LAYER, 15, "watch"), (LAYER, 14.9, "bad"), (LAYER, -math.inf, "bad"),
        (LAYER, None, ""), (LAYER, math.nan, ""), (KL, 0, "good"), (KL, 0.01, "good"), (KL, 0.05, "fine"),
        (KL, 0.2, "watch"), (KL, math.inf, "bad"), (OUTPUT, 20, "good"), (OUTPUT, 4.9, "bad"),
    ],
)  # fmt: skip
def test_grades_are_absolute(scale: Any, value: float | None, grade: str) -> None:
    assert scale.grade(value) == grade


def test_thresholds_are_in_words_and_consistent() -> None:
    assert LAYER.ranges()[0] == ("good", "at least 30 dB")
    assert KL.ranges()[-1] == ("bad", "above 0.2 nats")
    assert [a - b for a, b in zip(LAYER.bounds, OUTPUT.bounds, strict=True)] == [10, 10, 10]
    assert relative_error_of(20) == pytest.approx(0.1)
    assert [round(math.sqrt(kl / 2), 2) for kl in KL.bounds] == [0.07, 0.16, 0.32]  # as the page says


def test_the_heat_map_of_int8_is_calm() -> None:
    model = llama()
    found = pw.compare(model, quantized(model, pw.Int8WeightOnlyConfig()), prompts(1))
    table = heat_map(found.layers)
    assert {c["grade"] for row in table["rows"] for c in row["cells"]} == {"good"}
    coarse = pw.compare(model, quantized(model, pw.IntxWeightOnlyConfig(torch.int2, pw.PerGroup(32))), prompts(1))
    cells = [c for row in heat_map(coarse.layers)["rows"] for c in row["cells"]]
    assert {c["grade"] for c in cells} == {"bad"}
    assert {c["mark"] for c in cells} == {"✕"}


# -- kinds of layers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "type_name", "rank", "kind"),
    [
        ("model.embed_tokens.weight", "Embedding", 2, "embeddings"), ("wte.weight", "", 2, "embeddings"),
        ("token_embd.weight", "", 2, "embeddings"), ("embeddings.LayerNorm.weight", "LayerNorm", 1, "norms"),
        ("encoder.layer.0.attention.output.LayerNorm.bias", "", 1, "norms"), ("h.0.ln_1.weight", "", 1, "norms"),
        ("encoder.layer.0.attention.output.dense.weight", "Linear", 2, "attention"),
        ("encoder.layer.0.output.dense.bias", "Linear", 1, "MLP"), ("h.0.attn.c_attn.weight", "Conv1D", 2, "attention"),
        ("h.0.mlp.c_proj.weight", "Conv1D", 2, "MLP"), ("model.layers.3.self_attn.q_proj.weight", "", 2, "attention"),
        ("model.layers.3.mlp.experts.gate_up_proj", "", 3, "MLP"), ("lm_head.weight", "Linear", 2, "head"),
        ("classifier.bias", "Linear", 1, "head"), ("pooler.dense.weight", "Linear", 2, "head"),
        ("conv1.weight", "Conv2d", 4, "convolutions"), ("features.0.weight", "", 4, "convolutions"),
        ("bn1.weight", "BatchNorm2d", 1, "norms"), ("projection", "", 2, "other"),
    ],
)  # fmt: skip
def test_kinds_by_name(name: str, type_name: str, rank: int, kind: str) -> None:
    assert kind_of_layer(name, type_name, rank) == kind


@pytest.mark.parametrize("make", [llama, lambda: llama(tied=True), bert, mlp])
def test_bytes_by_kind_add_up_to_the_models(make: Any) -> None:
    model = make()
    small = quantized(model, pw.Int8WeightOnlyConfig())
    kinds = model_kinds(small, model)
    assert sum(k.bytes for k in kinds) == model_bytes(small)
    assert sum(k.bytes_float or 0 for k in kinds) == model_bytes(model)
    assert sum(k.elements for k in kinds) == sum(p.numel() for p in small.parameters()) + sum(
        b.numel() for n, b in small.named_buffers() if n in small.state_dict()
    )
    assert all(0 <= k.quantized <= k.elements for k in kinds)


# -- errors of weights -------------------------------------------------------------------------------------------------


def errors_of(model: nn.Module, small: nn.Module, name: str) -> Any:
    return weight_errors({p.name: p for p in pairs(model, small)[0]}[name])


def test_rounded_weights() -> None:
    model = mlp()
    small = quantized(model)
    e = errors_of(model, small, "2.weight")
    w, q = model[2].weight.detach(), small[2].weight.dequantize()
    assert (e.unit, e.beyond) == ("std", 0)
    assert e.reach == pytest.approx(float((q - w).abs().max() / w.std(correction=0)), rel=1e-5)
    assert sum(e.counts) == w.numel()
    torch.testing.assert_close(e.channels, (q - w).norm(dim=1) / w.norm(dim=1))
    noise = (q - w).square().sum(1)
    assert e.worst[0][0] == int(noise.argmax())
    assert e.share == pytest.approx(float(noise.sort(descending=True).values[:3].sum() / noise.sum()), rel=1e-5)
    blocks = (q - w).square().reshape(10, 2, 32).sum(-1)
    at = int(blocks.argmax())
    assert e.blocks[0][:3] == (at // 2, at % 2 * 32, at % 2 * 32 + 31)
    assert e.blocks[0][3] == pytest.approx(float(blocks.max() / blocks.sum()), rel=1e-5)


def test_weights_that_moved_by_more_than_half_a_step() -> None:
    model = mlp()
    small = quantized(model, pw.Int8WeightOnlyConfig())
    step = small[2].weight.scale.expand(10, 64)
    with torch.no_grad():
        model[2].weight.add_(1.2 * step * (torch.arange(64) < 16))
    e = errors_of(model, small, "2.weight")
    assert (e.unit, e.reach) == ("step", 1.5)
    assert e.beyond == pytest.approx(0.25, abs=0.01)


def test_every_shape_of_weight_has_errors_by_output_channel() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.up = nn.Conv2d(3, 8, 3), nn.ConvTranspose1d(6, 4, 3)
            self.table, self.conv1d = nn.Embedding(20, 32), Conv1D(12, 32)
            self.experts = nn.Parameter(torch.randn(4, 5, 32))

    torch.manual_seed(0)
    model = Many()
    int8 = pw.Int8WeightOnlyConfig()
    names = ("conv", "up", "table", "conv1d", "experts")
    small = quantized(model, pw.FqnToConfig(dict.fromkeys(names, int8)))
    channels = {n: len(errors_of(model, small, n if n == "experts" else f"{n}.weight").channels) for n in names}
    assert channels == {"conv": 8, "up": 4, "table": 20, "conv1d": 12, "experts": 20}
    e = errors_of(model, small, "conv1d.weight")
    q = small.conv1d.weight.dequantize()
    expected = (q - model.conv1d.weight).norm(dim=0) / model.conv1d.weight.norm(dim=0)
    torch.testing.assert_close(e.channels, expected.detach())


def test_formats_without_a_step() -> None:
    model = mlp()
    e = errors_of(model, quantized(model, pw.NF4WeightOnlyConfig()), "2.weight")
    assert (e.unit, e.beyond, sum(e.counts)) == ("std", None, 640)


# -- where the error comes from ----------------------------------------------------------------------------------------


@torch.no_grad()
def test_error_of_weights_and_of_inputs() -> None:
    model = mlp()
    small = quantized(model, pw.Int8DynamicActivationInt4WeightConfig(32))
    x = torch.randn(16, 32)
    found = error_sources(model, small, [x])
    assert found.keys() == {"0.weight", "2.weight"}
    y = model[0](x)
    weight_only = nn.functional.linear(x, small[0].weight.dequantize(), model[0].bias)
    s = found["0.weight"]
    assert s.weight_sqnr == pytest.approx(decibels(float(y.square().sum()), float((weight_only - y).square().sum())))
    both = float((small[0](x) - weight_only).square().sum())
    assert s.inputs == pytest.approx(both, rel=1e-4)
    assert 0 < s.share < 0.5  # 4-bit weights lose more than 8-bit inputs
    model[0].weight[:, 3] = 0  # an outlier channel that adds nothing to the output, but coarsens the other inputs
    small = quantized(model, pw.Int8DynamicActivationInt4WeightConfig(32))
    outliers = x * torch.where(torch.arange(32) == 3, 500.0, 1.0)
    assert error_sources(model, small, [outliers])["0.weight"].share > 0.9
    assert not any(m._forward_hooks for m in model.modules())


def test_without_quantized_inputs_all_error_is_of_weights() -> None:
    model = mlp()
    assert error_sources(model, quantized(model), [torch.randn(2, 32)]) == {}


# -- leaderboard -------------------------------------------------------------------------------------------------------


def standing(name: str, size: int, error: float | None, *speed: float, grade: str = "good") -> Standing:
    return Standing(name, name, size, 4.0, error, grade, None, speed)


def test_the_pareto_front() -> None:
    some = [
        standing("worse", 100, 0.5, 1.0, grade="bad"), standing("small", 50, 0.2, 1.0),
        standing("exact", 100, 0.1, 1.0), standing("fast", 100, 0.4, 2.0),
    ]  # fmt: skip
    found = ranked(some)
    assert [s.name for s in found] == ["exact", "small", "fast", "worse"]
    assert [s.name for s in found if s.front] == ["exact", "small", "fast"]
    assert summary(found) == "Smallest error: exact; smallest with a good output: small; fastest: fast."
    twins = ranked([standing("a", 1, 0.1), standing("b", 1, 0.1)])
    assert [s.front for s in twins] == [True, True]
    assert [s.front for s in ranked([standing("a", 1, None), standing("b", 2, None)])] == [True, False]
    assert summary([standing("a", 1, 0.9, grade="bad")]).endswith("none has a good or fine output.")


def test_letters() -> None:
    assert letters(3) == ["A", "B", "C"]
    assert (letters(28)[26], len(set(letters(80)))) == ("A2", 80)


def test_speed_in_turn() -> None:
    model = mlp()
    slow = nn.Sequential(*model, *(nn.Linear(10, 10) for _ in range(60)))
    batches = [("one", torch.randn(1, 32)), ("many", torch.randn(64, 32))]
    (first, again), (one, many) = model_speeds([model, slow], batches, rounds=3)
    assert (first.speed, first.low, first.high) == (1, 1, 1)
    assert again.what == many.what == "many"
    assert one.low <= one.speed <= one.high
    assert one.speed < 1  # sixty layers more
    assert one.seconds > 0
    with pytest.raises(ValueError, match="rounds must be at least 1, got 0"):
        model_speeds([model], batches, rounds=0)
    assert "thread" in processor()


def test_what_is_timed() -> None:
    (one, a), (all_, b) = timed_batches(prompts(1)[0], causal=True)
    assert (one, a["input_ids"].shape, all_, b["input_ids"].shape) == ("one token", (1, 1), "a batch of 3", (3, 12))
    assert [what for what, _ in timed_batches(prompts(1)[0], causal=False)] == ["one sample", "a batch of 3"]
    assert timed_batches((torch.ones(2),), False)[0][0] == "one batch"


# -- verdict -----------------------------------------------------------------------------------------------------------


def test_the_verdict_without_measurements() -> None:
    kinds = [KindBytes("embeddings", None, 810, 810, 0), KindBytes("MLP", None, 190, 190, 190)]
    found = verdict(None, [], kinds, total=1000, total_float=None, latency={})
    assert found.grade == ""
    assert [s.options for s in found.steps] == ["--float FLOAT_DIR", "--embeddings int8"]
    assert "Embeddings: 81% of the bytes, not quantized" in found.steps[1].text
    model = llama()
    layers, _ = pw.report.compare_models.compare_weights(model, quantized(model))
    found = verdict(None, layers, kinds, total=1000, total_float=4000, latency={})
    assert found.text.startswith("Weights of 15 quantized layers: ")
    assert "4.00× smaller" in found.text
    assert found.steps[0].options == "--text FILE"


def test_the_verdict_names_layers_slower_than_float() -> None:
    latency = {f"layers.{i}.k.weight": (Latency(1, 10.0, 30.0), Latency(64, 100.0, 101.0)) for i in range(2)}
    latency |= {"layers.0.up.weight": (Latency(1, 10.0, 12.0), Latency(64, 100.0, 50.0))}
    found = verdict(None, [], [], total=1, total_float=2, latency=latency, speed=0.8)
    step = found.steps[1]
    assert step.text == "3 of 3 layers are slower than float here; as float, these 2 are 40 µs faster in all at 1 row."
    assert step.options == "--layer 'layers.*.k=none'"
    assert "0.80× the speed of float" in found.steps[2].text
