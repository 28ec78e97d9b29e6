"""quantize: what it prints is what it wrote, and what it refuses it leaves untouched."""

import importlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import pennyweight as pw
from pennyweight.io import quantize_checkpoint
from pennyweight.planning.configs.by_name import by_name
from pennyweight.planning.quantize_report import size
from tests import forked

LINEAR = {"head.weight", *(f"blocks.{i}.{n}.weight" for i in range(2) for n in ("q", "up"))}


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file under a folder and its bytes; {} where there is no folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def quantized(state: dict[str, Tensor]) -> set[str]:
    return {name for name, t in state.items() if isinstance(t, pw.AffineQuantizedTensor)}


def model_bytes(folder: Path) -> int:
    """True size of the checkpoint's own files."""
    return sum(p.stat().st_size for p in folder.iterdir() if "safetensors" in p.name)


def test_what_it_says_is_what_it_wrote(run: Any, plain: Path, tmp_path: Path) -> None:
    out, report_file = tmp_path / "out", tmp_path / "report.json"
    result = run("quantize", plain, out, "--config", "int4", "--group-size", "32", "--json", report_file)
    assert (result.exit_code, result.stderr) == (0, "")  # no progress bar where there is no terminal
    report = json.loads(report_file.read_text())
    held = {t["name"]: t for t in json.loads(run("inspect", out, "--json").stdout)["tensors"]}
    before = load_file(plain / "model.safetensors")
    assert {r["name"] for r in report["rows"]} == held.keys() == before.keys()
    for row in report["rows"]:
        assert row["bytes_after"] == held[row["name"]]["bytes"]
        assert row["bytes_before"] == before[row["name"]].nbytes
        assert row["shape"] == list(before[row["name"]].shape)
        assert bool(row["scheme"]) == (row["name"] in LINEAR)
        assert row["note"] or row["scheme"], "left alone without a reason"
    assert report["bytes_after"] == sum(t["bytes"] for t in held.values())
    assert report["files"] == {"before": model_bytes(plain), "after": model_bytes(out)}
    ratio = model_bytes(plain) / model_bytes(out)
    assert f"files: {model_bytes(plain):,} bytes" in result.stdout
    assert f"-> {model_bytes(out):,} bytes ({size(model_bytes(out))}), {ratio:.2f}x smaller" in result.stdout
    table = {line.split("│")[1].strip(): line for line in result.stdout.splitlines() if line.startswith("│")}
    for row in report["rows"]:
        if row["scheme"]:
            cells = [cell.strip() for cell in table[row["name"]].split("│")]
            assert {row["kernel"], size(row["bytes_before"]), size(row["bytes_after"]), f"{row['sqnr']:.1f}"} <= {
                *cells
            }


def test_the_weights_are_those_of_quantize_(run: Any, plain: Path, tmp_path: Path) -> None:
    run("quantize", plain, tmp_path / "out", "--config", "int4", "--group-size", "32", "--json", tmp_path / "r.json")
    sqnr = {r["name"]: r["sqnr"] for r in json.loads((tmp_path / "r.json").read_text())["rows"]}
    before, after = load_file(plain / "model.safetensors"), pw.load(tmp_path / "out")
    assert quantized(after) == LINEAR
    for name, weight in before.items():
        if name not in LINEAR:
            assert torch.equal(after[name], weight)
            continue
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        layer.weight = torch.nn.Parameter(weight)
        (row,) = pw.quantize_(layer, by_name("int4", 32)).rows
        assert torch.equal(after[name].dequantize(), layer.weight.dequantize())
        assert sqnr[name] == pytest.approx(row.sqnr, abs=1e-3)


