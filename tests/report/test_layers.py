"""Inputs of layers, their speed, and where a layer stands in the model."""

import copy
import math

import pytest
import torch

import pennyweight as pw
from pennyweight.planning.quantize_report import Latency
from pennyweight.report.compare_models import compare_weights
from pennyweight.report.heat_map import place_of
from pennyweight.report.layers import BINS, activations
from pennyweight.report.page import overall
from pennyweight.report.page_assembly import time_layers
from tests.report.small import llama, mlp, prompts, quantized


@torch.no_grad()
def test_inputs_are_those_that_the_layers_get() -> None:
    model = mlp()
    model[0].weight[7] *= 100  # one channel of the second layer's input
    x = [torch.randn(5, 32), torch.randn(3, 32)]
    x[1][0, 4] = 0
    found = {i.name: i for i in activations(model, x)}
    whole, hidden = torch.cat(x), torch.cat([model[:2](t) for t in x])
    for name, expected in (("0.weight", whole), ("2.weight", hidden)):
        assert torch.equal(found[name].channels, expected.abs().amax(0)), name
        assert int(found[name].bins.sum()) == expected.numel()
        for i in range(1, BINS - 1):
            low, high = 2 ** (-16 + i / 2), 2 ** (-16 + (i + 1) / 2)
            inside = ((expected.abs() >= low) & (expected.abs() < high)).sum()
            assert abs(int(found[name].bins[i] - inside)) <= 1, (name, i)  # log2 rounds at the edges
    assert found["2.weight"].outliers[0] == 7
    assert found["0.weight"].outliers == []
    assert next(iter(found)) == "2.weight"
    assert found["2.weight"].ratio == pytest.approx(float(hidden.abs().amax(0).max() / hidden.abs().amax(0).median()))
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_every_linear_layer_has_inputs_and_no_table() -> None:
    names = {i.name for i in activations(llama(), prompts(1))}
    assert "model.embed_tokens.weight" not in names
    assert len(names) == 2 * 7 + 1


def test_layers_that_are_alike_are_timed_once() -> None:
    model = llama()
    small = quantized(model, pw.Int8WeightOnlyConfig())
    told: list[str] = []
    found = time_layers(model, small, (1, 3), told.append)
    assert found.keys() == {n for n, p in small.named_parameters() if isinstance(p, pw.AffineQuantizedTensor)}
    assert [t.rows for t in found["lm_head.weight"]] == [1, 3]
    assert all(t.float_us > 0 and t.quantized_us > 0 for times in found.values() for t in times)
    assert len(told) == len(set(told)) == 5  # q and o; k and v; gate and up; down; lm_head
    first, second = (found[f"model.layers.{i}.mlp.up_proj.weight"] for i in range(2))
    assert first is second


def test_overall_speed_is_that_of_the_sums() -> None:
    latency = {"a": (Latency(1, 10, 5), Latency(64, 10, 40)), "b": (Latency(1, 90, 15),)}
    assert overall(latency) == {1: 5.0, 64: 0.25}
    assert overall({}) == {}


def test_weights_without_inputs() -> None:
    model = mlp()
    layers, unmatched = compare_weights(model, quantized(model))
    assert unmatched == ()
    assert [w.layer_sqnr for w in layers] == [None, None]
    assert layers[0].weight_sqnr <= layers[1].weight_sqnr < math.inf
    same, _ = compare_weights(model, copy.deepcopy(model))
    assert [w.weight_sqnr for w in same] == [math.inf, math.inf]


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.3.mlp.up_proj.weight", ("mlp.up_proj", 3)),
        ("encoder.layer.10.attention.self.key.weight", ("attention.self.key", 10)),
        ("blocks.2.experts.7.up", ("experts.7.up", 2)),
        ("0.weight", ("weight", 0)),
        ("lm_head.weight", None),
    ],
)
def test_place_of(name: str, place: tuple[str, int] | None) -> None:
    assert place_of(name) == place
