"""Each tutorial page quotes its script: every Python fence stands there word for word."""

import re
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Scripts without a tutorial: those that need a model from PyPI or a harness; and the page that describes each
ELSEWHERE = {"lm_harness": "docs/report.md", "qlora": "docs/training.md"}
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))


def fences(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M)


def stands_in(quoted: str, lines: list[str]) -> bool:
    """Whether the lines quoted are consecutive lines, all of them further in by the same number of spaces or none."""
    wanted = quoted.rstrip("\n").split("\n")
    for start in range(len(lines) - len(wanted) + 1):
        block = textwrap.dedent("\n".join(lines[start : start + len(wanted)])).split("\n")
        if block == wanted:
            return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_a_page_quotes_its_script(page: Path) -> None:
    script = ROOT / "examples" / "tutorials" / f"{page.stem}.py"
    lines = script.read_text(encoding="utf-8").split("\n")
    quotes = fences(page, "python")
    assert quotes
    for quoted in quotes:
        assert stands_in(quoted, lines), f"{page.name} quotes what is not in {script.name}:\n{quoted}"
    assert f"(../../examples/tutorials/{script.name})" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_each_script_has_a_page_and_the_list_links_it() -> None:
    scripts = {path.stem for path in (ROOT / "examples" / "tutorials").glob("*.py")}
    assert scripts - ELSEWHERE.keys() == {page.stem for page in PAGES}
    for name, page in ELSEWHERE.items():
        assert re.search(rf"examples/tutorials/{name}\b", (ROOT / page).read_text(encoding="utf-8"))
    listed = (ROOT / "docs" / "tutorials.md").read_text(encoding="utf-8")
    for page in PAGES:
        assert f"(tutorials/{page.name})" in listed
