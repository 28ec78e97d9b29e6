"""inspect and explain say what the files say."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

import pennyweight as pw
from pennyweight.io import save


class Net(nn.Module):
    """An embedding tied to the head, a layer left float, one of each scheme."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, 64)
        self.layers = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(64, 96)}) for _ in range(11))
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embed.weight


CONFIG = pw.FqnToConfig(
    {
        "layers.0.up": pw.Int4WeightOnlyConfig(group_size=32),
        "layers.1.up": pw.Int4WeightOnlyConfig(group_size=24),
        "layers.2.up": pw.Int8DynamicActivationInt8WeightConfig(),
        "layers.10.up": pw.NVFP4WeightOnlyConfig(),
    }
)


@pytest.fixture
def quantized(tmp_path: Path) -> Path:
    model = Net().bfloat16()
    pw.quantize_(model, CONFIG)
    save(model, tmp_path / "q", max_shard_bytes=20_000)
    return tmp_path / "q"


def stored_bytes(folder: Path) -> dict[str, int]:
    """Stored name -> bytes, by the safetensors library."""
    out = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as f:
            out |= {name: f.get_tensor(name).nbytes for name in f.keys()}  # noqa: SIM118
    return out


def rows(output: str) -> dict[str, str]:
    """First word of a line -> the line."""
    return {line.split()[0]: line for line in output.splitlines() if line.strip()}


