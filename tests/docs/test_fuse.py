"""docs/fuse.md: its code runs, and its numbers are those of the code."""

import re
from pathlib import Path

import pytest
import torch

import pennyweight as pw
from pennyweight.inference import verify_block
from tests.inference.fuse_models import inputs, model_of

PAGE = (Path(__file__).parents[2] / "docs" / "fuse.md").read_text(encoding="utf-8")


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    names = {"pw": pw, "torch": torch, "model": model_of("bert"), "batch": inputs("bert")}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 1
    exec(compile(blocks[0], "fuse.md", "exec"), names)
    assert "encoder.layer.0" in capsys.readouterr().out


def test_the_limits_are_those_of_the_code() -> None:
    limits = re.findall(r"^\| (float32|bfloat16|float16|inputs .*?) \| ([0-9e-]+) \|", PAGE, re.M)
    v = verify_block
    assert [float(n) for _, n in limits] == [v.FLOAT32, v.BFLOAT16, v.FLOAT16, v.QUANTIZED_INPUTS]
