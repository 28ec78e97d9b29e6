"""Configs whose inputs are quantized per group of columns: schemes, words, and what becomes of them in other places."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.core.formats import INT8
from pennyweight.core.numerics import fake_quantize
from pennyweight.core.spec import QuantSpec
from pennyweight.planning import configs
from pennyweight.planning.configs.by_name import by_name

SYMMETRIC, ASYMMETRIC = pw.MappingType.SYMMETRIC, pw.MappingType.ASYMMETRIC
CONFIGS: dict[str, Any] = {
    "int8": pw.Int8DynamicActivationInt8WeightConfig(act_group_size=64),
    "int8, by granularity": pw.Int8DynamicActivationInt8WeightConfig(granularity=(pw.PerGroup(64), pw.PerRow())),
    "int8, 7 bits": pw.Int8DynamicActivationInt8WeightConfig(act_group_size=64, reduce_range=True),
    "int8, asymmetric": pw.Int8DynamicActivationInt8WeightConfig(ASYMMETRIC, act_group_size=64),
    "intx": pw.Int8DynamicActivationIntxWeightConfig(torch.int4, act_mapping_type=SYMMETRIC, act_group_size=64),
    "8da4w": configs.Int8DynamicActivationInt4WeightConfig(act_group_size=64),
}


def model(k: int = 192, n: int = 32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(k, n)).eval()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_input_has_a_scale_per_group(name: str) -> None:
    m, x = model(), torch.randn(5, 192)
    report = pw.quantize_(m, CONFIGS[name])
    w: Any = m[0].weight
    assert w.act.spec.block == (64,)
    assert w.act.mode == "dynamic"
    assert f"inputs {w.act.spec.format} in groups of 64 columns, dynamic" in report.rows[0].scheme_text
    told = fake_quantize(x, w.act.spec, w.act.rule, w.act.eps) @ w.dequantize().t() + m[0].bias
    torch.testing.assert_close(m(x), told, atol=1e-5, rtol=1e-5)


def test_groups_lower_the_error_of_inputs_with_outliers() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    x[:, 3] *= 60
    exact, error = model(256)(x).detach(), {}
    for size in (None, 128, 32):
        m = model(256)
        pw.quantize_(m, pw.Int8DynamicActivationInt8WeightConfig(act_group_size=size))
        error[size] = float((m(x).detach() - exact).norm() / exact.norm())
    assert error[128] < 0.85 * error[None]  # half of the columns keep the outlier's scale
    assert error[32] < 0.5 * error[None]


def test_a_group_that_is_not_smaller_than_the_input_is_a_token() -> None:
    for k, block in ((64, (-1,)), (63, (-1,)), (65, (64,))):
        m = model(k)
        pw.quantize_(m, CONFIGS["int8"])
        assert m[0].weight.act.spec.block == block  # type: ignore[union-attr]
    assert CONFIGS["int8"] != CONFIGS["int8, by granularity"]  # two ways to write one scheme
    a, b = model(), model()
    pw.quantize_(a, CONFIGS["int8"])
    pw.quantize_(b, CONFIGS["int8, by granularity"])
    assert a[0].weight.act == b[0].weight.act  # type: ignore[union-attr]


def test_a_convolution_is_refused_by_name() -> None:
    m = nn.Sequential(nn.Conv2d(64, 64, 3))
    with pytest.raises(pw.PlanError, match=r"0\.weight: the input of a convolution has one scale per sample.*of 64"):
        pw.quantize_(m, CONFIGS["int8"], lambda module, name: isinstance(module, nn.Conv2d))


def test_the_short_name() -> None:
    m = model(256)
    report = pw.quantize_(m, "int8-dynamic-grouped")
    w: Any = m[0].weight
    assert (w.spec.block, w.act.spec.block, w.act.spec.zero_point) == ((128,), (128,), True)
    assert "int8, groups of 128, symmetric" in report.rows[0].scheme_text
    small = by_name("int8-dynamic-grouped", 64)
    assert small == pw.Int8DynamicActivationInt8WeightConfig(ASYMMETRIC, granularity=pw.PerGroup(64))


@pytest.mark.parametrize("name", CONFIGS)
def test_files_keep_it(name: str, tmp_path: Path) -> None:
    m, x = model(), torch.randn(3, 192)
    pw.quantize_(m, CONFIGS[name])
    expected = m(x)
    pw.save(m, tmp_path / "model.safetensors")
    again = model()
    pw.load(tmp_path / "model.safetensors", again)
    assert again[0].weight.act == m[0].weight.act  # type: ignore[union-attr]
    assert torch.equal(again(x), expected)
    state = nn.Sequential(nn.Linear(192, 32))
    state.load_state_dict(m.state_dict(), assign=True)
    assert torch.equal(state(x), expected)


def test_torchaos_tensors_refuse_it() -> None:
    from pennyweight.io.codecs.torchao.int8_float8 import Int8Tensor, IntxUnpackedToInt8Tensor

    m = model()
    pw.quantize_(m, pw.Int8DynamicActivationInt8WeightConfig())
    assert Int8Tensor.holds(m[0].weight)  # type: ignore[arg-type]
    for config in CONFIGS.values():
        m = model()
        pw.quantize_(m, config)
        assert not Int8Tensor.holds(m[0].weight)  # type: ignore[arg-type]
        assert not IntxUnpackedToInt8Tensor.holds(m[0].weight)  # type: ignore[arg-type]


def test_qat_trains_with_the_same_groups() -> None:
    m, x = model(), torch.randn(4, 192)
    pw.quantize_(m, pw.QATConfig(CONFIGS["int8"], step="prepare"))
    y = m(x)
    y.sum().backward()
    pw.quantize_(m, pw.QATConfig(CONFIGS["int8"], step="convert"))
    assert m[0].weight.act.spec == QuantSpec(INT8, (64,))  # type: ignore[union-attr]
    torch.testing.assert_close(m(x), y, atol=1e-4, rtol=1e-4)
