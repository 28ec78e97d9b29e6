"""report of several quantizations on one page, its JSON, and models that read no text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import pennyweight as pw
from tests.cli.test_report import Page, check_alone


@pytest.fixture
def three(run: Any, writer: Path, tmp_path: Path) -> list[Path]:
    how = {"eight": ["int8"], "four": ["int4", "--group-size", "32"], "two": ["int2"]}
    for name, config in how.items():
        assert run("quantize", writer, tmp_path / name, "--config", *config).exit_code == 0
    return [tmp_path / name for name in how]


def test_a_leaderboard(run: Any, writer: Path, three: list[Path], text: Path, tmp_path: Path) -> None:
    out, path = tmp_path / "p.html", tmp_path / "p.json"
    how = ("--text", text, "--length", 16, "--rounds", 2, "-o", out, "--json", path)
    result = run("report", *three, "--float", writer, *how)
    assert (result.exit_code, result.stderr) == (0, "")
    assert [line.partition(":")[0] for line in result.stdout.splitlines()[1:]] == ["eight", "four", "two"]
    page, data = Page(out), json.loads(path.read_text())
    check_alone(page)
    assert [s["name"] for s in data["leaderboard"]] == ["eight", "four", "two"]
    assert [s["letter"] for s in data["leaderboard"]] == ["A", "B", "C"]
    rows = [row for row in page.rows if row and row[0][:2] in ("A ", "B ", "C ")]
    for row, standing, model in zip(rows, data["leaderboard"], data["models"], strict=True):
        assert row[0] == f"{standing['letter']} {standing['name']}"
        assert row[1] == ("◆ yes" if standing["front"] else "no")
        assert standing["error"] == model["comparison"]["kl"]["mean"]
        assert row[3] == f"{standing['error']:.3g}"
        assert [cell.partition("×")[0] for cell in row[-2:]] == [f"{s['speed']:.2f}" for s in model["speed"]]
        measured = json.loads(run("eval", writer, three[0].parent / row[0][2:], "--text", text, "--length", 16,
                                  "--json", "-").stdout)  # fmt: skip
        assert measured["kl"]["mean"] == pytest.approx(standing["error"], rel=1e-9)
    assert data["rounds"] == 2
    assert data["processor"] in page.text
    labels = [v for tag, n, v in page.attributes if (tag, n) == ("svg", "aria-label")]
    assert [label.partition(":")[0] for label in labels[:3]] == [
        "mean KL(float || quantized), nats over megabytes",
        "mean KL(float || quantized), nats over speed, one token",
        "mean KL(float || quantized), nats over speed, a batch of 8",
    ]
    header = next(row for row in page.rows if row[0] == "layer")
    assert header == ["layer", "shape", "eight", "four", "two"]


def test_without_speed_and_without_text(run: Any, writer: Path, three: list[Path], text: Path, tmp_path: Path) -> None:
    out = tmp_path / "p.html"
    result = run("report", *three[:2], "--float", writer, "--text", text, "--no-speed", "--json", "-", "-o", out)
    data = json.loads(result.stdout)
    assert (data["rounds"], data["processor"], data["models"][0]["speed"]) == (0, "", [])
    assert "--no-speed" in data["command"]
    assert "Speed vs float" not in Page(out).text
    assert [len(m["suggestions"]) for m in data["models"]] == [1, 1]  # embeddings: one trial each
    for arguments in (["--float", writer], []):
        result = run("report", *three[:2], *arguments, "-o", out, "--json", "-")
        assert result.exit_code == 0
        data = json.loads(result.stdout)
        check_alone(Page(out))
        assert [m["comparison"] for m in data["models"]] == [None, None]
        assert [s["error"] for s in data["leaderboard"]] == [None, None]
        assert (data["bytes_float"] is None) == (not arguments)


def test_equal_names_are_shown_as_paths(run: Any, three: list[Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    three[0].rename(tmp_path / "other" / "four")
    both = (tmp_path / "other" / "four", three[1])
    data = json.loads(run("report", *both, "-o", tmp_path / "p.html", "--json", "-").stdout)
    assert [m["name"] for m in data["models"]] == [str(p) for p in both]


def test_all_numbers_of_a_page_are_in_its_json(
    run: Any, writer: Path, three: list[Path], text: Path, tmp_path: Path
) -> None:
    out, path = tmp_path / "p.html", tmp_path / "p.json"
    run("report", three[1], "--float", writer, "--text", text, "--length", 16, "--measure", "--trials", 1, "-o", out,
        "--json", path)  # fmt: skip
    page, data = Page(out), json.loads(path.read_text())
    (model,) = data["models"]
    assert data["version"] == 1
    assert data["leaderboard"] == []
    assert data["scales"]["layer"]["bounds"] == {"good": 30.0, "fine": 25.0, "watch": 15.0}
    assert model["verdict"]["text"] in page.text
    for step in model["verdict"]["steps"]:
        assert step["text"] in page.text
    kinds = {row[0]: row for row in page.rows if row and row[0] in {k["kind"] for k in model["kinds"]}}
    assert sum(k["bytes"] for k in model["kinds"]) == model["bytes"]
    for k in model["kinds"]:
        assert kinds[k["kind"]][1:3] == [f"{k['bytes_float']:,}", f"{k['bytes']:,}"]
    for e in model["weight_errors"]:
        assert f"Worst channels: {e['worst'][0][0]} ({e['worst'][0][1]:.1%})" in page.text
        assert len(e["channels"]) == next(w["shape"][0] for w in model["layers"] if w["name"] == e["name"])
    assert {w["grade"] for w in model["layers"] if not w["scheme"]} == {"good"}
    assert model["latency"].keys() == {w["name"] for w in model["layers"] if w["scheme"]}
    assert [len(i["channels"]) for i in data["inputs"]] == [64, 64, 64] or len(data["inputs"]) == 3


def test_inputs_of_a_model_without_text(run: Any, tmp_path: Path) -> None:
    import transformers
    from safetensors.torch import save_file

    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1], num_labels=5)
    transformers.ResNetForImageClassification(config).save_pretrained(tmp_path / "net")
    assert (
        run(
            "quantize",
            tmp_path / "net",
            tmp_path / "small",
            "--config",
            "int8-dynamic",
            "--layer",
            "*convolution=int8-dynamic",
        ).exit_code
        == 0
    )
    save_file({"pixel_values": torch.randn(10, 3, 16, 16)}, tmp_path / "images.safetensors")
    how = ("--float", tmp_path / "net", "--inputs", tmp_path / "images.safetensors", "--batch", 4, "--limit", 9)
    result = run("report", tmp_path / "small", *how, "-o", tmp_path / "p.html", "--json", "-", "--speed", "--rounds", 1,
                 "--trials", 0)  # fmt: skip
    assert result.exit_code == 0, result.stderr
    (model,) = json.loads(result.stdout)["models"]
    assert model["comparison"]["rows"] == 9
    exact, small = (
        pw.report.evaluation_inputs.load_folder(str(tmp_path / n), str(tmp_path / "net")) for n in ("net", "small")
    )
    images = pw.load(tmp_path / "images.safetensors")["pixel_values"][:9]
    expected = pw.compare(exact, small, [{"pixel_values": images}])
    assert model["comparison"]["kl"]["mean"] == pytest.approx(expected.kl.mean, rel=1e-4)
    assert [s["what"] for s in model["speed"]] == ["one sample", "a batch of 4"]
    assert len(model["error_sources"]) == len([w for w in model["layers"] if w["scheme"]])
    text = Page(tmp_path / "p.html").text
    assert "images.safetensors" in text
    assert "Where the error comes from" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "t", "--inputs", "i"], "--text and --inputs are two ways"),
        (["--inputs", "i"], "--inputs needs --float"),
        (["--speed"], "--speed needs --float"),
        (["--float", "WRITER", "--trials", "2"], "--trials runs the models; pass --text or --inputs"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--json", "/nowhere/x"], "folder /nowhere does not exist"),
        (["--float", "WRITER", "--inputs", "UNEQUAL"], "every input needs the same number of samples"),
    ],
)
def test_errors(run: Any, writer: Path, three: list[Path], tmp_path: Path, arguments: list[str], message: str) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.ones(2, 3), "b": torch.ones(3, 3)}, tmp_path / "unequal.safetensors")
    known = {"WRITER": writer, "UNEQUAL": tmp_path / "unequal.safetensors"}
    result = run("report", *three[:2], *(known.get(a, a) for a in arguments), "-o", tmp_path / "p.html")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert not (tmp_path / "p.html").exists()
