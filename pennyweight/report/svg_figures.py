"""Figures as inline SVG for a page, without fixed colours, fonts or external references.

Colours come from the page's style sheet, so that figures follow light and dark mode. matplotlib writes colours as hex
codes; each placeholder is replaced by a variable of the style sheet.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from .layers import BINS, HIGH, LOW, OUTLIER, Inputs
from .weight_errors import WeightErrors

# variable of the style sheet -> its placeholder colour
COLOURS = {
    "ink": "#010203", "muted": "#040506", "line": "#070809", "float": "#0a0b0c", "quantized": "#0d0e0f",
    "worst": "#101112",
}  # fmt: skip
_COLUMNS = 400  # per panel; with more channels, neighbours share a column


def error_figure(errors: WeightErrors, label: str) -> str:
    """A weight's error: its distribution in steps or standard deviations, and by output channel."""
    fig, (left, right) = _figure(3.5, 2.9, rows=2)
    n, reach = len(errors.counts), errors.reach
    edges = [-reach + 2 * reach * i / n for i in range(n + 1)]
    left.stairs(errors.counts, edges, fill=True, color=COLOURS["quantized"], alpha=0.65, linewidth=0)
    if errors.unit == "step":
        for side in (-0.5, 0.5):
            left.axvline(side, color=COLOURS["muted"], linewidth=0.8, linestyle=(0, (3, 3)))
    left.set_yscale("log")
    left.set_ylim(bottom=0.5)
    left.set_xlim(-reach, reach)
    left.set_xlabel("error in steps" if errors.unit == "step" else "error in standard deviations of the weight")
    channels = errors.channels.double()
    step = -(-len(channels) // _COLUMNS)
    columns = torch.nn.functional.max_pool1d(channels[None], step, ceil_mode=True)[0].mul(100).tolist()
    ends = [min(i * step, len(channels)) for i in range(len(columns) + 1)]
    right.stairs(columns, ends, fill=True, color=COLOURS["float"], linewidth=0)
    for c, value in errors.worst:
        right.vlines([c + 0.5], 0, [100 * value], color=COLOURS["worst"], linewidth=1.4)
    right.set_ylim(bottom=0)
    right.set_xlim(0, max(1, len(channels)))
    right.set_xlabel("output channel: relative error, %")
    return _svg(fig, label)


def leaderboard_figure(
    points: Sequence[tuple[str, float, float, bool]], xlabel: str, ylabel: str, label: str, *, right_is_better: bool
) -> str:
    """Quantizations as lettered points (letter, x, error, on the Pareto front); errors on a logarithmic axis.
    ``right_is_better``: of the x axis, for the line through the front of these two metrics."""
    fig, (ax,) = _figure(3.5, 2.9)
    line = _front([(x, y) for _, x, y, _ in points], right_is_better)
    ax.plot([x for x, _ in line], [y for _, y in line], color=COLOURS["worst"], linewidth=0.9, linestyle=(0, (3, 2)))
    for letter, x, y, front in points:
        face = COLOURS["worst"] if front else COLOURS["float"]
        ax.plot([x], [y], marker="o" if front else "s", markersize=7, color=face, linestyle="")
        ax.annotate(letter, (x, y), (6, 5), textcoords="offset points", size=9.5, weight="bold", color=COLOURS["ink"])
    ax.set_yscale("log")
    ax.margins(x=0.12, y=0.16)
    ax.set_xlabel(xlabel)
    ax.set_title(ylabel, loc="left", fontsize=8.5, color=COLOURS["muted"], pad=3)
    return _svg(fig, label)


def _front(points: Sequence[tuple[float, float]], right_is_better: bool) -> list[tuple[float, float]]:
    """The points that no other is better than in both coordinates, in order of x."""
    out: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda p: (-p[0] if right_is_better else p[0], p[1])):
        if not out or y < out[-1][1]:
            out.append((x, y))
    return out


