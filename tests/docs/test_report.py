"""docs/report.md: its code runs, its options and figures exist."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import pennyweight as pw
from pennyweight.cli.app import app
from tests.report.small import llama, prompts, quantized

PAGE = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")


def test_the_code_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama()
    small = quantized(model, pw.Int8WeightOnlyConfig())
    pw.save(small, tmp_path)
    names: dict[str, Any] = {
        "model": model, "small": small, "batches": prompts(), "folder": tmp_path, "fresh_model": llama(),
    }  # fmt: skip
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, "report.md", "exec"), names)
    names["test_the_model_is_still_itself"]()
    assert "KL(float || quantized):" in capsys.readouterr().out


def test_the_options_are_real() -> None:
    shown = "".join(CliRunner().invoke(app, [c, "--help"]).stdout for c in ("eval", "report", "quantize", "verify"))
    options = set(re.findall(r"(--[a-z][a-z-]+)", PAGE))
    assert options >= {"--max-kl", "--text", "--measure", "--pareto"}
    assert not [o for o in options if o not in shown]


def test_the_picture_is_there() -> None:
    for name in re.findall(r"!\[[^]]*\]\(([^)]*)\)", PAGE):
        path = Path(__file__).parents[2] / "docs" / name
        assert path.stat().st_size < 300_000
