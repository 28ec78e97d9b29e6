"""docs/algorithms: every page has its section of what was measured, with the figures of the pages of accuracy."""

import re
from pathlib import Path

import pytest

from benchmarks.accuracy import page, pages
from benchmarks.accuracy.methods import ROWS
from benchmarks.accuracy.results import KEPT, Results
from pennyweight.algorithms import ALGORITHMS
from tests.docs.test_algorithms import FOLDER, ROOT

PAGES = sorted(path for path in FOLDER.glob("*.md") if path.stem not in {"README", *pages.UNMEASURED})
NETS = ROOT / "docs" / "accuracy-nets.md"
ACCURACY = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8") + NETS.read_text(encoding="utf-8")


def section(text: str) -> str:
    assert text.count(pages.BEGIN) == text.count(pages.END) == 1
    return text.split(pages.BEGIN)[1].split(pages.END, maxsplit=1)[0]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.stem)
def test_a_page_says_what_was_measured(path: Path) -> None:
    text = section(path.read_text(encoding="utf-8"))
    assert text.strip().startswith("Measured")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")][2:]
    assert rows
    for name, _, bits, loss, interval, *_ in rows:
        assert name in {p.row for p in pages.PAGES[path.stem]}
        figure = loss.split()[1]
        assert re.search(
            rf"\*\*pennyweight {re.escape(name)}\*\* \| {bits} \| {figure} \| {re.escape(interval)} \|", ACCURACY
        ), f"{path.name} shows {name}, no page of accuracy does; write both by benchmarks.accuracy --page --algorithms"


def test_every_page_and_every_algorithm_is_there() -> None:
    assert {path.stem for path in PAGES} == pages.PAGES.keys()
    ours = {name for name, cls in ALGORITHMS.items() if cls.__module__.startswith("pennyweight.")}
    assert ours <= pages.PAGES.keys() | pages.UNMEASURED.keys()
    assert all((FOLDER / f"{name}.md").exists() for name in pages.UNMEASURED)
    known = {row.name for row in ROWS}
    for some in pages.PAGES.values():
        assert {p.row for p in some} | {p.without for p in some} <= known | {""}


@pytest.mark.parametrize("name", ["accuracy.md", "accuracy-nets.md"])
def test_a_page_is_what_its_kept_rows_say(name: str, tmp_path: Path) -> None:
    page.write(Results(KEPT), tmp_path / name)
    assert (tmp_path / name).read_text(encoding="utf-8") == (NETS.parent / name).read_text(encoding="utf-8")


def test_a_page_that_shows_other_rows_stays(tmp_path: Path) -> None:
    from tests.benchmarks.test_accuracy_benchmark import _row

    for name in pages.PAGES:
        (tmp_path / f"{name}.md").write_text(f"{pages.BEGIN}\n{pages.END}\n")
    one, other = Results(), Results()
    one.add(_row("pennyweight", "int4 g128 zero point hqq", 4.188, 0.002))
    other.add(_row("pennyweight", "int3 g128 zero point hqq", 3.188, 0.002))
    assert "hqq" in pages.write(one, tmp_path)
    was = (tmp_path / "hqq.md").read_text()
    assert "hqq" not in pages.write(other, tmp_path, "more.md")
    assert (tmp_path / "hqq.md").read_text() == was
    other.take(one)
    assert "hqq" in pages.write(other, tmp_path, "more.md")
    assert "[accuracy](../more.md)" in (tmp_path / "hqq.md").read_text()


def test_sections_are_written_between_their_marks(tmp_path: Path) -> None:
    from tests.benchmarks.test_accuracy_benchmark import _row

    results = Results()
    results.add(_row("pennyweight", "int4 g128 zero point", 4.188, 0.004))
    results.add(_row("pennyweight", "int4 g128 zero point hqq", 4.188, 0.002))
    for name in pages.PAGES:
        (tmp_path / f"{name}.md").write_text(f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n")
    pages.write(results, tmp_path)
    text = (tmp_path / "hqq.md").read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "| int4 g128 zero point hqq | lm | 4.188 | KL 0.0027 | " in text
    assert "| 0.500 | 0.5 to 0.5 |" in text
    assert "not yet" in (tmp_path / "gptaq.md").read_text()
    before = text
    pages.write(results, tmp_path)
    assert (tmp_path / "hqq.md").read_text() == before
    (tmp_path / "hqq.md").write_text("no marks")
    with pytest.raises(ValueError, match="has no place for what was measured"):
        pages.write(results, tmp_path)
