"""docs/graph_mode.md: its code runs as it stands there."""

import re
from pathlib import Path

import pytest

from pennyweight.kernels.cpu import library
from pennyweight_torchao import graph_mode as gm

PAGE = (Path(__file__).parents[2] / "docs" / "graph_mode.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own, of a deep copy of its graphs
def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(compile(block, "graph_mode.md", "exec"), names)
    lowered = 2 if library.available() is True else 0
    assert f"{lowered} parameters lowered" in capsys.readouterr().out
    assert any("dequantize" in str(node.target) for node in names["trained"].graph.nodes)


def test_quantizers_are_all_there() -> None:
    kinds = {name for name in gm.__all__ if name.endswith("Quantizer")} - {"Quantizer"}
    assert set(re.findall(r"^\| `(\w+Quantizer)` \|", PAGE, re.M)) == kinds
