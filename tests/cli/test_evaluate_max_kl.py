"""quantize --max-kl: what passes is what plain quantize writes; what does not leaves nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

import pennyweight as pw
from tests.cli.conftest import snapshot


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_what_passes_is_what_would_have_been_written(run: Any, writer: Path, text: Path, tmp_path: Path) -> None:
    arguments = ("--config", "int4", "--group-size", "32", "--max-shard-size", "40kB")
    before = snapshot(writer)
    run("quantize", writer, tmp_path / "plain", *arguments)
    result = run("quantize", writer, tmp_path / "sub" / "gated", *arguments, "--max-kl", 100, "--text", text)
    assert result.exit_code == 0
    gated, plain = snapshot(tmp_path / "sub" / "gated"), snapshot(tmp_path / "plain")
    assert b"| KL(float \\|\\| quantized) | mean " in gated.pop("README.md")
    assert b"KL(" not in plain.pop("README.md")
    assert gated == plain
    assert len(snapshot(tmp_path / "plain")) > 5
    assert listing(tmp_path / "sub") == ["gated"]
    assert "KL(float || quantized): mean" in result.stderr
    assert "parameters quantized" in result.stdout
    assert snapshot(writer) == before


def test_what_fails_leaves_nothing(run: Any, writer: Path, text: Path, tmp_path: Path) -> None:
    before = listing(tmp_path)
    arguments = ("--config", "int4", "--max-kl", "1e-7", "--text", text, "--json", tmp_path / "r.json")
    result = run("quantize", writer, tmp_path / "sub" / "out", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "nats, the limit is 1e-07; worst layers: model.layers." in result.stderr
    assert result.stderr.count("\n") == 1
    assert listing(tmp_path) == before


def test_an_old_checkpoint_stays_until_the_new_one_passes(run: Any, writer: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("quantize", writer, out, "--config", "int8", "--max-shard-size", "40kB")
    (out / "notes.txt").write_text("mine")
    held = snapshot(out)
    gate = ("--config", "int4", "--text", text)
    assert "is not empty" in run("quantize", writer, out, *gate, "--max-kl", 100).stderr
    assert run("quantize", writer, out, *gate, "--max-kl", 1e-7, "--force").exit_code == 2
    assert snapshot(out) == held
    result = run("quantize", writer, out, *gate, "--max-kl", 100, "--force", "--json", "-")
    assert json.loads(result.stdout)["dry_run"] is False
    assert not list(out.glob("model-*.safetensors"))
    assert (out / "notes.txt").read_text() == "mine"
    assert {t.spec.format.name for t in pw.load(out).values() if isinstance(t, pw.AffineQuantizedTensor)} == {"uint4"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-kl", "0.1"], "--max-kl and --text must be used together"),
        (["--text", "TEXT"], "--max-kl and --text must be used together"),
        (["--max-kl", "-1", "--text", "TEXT"], "--max-kl must be positive, got -1.0"),
        (["--max-kl", "1", "--text", "TEXT", "--dry-run"], "leave out --dry-run"),
        (["--max-kl", "1", "--text", "/nowhere/t"], "/nowhere/t: No such file"),
        (["--max-kl", "1", "--text", "TEXT", "--skip", "nothing-like-it"], "matches no module or parameter"),
    ],
)
def test_errors(run: Any, writer: Path, text: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    before = listing(tmp_path)
    words = [text if a == "TEXT" else a for a in arguments]
    result = run("quantize", writer, tmp_path / "out", "--config", "int4", *words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert listing(tmp_path) == before


def test_a_model_that_cannot_be_run(run: Any, plain: Path, text: Path, tmp_path: Path) -> None:
    before = listing(tmp_path)
    result = run("quantize", plain, tmp_path / "out", "--config", "int4", "--max-kl", 1, "--text", text)
    assert result.exit_code == 2
    assert "config.json" in result.stderr
    assert listing(tmp_path) == before
