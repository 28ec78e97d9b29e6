"""Config files: what they say is what quantize_ does, and a wrong one is refused with its line."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.core.formats import UINT3
from pennyweight.core.spec import QuantSpec
from pennyweight.planning.configs.files import layer_config, read_config, write_config

TABLE = {
    "re:blocks\\.\\d+\\.up": pw.Int4WeightOnlyConfig(32),
    "*.k": None,
    "blocks.0.q": pw.SpecConfig(QuantSpec(UINT3, (128,), torch.float16, zero_point=UINT3)),
    "_embeddings": pw.Int8WeightOnlyConfig(),
    "_default": pw.IntxWeightOnlyConfig("int4", pw.PerGroup(128)),
}


@pytest.mark.parametrize("name", ["a.yaml", "a.yml", "a.json"])
@pytest.mark.parametrize("config", [pw.FqnToConfig(TABLE), pw.Int4WeightOnlyConfig(64)], ids=["mixed", "one"])
def test_a_config_is_the_same_after_a_file(config: pw.AOBaseConfig, name: str, tmp_path: Path) -> None:
    write_config(config, tmp_path / name)
    assert read_config(tmp_path / name) == config
    assert pw.AOBaseConfig.from_json(config.to_json()) == config
    if name.endswith("json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads(config.to_json())


def test_short_names_are_written_and_read(tmp_path: Path) -> None:
    file = tmp_path / "mixed.yaml"
    write_config(pw.FqnToConfig(TABLE), file)
    lines = file.read_text().splitlines()
    assert lines[0] == '"re:blocks\\\\.\\\\d+\\\\.up": int4:32'
    assert lines[1] == '"*.k": null'
    assert lines[3:] == ['"_embeddings": int8', '"_default": w4a16']
    file.write_text('{"a": "int4:64", "b": null, "c": {"type": "Int8WeightOnlyConfig"}}')
    same = pw.FqnToConfig({"a": "int4:64", "b": None, "c": "int8"})
    assert read_config(file) == same
    (tmp_path / "mixed.json").write_text(file.read_text())
    assert read_config(tmp_path / "mixed.json") == same


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.head = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight


def test_embeddings_are_a_rule_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("_embeddings: int8\n_default: int4:32\n")
    model = Tied()
    report = pw.quantize_(model, str(tmp_path / "a.yaml"))
    assert model.head.weight is model.embed.weight
    assert {r.name: r.scheme.partition("[")[0] for r in report.quantized} == {
        "embed.weight": "int8",
        "up.weight": "uint4",
    }
    with pytest.raises(pw.PlanError, match="_embeddings: the model has no embeddings"):
        pw.quantize_(nn.Sequential(nn.Linear(8, 8)), pw.FqnToConfig({"_embeddings": "int8", "_default": "int8"}))
    left = pw.plan(Tied(), pw.FqnToConfig({"_embeddings": None, "_default": "int8"}))
    assert [r.name for r in left.active] == ["up.weight"]
    exact = pw.plan(Tied(), pw.FqnToConfig({"head": "int4:32", "_embeddings": "int8", "_default": "int8"}))
    assert [str(r.scheme).partition("[")[0] for r in exact.active] == ["uint4", "int8"]  # exact names come first


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.yaml", "# one\n*.a: int4", "line 2: .*write a name that begins with . in quotes"),
        ("a.yaml", '# one\n"a": int44', r"line 2: a: unknown config 'int44' \(did you mean 'int4'"),
        ("a.yaml", "a: int4\na: int8", "line 2: 'a' was given twice"),
        ("a.yaml", "a: int4\n_defalt: int4", r"line 2: _defalt: unknown key \(did you mean '_default'\?\)"),
        ("a.yaml", "\na: [1", "line 2: expected ',' or ']'"),
        ("a.yaml", "a: &x int4\nb: *x", "line 2: aliases are not supported"),
        ("a.yaml", '\n"re:(a+)+$((": int4', r"'\$' is supported only at the very end.* \(line 2\)"),
        ("a.yaml", "- a", "line 1: expected names with their configs"),
        ("a.yaml", "3: int4", "line 1: 3: a name must be a string"),
        ("a.yaml", "a: !!python/object/apply:os.getcwd []", "line 1: could not determine a constructor"),
        ("a.yaml", "type: FqnToConfigg", r"does not know the type 'FqnToConfigg'.* \(line 1\)"),
        ("a.yaml", "\na: {type: Int4WeightOnlyConfig, group: 3}", "line 2: a: .*does not know this field"),
        ("a.yaml", "a: 3", "line 1: a: expected a config such as int4"),
        ("a.yaml", "a: int4:x", "line 1: a: 'int4:x': after the colon comes a group size"),
        ("a.json", '{\n"a": "int4",\n}', "line "),
        ("a.json", '{\n"a": "int4",\n"a": "int8"}', "line 3: 'a' was given twice"),
        ("a.json", '{\n"a": "int44"}', "line 2: a: unknown config 'int44'"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(name: str, text: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(ValueError, match=says) as caught:
        pw.quantize_(nn.Sequential(nn.Linear(8, 8)), str(file))
    assert str(caught.value).startswith(str(file))


def test_options_of_the_command_line() -> None:
    rest = pw.Int4WeightOnlyConfig(32)
    config = layer_config(["*.down=int8", "a=b=int4:64", "head=none"], "int8", rest)
    expected = {"*.down": "int8", "a=b": "int4:64", "head": None, "_embeddings": "int8", "_default": rest}
    assert config == pw.FqnToConfig(expected)
    merged = layer_config(["x=int8"], None, pw.FqnToConfig({"x": "int4", "y": "int4"}))
    assert merged == pw.FqnToConfig({"x": "int8", "y": "int4"})
    assert layer_config((), None, rest) is rest
    for wrong, says in (("int8", "expected PATTERN=CONFIG"), ("a=int88", "--layer a=int88: unknown config")):
        with pytest.raises(ValueError, match=says):
            layer_config([wrong])
    with pytest.raises(ValueError, match="a was given twice"):
        layer_config(["a=int8", "a=int4"])
