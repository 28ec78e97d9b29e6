"""Chains of blocks: found where each block's input is what the one before put out, and only there."""

import torch
from torch import Tensor, nn

from pennyweight.algorithms.calibration.block_order import CalibrationSegment, calibration_segments, inference_mode
from tests.algorithms.models import bert, linear_weights, t5
from tests.algorithms.models import deep_mlp as mlp
from tests.algorithms.models import padded_tokens as tokens
from tests.algorithms.models import small_llama as llama


def found(model: nn.Module, batch: object) -> list[CalibrationSegment]:
    with inference_mode(model):
        return calibration_segments(model, linear_weights(model), batch)


def chains(model: nn.Module, batch: object) -> list[list[str]]:
    return [[name for name, _ in s.blocks] for s in found(model, batch)]


def test_a_decoder() -> None:
    model = llama()
    layers, head = found(model, tokens(1)[0])
    assert [name for name, _ in layers.blocks] == ["model.layers.0", "model.layers.1"]
    assert len(layers.sites[0]) == len(layers.sites[1]) == 7
    assert head == CalibrationSegment([["lm_head.weight"]])


def test_an_encoder() -> None:
    layers, pooler = found(bert(), tokens(1)[0])
    assert [name for name, _ in layers.blocks] == ["encoder.layer.0", "encoder.layer.1"]
    assert all(len(names) == 6 for names in layers.sites)
    assert pooler.sites == [["pooler.dense.weight"]]


def test_an_encoder_and_a_decoder() -> None:
    model, batch = t5(), {**tokens(1)[0], "decoder_input_ids": torch.randint(0, 40, (2, 5))}
    encoder, decoder, head = found(model, batch)
    assert [name for name, _ in encoder.blocks] == ["encoder.block.0", "encoder.block.1"]
    assert [name for name, _ in decoder.blocks] == ["decoder.block.0", "decoder.block.1"]
    assert head == CalibrationSegment([["lm_head.weight"]], looked_up=True)  # tied to the embedding
    named = {n for s in (encoder, decoder, head) for names in s.sites for n in names}
    assert named == set(linear_weights(model).values())


def test_a_sequential_model_is_a_chain_itself() -> None:
    (one,) = found(mlp(), torch.randn(3, 32))
    assert [name for name, _ in one.blocks] == ["0", "1", "2", "3", "4"]
    assert one.sites == [["0.weight"], [], ["2.weight"], [], ["4.weight"]]


class Stages(nn.Module):
    """Three layers in a list, used as ``use`` says."""

    def __init__(self, use: str) -> None:
        super().__init__()
        self.use, self.stages = use, nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.stages
        if self.use == "backwards":
            return a(b(c(x)))
        if self.use == "side by side":
            return a(x) + b(x) + c(x)
        if self.use == "twice":
            return c(b(a(a(x))))
        if self.use == "changed between":
            return c(b(a(x)).relu())
        if self.use == "one left out":
            return b(a(x))
        return c(b(a(x)))


def test_what_is_no_chain() -> None:
    x = torch.randn(2, 8)
    assert chains(Stages("in order"), x) == [["stages.0", "stages.1", "stages.2"]]
    for use in ("backwards", "side by side", "twice", "changed between", "one left out"):
        (one,) = found(Stages(use), x)
        assert not one.blocks, use
        called = {"backwards": "210", "one left out": "01"}.get(use, "012")
        assert one.sites == [[f"stages.{i}.weight" for i in called]], use


def test_lists_inside_of_chains_are_theirs() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(2)))
    (one,) = found(model, torch.randn(2, 8))
    assert [name for name, _ in one.blocks] == ["0", "1"]
    assert one.sites == [["0.0.weight", "0.2.weight"], ["1.0.weight", "1.2.weight"]]


def test_layers_before_between_and_after() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last, self.never = (nn.Linear(8, 8) for _ in range(4))
            self.a = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.b = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            for layer in self.a:
                x = layer(x)
            x = self.middle(x)
            for layer in self.b:
                x = layer(x)
            return self.last(x)

    got = [s.sites for s in found(Model(), torch.randn(2, 8))]
    assert got == [
        [["first.weight"]], [["a.0.weight"], ["a.1.weight"]], [["middle.weight"]], [["b.0.weight"], ["b.1.weight"]],
        [["last.weight"]],
    ]  # fmt: skip


def test_the_model_is_left_as_it_was() -> None:
    model = llama().train()
    model.model.layers[0].eval()
    model.config.use_cache = True
    modes = {n: m.training for n, m in model.named_modules()}
    fast = torch.backends.mha.get_fastpath_enabled()
    with inference_mode(model):
        assert not model.training
        assert not model.config.use_cache
    assert {n: m.training for n, m in model.named_modules()} == modes
    assert model.config.use_cache
    assert torch.backends.mha.get_fastpath_enabled() == fast
    found(model, tokens(1)[0])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
