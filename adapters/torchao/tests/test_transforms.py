"""torchao's table of handlers: the same codes as quantize_."""

from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.planning.module_handlers import HANDLERS as REGISTERED
from pennyweight_torchao.configs import transforms
from pennyweight_torchao.configs.transforms import _QUANTIZE_CONFIG_HANDLER as HANDLERS

CONFIGS = [
    pw.Int8WeightOnlyConfig(), pw.Int8DynamicActivationInt8WeightConfig(), pw.Float8WeightOnlyConfig(),
    pw.IntxWeightOnlyConfig("int4", pw.PerGroup(32)), pw.Int4WeightOnlyConfig(group_size=32),
]  # fmt: skip


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(64, 8)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_one_layer_as_quantize_does_it(config: Any) -> None:
    want = layer()
    pw.quantize_(want, config)
    one = layer()
    assert HANDLERS[type(config)](one, config) is one
    x = torch.randn(3, 64)
    assert torch.equal(one(x), want(x))
    assert (one.weight.spec, one.weight.act) == (want.weight.spec, want.weight.act)


def test_another_parameter_and_none() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(8, 64))

    module = Two()
    transforms._transform(module, CONFIGS[0], parameter_name="up")
    assert isinstance(module.up, pw.AffineQuantizedTensor)
    with pytest.raises(AttributeError, match="Two has no parameter 'weight'"):
        transforms._transform(module, CONFIGS[0])


def test_the_table_of_handlers() -> None:
    class Mine(pw.AOBaseConfig):
        pass

    assert Mine not in HANDLERS
    with pytest.raises(KeyError):
        HANDLERS[Mine]
    HANDLERS[Mine] = lambda module, config: nn.Identity()
    assert Mine in HANDLERS
    model = nn.Sequential(nn.Linear(4, 4))
    pw.quantize_(model, Mine())
    assert type(model[0]) is nn.Identity
    assert {Mine, pw.Int8WeightOnlyConfig} <= set(HANDLERS)
    assert len(HANDLERS) == len(set(HANDLERS)) > 10
    del HANDLERS[Mine]
    assert Mine not in REGISTERED


def test_texts_and_filters() -> None:
    one = layer()
    assert transforms._quantization_type(one.weight).startswith("Tensor: <class")
    pw.quantize_(one, CONFIGS[0])
    assert transforms._quantization_type(one.weight).startswith("AffineQuantizedTensor(")
