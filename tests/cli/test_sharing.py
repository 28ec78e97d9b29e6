"""Hub ids, model cards and ``pennyweight push`` on the command line, against a local server."""

import json
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard, constants

import pennyweight as pw
from tests.cli.conftest import snapshot
from tests.io.hub_server import Hub

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
REPO = "org/writer"
INT4 = ("--config", "int4", "--group-size", "32")


@pytest.fixture
def there(hub: Hub, writer: Path) -> Hub:
    """The repositories org/writer and org/small: a float model and the same in int4."""
    card = b"---\nlicense: apache-2.0\n---\n"
    hub.add(REPO, {**snapshot(writer), "README.md": card})
    return hub


def ok(result: Any) -> str:
    assert result.exit_code == 0, result.stderr
    return result.stdout


def test_every_command_takes_ids(there: Hub, run: Any, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    out = tmp_path / "int4"
    ok(run("quantize", REPO, out, *INT4))
    ok(run("verify", out, "--make", "--text", text))
    there.add("org/small", snapshot(out))
    assert "tensors quantized" in ok(run("inspect", "org/small"))
    assert "RUNS" in ok(run("explain", "org/small@main", "model.layers.0.mlp.up_proj"))
    assert "KL(float || quantized)" in ok(run("eval", REPO, "org/small", "--text", text))
    assert "layers" in ok(run("report", "org/small", "--float", REPO, "-o", tmp_path / "r.html"))
    assert "as expected" in ok(run("verify", "org/small"))
    ok(run("convert", "org/small", tmp_path / "float", "--to", "float"))
    ok(run("export-onnx", "org/small", tmp_path / "m.onnx"))
    for command in (("quantize", tmp_path / "q", *INT4), ("convert", tmp_path / "c", "--to", "float")):
        result = run(command[0], "org/missing", *command[1:])
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert "pennyweight: org/missing: not found, neither as a local path nor as a repository of" in result.stderr
    refused = run("verify", "org/small", "--make", "--text", text)
    assert "--make writes into a folder" in refused.stderr


def test_a_local_folder_comes_first(there: Hub, run: Any, writer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(writer.parent)
    (writer.parent / "org").mkdir()
    writer.rename(writer.parent / "org" / "writer")
    ok(run("inspect", REPO))
    assert there.requests == []


def test_offline(there: Hub, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    first = ok(run("inspect", REPO))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    count = len(there.requests)
    assert ok(run("inspect", REPO)) == first
    result = run("inspect", "org/other")
    assert result.exit_code == 2
    assert "and HF_HUB_OFFLINE is set" in result.stderr
    assert len(there.requests) == count


def test_pickles_need_the_option(hub: Hub, run: Any, tmp_path: Path) -> None:
    import torch

    torch.save({"w": torch.ones(4, 4)}, tmp_path / "w.bin")
    hub.add("org/old", {"pytorch_model.bin": (tmp_path / "w.bin").read_bytes()})
    assert "pass --allow-pickle" in run("inspect", "org/old").stderr
    assert "w" in ok(run("inspect", "org/old", "--allow-pickle"))


def test_quantize_writes_a_card(there: Hub, run: Any, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ok(run("quantize", REPO, out, *INT4, "--max-kl", "100", "--text", text))
    card = ModelCard((out / "README.md").read_text())
    assert (card.data.base_model, card.data.license) == (REPO, "apache-2.0")
    assert "| SQNR of the weights | mean " in card.text
    assert "| KL(float \\|\\| quantized) | mean " in card.text
    report = json.loads(ok(run("quantize", REPO, tmp_path / "again", *INT4, "--json", "-")))
    worst = min(row["sqnr"] for row in report["rows"] if row["sqnr"] is not None)
    assert f"least {worst:.1f} dB" in (tmp_path / "again" / "README.md").read_text()
    # again: a generated card is replaced, and one that someone wrote is not
    ok(run("quantize", REPO, out, "--config", "int8", "--force"))
    assert "Int8WeightOnlyConfig" in (out / "README.md").read_text()
    for more in ((), ("--no-card",), ("--max-kl", "100", "--text", text), ("--calibration", text)):
        (out / "README.md").write_text("By hand")
        ok(run("quantize", REPO, out, *INT4, "--force", *more))
        assert (out / "README.md").read_text() == "By hand", more
    ok(run("quantize", REPO, tmp_path / "none", *INT4, "--no-card"))
    assert "apache" in (tmp_path / "none" / "README.md").read_text()  # the base model's, as a side file
    assert "Pennyweight" not in (tmp_path / "none" / "README.md").read_text()


def test_convert_renews_a_generated_card(there: Hub, run: Any, tmp_path: Path) -> None:
    ok(run("quantize", REPO, tmp_path / "out", "--config", "int8"))
    ok(run("convert", tmp_path / "out", tmp_path / "ct", "--to", "compressed-tensors"))
    card = ModelCard((tmp_path / "ct" / "README.md").read_text())
    assert (card.data.base_model, card.data.license) == (REPO, "apache-2.0")
    assert "compressed-tensors" in card.data.tags
    assert "in the format compressed-tensors" in card.text
    pw.convert(tmp_path / "out", tmp_path / "plain", to="compressed-tensors")  # copies no card of other files
    assert not (tmp_path / "plain" / "README.md").exists()
    ok(run("convert", REPO, tmp_path / "float", "--to", "float"))
    assert "license: apache-2.0" in (tmp_path / "float" / "README.md").read_text()


def test_with_calibration(run: Any, writer: Path, text: Path, tmp_path: Path) -> None:
    ok(run("quantize", writer, tmp_path / "out", *INT4, "--calibration", text))
    assert "# writer, int4" in (tmp_path / "out" / "README.md").read_text()


def test_other_folders_get_no_card(run: Any, plain: Path, tmp_path: Path) -> None:
    ok(run("quantize", plain, tmp_path / "out", *INT4))
    assert not (tmp_path / "out" / "README.md").exists()


def test_push(there: Hub, run: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ok(run("quantize", REPO, out, *INT4))
    told = ok(run("push", out, "org/int4", "--private", "--message", "Small"))
    repo = there.repos["org/int4"]
    assert told.strip() == f"{there.url}/org/int4/commit/{repo.branches['main']}"
    assert (repo.private, repo.messages[-1]) == (True, "Small")
    assert b'from_pretrained("org/int4")' in repo.main["README.md"]
    assert b"SQNR" in repo.main["README.md"]
    ok(run("push", out, "org/int4", "--revision", "next"))
    assert "next" in repo.branches
    state, again = pw.load(out), pw.load(pw.io.local_path("org/int4"))
    assert state.keys() == again.keys()
    assert all(repr(state[name]) == repr(again[name]) for name in state)
    result = run("push", tmp_path / "nothing", "org/int4")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "nothing was not uploaded to org/int4" in result.stderr
