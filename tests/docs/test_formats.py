"""docs/formats.md says what the registries say, and its code runs."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import pennyweight as pw
from tests.every.formats_table import DOC, filled

TEXT = DOC.read_text(encoding="utf-8")


def test_the_tables_are_those_of_the_registries() -> None:
    assert filled(TEXT) == TEXT, "run python -m tests.every.formats_table"


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm = nn.Linear(128, 256), nn.LayerNorm(128)

    model = Net().half()
    pw.quantize_(model, pw.IntxWeightOnlyConfig(torch.int4, pw.PerGroup(32)))
    pw.save(model, tmp_path / "small")
    (tmp_path / "small" / "config.json").write_text(json.dumps({"model_type": "x"}))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, flags=re.S)
    assert blocks
    for block in blocks:
        exec(block, {"model": Net().half()})
