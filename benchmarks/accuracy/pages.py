"""The measured section of each page of docs/algorithms: our rows with the algorithm and without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.accuracy import statistics
from benchmarks.accuracy.results import Results
from benchmarks.accuracy.rivals import OURS
from benchmarks.accuracy.subjects import KINDS, SUBJECTS
from benchmarks.accuracy.targets import LOSS
from benchmarks.report import markdown

BEGIN = "<!-- measured: written by benchmarks.accuracy --algorithms; not by hand -->"
END = "<!-- measured: end -->"
_WEIGHTS = ("int4 g128 zero point", "int3 g128 zero point", "int2 g64 zero point")
_INPUTS = ("int8-dynamic", "int8-dynamic-int4 g128", "int4-dynamic-int4 g128")


@dataclass(frozen=True)
class Pair:
    """One of our rows, and its baseline: the same without the algorithm, or the alternative."""

    row: str
    without: str = ""


def _after(names: tuple[str, ...], algorithm: str, before: str = "") -> tuple[Pair, ...]:
    return tuple(Pair(f"{n}{before} {algorithm}", f"{n}{before}") for n in names)


# Pages whose algorithm has rows of its own
PAGES: dict[str, tuple[Pair, ...]] = {
    "nearest": tuple(map(Pair, ("int8", "int4 g128", *_WEIGHTS, "mxfp4", "nvfp4"))),
    "mse": _after(("int8", "int4 g128", *_WEIGHTS, "nvfp4"), "mse"),
    "hqq": _after(_WEIGHTS, "hqq"),
    "imatrix": _after(_WEIGHTS, "imatrix"),
    "gptq": _after(("int4 g128", *_WEIGHTS), "gptq"),
    "gptaq": tuple(Pair(f"{n} gptaq", f"{n} gptq") for n in _WEIGHTS),
    "auto": _after(("int8", "int4 g128", *_WEIGHTS, "mxfp4", "nvfp4"), "auto"),
    "awq": tuple(Pair(f"{n} awq auto", f"{n} auto") for n in _WEIGHTS),
    "bias": _after(_WEIGHTS, "bias", " gptq"),
    "tune": (Pair("int4 g128 zero point auto tune", "int4 g128 zero point auto"),
             Pair("mixed 4.25 auto tune", "mixed 4.25 auto")),
    "kmeans": (Pair("learned 2 bits x4 kmeans", "int2 g64 zero point auto"),
               Pair("learned 3 bits kmeans", "int3 g128 zero point auto"),
               Pair("learned 4 bits g64 kmeans", "int4 g128 zero point auto")),
    "distill": (Pair("int4 g128 zero point auto distill", "int4 g128 zero point auto"),),
    "reconstruct": (Pair("int4 g128 zero point auto reconstruct", "int4 g128 zero point auto"),
                    Pair("int4 g128 zero point auto reconstruct distill", "int4 g128 zero point auto reconstruct")),
    "smooth": _after(_INPUTS, "smooth"),
    "rotate": (Pair("int4 g128 zero point rotate auto", "int4 g128 zero point auto"),
               *_after(_INPUTS, "rotate", " smooth")),
    "static": tuple(Pair(f"int8-static {m}", "int8-dynamic") for m in ("minmax", "percentile", "mse", "histogram")),
    "improve": (Pair("int4 g128 zero point nearest improve", "int4 g128 zero point"),
                Pair("int4 g128 zero point gptq improve", "int4 g128 zero point gptq")),
    "sparsify": (Pair("int8 2:4 magnitude"), Pair("int8 2:4 wanda", "int8 2:4 magnitude"),
                 Pair("int8 2:4 sparsegpt", "int8 2:4 magnitude")),
    "search": (Pair("mixed 4.25 auto tune", "int4 g128 zero point auto tune"),
               Pair("mixed 3.15 auto tune", "int3 g128 zero point auto"), Pair("mixed 2.75 auto tune"),
               Pair("mixed 2.3 auto tune", "int2 g64 zero point auto")),
}  # fmt: skip
# Algorithms without a section, and why.
UNMEASURED = {"fold": "no model of these benchmarks has a batch norm; the function stays, to float rounding"}


def section(results: Results, page: str, source: str = "accuracy.md") -> str:
    """The text between the marks, marks included. source: the page with all results."""
    body = [cells for subject in results.subjects() for p in PAGES[page] if (cells := _cells(results, subject, p))]
    text = f"Measured ([accuracy](../{source}) has the conditions and other libraries; lower is better):\n\n"
    text += markdown(["", "model", "bits", "loss", "95 %", "baseline loss", "ratio", "95 %"], body)
    if not body:
        text = f"Measured: not yet; its rows in [accuracy](../{source}) are " + ", ".join(p.row for p in PAGES[page])
    return f"{BEGIN}\n{text}\n{END}"


def _cells(results: Results, subject: str, pair: Pair) -> list[str] | None:
    ours, without = results.find(subject, OURS, pair.row), results.find(subject, OURS, pair.without)
    if ours is None:
        return None
    measure = KINDS[SUBJECTS[subject][0]].measure
    loss = statistics.mean(_values(ours, measure))
    head = [pair.row, subject, f"{ours['bits']:.3f}", f"{LOSS[measure]} {number(loss.value)}", interval(loss)]
    if without is None:
        return [*head, "", "", ""]
    ratio = statistics.ratio(_values(ours, measure), _values(without, measure))
    theirs = statistics.mean(_values(without, measure)).value
    told = f"{number(theirs)}" + (f" ({pair.without})" if pair.without not in pair.row else "")
    return [*head, told, f"{ratio.value:.3f}", interval(ratio)]


def _values(row: dict[str, Any], measure: str) -> list[float]:
    return row["figures"]["per_sequence"][measure]  # type: ignore[no-any-return]


def number(x: float) -> str:
    return f"{x:.3g}" if x >= 1e-3 or x == 0 else f"{x:.2e}"


def interval(i: statistics.Interval) -> str:
    return f"{number(i.low)} to {number(i.high)}"


def write(results: Results, folder: Path, source: str = "accuracy.md") -> list[str]:
    """Write the sections into the pages of a folder, between their marks. A page with rows missing from these results
    is not changed. Returns the names of the written pages. Raises ValueError for a page without marks."""
    done = []
    for name in PAGES:
        path = folder / f"{name}.md"
        text = path.read_text(encoding="utf-8")
        if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
            raise ValueError(f"{path} has no place for what was measured: {BEGIN} and {END}, once each")
        before, rest = text.split(BEGIN)
        old, after = rest.split(END)
        new = section(results, name, source)
        if not _rows(old) <= _rows(new):
            continue
        path.write_text(before + new + after, encoding="utf-8")
        done.append(name)
    return done


def _rows(text: str) -> set[tuple[str, ...]]:
    """(row, subject) of a section's table."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {(cells[0], cells[1]) for cells in lines if len(cells) > 2}
