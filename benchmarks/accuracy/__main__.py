"""How much a model loses for how many bits: ours and the others', on a language model, an embedder and small nets.

    python -m benchmarks.accuracy [--subjects lm,minilm] [--methods int4,gptq] [--rivals torchao,hqq] [--json FILE]
                                  [--python torchao=/venv/bin/python] [--quick] [--page docs/accuracy.md]
                                  [--algorithms docs/algorithms]

Rows are kept in the JSON file and not measured again, so that ours can be added without running the others anew
(``--rivals none``); ``--again TEXT`` measures rows whose "family: name" holds the text. The first run trains the
language model, some 40 minutes on one core; it is kept in ``PENNYWEIGHT_CACHE``.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.accuracy import gates, page, pages
from benchmarks.accuracy.language_model import Recipe, cache_folder
from benchmarks.accuracy.results import Results
from benchmarks.accuracy.rivals import FAMILIES, OURS
from benchmarks.accuracy.runner import Choice, run
from benchmarks.accuracy.subjects import QUICK, SUBJECTS, Sizes, prepare


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--subjects", type=_names, default=("lm", "minilm"), help=f"of {', '.join(SUBJECTS)}, or all")
    p.add_argument("--methods", type=_names, default=(), help="parts of our rows' names; none: ours are left out")
    p.add_argument("--rivals", type=_names, default=("all",), help="families, all, or none")
    p.add_argument("--python", action="append", default=[], metavar="FAMILY=PYTHON", help="a family's interpreter")
    p.add_argument("--again", type=_names, default=(), help="measure rows anew whose family: name holds this")
    p.add_argument("--quick", action="store_true", help="less data, nothing that takes minutes")
    p.add_argument("--json", type=Path, metavar="FILE", help="results, kept and extended")
    p.add_argument("--add", type=Path, nargs="*", default=[], metavar="FILE", help="results of other runs, taken over")
    p.add_argument("--page", type=Path, help="write the document and its plots")
    p.add_argument("--algorithms", type=Path, metavar="FOLDER", help="write the measured sections of its pages")
    p.add_argument("--force", action="store_true", help="write the page though a gate failed")
    p.add_argument("--no-run", action="store_true", help="measure nothing, only print or write")
    p.add_argument("--steps", type=int, default=Recipe.steps, help="of the language model's training")
    p.add_argument("--split", default=Sizes.split, help="evaluated: test, or validation while developing")
    p.add_argument("--seconds", type=float, default=Choice.seconds, help="a row may take")
    p.add_argument("--keep", type=Path, metavar="FOLDER", help="for the weights, see multiple_choice")
    return p


def _names(text: str) -> tuple[str, ...]:
    return tuple(t.strip() for t in text.split(",") if t.strip())


def choice_of(o: argparse.Namespace) -> Choice:
    """Raises ValueError for a family or a subject that is not known."""
    rivals = [f for f in FAMILIES if f != OURS] if o.rivals == ("all",) else [] if o.rivals == ("none",) else o.rivals
    families = ([] if o.methods == ("none",) else [OURS]) + list(rivals)
    pythons = dict(text.split("=", 1) if "=" in text else (text, "") for text in o.python)
    for name in (*families, *pythons):
        if name not in FAMILIES:
            raise ValueError(f"unknown family {name!r}; known: {', '.join(FAMILIES)}")
    if not all(pythons.values()):
        raise ValueError("--python takes FAMILY=PYTHON")
    return Choice(tuple(families), o.methods, pythons, o.again, o.quick, o.seconds, o.keep)


def table_of(results: Results, subject: str) -> Table:
    table = Table(title=f"{subject}: {SUBJECTS[subject][2]}")
    for i, column in enumerate([*page.header(subject), "inputs"]):
        table.add_column(column, justify="right" if i else "left")
    for line in page.lines(results, subject):
        style = "bold" if line.row["family"] == OURS else None
        table.add_row(*page.cells(line, subject), line.row.get("inputs", ""), style=style)
    return table


def show(console: Console, results: Results) -> None:
    for subject in results.subjects():
        console.print(table_of(results, subject))
        for line in page.left_out(results, subject):
            console.print(line, markup=False, highlight=False)
    for gate in page.gate_lines(gates.check(results)):
        console.print(" | ".join(gate), markup=False, highlight=False)


def main(arguments: list[str] | None = None) -> int:
    o = parser().parse_args(arguments)
    console, begin = Console(width=200), time.perf_counter()

    def say(text: str) -> None:
        console.print(f"{time.perf_counter() - begin:5.0f} s  {text}", style="dim", markup=False, highlight=False)

    torch.set_num_threads(1)
    results = Results(o.json)
    try:
        choice = choice_of(o)
        for other in o.add:
            results.take(Results(other))
        if not o.no_run:
            measure(o, choice, results, say)
    except (ValueError, ModuleNotFoundError) as e:
        console.print(str(e), markup=False)
        return 2
    show(console, results)
    if o.page is None:
        return 0
    failed = [g for g in gates.check(results) if not g["passed"]]
    if failed and not o.force:
        why = f"{len(failed)} gates failed or were not measured"
        console.print(f"{o.page} is not written: {why}; --force writes it nevertheless", markup=False)
        return 1
    page.write(results, o.page)
    if o.algorithms is not None:
        pages.write(results, o.algorithms, o.page.name)
    return 0


def measure(o: argparse.Namespace, choice: Choice, results: Results, say: Any) -> None:
    recipe = Recipe(steps=o.steps)
    sizes = Sizes(**vars(QUICK if o.quick else Sizes()) | {"split": o.split})
    names = tuple(SUBJECTS) if o.subjects == ("all",) else o.subjects
    subjects = []
    for name in names:
        subjects.append(prepare(name, cache_folder(), recipe, sizes, say))
        say(f"{name}: {len(subjects[-1].layers)} layers, {subjects[-1].folder.name}")
    m = machine.describe(1)
    results.machine = f"{m['cpu']} ({', '.join(m['isa'])}), one thread, {m['memory_gib']} GiB; Python {m['python']}"
    run(subjects, choice, results, say)
    lm = next((s for s in subjects if s.name == gates.SUBJECT), None)
    if lm is not None:
        results.rank = gates.effective_rank(lm)
        results.write()


if __name__ == "__main__":
    sys.exit(main())
