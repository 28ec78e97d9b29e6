"""report: one page, whole, that asks nothing of a network."""

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import pennyweight as pw

VOID = {"meta", "br", "hr", "img", "input", "link", "wbr"}


class Page(HTMLParser):
    """Its text, its attributes, its tables; tags that are not closed in order fail."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"td", "th"} & {*self.open[-3:]}:
            self.rows[-1][-1] += data


def check_alone(page: Page) -> None:
    """Nothing is fetched: no address anywhere, links only to ids of the page, ids only once."""
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", page.source)
    assert not [a for a in page.attributes if a[1] in ("src", "srcset", "action", "background", "data")]
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    used = {v[1:] for _, n, v in page.attributes if n in ("href", "xlink:href")}
    used |= set(re.findall(r"url\(#([^)]*)\)", page.source))
    assert used <= set(ids)
    assert not [a for a in page.attributes if a[1].startswith("on")]


@pytest.fixture
def small(run: Any, writer: Path, tmp_path: Path) -> Path:
    assert run("quantize", writer, tmp_path / "small", "--config", "int4", "--group-size", "32").exit_code == 0
    return tmp_path / "small"


def test_a_whole_page(run: Any, writer: Path, small: Path, text: Path, tmp_path: Path) -> None:
    points = [{"name": "a <b>", "bits_per_weight": 4.25, "kl": 0.1, "interval": [0.05, 0.2]}]
    (tmp_path / "points.json").write_text(json.dumps(points))
    out = tmp_path / "page.html"
    arguments = ("--text", text, "--length", 16, "--measure", "--pareto", tmp_path / "points.json", "-o", out)
    arguments += ("--trials", 0)
    result = run("report", small, "--float", writer, *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    first, said = result.stdout.splitlines()
    assert first == f"{out}: {out.stat().st_size:,} bytes, 16 layers"
    page = Page(out)
    check_alone(page)
    data = json.loads(run("eval", writer, small, "--text", text, "--length", 16, "--json", "-").stdout)
    rows = {row[0]: row for row in page.rows if row and row[0].endswith(".weight")}
    assert rows.keys() == {w["name"] for w in data["layers"]}
    for w in data["layers"]:
        figures = [f"{w[k]:.1f}" if w[k] != "inf" else "exact" for k in ("weight_sqnr", "layer_sqnr", "stream_sqnr")]
        shown = [cell.removesuffix(" ▲").removesuffix(" ✕") for cell in rows[w["name"]][3:8]]
        assert shown == [f"{w['bits_per_weight']:.3f}", f"{w['bytes']:,}", *figures]
        assert all(cell.endswith("×") for cell in rows[w["name"]][8:]) or not w["scheme"]
    assert f"{data['kl']['mean']:.3g}" in page.text
    assert f"× {data['perplexity']['ratio']:.4f}" in page.text
    assert f"{data['bits_per_weight']:.3f}" in page.text
    heat = [row for row in page.rows if row[0] in ("self_attn.q_proj", "mlp.down_proj")]
    assert len(heat) == 2
    layer = {w["name"]: w["layer_sqnr"] for w in data["layers"]}
    for kind, *cells in heat:
        for i, cell in enumerate(cells):
            assert cell.split()[0] == f"{layer[f'model.layers.{i}.{kind}.weight']:.1f}"
    assert "Verdict" in page.text
    assert said.partition(": ")[2] in page.text
    labels = [v for tag, n, v in page.attributes if (tag, n) == ("svg", "aria-label")]
    worst = [w["name"] for w in data["layers"] if w["scheme"]][:6]
    assert [f"error of {name}" for name in worst] == [label.partition(":")[0] for label in labels[:6]]
    assert len(labels) == 6 + 3 + 1
    assert f"report {small} --float {writer} --text {text} --measure --trials 0 --pareto" in page.text
    assert "a <b>" in page.text


def test_an_encoder(run: Any, encoder: Path, text: Path, tmp_path: Path) -> None:
    run("quantize", encoder, tmp_path / "small", "--config", "int8")
    assert (
        run("report", tmp_path / "small", "--float", encoder, "--text", text, "-o", tmp_path / "p.html").exit_code == 0
    )
    page = Page(tmp_path / "p.html")
    check_alone(page)
    assert "Mean retrieval KL" in page.text
    assert "Perplexity" not in page.text


def test_weights_alone(run: Any, writer: Path, small: Path, tmp_path: Path) -> None:
    pages = []
    for _ in range(2):
        assert run("report", small, "--float", writer, "-o", tmp_path / "p.html").exit_code == 0
        pages.append((tmp_path / "p.html").read_bytes())
    assert pages[0] == pages[1]
    page = Page(tmp_path / "p.html")
    check_alone(page)
    header = next(row for row in page.rows if row[0] == "layer")
    assert header == ["layer", "shape", "scheme", "bits", "bytes", "weight dB"]
    quantized = [row for row in page.rows if row[0].endswith("_proj.weight")]
    assert {row[2] for row in quantized} == {"int4, groups of 32"}
    specs = {value for _, name, value in page.attributes if name == "title" and "[32]" in value}
    assert specs == {"uint4[32] scale=f32 offset=f32 mid=8"}  # the whole spec on demand
    assert "mid=8" not in page.text
    assert "SQNR of each weight in dB" in page.text
    assert "no text was given" in page.text


def test_the_quantized_folder_alone(run: Any, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run("quantize", plain, tmp_path / "small", "--config", "int8")
    monkeypatch.chdir(tmp_path)
    assert run("report", "small").stdout.startswith("report.html: ")
    page = Page(tmp_path / "report.html")
    check_alone(page)
    with pw.open(tmp_path / "small") as checkpoint:
        shown = {name: held.nbytes for name, held in checkpoint.held.items() if len(held.kind.shape) > 1}
    rows = {row[0]: row for row in page.rows if row and row[0].endswith(".weight")}
    assert {name: row[4] for name, row in rows.items()} == {name: f"{n:,}" for name, n in shown.items()}
    assert "pennyweight report small" in page.text


def test_names_are_text_and_nothing_else(run: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file
    from torch import ones

    (tmp_path / "<script>x").mkdir()
    save_file({"<img src=x onerror=y>.weight": ones(2, 2)}, tmp_path / "<script>x" / "model.safetensors")
    assert run("report", tmp_path / "<script>x", "-o", tmp_path / "p.html").exit_code == 0
    page = Page(tmp_path / "p.html")
    check_alone(page)
    assert page.source.count("<script>") == 1
    assert "<img src=x onerror=y>.weight" in page.text


@pytest.mark.parametrize("name", ["jinja2", "matplotlib"])
def test_a_package_that_is_not_there(run: Any, small: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    result = run("report", small)
    assert result.exit_code == 2
    assert f"the HTML report needs {name}: pip install jinja2 matplotlib" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "t"], "--text needs --float"),
        (["--measure"], "--measure needs --float"),
        (["-o", "/nowhere/x.html"], "folder /nowhere does not exist"),
        (["-o", "/"], "is a folder"),
        (["--pareto", "BAD"], "not JSON"),
        (["--pareto", "LIST"], "Pareto points must be a list of objects"),
        (["--pareto", "POINT"], "Pareto point 0 needs a name, and bits_per_weight and kl above 0"),
    ],
)
def test_errors(run: Any, small: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    for name, data in {"BAD": "x", "LIST": "{}", "POINT": '[{"name": "a", "bits_per_weight": 4, "kl": 0}]'}.items():
        (tmp_path / name).write_text(data)
    words = [tmp_path / a if a in ("BAD", "LIST", "POINT") else a for a in arguments]
    out = [] if "-o" in arguments else ["-o", tmp_path / "p.html"]
    result = run("report", small, *words, *out)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert not (tmp_path / "p.html").exists()
