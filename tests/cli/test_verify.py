"""pennyweight verify: right, wrong and missing, and how the file is made."""

from pathlib import Path
from typing import Any

import pytest
import torch

import pennyweight as pw
from pennyweight.inference import CheckError
from pennyweight.inference.verify_block import compare
from pennyweight.kernels.cpu import library
from pennyweight.report.evaluation_inputs import load_folder
from pennyweight.report.golden_outputs import golden
from tests.cli.conftest import snapshot
from tests.inference.fuse_models import conv_net


@pytest.fixture
def small(run: Any, writer: Path, text: Path, tmp_path: Path) -> Path:
    out = tmp_path / "small"
    assert run("quantize", writer, out, "--config", "int4", "--group-size", "32").exit_code == 0
    before = snapshot(out)
    result = run("verify", out, "--make", "--text", text)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"written: {out / 'golden.safetensors'}\n"
    assert {n: b for n, b in snapshot(out).items() if n != "golden.safetensors"} == before
    return out


def test_it_gives_what_it_gave(run: Any, small: Path, writer: Path) -> None:
    result = run("verify", small)
    assert result.exit_code == 0, result.stderr
    assert result.stdout.startswith("as expected: mean KL ")
    assert (small / "golden.safetensors").stat().st_size < 50_000
    (small / "config.json").unlink()
    assert run("verify", small, "--like", writer).exit_code == 0


def test_fused_blocks(run: Any, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("verify", small, "--fused")
    if "nothing is fused" in result.stderr:  # no native library here
        return
    assert result.exit_code == 0, result.stderr
    assert "2 fused blocks agree" in result.stdout.replace("agrees", "agree").replace("each call of ", "")
    monkeypatch.setattr(
        "pennyweight.inference.verify_block.compare", lambda what, error, limit: compare(what, error, -1.0)
    )
    result = run("verify", small, "--fused")
    assert result.exit_code == 2
    assert "model.layers.0: the output of the fused block differs" in result.stderr


@pytest.mark.skipif(library.available() is not True, reason=str(library.available()))
def test_fused_convolution_nets(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    net = conv_net()
    expected = golden(net, [torch.randn(2, 3, 12, 11)])
    monkeypatch.setattr("pennyweight.report.golden_files.expected_beside", lambda path: expected)
    monkeypatch.setattr("pennyweight.report.evaluation_inputs.load_folder", lambda path, like: conv_net())
    result = run("verify", "folder", "--fused")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.endswith("; each call of 1 fused net agrees with the module's own forward\n")
    monkeypatch.setattr("pennyweight.inference.fuse_conv_net.compare", differs)
    result = run("verify", "folder", "--fused")
    assert (result.exit_code, "the model: the output" in result.stderr) == (2, True)


def differs(what: str, error: float, limit: float, kind: str) -> None:
    raise CheckError(what)


def test_it_does_not(run: Any, small: Path, writer: Path) -> None:
    (small / "model.safetensors").write_bytes((writer / "model.safetensors").read_bytes())  # the float weights
    result = run("verify", small)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "NOT as expected: mean KL" in result.stderr
    assert "times the bound of 0.00025" in result.stderr
    assert run("verify", small, "--bound", 100).exit_code == 0
    with pytest.raises(pw.CheckpointError, match="NOT as expected"):
        pw.load(small, load_folder(str(writer)), verify=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "has no golden.safetensors"),
        (["--make"], "--make and --text must be used together"),
        (["--text", "a.txt"], "--make and --text must be used together"),
        (["--bound", "0"], "--bound must be positive"),
        (["--make", "--text", "a.txt", "--bound", "1"], "--bound cannot be used with --make"),
        (["--make", "--text", "a.txt", "--fused"], "--fused cannot be used with --make"),
    ],
)
def test_what_does_not_fit(run: Any, writer: Path, arguments: list[str], message: str) -> None:
    result = run("verify", writer, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (writer / "golden.safetensors").exists()
