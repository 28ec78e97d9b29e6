"""docs/export_onnx.md: its code runs, and its table speaks of every form there is."""

import re
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest

from pennyweight.export import onnx_patterns

PAGE = (Path(__file__).parents[2] / "docs" / "export_onnx.md").read_text(encoding="utf-8")


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    names: dict[str, Any] = {}
    exec(compile(code, "export_onnx.md", "exec"), names)
    assert names["y"].shape == (5, 10)
    assert isinstance(names["session"], onnxruntime.InferenceSession)
    assert {n.op_type for n in onnx.load("model.onnx").graph.node} >= {"MatMulNBits", "Relu"}


def test_the_table_names_every_form() -> None:
    table = [line for line in PAGE.splitlines() if line.startswith("|")]
    for form in (*onnx_patterns.LINEAR, *onnx_patterns.EMBEDDING, *onnx_patterns.VALUES):
        rows = [line for line in table if f"`{form.name}`" in line or f"`{form.name}:" in line]
        assert rows, form.name
        styles = " ".join(line.split("|")[2] for line in rows)
        assert "all" in styles or all(f"`{style}`" in styles for style in form.styles if form.name != "decode + MatMul")


def test_the_command_line_is_real(run_help: str) -> None:
    for option in re.findall(r"`(--[a-z-]+)`", PAGE):
        assert option in run_help


@pytest.fixture
def run_help() -> str:
    from typer.testing import CliRunner

    from pennyweight.cli.app import app

    return CliRunner().invoke(app, ["export-onnx", "--help"], env={"COLUMNS": "200"}).stdout
