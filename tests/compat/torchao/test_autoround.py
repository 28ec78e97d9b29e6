"""AutoRound by torchao's names: better than rounding, blocks, outputs, errors; the small utilities."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.compat.torchao.algorithms import autoround
from pennyweight.compat.torchao.algorithms.autoround import (
    apply_auto_round,
    apply_auto_round_optimization,
    count_tensor_of_type,
    dump_elapsed_time,
    freeze_random,
    is_auto_round_available,
    prepare_model_for_applying_auto_round_,
    singleton,
)
from pennyweight.compat.torchao.algorithms.multi_tensor import MultiTensor
from pennyweight.compat.torchao.quant_api import quantize_
from pennyweight.core.tensor import AffineQuantizedTensor


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> tuple[Tensor, float]:
        return x + scale * self.down(self.up(x).relu()), scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(32) for _ in range(2))
        self.head = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x, scale=0.5)
        return self.head(x)


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.fixture
def batches() -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    mix = torch.randn(8, 32, generator=g)
    return [torch.randn(4, 12, 8, generator=g) @ mix for _ in range(6)]


def is_block(module: nn.Module, name: str) -> bool:
    return isinstance(module, Block)


def error(q: nn.Module, model: nn.Module, batches: list[Tensor]) -> float:
    return sum((q(x) - model(x)).pow(2).mean().item() for x in batches)


@pytest.mark.parametrize("optimized", [False, True])
def test_it_is_better_than_rounding(optimized: bool, model: Model, batches: list[Tensor]) -> None:
    q, rounded = copy.deepcopy(model), copy.deepcopy(model)
    pw.quantize_(rounded, pw.UIntXWeightOnlyConfig(torch.uint3, 16), lambda m, name: "blocks" in name)
    prepare_model_for_applying_auto_round_(
        q, is_block, bits=3, group_size=16, iters=60, use_optimized_layer_output=optimized
    )
    y: Any = q(MultiTensor(batches))
    assert all(torch.equal(a, model(x)) for a, x in zip(y.values, batches, strict=True))
    values = q.blocks[1].up.weight
    assert type(values) is nn.Parameter
    assert not torch.equal(values, model.blocks[1].up.weight)
    quantize_(q, apply_auto_round(), is_block)
    for block in q.blocks:
        w: Any = block.up.weight  # type: ignore[union-attr]
        assert type(w) is AffineQuantizedTensor
        assert w.spec.format.name == "uint3"
        assert w.spec.block == (16,)
    assert torch.equal(q.blocks[1].up.weight.dequantize(), values)  # type: ignore[operator, union-attr]
    assert type(q.head.weight) is nn.Parameter
    assert error(q, model, batches) < 0.8 * error(rounded, model, batches)
    assert count_tensor_of_type(q, AffineQuantizedTensor) == 4


def test_one_batch_and_a_whole_model(batches: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 16))
    prepare_model_for_applying_auto_round_(model, lambda m, name: isinstance(m, nn.Linear), iters=2, group_size=32)
    model(batches[0])
    quantize_(model, apply_auto_round(), lambda m, name: isinstance(m, nn.Linear))
    assert isinstance(model[0].weight, AffineQuantizedTensor)
    block = Block(32)
    out = object()
    given = apply_auto_round_optimization(block, (MultiTensor(batches),), {"scale": 1.0}, out)
    assert given is out
    assert apply_auto_round()(block) is block
    assert isinstance(block.down.weight, AffineQuantizedTensor)


def test_errors(model: Model) -> None:
    with pytest.raises(ValueError, match="bits must be 1 to 8"):
        prepare_model_for_applying_auto_round_(model, is_block, bits=9)
    with pytest.raises(ValueError, match="selects no module"):
        prepare_model_for_applying_auto_round_(model, lambda m, name: False)
    with pytest.raises(ValueError, match="has no optimized weights"):
        apply_auto_round()(model.blocks[0])


def test_utilities(caplog: pytest.LogCaptureFixture) -> None:
    @singleton
    class Options:
        def __init__(self, value: int) -> None:
            self.value = value

    assert Options(1) is Options(2)
    freeze_random(3)
    first = torch.rand(2)
    freeze_random(3)
    assert torch.equal(torch.rand(2), first)

    @dump_elapsed_time("step", record=True)
    def step(x: int) -> int:
        return x + 1

    with caplog.at_level(logging.WARNING):
        assert step(1) == 2
    assert "step elapsed time:" in caplog.text
    assert len(autoround.execution_records[step.__wrapped__.__qualname__]) == 1
    assert is_auto_round_available() in (True, False)