def activation_figure(inputs: Inputs, label: str) -> str:
    """A layer's inputs: histogram of magnitudes, and the maximum of each channel."""
    fig, (left, right) = _figure(7.2, 2.1, 2)
    edges = [2.0 ** (LOW + i * (HIGH - LOW) / BINS) for i in range(BINS + 1)]
    counts = inputs.bins.tolist()
    occupied = [i for i, n in enumerate(counts) if n]
    low, high = (min(occupied), max(occupied) + 1) if occupied else (0, BINS)
    left.stairs(counts[low:high], edges[low : high + 1], fill=True, color=COLOURS["quantized"], alpha=0.6, linewidth=0)
    left.set_xscale("log")
    left.set_yscale("log")
    left.set_ylim(bottom=0.5)
    left.set_xlabel("|input|")
    channels = inputs.channels.double()
    limit = OUTLIER * float(channels.median())
    out = (channels > limit).nonzero().flatten()
    step = -(-len(channels) // _COLUMNS)
    columns = torch.nn.functional.max_pool1d(channels[None], step, ceil_mode=True)[0].tolist()
    ends = [min(i * step, len(channels)) for i in range(len(columns) + 1)]
    right.stairs(columns, ends, fill=True, color=COLOURS["float"], linewidth=0)
    right.vlines(out.tolist(), 0, channels[out].tolist(), color=COLOURS["worst"], linewidth=1.4)
    right.axhline(limit, color=COLOURS["muted"], linewidth=0.7, linestyle=(0, (3, 3)))
    right.set_ylim(bottom=0)
    right.set_xlim(0, len(channels))
    right.set_xlabel("channel: largest |input|")
    return _svg(fig, label)


def pareto_figure(points: Sequence[dict[str, Any]], here: tuple[float, float] | None, label: str) -> str:
    """KL over bits per weight, logarithmic; ``here``: this model."""
    fig, (ax,) = _figure(7.2, 3.4, right=1.7)
    groups: dict[str, list[dict[str, Any]]] = {}
    for p in points:
        groups.setdefault(p["name"], []).append(p)
    markers = "os^Dv<>PX*hp"
    for i, (name, some) in enumerate(groups.items()):
        some = sorted(some, key=lambda p: p["bits_per_weight"])
        x, y = [p["bits_per_weight"] for p in some], [p["kl"] for p in some]
        style = {"color": COLOURS["float"], "marker": markers[i % len(markers)], "markersize": 5, "linewidth": 0.8}
        ax.plot(x, y, label=name, **style)
        for p in some:
            if p.get("interval"):
                ax.vlines(p["bits_per_weight"], *p["interval"], color=COLOURS["float"], linewidth=0.8)
    if here is not None:
        ax.plot(
            *[[v] for v in here], linestyle="", marker="o", markersize=10, color=COLOURS["worst"], label="this model"
        )
    ax.set_yscale("log")
    ax.set_xlabel("bits per weight, metadata included")
    ax.legend(fontsize=8, frameon=False, labelcolor=COLOURS["ink"], loc="center left", bbox_to_anchor=(1.01, 0.5))
    return _svg(fig, label)


def check_points(data: Any) -> list[dict[str, Any]]:
    """Check points of :func:`pareto_figure` from JSON: [{"name", "bits_per_weight", "kl", "interval": [low, high]}].
    Raises ValueError."""
    if not isinstance(data, list) or not data:
        raise ValueError(
            'Pareto points must be a list of objects such as {"name": "int4", "bits_per_weight": 4.25, "kl": 0.01}'
        )
    out = []
    for i, point in enumerate(data):
        known = isinstance(point, dict) and isinstance(point.get("name"), str)
        if not known or not all(_positive(point.get(key)) for key in ("bits_per_weight", "kl")):
            raise ValueError(f"Pareto point {i} needs a name, and bits_per_weight and kl above 0: {str(point)[:120]}")
        interval = point.get("interval")
        if interval is not None:
            fits = isinstance(interval, list) and len(interval) == 2 and all(map(_positive, interval))
            if not fits:
                raise ValueError(f"Pareto point {i}: interval must be [low, high] above 0, got {str(interval)[:80]}")
        out.append({k: point.get(k) for k in ("name", "bits_per_weight", "kl", "interval")})
    return out


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0


# -- matplotlib ------------------------------------------------------------------------------------------------------


def _figure(
    width: float, height: float, columns: int = 1, right: float = 0.08, rows: int = 1
) -> tuple[Any, Sequence[Any]]:
    """A figure with fixed margins in inches; fitting them to the text would take matplotlib longer than the drawing."""
    from matplotlib.figure import Figure

    fig = Figure(figsize=(width, height))
    margins = {"left": 0.42 / width, "right": 1 - right / width, "bottom": 0.42 / height, "top": 1 - 0.2 / height}
    fig.subplots_adjust(**margins, wspace=0.16, hspace=0.62)
    fig.patch.set_alpha(0)
    axes = fig.subplots(rows, columns, squeeze=False).flatten().tolist()
    for ax in axes:
        ax.patch.set_alpha(0)
        ax.grid(True, color=COLOURS["line"], linewidth=0.6)
        ax.set_axisbelow(True)
        ax.tick_params(which="both", colors=COLOURS["muted"], labelsize=8, length=0)
        ax.xaxis.label.set(color=COLOURS["muted"], size=8.5)
        ax.yaxis.label.set(color=COLOURS["muted"], size=8.5)
        for side, spine in ax.spines.items():
            spine.set_visible(side == "bottom")
            spine.set(color=COLOURS["line"])
    return fig, axes


def _svg(fig: Any, label: str) -> str:
    """The figure as an SVG element. Its ids depend on the label, so each figure needs a different one."""
    import matplotlib

    out = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        fig.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'\s(?:xmlns(?::\w+)?|version)="[^"]*"', "", text)
    # the page sets the size; the viewBox keeps the aspect ratio
    text = re.sub(r'\swidth="[\d.]+pt"|\sheight="[\d.]+pt"', "", text)
    text = re.sub(r" font-family: [^;\"]*;", "", text)
    text = re.sub(r"<style.*?</style>", "", text, flags=re.S)  # it would apply to the whole page
    for name, colour in COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    # ids of groups (axes_1, patch_2) are the same in every figure, and nothing refers to them
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    label = label.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1).strip()