def test_a_dry_run_writes_nothing_and_foretells_the_bytes(run: Any, plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("quantize", plain, out, "--config", "int8-dynamic")
    dry = json.loads(run(*arguments, "--dry-run", "--json", "-").stdout)
    text = run(*arguments, "--dry-run").stdout
    assert not out.exists()
    assert dry["dry_run"]
    assert dry["files"] == {"before": model_bytes(plain), "after": None}
    assert "a dry run, nothing written" in text
    assert f"{dry['bytes_after']:,} bytes" in text
    real = json.loads(run(*arguments, "--json", "-").stdout)
    strip = [{k: v for k, v in row.items() if k != "sqnr"} for row in real["rows"]]
    assert strip == [{k: v for k, v in row.items() if k != "sqnr"} for row in dry["rows"]]
    assert {r["name"] for r in real["rows"] if r["sqnr"] is not None} == LINEAR


def test_json_is_the_report(run: Any, plain: Path, tmp_path: Path) -> None:
    data = json.loads(run("quantize", plain, tmp_path / "a", "--config", "int8", "--json", "-").stdout)
    expected = quantize_checkpoint(plain, tmp_path / "b", pw.Int8WeightOnlyConfig()).to_dict()
    assert data.items() >= expected.items()
    assert data.keys() - expected.keys() == {"dry_run", "files"}


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["head"], {"head.weight"}),
        (["blocks.0.*"], {"blocks.0.q.weight", "blocks.0.up.weight"}),
        (["up"], {"blocks.0.up.weight", "blocks.1.up.weight"}),
        (["head", "blocks.1.q.weight"], {"head.weight", "blocks.1.q.weight"}),
    ],
)
def test_skip_leaves_alone(run: Any, plain: Path, tmp_path: Path, skip: list[str], left: set[str]) -> None:
    words = [word for name in skip for word in ("--skip", name)]
    data = json.loads(run("quantize", plain, tmp_path / "out", "--config", "int8", *words, "--json", "-").stdout)
    assert quantized(pw.load(tmp_path / "out")) == LINEAR - left
    notes = {r["name"]: r["note"] for r in data["rows"]}
    for name in left:
        assert notes[name] in {f"skipped by {word!r}" for word in skip}
    before = load_file(plain / "model.safetensors")
    assert all(torch.equal(pw.load(tmp_path / "out")[name], before[name]) for name in left)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config is required, such as int8, int8-dynamic, int4"),
        (["--config", "int44"], "unknown config 'int44' (did you mean 'int4'"),
        (
            ["--config", "int8-dynamic", "--group-size", "32"],
            "--group-size 32 cannot be used with int8-dynamic",
        ),
        (["--config", "mxfp4", "--group-size", "32"], "--group-size 32 cannot be used with mxfp4: the OCP MX standard"),
        (["--config", "int4", "--skip", "haed"], "--skip 'haed' matches no module or parameter (did you mean 'head'"),
        (["--config", "int4", "--skip", "*"], "nothing would be quantized"),
        (
            ["--config", "int4", "--group-size", "48", "--on-indivisible", "error"],
            "group size 48 does not divide its 64 inputs; use --group-size 32, or --on-indivisible 'pad'",
        ),
        (["--config", "int4", "--on-indivisible", "bend"], "--on-indivisible must be one of pad, largest_divisor"),
        (["--config", "int4", "--max-shard-size", "4 apples"], "'4 apples' is not a size; write for example 4GB"),
        (["--config", "int4", "--json", "/nowhere/r.json"], "--json /nowhere/r.json: folder /nowhere does not exist"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(
    run: Any, plain: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    source = snapshot(plain)
    result = run("quantize", plain, tmp_path / "out", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("pennyweight: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert snapshot(plain) == source


@pytest.mark.parametrize("policy", ["pad", "largest_divisor", "skip"])
def test_on_indivisible(run: Any, plain: Path, tmp_path: Path, policy: str) -> None:
    tensors = load_file(plain / "model.safetensors") | {"odd.weight": torch.randn(8, 90)}
    save_file(tensors, plain / "model.safetensors")
    arguments = ("--config", "uint4", "--group-size", "64", "--on-indivisible", policy)
    data = json.loads(run("quantize", plain, tmp_path / "out", *arguments, "--json", "-").stdout)
    (row,) = [r for r in data["rows"] if r["name"] == "odd.weight"]
    weight = pw.load(tmp_path / "out")["odd.weight"]
    if policy == "skip":
        assert torch.equal(weight, tensors["odd.weight"])
        assert "group size 64 does not divide its 90 inputs" in row["note"]
    else:
        assert weight.spec.block == ((64,) if policy == "pad" else (45,))
        assert ("90 inputs padded to 128" in row["note"]) is (policy == "pad")


def test_nan_is_named_and_no_checkpoint_is_left(run: Any, plain: Path, tmp_path: Path) -> None:
    tensors = load_file(plain / "model.safetensors")
    tensors["blocks.1.q.weight"][3, 3] = torch.nan
    save_file(tensors, plain / "model.safetensors")
    result = run("quantize", plain, tmp_path / "out", "--config", "int8")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "blocks.1.q.weight: 1 of 4096 values are NaN or inf" in result.stderr
    assert not list((tmp_path / "out").glob("*.safetensors*"))


def test_shards(run: Any, plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("quantize", plain, out, "--config", "int8", "--max-shard-size", "20kB")
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert f"-> {model_bytes(out):,} bytes" in result.stdout
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert {*weight_map.values()} == {p.name for p in shards}
    assert quantized(pw.load(out)) == LINEAR


def test_a_folder_in_use_is_refused_unless_forced(run: Any, plain: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("quantize", plain, out, "--config", "int8", "--max-shard-size", "20kB")
    (out / "notes.txt").write_text("mine")
    held = snapshot(out)
    refused = run("quantize", plain, out, "--config", "int4")
    assert refused.exit_code == 2
    assert f"{out} is not empty (model-00001-of-" in refused.stderr
    assert "--force" in refused.stderr
    failed = run("quantize", plain, out, "--config", "int4", "--skip", "nothing-like-it", "--force")
    assert failed.exit_code == 2
    assert snapshot(out) == held  # a job that cannot be done does not cost what was there
    assert run("quantize", plain, out, "--config", "int4", "--force").exit_code == 0
    assert sorted(snapshot(out)) == ["model.safetensors", "notes.txt"]  # no shard of the older one is left
    assert {t.spec.format.name for t in pw.load(out).values() if isinstance(t, pw.AffineQuantizedTensor)} == {"uint4"}


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_the_source_is_never_the_target(run: Any, plain: Path, tmp_path: Path, force: list[str]) -> None:
    source = snapshot(plain)
    link = tmp_path / "link"
    link.symlink_to(plain)
    for target in (plain, link):
        result = run("quantize", plain, target, "--config", "int8", *force)
        assert result.exit_code == 2
        assert "is the input folder" in result.stderr
    inner = run("quantize", plain / "model.safetensors", plain, "--config", "int8", *force)
    assert inner.exit_code == 2
    assert snapshot(plain) == source


def test_a_quantized_source_is_refused(run: Any, plain: Path, tmp_path: Path) -> None:
    run("quantize", plain, tmp_path / "a", "--config", "int8")
    result = run("quantize", tmp_path / "a", tmp_path / "b", "--config", "int4")
    assert result.exit_code == 2
    assert "is already quantized" in result.stderr
    assert not (tmp_path / "b").exists()


@pytest.fixture
def stopped(run: Any, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where Ctrl-C came while the third weight was written, with files done before it."""

    @contextmanager
    def interrupts() -> Iterator[Any]:
        def told(done: int, total: int, name: str) -> None:
            assert total == len(LINEAR)
            if done == 3:
                raise KeyboardInterrupt

        yield told

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(importlib.import_module("pennyweight.cli.quantize"), "progress_bar", interrupts)
        result = run("quantize", plain, out, "--config", "int4", "--max-shard-size", "8kB")
    assert result.exit_code == 130
    assert result.stderr == "pennyweight: interrupted; run the same command again to resume\n"
    assert list(out.glob("*.safetensors"))
    assert run("inspect", out).exit_code == 2  # nobody takes it for a checkpoint
    return out


def test_resume_goes_on_to_the_same_bytes(run: Any, plain: Path, tmp_path: Path, stopped: Path) -> None:
    written = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in stopped.glob("*.safetensors")}
    arguments = ("--config", "int4", "--max-shard-size", "8kB", "--json", "-")
    resumed = json.loads(run("quantize", plain, stopped, *arguments).stdout)
    assert {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in written} == written  # not written again
    whole = json.loads(run("quantize", plain, tmp_path / "whole", *arguments).stdout)
    assert snapshot(stopped) == snapshot(tmp_path / "whole")
    assert resumed == whole  # the SQNR of what was written before the stop included


def test_another_job_is_not_mixed_in(run: Any, plain: Path, tmp_path: Path, stopped: Path) -> None:
    held = snapshot(stopped)
    arguments = ("--config", "int8", "--max-shard-size", "8kB")
    result = run("quantize", plain, stopped, *arguments)
    assert result.exit_code == 2
    assert "has another source, config" in result.stderr
    assert "pass --no-resume to start over" in result.stderr
    assert snapshot(stopped) == held
    assert run("quantize", plain, stopped, *arguments, "--no-resume").exit_code == 0
    run("quantize", plain, tmp_path / "whole", *arguments)
    assert snapshot(stopped) == snapshot(tmp_path / "whole")


def test_a_llama_by_its_config(run: Any, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("--config", "int4", "--group-size", "32", "--skip", "lm_head", "--json", "-")
    data = json.loads(run("quantize", llama, out, *arguments).stdout)
    assert "layers from config.json: LlamaForCausalLM" in data["config"]
    schemes = {r["name"]: r["scheme"] for r in data["rows"]}
    assert {n for n, s in schemes.items() if s} == {n for n in schemes if n.endswith("_proj.weight")}
    assert len([s for s in schemes.values() if s]) == 14
    notes = {r["name"]: r["note"] for r in data["rows"]}
    assert notes["lm_head.weight"] == "skipped by 'lm_head'"
    assert notes["model.embed_tokens.weight"] == "Embedding: not selected by default"
    assert (out / "tokenizer.json").read_bytes() == (llama / "tokenizer.json").read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "pennyweight"
    words = run("explain", out, "model.layers.1.mlp.down_proj").stdout
    assert "torch_int4" in words
    assert "RUNS" in words
    assert f"{model_bytes(out):,} bytes" in run("inspect", out).stdout


def test_as_a_process(plain: Path, tmp_path: Path) -> None:
    command = ["-W", "error", "-m", "pennyweight", "quantize", plain, tmp_path / "out", "--config", "nf4"]
    done = forked.run(command)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"-> {model_bytes(tmp_path / 'out'):,} bytes" in done.stdout
    assert {t.spec.format.name for n, t in pw.load(tmp_path / "out").items() if n in LINEAR} == {"nf4"}


@pytest.mark.skipif(os.name != "posix", reason="needs a pseudo-terminal")
def test_progress_is_shown_on_a_terminal_only_there(plain: Path, tmp_path: Path) -> None:
    import pty

    terminal, stderr = pty.openpty()
    command = ["-m", "pennyweight", "quantize", plain, tmp_path / "out", "--config", "int8"]
    with open(tmp_path / "stdout", "wb") as stdout:
        process = forked.start(command, stdout=stdout, stderr=stderr)
    os.close(stderr)
    shown = b""
    with suppress(OSError):  # how Linux says that the other end is closed
        while piece := os.read(terminal, 1 << 16):
            shown += piece
    os.close(terminal)
    assert process.wait() == 0
    assert b"5/5" in shown
    assert any(name.encode() in shown for name in LINEAR)
    written = (tmp_path / "stdout").read_text()
    assert "5/5" not in written
    assert "\x1b" not in written
