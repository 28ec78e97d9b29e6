"""The report of a quantized model as one self-contained HTML page: its data and its rendering."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module, resources
from typing import Any

from ..planning.report import Latency, size
from .comparison import KL_OF, Comparison, Layer
from .layers import OUTLIER, Inputs

HISTOGRAMS, ACTIVATIONS = 6, 3  # layers shown


@dataclass
class Page:
    """The data of a page.

    title       the model; command: reproduces this page; versions: of the software
    layers      all layers, worst first; without a float model their errors are NaN
    bytes_*     of the weights as stored, float (None: unknown) and quantized
    comparison  if text was given; latency by layer if measured
    histograms  (name, SVG, note) of the worst layers; inputs: with their SVGs; pareto: an SVG or ""
    """

    title: str
    command: str
    versions: str
    layers: Sequence[Layer]
    bytes: int
    bytes_float: int | None = None
    comparison: Comparison | None = None
    texts: str = ""
    latency: Mapping[str, tuple[Latency, ...]] = field(default_factory=dict)
    histograms: Sequence[tuple[str, str, str]] = ()
    inputs: Sequence[tuple[Inputs, str]] = ()
    pareto: str = ""
    unmatched: Sequence[str] = ()


def require_packages() -> None:
    """Raise ValueError if a package that renders pages is not installed."""
    for name in ("jinja2", "matplotlib"):
        try:
            import_module(name)
        except ImportError:
            raise ValueError(f"the HTML report needs {name}; pip install 'pennyweight[report]'") from None


def html(page: Page) -> str:
    """Render the page with jinja2."""
    import jinja2
    from markupsafe import Markup

    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    out: str = environment.from_string(template).render(
        title=page.title, lead=_lead(page), tiles=_tiles(page), heat=_heat(page.layers),
        histograms=[{"name": n, "svg": Markup(svg), "note": note} for n, svg, note in page.histograms],
        activations=[{"name": i.name, "svg": Markup(svg), "note": _channels(i)} for i, svg in page.inputs],
        outlier=f"{OUTLIER:g}", pareto=Markup(page.pareto), table=_table(page), unmatched=page.unmatched,
        made={"how": _how(page), "command": page.command, "versions": page.versions},
    )  # fmt: skip
    return out


# -- text ------------------------------------------------------------------------------------------------------------


def _lead(page: Page) -> str:
    quantized = [w for w in page.layers if w.quantized]
    schemes = list(dict.fromkeys(w.scheme for w in quantized))
    named = ", ".join(schemes[:3]) + (f" and {len(schemes) - 3} more" if len(schemes) > 3 else "")
    left = len(page.layers) - len(quantized)
    kept = f"; {left} more matrices not quantized" if left else ""
    return f"{len(quantized)} layers quantized as {named}{kept}." if quantized else "No layer is quantized."


def _how(page: Page) -> str:
    if page.comparison is None:
        return "Weights only: no text was given, so no outputs were compared."
    c = page.comparison
    things = {"embeddings": "embeddings", "logits": "next-token distributions"}.get(c.kind, "rows of outputs")
    return f"Both models ran the same {c.sequences:,} sequences of {page.texts}; {c.rows:,} {things} were compared."


def _tiles(page: Page) -> list[dict[str, str]]:
    out = [_size_tile(page)]
    bits = _bits(page.layers)
    if bits is not None:
        out.append(_tile("Bits per weight", f"{bits:.3f}", "of quantized weights, scales and padding included"))
    c = page.comparison
    if c is not None and c.kl is not None:
        interval = "" if c.kl_interval is None else f"95 %: {c.kl_interval[0]:.3g} to {c.kl_interval[1]:.3g}; "
        out.append(_tile(f"Mean {KL_OF[c.kind]}", f"{c.kl.mean:.3g}", f"nats; {interval}p99 {c.kl.p99:.3g}"))
    if c is not None and c.perplexity is not None:
        p = c.perplexity
        out.append(_tile("Perplexity", f"× {p.ratio:.4f}", f"{p.reference:.4g} to {p.quantized:.4g}"))
    if c is not None and c.top1 is not None:
        what = {"embeddings": "same nearest neighbour", "logits": "same likeliest token"}.get(c.kind, "")
        out.append(_tile("Top-1 agreement", f"{c.top1:.1%}", what))
    if c is not None and c.kind != "logits":
        out.append(_tile("Cosine to float", f"{c.cosine[0]:.5f}", f"mean; minimum {c.cosine[1]:.5f}"))
    for rows, speed in overall(dict(page.latency)).items():
        note = f"linear layers, {rows} row{'s' * (rows > 1)} at a time"
        out.append(_tile("Speed vs float", f"{speed:.2f}×", note))
    return out


def overall(latency: dict[str, tuple[Latency, ...]]) -> dict[int, float]:
    """Overall speed of the layers relative to float, by number of rows: the ratio of the total times."""
    sums: dict[int, tuple[float, float]] = {}
    for times in latency.values():
        for t in times:
            a, b = sums.get(t.rows, (0.0, 0.0))
            sums[t.rows] = (a + t.float_us, b + t.quantized_us)
    return {rows: a / b for rows, (a, b) in sums.items() if b > 0}


def _size_tile(page: Page) -> dict[str, str]:
    if page.bytes_float is None:
        return _tile("Weights stored", size(page.bytes), f"{page.bytes:,} bytes")
    ratio = page.bytes_float / max(1, page.bytes)
    return _tile("Weights stored", size(page.bytes), f"{ratio:.2f}× smaller than {size(page.bytes_float)}")


def _tile(label: str, value: str, note: str) -> dict[str, str]:
    return {"label": label, "value": value, "note": note}


def _bits(layers: Iterable[Layer]) -> float | None:
    once = [w for w in layers if w.quantized and not w.tied]
    weights = sum(w.weights for w in once)
    return 8 * sum(w.bytes for w in once) / weights if weights else None


def _channels(inputs: Inputs) -> str:
    out = inputs.outliers
    largest, median = float(inputs.channels.max()), float(inputs.channels.median())
    text = f"Largest {largest:.3g}, median channel {median:.3g}: {inputs.ratio:.1f} times. "
    if not out:
        return text + "No outlier channels."
    named = ", ".join(map(str, out[:8])) + (f" and {len(out) - 8} more" if len(out) > 8 else "")
    return text + f"{len(out)} of {len(inputs.channels)} channels are outliers: {named}."


# -- the heat map ----------------------------------------------------------------------------------------------------


def place_of(name: str) -> tuple[str, int] | None:
    """(kind, depth) of a layer: its name without its first number, and that number; None without a number."""
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if at is None:
        return None
    kind = ".".join(parts[at + 1 :]).removesuffix(".weight")
    return kind or ".".join(parts[:at]), int(parts[at])


def _heat(layers: Sequence[Layer]) -> dict[str, Any] | None:
    found: dict[str, dict[int, Layer]] = {}
    for w in layers:
        where = place_of(w.name)
        if w.quantized and where is not None and math.isfinite(w.worst):
            found.setdefault(where[0], {}).setdefault(where[1], w)
    depths = sorted({d for row in found.values() for d in row})
    if len(depths) < 2:
        return None
    values = [w.worst for row in found.values() for w in row.values()]
    low, high = min(values), max(values)
    measured = any(w.layer_sqnr is not None for row in found.values() for w in row.values())
    rows = []
    for kind in sorted(found, key=lambda k: _order(k, found[k])):
        cells: list[dict[str, str] | None] = []
        for d in depths:
            here = found[kind].get(d)
            v = 0.0 if here is None or high == low else (high - here.worst) / (high - low)
            cells.append(None if here is None else {"v": f"{v:.3f}", "text": f"{here.worst:.1f}", "name": here.name})
        rows.append({"kind": kind, "cells": cells})
    what = "SQNR of each layer's output, with the float model's input," if measured else "SQNR of each weight"
    return {"depths": depths, "rows": rows, "what": what}


def _order(kind: str, row: Mapping[int, Layer]) -> tuple[bool, str]:
    """Attention layers first, as in the model."""
    return not re.search(r"att", kind), kind


# -- the table -------------------------------------------------------------------------------------------------------


def _table(page: Page) -> dict[str, Any]:
    errors = any(not math.isnan(w.weight_sqnr) for w in page.layers)
    counts = list(dict.fromkeys(t.rows for times in page.latency.values() for t in times))
    columns = [("layer", True, "parameter"), ("shape", False, ""), ("scheme", True, "how it is stored"),
               ("bits", False, "bits per weight, with scales and padding"), ("bytes", False, "as stored")]  # fmt: skip
    if errors:
        columns.append(("weight dB", False, "SQNR of the weight"))
    if page.comparison is not None:
        columns.append(("layer dB", False, "SQNR of the output, both layers with the float model's input"))
        columns.append(("stream dB", False, "SQNR of the output, each layer in its own model"))
    columns += [(f"speed at {n}", False, f"float time divided by the layer's time, {n} rows") for n in counts]
    rows = []
    for w in page.layers:
        name = f"{w.name} (tied to {w.tied})" if w.tied else w.name
        shape = "×".join(map(str, w.shape))
        row = [
            _cell(name, w.name, "l name"),
            _cell(shape, w.weights),
            _cell(w.scheme or "left alone", w.scheme, "l scheme"),
            _cell(f"{w.bits_per_weight:.3f}", w.bits_per_weight),
            _cell(f"{w.bytes:,}", w.bytes),
        ]
        row += [_db(w.weight_sqnr)] if errors else []
        row += [_db(w.layer_sqnr), _db(w.stream_sqnr)] if page.comparison is not None else []
        times = {t.rows: t for t in page.latency.get(w.name, ())}
        row += [_cell(f"{times[n].speed:.2f}×", times[n].speed) if n in times else _cell("", -1) for n in counts]
        rows.append(row)
    note = "Click a heading to sort."
    if page.comparison is not None:
        note += (
            " SQNR in dB, higher is better: of the weight; of the layer's output if both layers get the float "
            "model's input (the loss of this layer alone); and of its output if each runs in its own model "
            "(including the loss of the layers before it)."
        )
    return {"columns": [{"name": n, "left": left, "help": h} for n, left, h in columns], "rows": rows, "note": note}


def _cell(text: str, sort: Any, style: str = "") -> dict[str, str]:
    return {"text": text, "sort": str(sort), "style": style}


def _db(value: float | None) -> dict[str, str]:
    if value is None or math.isnan(value):
        return _cell("–", 1e6)
    return _cell("exact" if value == math.inf else f"{value:.1f}", max(-1e5, min(1e5, value)))
