"""docs/sharing.md: its code and its commands run against a local server, its options exist."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import pennyweight as pw
from pennyweight.cli.app import app
from tests.cli.conftest import add_tokenizer, snapshot, write_text
from tests.integrations.small import assert_same_weights, float_folder
from tests.io.hub_server import Hub

PAGE = Path(__file__).parents[2] / "docs" / "sharing.md"
TEXT = PAGE.read_text(encoding="utf-8")
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def model(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """The repository org/model, and an empty folder to work in."""
    folder = float_folder(tmp_path / "float", max_position_embeddings=32)
    add_tokenizer(folder)
    hub.add("org/model", snapshot(folder))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return hub


def test_the_code_runs(model: Hub) -> None:
    names: dict[str, Any] = {}
    blocks = re.findall(r"^```python\n(.*?)^```$", TEXT, re.S | re.M)
    assert len(blocks) == 3
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    assert_same_weights(names["again"], names["model"])
    assert names["address"].startswith(f"{model.url}/you/model-int4/commit/")
    assert any(isinstance(t, pw.AffineQuantizedTensor) for t in names["tensors"].values())


def test_the_commands_run(model: Hub) -> None:
    write_text(Path("text.txt"))
    (block,) = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.S | re.M)
    for line in block.splitlines():
        result = CliRunner().invoke(app, shlex.split(line, comments=True)[1:], catch_exceptions=False)
        assert result.exit_code == 0, result.stderr
    assert model.repos["you/model-int4"].private
    assert b"base_model: org/model\n" in model.repos["you/model-int4"].main["README.md"]


def test_the_options_are_real() -> None:
    shown = "".join(CliRunner().invoke(app, [c, "--help"]).stdout for c in ("quantize", "push", "inspect", "eval"))
    assert not [o for o in set(re.findall(r"(--[a-z][a-z-]+)", TEXT)) if o not in shown]
