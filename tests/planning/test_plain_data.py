"""Configs as plain data: every class of the library round-trips through JSON, and bad data is refused by name."""

import json
from dataclasses import dataclass

import pytest
import torch

import pennyweight as pw
from pennyweight.core.formats import INT4, INT8
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.planning import configs
from pennyweight.planning.configs.by_name import CONFIGS, by_name
from pennyweight.planning.configs.serialize import TYPES, config_from_data, config_to_data

GIVEN = [
    pw.CodebookWeightOnlyConfig(bits=4, dim=2, group_size=64),
    *(by_name(name) for name in CONFIGS),
    pw.Int4WeightOnlyConfig(64),
    pw.Int8WeightOnlyConfig(granularity=pw.PerGroup(32)),
    pw.Int8DynamicActivationInt8WeightConfig(granularity=[pw.PerTensor(), pw.PerRow()]),
    pw.Int8DynamicActivationInt8WeightConfig(act_mapping_type=pw.MappingType.ASYMMETRIC),
    pw.Int8DynamicActivationInt8WeightConfig(granularity=(pw.PerGroup(64), pw.PerRow())),
    pw.Int8DynamicActivationInt8WeightConfig(act_group_size=64),
    pw.Int8DynamicActivationIntxWeightConfig(torch.int4, act_group_size=128),
    configs.Int8DynamicActivationInt4WeightConfig(act_group_size=32),
    pw.Int8StaticActivationInt8WeightConfig(act_quant_scale=torch.tensor([0.25])),
    pw.Int8DynamicActivationIntxWeightConfig(torch.int4, pw.PerGroup(16), weight_scale_dtype=torch.bfloat16),
    pw.IntxWeightOnlyConfig(INT4, pw.PerAxis(0), pw.MappingType.ASYMMETRIC),
    pw.Float8StaticActivationFloat8WeightConfig(0.5),
    pw.Float8WeightOnlyConfig(granularity=pw.PerBlock((128, 128))),
    pw.ContractedAxis(pw.Int8WeightOnlyConfig(), -2),
    pw.SpecConfig(QuantSpec(INT8, (-1,)), ActivationSpec(QuantSpec(INT8, (-1,))), "symmetric"),
    pw.FqnToConfig({"re:b.*": pw.Int8WeightOnlyConfig(), "*.a": None, "_default": pw.Int4WeightOnlyConfig(32)}),
]


@pytest.mark.parametrize("config", GIVEN, ids=str)
def test_a_config_is_the_same_after_json_with_sorted_keys(config: pw.AOBaseConfig) -> None:
    data = json.loads(json.dumps(config_to_data(config), sort_keys=True))
    again = config_from_data(data)
    assert again == config
    assert type(again) is type(config)


def test_every_config_of_the_library_has_a_form() -> None:
    classes = {v for v in vars(configs).values() if isinstance(v, type) and issubclass(v, pw.AOBaseConfig)}
    assert classes - {pw.AOBaseConfig} == {v for v in TYPES.values() if issubclass(v, pw.AOBaseConfig)}
    assert {type(c) for c in GIVEN} == classes - {pw.AOBaseConfig}


def test_defaults_are_left_out_and_order_is_kept() -> None:
    assert config_to_data(pw.Int4WeightOnlyConfig(64)) == {"type": "Int4WeightOnlyConfig", "group_size": 64}
    data = config_to_data(GIVEN[-1])
    assert [key for key, _ in data["fqn_to_config"]] == ["re:b.*", "*.a", "_default"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (
            {"type": "Int9WeightOnlyConfig"},
            "config: this release does not know the type 'Int9WeightOnlyConfig'; upgrade",
        ),
        ({"type": "Int4WeightOnlyConfig", "rounding": 1}, "rounding: this release does not know this field"),
        ({"type": "Int4WeightOnlyConfig", "group_size": "64"}, "Int4WeightOnlyConfig.group_size cannot be 64"),
        ({"type": "Int4WeightOnlyConfig", "group_size": True}, "group_size cannot be True"),
        ({"type": "Int4WeightOnlyConfig", "group_size": 0}, "group_size must be a positive integer"),
        (
            {"type": "Int8DynamicActivationInt8WeightConfig", "act_group_size": 0},
            "group_size must be a positive integer",
        ),
        ({"type": "Int8DynamicActivationInt8WeightConfig", "act_group_size": "64"}, "act_group_size cannot be 64"),
        ({"type": "Int8WeightOnlyConfig", "granularity": {"type": "dtype", "name": "int8"}}, "granularity cannot be"),
        ({"type": "IntxWeightOnlyConfig", "weight_dtype": {"type": "dtype", "name": "os"}}, "unknown dtype 'os'"),
        ({"type": "MXWeightOnlyConfig", "weight_dtype": {"type": "Format", "name": "e9m9"}}, "e9m9"),
        ({"type": "SpecConfig", "weight": {"type": "QuantSpec", "format": "int8"}}, "missing"),
        ({"type": "SpecConfig"}, "weight"),
        ({"type": "FqnToConfig", "fqn_to_config": {"a": None}}, "must be a list of pairs"),
        ({"type": "FqnToConfig", "fqn_to_config": [["a", None], ["a", None]]}, "has a duplicate key"),
        ({"type": "FqnToConfig", "fqn_to_config": [["a", {"type": "PerRow"}]]}, "cannot be"),
        ({"type": "PerRow"}, "whose type is a config"),
        ({"type": ["x"]}, "does not know the type"),
        ("int4", "must be an object"),
        (None, "must be an object"),
    ],
)
def test_bad_data_is_refused_by_name(data: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        config_from_data(data)


def test_depth_has_an_end() -> None:
    data = {"type": "Int8WeightOnlyConfig"}
    for _ in range(9):
        data = {"type": "ContractedAxis", "config": data}
    with pytest.raises(ValueError, match="nested too deep"):
        config_from_data(data)


def test_a_config_of_ones_own_is_refused() -> None:
    @dataclass(frozen=True)
    class Mine(pw.AOBaseConfig):
        group: int = 3

    with pytest.raises(ValueError, match="Mine is not one of the library's configs"):
        config_to_data(Mine())
    with pytest.raises(ValueError, match=r"FqnToConfig.fqn_to_config\['a'\]: a Mine cannot be serialized"):
        config_to_data(pw.FqnToConfig({"a": Mine()}))
