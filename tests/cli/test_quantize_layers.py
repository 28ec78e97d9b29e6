"""quantize --layer, --embeddings, --config FILE: the same configs on disk, in memory and in quantize_."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pennyweight as pw
from pennyweight.planning.configs.files import read_config
from pennyweight.planning.engines import fused_groups
from pennyweight.report.evaluation_inputs import load_folder
from tests.cli.conftest import snapshot

OPTIONS = ("--config", "int4", "--group-size", "32", "--layer", "*.up=int8", "--layer", "head=none")
FILE = '"*.up": int8\nhead: none\n_embeddings: int8\n_default: int4:32\n'


def schemes(result: Any) -> dict[str, str]:
    assert result.exit_code == 0, result.stderr
    return {r["name"]: r["scheme"].partition("[")[0] for r in json.loads(result.stdout)["rows"] if r["scheme"]}


def test_options_and_file_write_the_same(run: Any, plain: Path, tmp_path: Path) -> None:
    saved, file = tmp_path / "saved.yaml", tmp_path / "mixed.yaml"
    file.write_text(FILE)
    options = (*OPTIONS, "--embeddings", "int8", "--json", "-")
    made = schemes(run("quantize", plain, tmp_path / "a", *options, "--save-config", saved))
    ups, queries = {f"blocks.{i}.up.weight": "int8" for i in (0, 1)}, {f"blocks.{i}.q.weight": "uint4" for i in (0, 1)}
    assert made == ups | queries | {"embed.weight": "int8"}
    assert schemes(run("quantize", plain, tmp_path / "b", "--config", file, "--json", "-")) == made
    assert schemes(run("quantize", plain, tmp_path / "c", "--config", saved, "--json", "-")) == made
    pw.quantize_checkpoint(plain, tmp_path / "d", str(file))
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b") == snapshot(tmp_path / "c") == snapshot(tmp_path / "d")
    before, after = load_file(plain / "model.safetensors"), pw.load(tmp_path / "a")
    layer = torch.nn.Embedding(96, 64, _weight=before["embed.weight"])
    pw.quantize_(layer, pw.FqnToConfig({"_embeddings": "int8"}))
    assert torch.equal(after["embed.weight"].dequantize(), layer.weight.dequantize())


def test_only_the_named_layers(run: Any, plain: Path, tmp_path: Path) -> None:
    made = schemes(run("quantize", plain, tmp_path / "a", "--layer", "re:blocks\\.1\\..*=int8", "--json", "-"))
    assert made == {"blocks.1.q.weight": "int8", "blocks.1.up.weight": "int8"}
    made = schemes(run("quantize", plain, tmp_path / "b", "--embeddings", "int8", "--json", "-"))
    assert made == {"embed.weight": "int8"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--layer", "blocks.*.upp=int8"],
            "'blocks.*.upp' matches no module or parameter (did you mean 'blocks.*.up'?",
        ),
        (["--layer", "blocks.0.u=int8"], "did you mean 'blocks.0.up'"),
        (["--layer", "head=int44"], "--layer head=int44: unknown config 'int44' (did you mean 'int4'"),
        (["--layer", "head"], "--layer head: expected PATTERN=CONFIG"),
        (["--embeddings", "int88"], "--embeddings int88: unknown config 'int88'"),
        (["--layer", "head=w4a16-awq"], "stands for an algorithm over the whole model"),
        (["--config", "w4a16-awq"], "stands for --algorithm awq, which needs text: pass --calibration"),
        (["--config", "nowhere.yaml"], "'nowhere.yaml': there is no such file"),
        (["--layer", "head=int8", "--group-size", "32"], "--group-size belongs to a --config given by its name"),
        (["--layer", "head=int8", "--save-config", "x.txt"], "must end in .yaml, .yml or .json"),
        (["--layer", "head=int8", "--budget", "4 bpw"], "leave out --config, --layer and --embeddings"),
    ],
)
def test_errors_leave_nothing(run: Any, plain: Path, tmp_path: Path, arguments: list[str], says: str) -> None:
    result = run("quantize", plain, tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert not (tmp_path / "out").exists()


def test_in_memory_it_means_the_same(run: Any, writer: Path, text: Path, tmp_path: Path) -> None:
    options = ("--config", "int4", "--layer", "*.down_proj=int8", "--embeddings", "int8", "--layer", "lm_head=none")
    on_disk = schemes(run("quantize", writer, tmp_path / "a", *options, "--json", "-"))
    nearest = ("--algorithm", "nearest")
    assert schemes(run("quantize", writer, tmp_path / "b", *options, *nearest, "--json", "-")) == on_disk
    assert set(on_disk.values()) == {"int8", "uint4"}
    first, second = load_folder(str(tmp_path / "a")), load_folder(str(tmp_path / "b"))
    ids = torch.arange(8)[None]
    assert torch.equal(first(ids).logits, second(ids).logits)
    found = tmp_path / "found.yaml"
    text.write_text(text.read_text() * 8)
    budget = ("--budget", "6 bpw", "--calibration", text, "--algorithm", "nearest", "--skip", "lm_head")
    searched = schemes(run("quantize", writer, tmp_path / "c", *budget, "--save-config", found, "--json", "-"))
    assert schemes(run("quantize", writer, tmp_path / "d", "--config", found, "--json", "-")) == searched
    awq = ("--config", "w4a16-awq", "--group-size", "32", "--calibration", text, "--skip", "lm_head", "--json", "-")
    assert set(schemes(run("quantize", writer, tmp_path / "e", *awq)).values()) == {"uint4"}


def test_for_an_engine_it_checks_before_it_writes(
    run: Any, plain: Path, writer: Path, text: Path, tmp_path: Path
) -> None:
    refused = run("quantize", plain, tmp_path / "a", "--config", "int8", "--for", "vllm")
    assert refused.exit_code == 2
    assert "blocks.0.q.weight: vLLM on a CPU does not read int8, per row" in refused.stderr
    assert "use 'w8a8', which it reads" in refused.stderr
    assert not (tmp_path / "a").exists()
    read = run("quantize", plain, tmp_path / "a", "--config", "w8a8", "--for", "vllm")
    assert read.exit_code == 0, read.stderr
    assert "vLLM on a CPU reads all quantized weights, from a file in the format compressed-tensors" in read.stdout
    in_memory = ("--config", "int8", "--for", "vllm", "--algorithm", "nearest", "--skip", "lm_head")
    assert "does not read int8" in run("quantize", writer, tmp_path / "b", *in_memory).stderr
    text.write_text(text.read_text() * 8)
    found = tmp_path / "found.yaml"
    budget = ("--budget", "7 bpw", "--calibration", text, "--algorithm", "nearest", "--skip", "lm_head")
    result = run("quantize", writer, tmp_path / "c", *budget, "--for", "vllm", "--save-config", found)
    assert result.exit_code == 0, result.stderr
    config = read_config(found)
    assert isinstance(config, pw.FqnToConfig)
    groups = fused_groups(name.removesuffix(".weight") for name in config.fqn_to_config)
    assert groups
    for parts in groups.values():
        assert len({config.fqn_to_config[f"{part}.weight"] for part in parts}) == 1
    converted = run("convert", tmp_path / "c", tmp_path / "d", "--for", "vllm")
    assert converted.exit_code == 0, converted.stderr
