"""Short names of configs: each builds what its text says, with the group size that was given."""

import re

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.core import spec
from pennyweight.core.convert_spec import conversion_kind
from pennyweight.planning.configs.by_name import CONFIGS, algorithm_of, by_name
from pennyweight.planning.parameters import Site

SITE = Site("a.weight", "a", "weight", "linear", (64, 256), torch.bfloat16, "cpu", "Linear")


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
    bits = re.search(r"(?:int|fp|nf|^w|^q)([0-9])", name.removeprefix("8da4w"))
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


def test_names_of_engines_are_the_schemes_that_engines_call_so() -> None:
    made = {name: by_name(name).scheme(SITE) for name in ("w4a16", "w4a16-awq", "w8a8", "fp8", "q4_0", "q8_0")}
    assert str(made["w4a16"]) == "int4[128] scale=bf16"
    assert str(made["w4a16-awq"]) == "uint4[128] scale=f16 zero_point=uint4"
    assert made["w8a8"] == by_name("int8-dynamic").scheme(SITE)
    assert made["fp8"].describe() == "e4m3, per row, f32 scales; inputs e4m3 per row, dynamic"
    assert conversion_kind(made["q4_0"].weight, SITE.shape, spec.Q4_0) == "exact"
    assert conversion_kind(made["q8_0"].weight, SITE.shape, spec.Q8_0) == "exact"


def test_a_name_with_an_algorithm_needs_data() -> None:
    model = nn.Sequential(nn.Linear(256, 32))
    with pytest.raises(ValueError, match=r"algorithm awq . nearest needs calibration data"):
        pw.quantize_(model, "w4a16-awq")
    with pytest.raises(ValueError, match="use 'uint4:128' and algorithm='awq'"):
        pw.FqnToConfig({"0": "w4a16-awq"})
    with pytest.raises(ValueError, match="w4a16-awq stands for the algorithm awq"):
        pw.quantize_checkpoint("nowhere", "nowhere-else", "w4a16-awq")
    report = pw.quantize_(model, "w4a16-awq", calibration=[torch.randn(8, 256)])
    assert "awq" in report.config


def test_wrong_names_and_sizes() -> None:
    with pytest.raises(ValueError, match=r"unknown config 'int88' \(did you mean 'int8'.*Known: int8, int8-dynamic"):
        by_name("int88")
    with pytest.raises(ValueError, match="group_size must be a positive integer, got 0"):
        by_name("int4", 0)


def test_names_in_capitals_bring_their_algorithm_too() -> None:
    assert by_name("INT4") == by_name("int4")
    assert algorithm_of("W4A16-AWQ") == algorithm_of("w4a16-awq") == "awq"
    with pytest.raises(pw.PlanError, match="calibration"):
        pw.quantize_(nn.Sequential(nn.Linear(128, 32)), "W4A16-AWQ")
    with pytest.raises(ValueError, match="stands for an algorithm over the whole model"):
        pw.FqnToConfig({"0": "W4A16-AWQ"})


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


def test_a_group_size_after_a_colon() -> None:
    a, b = (nn.Sequential(nn.Linear(64, 32)) for _ in range(2))
    b.load_state_dict(a.state_dict())
    pw.quantize_(a, "int4:32")
    pw.quantize_(b, pw.Int4WeightOnlyConfig(32))
    assert torch.equal(a[0].weight.dequantize(), b[0].weight.dequantize())
    for wrong in ("int4:0", "int4:x", "nothing:32", "int8-dynamic:32"):
        with pytest.raises(pw.PlanError):
            pw.quantize_(nn.Sequential(nn.Linear(64, 32)), wrong)
