"""Configs that choose their solver: hqq in int4, uint and intx configs, alone, in mixtures, on disk, overridden."""

import copy
import enum
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import pennyweight as pw


class Int4ChooseQParamsAlgorithm(enum.Enum):
    """As torchao's."""

    HQQ = "hqq"


HQQ = {
    "int4": lambda: pw.Int4WeightOnlyConfig(32, int4_choose_qparams_algorithm="hqq"),
    "int4, enum": lambda: pw.Int4WeightOnlyConfig(32, int4_choose_qparams_algorithm=Int4ChooseQParamsAlgorithm.HQQ),
    "uint3": lambda: pw.UIntXWeightOnlyConfig(torch.uint3, 32, use_hqq=True),
    "int3": lambda: pw.IntxWeightOnlyConfig("int3", pw.PerGroup(32), intx_choose_qparams_algorithm="hqq_scale_only"),
    "8da4w": lambda: pw.Int8DynamicActivationIntxWeightConfig(
        torch.int4, intx_choose_qparams_algorithm="hqq_scale_only"
    ),
}
PLAIN: dict[str, Callable[[], pw.AOBaseConfig]] = {
    "int4": lambda: pw.Int4WeightOnlyConfig(32),
    "uint3": lambda: pw.SpecConfig(pw.UIntXWeightOnlyConfig(torch.uint3, 32, use_hqq=True).scheme(SITE).weight),
    "int3": lambda: pw.IntxWeightOnlyConfig("int3", pw.PerGroup(32)),
    "8da4w": lambda: pw.Int8DynamicActivationIntxWeightConfig(torch.int4),
}
SITE = pw.plan(nn.Sequential(nn.Linear(96, 48)), pw.Int8WeightOnlyConfig()).active[0].site


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, 31))
    for layer in (net[0], net[2]):  # with outliers, for which hqq's norm is meant
        layer.weight.data.mul_(1 + 6 * (torch.rand_like(layer.weight) > 0.98))
    return net


def same(a: nn.Module, b: nn.Module) -> bool:
    return torch.equal(a.weight.dequantize(), b.weight.dequantize())


def error(made: Tensor, weight: Tensor, power: float) -> float:
    return float((made.detach().dequantize() - weight.detach()).abs().pow(power).sum())


@pytest.mark.parametrize("name", HQQ)
def test_the_error_that_is_minimised_falls(name: str, model: nn.Sequential) -> None:
    plain, small = copy.deepcopy(model), copy.deepcopy(model)
    report = pw.quantize_(small, HQQ[name]())
    pw.quantize_(plain, PLAIN[name.replace(",", "").partition(" ")[0]]())
    power = 2 if name in ("int3", "8da4w") else 0.7  # scale only: squared error; hqq: its norm
    for i in (0, 2):
        assert small[i].weight.spec == plain[i].weight.spec
        assert error(small[i].weight, model[i].weight, power) < 0.99 * error(plain[i].weight, model[i].weight, power)
    assert ("by hqq" in str(report)) == (power != 2)


def test_it_is_the_algorithm_hqq(model: nn.Sequential) -> None:
    by_config, by_algorithm = copy.deepcopy(model), copy.deepcopy(model)
    pw.quantize_(by_config, HQQ["int4"]())
    pw.quantize_(by_algorithm, pw.Int4WeightOnlyConfig(32), algorithm="hqq")
    assert all(same(by_config[i], by_algorithm[i]) for i in (0, 2))


def test_an_algorithm_of_the_call_comes_first(model: nn.Sequential) -> None:
    a, b = copy.deepcopy(model), copy.deepcopy(model)
    pw.quantize_(a, HQQ["int4"](), algorithm="nearest")
    pw.quantize_(b, pw.Int4WeightOnlyConfig(32))
    assert same(a[0], b[0])


def test_each_layer_of_a_mixture_has_its_own(model: nn.Sequential) -> None:
    mixed, all_hqq, none = (copy.deepcopy(model) for _ in range(3))
    pw.quantize_(mixed, pw.FqnToConfig({"0": HQQ["int4"](), "2": pw.Int4WeightOnlyConfig(32)}))
    pw.quantize_(all_hqq, HQQ["int4"]())
    pw.quantize_(none, pw.Int4WeightOnlyConfig(32))
    assert same(mixed[0], all_hqq[0])
    assert same(mixed[2], none[2])


def test_on_disk_it_is_the_same(model: nn.Sequential, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "in" / "model.safetensors")
    pw.quantize_checkpoint(tmp_path / "in", tmp_path / "out", HQQ["int4"]())
    loaded = pw.load(tmp_path / "out", copy.deepcopy(model))
    pw.quantize_(model, HQQ["int4"]())
    assert all(same(loaded[i], model[i]) for i in (0, 2))
