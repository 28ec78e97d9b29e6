"""torchao's functions for one layer, one tensor: the same codes as quantize_; the table of handlers."""

from types import ModuleType
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
def test_one_layer_and_one_tensor_as_quantize_does_them(config: Any) -> None:
    want = layer()
    pw.quantize_(want, config)
    one = layer()
    assert HANDLERS[type(config)](one, config) is one
    weight = layer().weight
    two = transforms._int8_weight_only_quantize_tensor(weight, config)  # type: ignore[attr-defined]
    x = torch.randn(3, 64)
    assert torch.equal(one(x), want(x))
    assert torch.equal(two.dequantize(), want.weight.dequantize())
    assert type(weight) is nn.Parameter
    assert (one.weight.spec, one.weight.act) == (want.weight.spec, want.weight.act)


def test_another_parameter_and_none() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(8, 64))

    module = Two()
    transforms._int8_weight_only_transform(module, CONFIGS[0], parameter_name="up")  # type: ignore[attr-defined]
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


def test_constructors_are_inserted() -> None:
    seen: list[Any] = []

    def make(weight: torch.Tensor, scale: float, bias: Any = None) -> torch.Tensor:
        seen.append(bias)
        return weight * scale

    one = layer()
    want = one.weight * 2
    transforms._get_linear_subclass_inserter(make, scale=2.0, propagate_bias=True, allow_requires_grad=True)(one)
    assert torch.equal(one.weight, want)
    assert one.weight.requires_grad
    assert seen == [one.bias]

    class Half:
        @staticmethod
        def from_float(weight: torch.Tensor) -> torch.Tensor:
            return weight / 2

    two = transforms._get_subclass_inserter(Half)(layer())
    assert torch.equal(two.weight, layer().weight / 2)
    assert not two.weight.requires_grad
    with pytest.raises(NotImplementedError, match="unwrap_tensor_subclass"):
        transforms._get_subclass_inserter(Half, True)


def test_replacement_with_names() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    names: list[Any] = []

    def swap(module: nn.Module, name: str, extra: int) -> nn.Module:
        names.append((name, extra))
        return nn.Identity()

    found = transforms._replace_with_custom_fn_if_matches_filter_with_name(
        model, swap, lambda m, n: isinstance(m, nn.Linear), extra_args=(3,)
    )
    assert found is model
    assert names == [("0", 3), ("1.1", 3)]
    assert [type(m).__name__ for m in (model[0], model[1][1])] == ["Identity", "Identity"]


def test_texts_and_filters() -> None:
    one = layer()
    assert transforms._linear_extra_repr(one).startswith("in_features=64, out_features=8, weight=Tensor: <class")
    pw.quantize_(one, CONFIGS[0])
    assert "weight=AffineQuantizedTensor(" in transforms._linear_extra_repr(one)
    assert transforms._module_extra_repr(one, lambda: "a=1", "weight").startswith("a=1, weight=AffineQuantizedTensor(")
    assert transforms._embedding_extra_repr(nn.Embedding(3, 5)).startswith("num_embeddings=3, embedding_dim=5, weight=")
    assert transforms._in_features_greater_than_16(one)
    assert not transforms._in_features_greater_than_16(nn.ReLU())
    assert transforms._fp8_mm_compat(torch.empty(16, 32))
    assert not transforms._fp8_mm_compat(torch.empty(8, 32))
    with pytest.raises(AssertionError, match="2 or 3 axes"):
        transforms._fp8_mm_compat(torch.empty(8))


def test_inputs_of_the_older_era(torchao: ModuleType) -> None:
    from torchao.quantization.quant_api import _int8_symm_per_token_quant, _uint8_asymm_per_token_quant

    x = torch.randn(3, 32)
    scale = x.abs().amax(-1, keepdim=True) / 127
    w = _int8_symm_per_token_quant(x)
    assert torch.equal(w.dequantize(), (x * (1 / scale)).round() * scale)
    u = _uint8_asymm_per_token_quant(x)
    assert (u.dequantize() - x).abs().max() <= ((x.amax(-1) - x.amin(-1)) / 255).max()
    assert u.tensor_impl.get_plain()[0].dtype is torch.uint8
    assert transforms._int8_symm_per_token_reduced_range_quant_noop_decode(x[:, :1]).shape == (3, 1)
