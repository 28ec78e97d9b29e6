"""Short names of configs: each builds what its text says, with the group size that was given."""

import re

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.planning.configs.aliases import CONFIGS, by_name


@pytest.mark.parametrize("name", CONFIGS)
def test_a_name_quantizes_as_its_text_says(name: str) -> None:
    model = nn.Sequential(nn.Linear(256, 32, dtype=torch.bfloat16))
    pw.quantize_(model, by_name(name))
    weight = model[0].weight
    assert isinstance(weight, pw.AffineQuantizedTensor)
    text = CONFIGS[name].text
    said = re.search(r"(?:groups|blocks) of ([0-9]+)", text)
    if said:
        assert weight.spec.block == (int(said[1]),)
    bits = re.search(r"(?:int|fp|nf)([0-9])", name.removeprefix("8da4w"))
    assert weight.spec.format.bits == (int(bits[1]) if bits else {"8da4w": 4, "float8": 8}[name.partition("-")[0]])
    assert (weight.act is not None) == ("inputs" in text)


@pytest.mark.parametrize("name", [n for n, e in CONFIGS.items() if e.group])
def test_group_size_is_what_was_asked(name: str) -> None:
    model = nn.Sequential(nn.Linear(256, 32))
    pw.quantize_(model, by_name(name, 16))
    assert model[0].weight.spec.block == (16,)  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [n for n, e in CONFIGS.items() if not e.group])
def test_group_size_is_refused_with_the_reason(name: str) -> None:
    reason = re.escape(CONFIGS[name].no_group)
    with pytest.raises(ValueError, match=f"group_size=16 cannot be used with {name}: {reason}"):
        by_name(name, 16)


def test_wrong_names_and_sizes() -> None:
    with pytest.raises(ValueError, match=r"unknown config 'int88' \(did you mean int8.*Known: int8, int8-dynamic"):
        by_name("int88")
    with pytest.raises(ValueError, match="group_size=0: must be a positive integer"):
        by_name("int4", 0)


def test_short_names_are_configs_wherever_a_config_is_expected() -> None:
    table = pw.FqnToConfig({"0": "int8", "1": pw.Int4WeightOnlyConfig(32), "_default": None})
    assert table == pw.FqnToConfig({"0": pw.Int8WeightOnlyConfig(), "1": pw.Int4WeightOnlyConfig(32), "_default": None})
    assert pw.QATConfig("int4") == pw.QATConfig(pw.Int4WeightOnlyConfig())
    model = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
    assert pw.plan(model, "int8").config == pw.Int8WeightOnlyConfig()
    tried = pw.recommend(model, torch.randn(1, 64), candidates=["int8"], seconds=0.01).candidates
    assert str(pw.Int8WeightOnlyConfig()) in [c.name for c in tried]
    with pytest.raises(ValueError, match="unknown config 'int88'"):
        pw.FqnToConfig({"0": "int88"})
