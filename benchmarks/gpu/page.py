"""The generated parts of docs/gpu.md: what ran on a device, and its tables. Every figure comes from a results file.

``python -m benchmarks.gpu.page`` writes them again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .collect import PAGE, all_results
from .report import (
    BENCH_COLUMNS,
    HOST_COLUMNS,
    INPUT_COLUMNS,
    MODEL_COLUMNS,
    bench_rows,
    host_rows,
    input_rows,
    model_rows,
)
from .results import ROOT

# Target -> cards of it. Compiled for: where tests/kernels/triton compiles the kernels ahead
TARGETS = {
    "cuda:sm_80": "A100",
    "cuda:sm_89": "L4, L40S, RTX 40",
    "cuda:sm_90": "H100, H200",
    "cuda:sm_100": "B200",
    "cuda:sm_120": "RTX 50",
    "hip:gfx942": "MI300X",
}
NOTHING = "Nothing has run on a device yet: no kernel of this page was ever launched on one, and there are no times."
_MARK = re.compile(r"(<!-- generated: (\w+) -->\n)(?:(?!<!-- generated).)*?(<!-- end -->)", re.S)
Found = dict[str, dict[str, Any]]


def write_page(root: Path = ROOT) -> None:
    path = root / PAGE
    path.write_text(rendered(path.read_text("utf-8"), root), "utf-8")


def rendered(text: str, root: Path = ROOT) -> str:
    """The page with its generated parts as the results files give them."""
    found = all_results(root)

    def part(match: re.Match[str]) -> str:
        return f"{match[1]}{PARTS[match[2]](found, root)}\n{match[3]}"

    return _MARK.sub(part, text)


# -- parts -------------------------------------------------------------------------------------------------------------


def what_ran(found: Found, root: Path) -> str:
    """The opening: one line per run, the newest first."""
    if not found:
        return NOTHING
    lines = []
    for name, data in reversed(found.items()):
        machine = _machine(data)
        cases = data["stages"].get("conformance", {}).get("cases", {})
        failed = sum("error" in values for values in cases.values())
        told = f"{len(cases)} conformance cases, {failed} failed" if cases else "conformance did not run"
        dry = " **Invented: a dry run.**" if data["dry"] else ""
        lines.append(
            f"- {data['started'][:10]}, {machine['card']}, commit {data['commit'][:12]}: {told}. Driver"
            f" {machine['driver']}, torch {machine['torch']}, triton {machine['triton']}, Python {machine['python']}."
            f" [{Path(name).name}](../{name}){dry}"
        )
    return "\n".join(lines)


def targets(found: Found, root: Path) -> str:
    """Ran on, compiled for, or not run, per target."""
    compiled = compiled_for(root)
    ran: dict[str, list[str]] = {}
    for data in found.values():
        machine = _machine(data)
        ran.setdefault(machine["target"], []).append(f"{machine['card']}, {data['started'][:10]}")
    rows = []
    for target in [*TARGETS, *(t for t in ran if t not in TARGETS)]:
        state = f"ran on {'; '.join(dict.fromkeys(ran[target]))}" if target in ran else "not run"
        rows.append((f"`{target}`", TARGETS.get(target, ""), "yes" if target in compiled else "no", state))
    rows.append(("XPU, MPS", "", "no kernels of ours", "not run"))
    return markdown(("target", "cards", "compiled for, in the tests", "state"), rows)


def compiled_for(root: Path) -> set[str]:
    """The targets that the tests compile for: ``TARGETS`` of aot_compile.py, read without importing Triton."""
    path = root / "benchmarks" / "gpu" / "aot_compile.py"
    if not path.exists():
        return set()
    listed = re.search(r"^TARGETS[^=\n]*=\s*[({\[](.*?)[)}\]]\n", path.read_text("utf-8"), re.M | re.S)
    return set(re.findall(r'"((?:cuda:sm_|hip:gfx)\w+)"', listed[1])) if listed else set()


def questions(found: Found, root: Path) -> str:
    rows = []
    for data in found.values():
        facts = data["stages"]["facts"]["cases"]
        copy, product = facts.get("copy rate", {}), facts.get("bf16 product", {})
        told = [f"{name}: {'yes' if values['ok'] else 'no'}" for name, values in facts.items() if "ok" in values]
        rows.append(
            (
                f"{_machine(data)['card']}, {data['started'][:10]}",
                f"{copy['bytes_per_s'] / 1e12:.2f} TB/s" if "bytes_per_s" in copy else "not measured",
                f"{product['tflops']:.0f} TFLOP/s" if "tflops" in product else "not measured", "; ".join(told),
            )
        )  # fmt: skip
    columns = ("card", "copy, read and written", "bf16 product of 8192 x 8192 x 8192", "questions")
    return markdown(columns, rows) if rows else "No results."


def products(found: Found, root: Path) -> str:
    """The goals of each card's newest run that has them."""
    columns = {"of copy": "of copy rate", "tuned": "tuned tile"}
    return _tables(found, "bench", [columns.get(name, name) for name in BENCH_COLUMNS], bench_rows)


