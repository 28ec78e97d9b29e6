"""--json on every command: one option, one meaning, nothing but JSON on stdout."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer

from pennyweight.cli.app import app
from tests.cli.conftest import snapshot
from tests.io.hub_server import Hub

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
LAYER = "model.layers.0.mlp.up_proj"
# Command -> arguments, and keys that scripts may rely on
CASES: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "quantize": (
        ("{float}", "{new}", "--config", "int4", "--group-size", "32"),
        {"config", "bytes_before", "bytes_after", "notes", "rows", "dry_run", "files"},
    ),
    "convert": (
        ("{small}", "{new}", "--to", "float"),
        {"config", "bytes_before", "bytes_after", "notes", "rows", "dry_run", "files"},
    ),
    "export-onnx": (("{small}", "{new}.onnx"), {"rows", "files", "opset", "inputs", "outputs", "file_bytes"}),
    "push": (("{small}", "org/pushed"), {"folder", "repo_id", "url"}),
    "inspect": (("{small}",), {"format", "files", "file_bytes", "tensor_bytes", "kinds", "tensors"}),
    "explain": (("{small}", LAYER), {"name", "tied_to", "shape", "dtype", "scheme", "bytes", "op", "inputs"}),
    "eval": (("{float}", "{small}", "--text", "{text}"), {"kl", "perplexity", "top1", "layers", "bits_per_weight"}),
    "report": (("{small}", "-o", "{new}.html"), {"file", "file_bytes", "models", "leaderboard", "command"}),
    "verify": (("{small}",), {"ok", "kind", "rows", "kl", "error", "top1", "bound"}),
    "generate": (
        ("{small}", "--prompt", "the cat", "--max-new-tokens", "3", "--no-fuse"),
        {"prompt", "text", "tokens", "prompt_tokens", "first_token_seconds", "seconds", "tokens_per_second", "stopped"},
    ),
    "doctor": ((), {"healthy", "versions", "cpu", "kernels", "problems"}),
}

SLOW = {"doctor", "export-onnx"}  # run once, the option is the same


@pytest.fixture
def places(hub: Hub, writer: Path, text: Path, tmp_path: Path, run: Any) -> dict[str, Any]:
    """A float model, the same in int4 with golden outputs, and names for new files."""
    small = tmp_path / "small"
    assert run("quantize", writer, small, "--config", "int4", "--group-size", "32").exit_code == 0
    assert run("verify", small, "--make", "--text", text).exit_code == 0
    return {"float": writer, "small": small, "text": text, "new": tmp_path / "new"}


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"chat"}))  # a conversation has no result
def test_every_command_has_the_option(name: str) -> None:
    (option,) = [p for p in COMMANDS[name].params if "--json" in p.opts]
    assert option.metavar == "[FILE]", "use options.Json"
    assert name in CASES, f"add {name} to the table of this test"


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_page_names_the_keys(name: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    (row,) = [
        line for line in page.partition("## JSON")[2].splitlines() if line.startswith("|") and f"`{name}`" in line
    ]
    assert {key for key in CASES[name][1] if f"`{key}`" not in row} == set()


@pytest.mark.parametrize("name", sorted(CASES))
def test_stdout_is_json(name: str, places: dict[str, Any], run: Any, tmp_path: Path) -> None:
    if name == "export-onnx":
        pytest.importorskip("onnxscript")
    arguments, keys = CASES[name]
    file, folder = tmp_path / "result.json", dict(places)
    results = []
    for number, option in enumerate((["--json"], ["--json", "-"], ["--json", str(file)])):
        folder["new"] = tmp_path / f"new{number}"
        result = run(name, *(a.format(**folder) for a in arguments), *option)
        assert result.exit_code == 0, result.stderr
        results.append(result.stdout)
        if name in SLOW:
            break
    data = json.loads(results[0])
    assert data["version"] == 1
    assert keys <= data.keys(), f"{name} --json lost a key"
    if name not in SLOW:
        assert json.loads(results[1]).keys() == data.keys()
        assert json.loads(file.read_text()).keys() == data.keys()
        with pytest.raises(ValueError, match="Expecting value"):
            json.loads(results[2])  # the text


def test_the_option_may_stand_before_others_and_before_the_path_of_inspect(plain: Path, run: Any) -> None:
    expected = run("inspect", plain, "--json").stdout
    assert json.loads(expected)["path"] == str(plain)
    assert run("inspect", "--json", plain).stdout == expected
    assert run("inspect", "--json", "-", plain).stdout == expected
    assert run("inspect", "--json", "--allow-pickle", plain).stdout == expected
    assert run("inspect", "--json").exit_code == 2
    assert "Missing argument" in run("inspect", "--json").stderr


def test_a_file_is_never_taken_for_a_missing_argument(plain: Path, run: Any, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    result = run("quantize", plain, "--json", tmp_path / "r.json", "--config", "int4")
    assert result.exit_code == 2
    assert "Missing argument 'OUT_DIR'" in result.stderr
    assert snapshot(tmp_path) == before


def test_a_failed_check_is_json_too(places: dict[str, Any], run: Any) -> None:
    other = places["new"]
    assert run("quantize", places["float"], other, "--config", "int2").exit_code == 0
    (other / "golden.safetensors").write_bytes((places["small"] / "golden.safetensors").read_bytes())
    result = run("verify", other, "--bound", "1e-9", "--json")
    data = json.loads(result.stdout)
    assert (result.exit_code, data["ok"]) == (2, False)
    assert data["kl"]["mean"] > data["bound"] == 1e-9
    assert result.stderr.count("\n") == 1


def test_explain_as_data_says_what_the_text_says(places: dict[str, Any], run: Any) -> None:
    data = json.loads(run("explain", places["small"], LAYER, "--json").stdout)
    text = run("explain", places["small"], LAYER).stdout
    assert [i["dtype"] for i in data["inputs"]] == ["float32", "bfloat16"]
    for one in data["inputs"]:
        assert [k["verdict"] for k in one["kernels"]].count("RUNS") == 1
        for kernel in one["kernels"]:
            assert f"{kernel['kernel']} " in text
            assert kernel["verdict"] in text


def test_numbers_that_json_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    from pennyweight.cli.output import show

    show({"a": [float("inf"), (float("nan"), 1.5)], "b": {"c": float("-inf")}}, lambda: "text", "-")
    assert json.loads(capsys.readouterr().out) == {"a": ["inf", ["nan", 1.5]], "b": {"c": "-inf"}}
