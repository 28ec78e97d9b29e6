"""The README's picture: accuracy by bits, and speed beside the fastest peer; in a light and a dark version.

    python -m benchmarks.overview

Reads measured rows only: the weights table of the language model in docs/accuracy.md, and
benchmarks/models/measured.json. Writes docs/overview-light.svg and docs/overview-dark.svg. Every case of speed is
drawn, lost ones included.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.accuracy.page import DRAWN
from benchmarks.accuracy.rivals import FAMILIES, OURS
from benchmarks.models.page import MEASURED, all_verdicts

DOCS = Path(__file__).parent.parent / "docs"
ACCURACY = DOCS / "accuracy.md"
THEMES = {"light": ("#24292f", "#d0d7de"), "dark": ("#e6edf3", "#3d444d")}  # text, grid
OWN, BEHIND = "#1f77b4", "#d1603d"


class Point(NamedTuple):
    family: str
    bits: float
    kl: float


def points(page: str) -> list[Point]:
    """Rows of the table "Weights" of the section "lm", up to 6.6 bits a weight.

    Raises ValueError if the page has no such table.
    """
    section = page.partition("\n## lm: ")[2].partition("\n## ")[0]
    table = section.partition("**Weights**")[2].partition("\n**")[0]
    families = sorted(FAMILIES, key=len, reverse=True)
    found = []
    for line in table.splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        family = next((f for f in families if cells[0].startswith(f"{f} ")), None)
        if family is not None and float(cells[1]) <= DRAWN:
            found.append(Point(family, float(cells[1]), float(cells[2])))
    if not any(p.family == OURS for p in found):
        raise ValueError(f"{ACCURACY.name} has no table of the language model's weights")
    return found


def front(some: list[Point]) -> list[Point]:
    """Those that no other one beats in both bits and KL."""
    best: list[Point] = []
    for point in sorted(some, key=lambda p: (p.bits, p.kl)):
        if not best or point.kl < best[-1].kl:
            best.append(point)
    return best


def draw(accuracy: list[Point], models: dict[str, Any], path: Path, text: str, grid: str) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pennyweight"  # the same data give the same file
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    colours = {"text.color": text, "axes.labelcolor": text, "xtick.color": text, "ytick.color": text}
    with plt.rc_context(colours | {"axes.edgecolor": grid, "grid.color": grid, "font.size": 9}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.8), layout="constrained")
        for i, family in enumerate(sorted({p.family for p in accuracy}, key=lambda f: (f == OURS, f))):
            mine = [p for p in accuracy if p.family == family]
            own = family == OURS
            colour = OWN if own else f"C{1 + i % 9}"
            best = front(mine)
            left.plot(
                [p.bits for p in best], [p.kl for p in best], color=colour, linewidth=2.2 if own else 1,
                marker="o", markersize=5 if own else 3, label=family,
            )  # fmt: skip
        left.set_yscale("log")
        left.set_xlabel("bits per weight, all stored data")
        left.set_ylabel("KL divergence from the float model, nats")
        left.set_title("Loss of accuracy of a language model", fontsize=10)
        left.grid(alpha=0.6)
        left.legend(fontsize=8, labelcolor=text, framealpha=0)

        found = [v for v in all_verdicts(models) if v.ratio is not None]
        at = range(len(found), 0, -1)
        ratios = [v.ratio or 1.0 for v in found]
        right.barh(at, [r - 1 for r in ratios], left=1, height=0.65, color=[OWN if r >= 1 else BEHIND for r in ratios])
        right.axvline(1, color=text, linewidth=1)
        right.set_xscale("log")
        right.xaxis.set_major_locator(FixedLocator([0.25, 0.5, 1, 2, 3]))
        right.xaxis.set_minor_locator(NullLocator())
        right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        right.set_yticks(at, [f"{v.case}, {v.bits} bits" for v in found], fontsize=7)
        right.set_title("Speed beside the fastest other library", fontsize=10)
        right.grid(alpha=0.6, axis="x")
        for axis in (left, right):
            axis.set_facecolor("none")
            axis.set_axisbelow(True)
            axis.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None}, transparent=True)
        plt.close(figure)


def main() -> None:
    accuracy = points(ACCURACY.read_text(encoding="utf-8"))
    models = json.loads(MEASURED.read_text(encoding="utf-8"))
    for theme, colours in THEMES.items():
        draw(accuracy, models, DOCS / f"overview-{theme}.svg", *colours)


if __name__ == "__main__":
    main()