def inputs(found: Found, root: Path) -> str:
    return _tables(found, "bench", INPUT_COLUMNS, input_rows)


def hosts(found: Found, root: Path) -> str:
    return _tables(found, "bench", HOST_COLUMNS, host_rows)


def models(found: Found, root: Path) -> str:
    return _tables(found, "model", ("case", *MODEL_COLUMNS[1:]), model_rows)


def _tables(found: Found, stage: str, columns: Sequence[str], rows_of: Callable[[Any], list[tuple[str, ...]]]) -> str:
    """A table for each card whose newest run has rows."""
    parts = []
    for data in _newest(found, stage):
        rows = rows_of(data["stages"][stage]["cases"])
        parts += [f"{_heading(data)}\n\n{markdown(columns, rows)}"] if rows else []
    return "\n\n".join(parts) or "No results."


def missed(found: Found, root: Path) -> str:
    """Goals that the newest run of each card missed, and the stages that failed there."""
    lines = []
    for data in _newest(found, "bench"):
        rows = [row for row in bench_rows(data["stages"]["bench"]["cases"]) if row[9] == "missed"]
        card = _machine(data)["card"]
        lines += [f"- {card}: {row[0]}: {row[7] or row[4]} of {row[8]}" for row in rows]
        rows = [row for row in input_rows(data["stages"]["bench"]["cases"]) if row[6] == "missed"]
        lines += [f"- {card}: {row[0]}: {row[4]} of {row[5]} of the copy rate" for row in rows]
        for name, stage in data["stages"].items():
            lines += [f"- {card}: stage {name} {stage['status']}: {stage['note']}"] if stage["status"] != "done" else []
    return "\n".join(lines) or "No results."


PARTS: dict[str, Callable[[Found, Path], str]] = {
    "ran": what_ran, "targets": targets, "facts": questions, "products": products, "inputs": inputs,
    "hosts": hosts, "models": models, "missed": missed,
}  # fmt: skip


def summary(root: Path = ROOT) -> str:
    """A sentence for the table of the README."""
    found = all_results(root)
    if not found:
        return "not run on a device yet"
    cards = dict.fromkeys(_machine(data)["card"] for data in found.values())
    return f"ran on {', '.join(cards)}"


def _machine(data: dict[str, Any]) -> dict[str, Any]:
    return data["stages"]["facts"]["cases"]["machine"]


def _heading(data: dict[str, Any]) -> str:
    return f"{_machine(data)['card']}, {data['started'][:10]}, commit {data['commit'][:12]}:"


def _newest(found: Found, stage: str) -> list[dict[str, Any]]:
    """The last run of each card in which the stage has a time."""
    by_card = {
        _machine(data)["card"]: data
        for data in found.values()
        if any("us" in values for values in data["stages"].get(stage, {}).get("cases", {}).values())
    }
    return list(by_card.values())


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


if __name__ == "__main__":
    write_page()
