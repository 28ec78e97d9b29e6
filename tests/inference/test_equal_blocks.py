"""Blocks that are built alike are described once: as if each had been recognized by itself."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.inference import FusedBlock, fuse
from pennyweight.inference.describe_block import describe_block
from pennyweight.inference.equal_blocks import described_as
from pennyweight.inference.examples import candidates, observe
from pennyweight.support.errors import Refusal
from tests.inference.fuse_models import FAMILIES, blocks_of, inputs, model_of, states

transformers = pytest.importorskip("transformers")
# Families in which a kind of block occurs once: layers attend differently, or to a cache that only some have
DIFFERENT = ("gemma2", "gemma3")


def described(model: nn.Module, given: dict[str, Any]) -> list[tuple[str, nn.Module, Any, Any]]:
    """(name, block, its call, its description) of the blocks that are recognized, each by itself."""
    blocks = candidates(model)
    with torch.no_grad():
        seen = observe(model, blocks, given)
        found = []
        for name, block in blocks.items():
            try:
                found.append((name, block, seen[name], describe_block(name, block, seen[name])))
            except (Refusal, KeyError):
                continue
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_description_is_that_of_the_block_alone(family: str) -> None:
    found = described(model_of(family), inputs(family))
    equal = 0
    for name, block, seen, own in found:
        for _, other, call, description in found:
            if other is not block and (made := described_as(name, block, seen, other, call, description)) is not None:
                assert repr(made) == repr(own), name  # steps are equal by identity
                equal += 1
    assert equal > 0 or family in DIFFERENT or len(found) < 2


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the blocks that are recognized by themselves from now on."""
    names: list[str] = []
    real = fuse.describe_block

    def counting(name: str, *rest: Any) -> Any:
        names.append(name)
        return real(name, *rest)

    monkeypatch.setattr(fuse, "describe_block", counting)
    return names


def test_one_of_equal_blocks_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    names, model = counted(monkeypatch), model_of("llama", "int4")
    given = inputs("llama")
    with torch.no_grad():
        expected = states(model(**given))
        report = pw.fuse_(model)
        assert (states(model(**given)) - expected).abs().max() < 1e-4
    assert names == ["model.layers.0"]
    assert set(blocks_of(report).values()) == {""}


@pytest.mark.parametrize("scheme", ["int8", "int8-dynamic"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("gemma2", "t5")])  # theirs differ
def test_the_check_of_equal_blocks_runs_no_forward_again(
    family: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, model = counted(monkeypatch), model_of(family, scheme)
    blocks = candidates(model)
    calls: list[nn.Module] = []
    for kind in {type(block) for block in blocks.values()}:

        def forward(self: nn.Module, *args: Any, own: Any = kind.forward, **kwargs: Any) -> Any:
            calls.append(self)
            return own(self, *args, **kwargs)

        monkeypatch.setattr(kind, "forward", wraps(kind.forward)(forward))
    report = pw.fuse_(model, inputs(family))
    assert set(blocks_of(report).values()) == {""}
    equal = [block for name, block in blocks.items() if name not in names]
    assert len(equal) == len(blocks) // 2
    assert all(sum(one is block for one in calls) == 1 for block in equal)  # the run of the model


def _eps(block: Any) -> None:
    block.input_layernorm.variance_epsilon = 1e-3


def _activation(block: Any) -> None:
    block.mlp.act_fn = nn.GELU()


def _hook(block: Any) -> None:
    block.mlp.register_forward_hook(lambda module, args, out: None)


def _bias(block: Any) -> None:
    block.mlp.down_proj.bias = nn.Parameter(torch.randn(64), requires_grad=False)


def _scale(block: Any) -> None:
    block.self_attn.scaling = 0.5


def _object(block: Any) -> None:
    block.mlp.extra = object()


@pytest.mark.parametrize("change", [_eps, _activation, _hook, _bias, _scale, _object])
def test_a_block_that_differs_is_recognized_by_itself(
    change: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    names, model = counted(monkeypatch), model_of("llama")
    change(model.model.layers[1])
    given = inputs("llama")
    with torch.no_grad():
        expected = states(model(**given))
        pw.fuse_(model)
        assert (states(model(**given)) - expected).abs().max() < 1e-4
    assert names == ["model.layers.0", "model.layers.1"]


def test_values_and_schemes_of_weights_may_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    names, model = counted(monkeypatch), model_of("llama", "int4")
    w = model.model.layers[1].mlp.up_proj.weight
    float_layer = nn.Linear(64, 96, bias=False)
    float_layer.weight = nn.Parameter(w.dequantize(), requires_grad=False)
    pw.quantize_(float_layer, "int8", filter_fn=lambda module, name: True)
    model.model.layers[1].mlp.up_proj = float_layer
    given = inputs("llama")
    with torch.no_grad():
        expected = states(model(**given))
        pw.fuse_(model)
        assert (states(model(**given)) - expected).abs().max() < 1e-4
    assert names == ["model.layers.0"]


def test_a_block_that_computes_something_else_is_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What no attribute shows, the short check finds."""
    model = model_of("llama")
    layer = model.model.layers[1]
    kind = type(layer.mlp)
    forward = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: forward(self, x) * (2 if self is layer.mlp else 1))
    report = pw.fuse_(model)
    assert isinstance(model.model.layers[0], FusedBlock)
    given = inputs("llama")
    with torch.no_grad():
        y = states(model(**given))
        pw.inference.thaw_(model)
        assert (states(model(**given)) - y).abs().max() < 1e-4
    assert blocks_of(report)["model.layers.0"] == ""


def test_tuples_of_tensors_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    names, model = counted(monkeypatch), model_of("llama")
    for layer in model.model.layers:
        layer.mlp.extra = (torch.zeros(2), 1)
    pw.fuse_(model)
    assert names == ["model.layers.0", "model.layers.1"]
