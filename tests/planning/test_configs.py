"""What a config refuses, and how torchao's users write them."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.core.formats import INT4
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.planning import configs

STATIC = ActivationSpec(QuantSpec(INT4, None), "static")

WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: pw.Int8WeightOnlyConfig(group_size=0), "group_size must be a positive integer"),
    (lambda: pw.Int8WeightOnlyConfig(granularity="row"), r"PerRow\(\)"),
    (lambda: pw.Int8DynamicActivationInt8WeightConfig(weight_only_decode=True), "Int8WeightOnlyConfig"),
    (lambda: pw.Int8DynamicActivationInt8WeightConfig(granularity=(pw.PerRow(),) * 3), "PerRow"),
    (lambda: pw.Int8DynamicActivationInt8WeightConfig(act_group_size=0), "group_size must be a positive integer"),
    (
        lambda: pw.Int8DynamicActivationIntxWeightConfig(act_group_size=1.5),
        "act_group_size must be a positive integer, got 1.5",
    ),
    (lambda: configs.Int8DynamicActivationInt4WeightConfig(act_group_size=-1), "group_size must be a positive integer"),
    (pw.Int8StaticActivationInt8WeightConfig, "calibrate"),
    (lambda: pw.Int8StaticActivationInt8WeightConfig(-1.0), "positive"),
    (lambda: pw.Int8StaticActivationInt8WeightConfig(float("nan")), "positive"),
    (lambda: pw.Int8StaticActivationInt8WeightConfig(torch.ones(2, 3)), "one number"),
    (lambda: pw.Int8StaticActivationInt8WeightConfig(0.1, act_mapping_type=pw.MappingType.ASYMMETRIC), "zero_point"),
    (lambda: pw.Int8StaticActivationInt8WeightConfig(0.1, 3), "ASYMMETRIC"),
    (lambda: pw.Int8StaticActivationInt8WeightConfig(0.1, 200, act_mapping_type=pw.MappingType.ASYMMETRIC), "int8"),
    (lambda: pw.Int4WeightOnlyConfig(group_size=-32), "group_size must be a positive integer"),
    (lambda: pw.Int4WeightOnlyConfig(int4_choose_qparams_algorithm="awq"), "'tinygemm', 'hqq', got 'awq'"),
    (lambda: pw.IntxWeightOnlyConfig(torch.float8_e4m3fn), "int1 to int8"),
    (lambda: pw.IntxWeightOnlyConfig("int9"), "known are int1 to int8"),
    (lambda: pw.IntxWeightOnlyConfig(intx_choose_qparams_algorithm="hqq"), "'affine', 'hqq_scale_only'"),
    (lambda: pw.UIntXWeightOnlyConfig("int4"), "uint1 to uint8"),
    (lambda: pw.FPXWeightOnlyConfig(4, 3), r"\(3, 2\)"),
    (lambda: pw.Float8WeightOnlyConfig(torch.int8), "float8_e4m3fn"),
    (lambda: pw.Float8DynamicActivationFloat8WeightConfig(activation_value_lb=1.0), "leave them None"),
    (pw.Float8StaticActivationFloat8WeightConfig, "calibrate"),
    (lambda: pw.MXWeightOnlyConfig("int8"), "MX elements"),
    (lambda: pw.MXWeightOnlyConfig(scaling_mode="up"), "rceil"),
    (lambda: pw.NF4WeightOnlyConfig(block_size=0), "positive"),
    (lambda: pw.SpecConfig("int4"), "needs a QuantSpec"),
    (lambda: pw.SpecConfig(QuantSpec(INT4, None), STATIC), "calibrate"),
    (lambda: pw.SpecConfig(QuantSpec(INT4, None), act_scale=1.0), "static"),
    (lambda: pw.FqnToConfig({"a": 3}), "names to configs or None"),
    (lambda: pw.FqnToConfig({"a": pw.FqnToConfig({})}), "merge the keys into one"),
    (lambda: pw.FqnToConfig({"a": None}, {"b": None}), "not both"),
    (lambda: configs.ContractedAxis(pw.Int8WeightOnlyConfig(), 0), "-1 or -2"),
    (lambda: configs.ContractedAxis(-2), "wraps a config"),
]


@pytest.mark.parametrize(("make", "remedy"), WRONG)
def test_a_wrong_config_cannot_be_built(make: Callable[[], Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        make()


def test_str_tells_only_what_differs_from_the_default() -> None:
    assert str(pw.Int4WeightOnlyConfig()) == "Int4WeightOnlyConfig()"
    assert str(pw.Int4WeightOnlyConfig(64)) == "Int4WeightOnlyConfig(group_size=64)"
    assert str(pw.IntxWeightOnlyConfig("int4")) == "IntxWeightOnlyConfig(weight_dtype='int4')"
    assert str(pw.FqnToConfig({"a": None, "b": pw.Int8WeightOnlyConfig()})) == (
        "FqnToConfig({'a': None, 'b': Int8WeightOnlyConfig()})"
    )


def test_the_order_of_keys_is_part_of_the_value() -> None:
    a, b = pw.Int8WeightOnlyConfig(), None
    assert pw.FqnToConfig({"x*": a, "*y": b}) != pw.FqnToConfig({"*y": b, "x*": a})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (pw.int8_weight_only(), pw.Int8WeightOnlyConfig()),
        (pw.int8_dynamic_activation_int8_weight(), pw.Int8DynamicActivationInt8WeightConfig()),
        (pw.int8_static_activation_int8_weight(0.1), pw.Int8StaticActivationInt8WeightConfig(0.1)),
        (pw.int8_dynamic_activation_int4_weight(64), pw.Int8DynamicActivationInt4WeightConfig(64)),
        (pw.int4_weight_only(group_size=32), pw.Int4WeightOnlyConfig(32)),
        (pw.intx_weight_only(torch.int4), pw.IntxWeightOnlyConfig(torch.int4)),
        (pw.uintx_weight_only("uint4", 32), pw.UIntXWeightOnlyConfig("uint4", 32)),
        (pw.fpx_weight_only(3, 2), pw.FPXWeightOnlyConfig()),
        (pw.float8_weight_only(), pw.Float8WeightOnlyConfig()),
        (pw.float8_dynamic_activation_float8_weight(), pw.Float8DynamicActivationFloat8WeightConfig()),
        (pw.float8_static_activation_float8_weight(0.1), pw.Float8StaticActivationFloat8WeightConfig(0.1)),
    ],
)
def test_the_old_names(old: pw.AOBaseConfig, new: pw.AOBaseConfig) -> None:
    assert old == new


def test_quantize_takes_torchaos_positional_arguments() -> None:
    model = nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pw.quantize_(model, pw.int4_weight_only(group_size=32), lambda m, fqn: fqn == "0", "cpu")
    assert isinstance(model[0].weight, pw.AffineQuantizedTensor)
    assert not isinstance(model[1].weight, pw.AffineQuantizedTensor)


def test_uint4_dtype_of_torch() -> None:
    assert pw.UIntXWeightOnlyConfig(torch.uint4, 32).dtype is torch.uint4  # type: ignore[attr-defined]


def test_scales_along_another_axis_are_refused() -> None:
    for granularity in (pw.PerAxis(1), pw.PerRow(0)):
        with pytest.raises(pw.PlanError, match=r"weight.*Per"):
            pw.quantize_(nn.Linear(8, 8), pw.IntxWeightOnlyConfig(granularity=granularity))


@pytest.mark.parametrize("size", ["64", "e4m3", 64.0, True, None])
def test_a_size_that_is_no_number_is_named(size: Any) -> None:
    with pytest.raises(ValueError, match="MXDynamicActivationMXWeightConfig: block_size must be a positive integer"):
        pw.MXDynamicActivationMXWeightConfig(size)
    with pytest.raises(ValueError, match="Int4WeightOnlyConfig: group_size must be a positive integer"):
        pw.Int4WeightOnlyConfig(group_size=size)