def test_inspect_counts_what_lies_on_disk(run: Any, quantized: Path) -> None:
    result = run("inspect", quantized, "--json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    on_disk = {p.name: p.stat().st_size for p in quantized.iterdir()}
    assert len(on_disk) > 2  # sharded, or the sum below would be no news
    assert data["files"] == on_disk
    assert data["file_bytes"] == sum(on_disk.values())
    stored = stored_bytes(quantized)
    assert data["tensor_bytes"] == sum(stored.values())
    for t in data["tensors"]:
        mine = [n for name, n in stored.items() if name == t["name"] or name.startswith(f"{t['name']}.")]
        assert t["bytes"] == sum(mine), t["name"]
    small = [t for t in data["tensors"] if t["scheme"]]
    assert {t["name"] for t in small} == {f"layers.{i}.up.weight" for i in (0, 1, 2, 10)}
    assert data["bits_per_weight"] == 8 * sum(t["bytes"] for t in small) / (4 * 96 * 64)
    assert data["bits_per_parameter"] == 8 * sum(on_disk.values()) / (12 * 96 * 64 + 11 * 96)
    assert (data["format"], data["format_version"]) == ("pennyweight", 4)


def test_inspect_prints_each_tensor_and_totals(run: Any, quantized: Path) -> None:
    output = run("inspect", quantized, "--all").stdout
    data = json.loads(run("inspect", quantized, "--json").stdout)
    lines = rows(output)
    for t in data["tensors"]:
        line = lines[t["name"]]
        assert f"{t['bytes']:,}" in line
        assert "×".join(map(str, t["shape"])) in line
        assert (t["scheme"] or t["dtype"]) in line
    assert "uint4[24] scale=bf16 offset=bf16" in lines["layers.1.up.weight"]
    assert "tied: head.weight" in lines["embed.weight"]
    names = [t["name"] for t in data["tensors"]]
    assert names.index("layers.2.up.weight") < names.index("layers.10.up.weight")
    assert f"{data['file_bytes']:,} bytes" in output
    assert f"{data['bits_per_weight']:.3f} bits per quantized weight" in output
    assert f"{data['bits_per_parameter']:.3f} bits per number" in output
    assert "pennyweight format, version 4" in output


def test_inspect_a_plain_folder(run: Any, plain: Path) -> None:
    data = json.loads(run("inspect", plain, "--json").stdout)
    assert (data["format"], data["format_version"], data["bits_per_weight"]) == ("safetensors", None, None)
    assert {t["name"]: t["bytes"] for t in data["tensors"]} == stored_bytes(plain)
    assert "plain safetensors" in run("inspect", plain).stdout
    assert run("inspect", plain / "model.safetensors", "--json").stdout.count('"scheme": ""') == len(data["tensors"])


def test_inspect_reads_no_tensor(run: Any, quantized: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pennyweight.io.safetensors_file import File

    def refuse(self: File, name: str) -> None:
        raise AssertionError(f"read {name}")

    monkeypatch.setattr(File, "tensor", refuse)
    monkeypatch.setattr(File, "read", refuse)
    assert "layers.10.up.weight" in run("inspect", quantized, "--all").stdout
    assert "RUNS" in run("explain", quantized, "layers.0.up").stdout


@pytest.mark.parametrize("command", [["inspect"], ["explain", "x"]])
def test_a_bad_file_is_one_line_on_stderr(run: Any, plain: Path, command: list[str]) -> None:
    path = plain / "model.safetensors"
    os.truncate(path, path.stat().st_size - 1)
    result = run(command[0], plain, *command[1:])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"pennyweight: {path}: ")
    assert "truncated" in result.stderr
    assert result.stderr.count("\n") == 1
    with pytest.raises(ValueError, match="truncated"):
        run(command[0], plain, *command[1:], "--traceback")


def test_a_missing_folder_is_named(run: Any, tmp_path: Path) -> None:
    result = run("inspect", tmp_path / "nowhere")
    assert result.exit_code == 2
    assert "nowhere" in result.stderr
    assert "No such file or directory" in result.stderr


def sections(output: str) -> dict[str, dict[str, str]]:
    """Explained dtype -> kernel -> its verdict."""
    out: dict[str, dict[str, str]] = {}
    for block in output.split("\n\n")[1:]:
        head, *lines = block.splitlines()
        dtype = head.split(", ")[-1].split(" on ")[0]
        out[dtype] = {}
        for line in lines[:-1]:  # the last says whether a row depends on its batch
            name, _, _, *words = line.split()
            out[dtype][name] = " ".join(words)
    return out


@pytest.mark.parametrize("layer", [0, 1, 2, 10])
def test_explain_agrees_with_the_kernels_that_a_loaded_weight_meets(run: Any, quantized: Path, layer: int) -> None:
    output = run("explain", quantized, f"layers.{layer}.up.weight").stdout
    said = sections(output)
    model = Net().bfloat16()
    report = pw.quantize_(model, CONFIG)
    weight: Any = model.layers[layer]["up"].weight  # type: ignore[index]
    assert list(said) == ["float32", "bfloat16"]
    for dtype, verdicts in said.items():
        (runs,) = [name for name, verdict in verdicts.items() if verdict == "RUNS"]
        expected = {name: verdict for name, _, verdict in pw.explain(getattr(torch, dtype), weight).rows}
        assert expected[runs] == "RUNS"
        assert verdicts.keys() == expected.keys()
    (row,) = [r for r in report.rows if r.name == f"layers.{layer}.up.weight"]
    assert said["bfloat16"][row.kernel] == "RUNS"
    assert f"bytes         {row.bytes_after:,}, {8 * row.bytes_after / (96 * 64):.3f} bits per weight" in output


def test_explain_says_it_in_words(run: Any, quantized: Path) -> None:
    words = run("explain", quantized, "layers.1.up").stdout
    assert "(code - 8) * scale + offset" in words
    assert "one bfloat16 for each 24 consecutive elements of a row" in words
    assert "[96, 64] is stored as [96, 72], whole blocks" in words
    assert "needs groups of (32, 64, 128, 256), the weight has 24" in words
    dynamic = run("explain", quantized, "layers.2.up", "--dtype", "bfloat16").stdout
    assert "quantized at each call to int8, one float32 for each row (token)" in dynamic
    assert list(sections(dynamic)) == ["bfloat16"]
    nested = run("explain", quantized, "layers.10.up").stdout
    assert "one e4m3 for each 16 consecutive elements of a row" in nested
    assert "scale.scale   one float32 for the whole tensor" in nested


def test_explain_float_and_tied_tensors(run: Any, quantized: Path) -> None:
    output = run("explain", quantized, "head").stdout
    assert "head.weight [96, 64], tied to embed.weight" in output
    assert "bfloat16: not quantized" in output
    assert "12,288" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["layers.0.upp"], "no tensor 'layers.0.upp' (did you mean 'layers.0.up'"),
        (["layers.0"], "layers.0 contains 2 tensors; pass one of them: layers.0.up.bias, layers.0.up.weight"),
        (["layers.0.up", "--dtype", "int8"], "--dtype must be one of float32, bfloat16, float16, got 'int8'"),
        (["layers.0.up", "--op", "liner"], "no kernels for op 'liner' (did you mean 'linear'?)"),
    ],
)
def test_explain_helps_with_wrong_names(run: Any, quantized: Path, arguments: list[str], message: str) -> None:
    result = run("explain", quantized, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
