"""Renders the data of a report as one self-contained HTML page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module, resources
from typing import Any

from ..planning.layer_kinds import KINDS
from ..planning.quantize_report import Latency, size
from ..support.extras import install
from . import svg_figures
from .comparison import KL_OF, Layer
from .grades import KL, LAYER, MARKS, OUTPUT, relative_error_of
from .heat_map import counts, graded_cell, heat_map
from .layers import OUTLIER, Inputs
from .leaderboard import summary
from .page_data import Page, Quantization
from .verdict import LEVELS
from .weight_errors import WeightErrors

THINGS = {"embeddings": "embeddings", "logits": "next-token distributions"}


def require_packages() -> None:
    """Raise ValueError if a package that renders pages is not installed."""
    for name in ("jinja2", "matplotlib"):
        try:
            import_module(name)
        except ImportError:
            raise ValueError(f"the HTML report needs {name}: {install('report')}") from None


def html(page: Page) -> str:
    """Render the page with jinja2."""
    import jinja2
    from markupsafe import Markup

    folder = resources.files(__package__)
    template, style = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("page.html", "page.css"))
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    several = len(page.models) > 1
    out: str = environment.from_string(template).render(
        style=Markup(style), title=page.title, several=several, lead=_lead(page),
        board=_board(page) if several else None, kinds=_compared_kinds(page) if several else None,
        models=[_model(page, m, several) for m in page.models], marks=MARKS, levels=LEVELS,
        activations=[_activation(i) for i in page.inputs], outlier=f"{OUTLIER:g}",
        pareto=Markup(svg_figures.pareto_figure(page.points, _here(page), "KL over bits per weight"))
        if page.points else "", table=_tables(page), scales=_scales(),
        made={"how": _how(page), "command": page.command, "versions": page.versions},
    )  # fmt: skip
    return out


# -- text -------------------------------------------------------------------------------------------------------------


def _lead(page: Page) -> str:
    if len(page.models) > 1:
        return f"{len(page.models)} quantizations of one model. {summary(page.standings)}"
    layers = page.models[0].layers
    quantized = [w for w in layers if w.quantized]
    schemes = list(dict.fromkeys(w.short for w in quantized))
    more = [f"{len(schemes) - 3} more"] if len(schemes) > 3 else []
    named = " and ".join(schemes[:3] + more)  # a scheme has commas of its own
    left = len(layers) - len(quantized)
    kept = f"; {left} more matrices not quantized" if left else ""
    return f"{len(quantized)} layers quantized as {named}{kept}." if quantized else "No layer is quantized."


def _how(page: Page) -> str:
    c = page.models[0].comparison
    if c is None:
        return "Weights only: no text was given, so no outputs were compared."
    things = THINGS.get(c.kind, "rows of outputs")
    text = f"All models ran the same {c.sequences:,} sequences of {page.texts}; {c.rows:,} {things} were compared."
    if page.processor:
        text += f" Speed: {page.processor}"
        text += f", {page.rounds} rounds in turn." if page.rounds else "."
    return text


def _scales() -> list[dict[str, Any]]:
    return [
        {
            "name": f"{s.name[0].upper()}{s.name[1:]}",
            "ranges": [
                {
                    "grade": grade,
                    "text": text if s is KL or b is None else f"{text} (error {100 * relative_error_of(b):.2g} %)",
                }
                for (grade, text), b in zip(s.ranges(), (*s.bounds, None), strict=True)
            ],
        }
        for s in (LAYER, KL, OUTPUT)
    ]


# -- one quantization -------------------------------------------------------------------------------------------------


def _model(page: Page, m: Quantization, several: bool) -> dict[str, Any]:
    from markupsafe import Markup

    prefix = f"{m.name}: " if several else ""
    figures = [
        {
            "name": e.name,
            "svg": Markup(svg_figures.error_figure(e, f"{prefix}error of {e.name}: {_error_text(e)}")),
            "note": _error_note(m, e),
        }
        for e in m.errors
    ]
    return {
        "name": m.name, "verdict": m.verdict, "tiles": _tiles(page, m), "heat": heat_map(m.layers),
        "counts": counts(m.layers), "figures": figures, "kinds": _kinds(m), "sources": _sources(m),
        "unmatched": m.unmatched,
        "tried": bool(m.suggestions),
    }  # fmt: skip


def _tiles(page: Page, m: Quantization) -> list[dict[str, str]]:
    ratio = None if m.bytes_float is None else m.bytes_float / max(1, m.bytes)
    note = f"{m.bytes:,} bytes" if ratio is None else f"{ratio:.2f}× smaller than {size(m.bytes_float or 0)}"
    out = [_tile("Weights stored", size(m.bytes), note)]
    bits = m.bits_per_weight
    if bits is not None:
        out.append(_tile("Bits per weight", f"{bits:.3f}", "of quantized weights, scales and padding included"))
    c = m.comparison
    if c is not None and c.kl is not None:
        interval = "" if c.kl_interval is None else f"95 %: {c.kl_interval[0]:.3g} to {c.kl_interval[1]:.3g}; "
        note = f"nats; {interval}p99 {c.kl.p99:.3g}"
        out.append(_tile(f"Mean {KL_OF[c.kind]}", f"{c.kl.mean:.3g}", note, KL.grade(c.kl.mean)))
    if c is not None and c.perplexity is not None:
        p = c.perplexity
        out.append(_tile("Perplexity", f"× {p.ratio:.4f}", f"{p.reference:.4g} to {p.quantized:.4g}"))
    if c is not None and c.top1 is not None:
        what = {"embeddings": "same nearest neighbour", "logits": "same likeliest token"}.get(c.kind, "")
        out.append(_tile("Top-1 agreement", f"{c.top1:.1%}", what))
    if c is not None and c.kind != "logits":
        out.append(_tile("Cosine to float", f"{c.cosine[0]:.5f}", f"mean; minimum {c.cosine[1]:.5f}"))
    if c is not None and c.kl is None:
        out.append(_tile("Error of the output", f"{c.error:.2%}", f"{c.sqnr:.1f} dB", OUTPUT.grade(c.sqnr)))
    for rows, speed in overall(dict(m.latency)).items():
        note = f"linear layers, {rows} row{'s' * (rows > 1)} at a time"
        out.append(_tile("Speed vs float", f"{speed:.2f}×", note))
    for s in m.speed:
        note = f"whole model, {s.what}; rounds {s.low:.2f} to {s.high:.2f}"
        out.append(_tile("Speed vs float", f"{s.speed:.2f}×", note))
    return out


def overall(latency: dict[str, tuple[Latency, ...]]) -> dict[int, float]:
    """Overall speed of the layers relative to float, by number of rows: the ratio of the total times."""
    sums: dict[int, tuple[float, float]] = {}
    for times in latency.values():
        for t in times:
            a, b = sums.get(t.rows, (0.0, 0.0))
            sums[t.rows] = (a + t.float_us, b + t.quantized_us)
    return {rows: a / b for rows, (a, b) in sums.items() if b > 0}


def _tile(label: str, value: str, note: str, grade: str = "") -> dict[str, str]:
    return {"label": label, "value": value, "note": note, "grade": grade}


def _kinds(m: Quantization) -> list[dict[str, Any]]:
    most = max((max(k.bytes, k.bytes_float or 0) for k in m.kinds), default=0) or 1
    return [
        {
            "kind": k.kind,
            "before": None if k.bytes_float is None else f"{k.bytes_float:,}",
            "after": f"{k.bytes:,}",
            "share": f"{k.bytes / max(1, m.bytes):.1%}",
            "quantized": f"{k.quantized / max(1, k.elements):.0%}",
            "wide_before": None if k.bytes_float is None else f"{100 * k.bytes_float / most:.2f}",
            "wide_after": f"{100 * k.bytes / most:.2f}",
        }
        for k in m.kinds
    ]


def _sources(m: Quantization) -> list[dict[str, Any]]:
    """Layers with quantized inputs, the largest error first."""
    some = sorted(m.sources.values(), key=lambda s: min(s.weight_sqnr, s.inputs_sqnr))
    return [
        {
            "name": s.name, "weight": graded_cell(s.weight_sqnr), "inputs": graded_cell(s.inputs_sqnr),
            "share": f"{s.share:.1%}", "wide": f"{100 * s.share:.1f}",
        }
        for s in some[:12]
    ]  # fmt: skip


def _error_text(e: WeightErrors) -> str:
    worst = ", ".join(f"{c} ({value:.1%})" for c, value in e.worst)
    text = f"largest error in output channels {worst}"
    return text if e.beyond is None else f"{text}; {e.beyond:.2%} of the weights are off by more than half a step"


def _error_note(m: Quantization, e: WeightErrors) -> str:
    w = next(w for w in m.layers if w.name == e.name)
    db = f"weight {w.weight_sqnr:.1f} dB" + ("" if w.layer_sqnr is None else f", layer {w.layer_sqnr:.1f} dB")
    text = f"{w.short}: {db}. Worst channels: {', '.join(f'{c} ({v:.1%})' for c, v in e.worst)}"
    text += f", {e.share:.1%} of the squared error."
    if e.blocks:
        channel, first, last, share = e.blocks[0]
        text += f" Worst block: channel {channel}, inputs {first} to {last}, {share:.2%}."
    if e.beyond is not None:
        text += f" Off by more than half a step: {e.beyond:.2%}."
    return text


# -- inputs of the float model ----------------------------------------------------------------------------------------


def _activation(inputs: Inputs) -> dict[str, Any]:
    from markupsafe import Markup

    figure = svg_figures.activation_figure(inputs, f"Inputs of {inputs.name}")
    return {"name": inputs.name, "svg": Markup(figure), "note": _channels(inputs)}


def _channels(inputs: Inputs) -> str:
    out = inputs.outliers
    largest, median = float(inputs.channels.max()), float(inputs.channels.median())
    text = f"Largest {largest:.3g}, median channel {median:.3g}: {inputs.ratio:.1f} times. "
    if not out:
        return text + "No outlier channels."
    named = ", ".join(map(str, out[:8])) + (f" and {len(out) - 8} more" if len(out) > 8 else "")
    return text + f"{len(out)} of {len(inputs.channels)} channels are outliers: {named}."


# -- several quantizations --------------------------------------------------------------------------------------------


def _board(page: Page) -> dict[str, Any]:
    from markupsafe import Markup

    some = page.standings
    words = [s.what for s in page.models[0].speed]
    c = page.models[0].comparison
    metric = "" if c is None else f"mean {KL_OF[c.kind]}, nats" if c.kl is not None else "relative error of the output"
    known = [s for s in some if s.error is not None and s.error > 0]
    figures = []
    if known:
        points = [(s.letter, s.bytes / 1e6, s.error or 0.0, s.front) for s in known]
        label = f"{metric} over megabytes: " + _spoken(
            [(s.name, f"{s.bytes / 1e6:.1f} MB, {s.error:.3g}") for s in known]
        )
        figures.append(svg_figures.leaderboard_figure(points, "MB stored", metric, label, right_is_better=False))
    for i, what in enumerate(words if known else ()):
        points = [(s.letter, s.speed[i], s.error or 0.0, s.front) for s in known]
        label = f"{metric} over speed, {what}: " + _spoken(
            [(s.name, f"{s.speed[i]:.2f}×, {s.error:.3g}") for s in known]
        )
        axis = f"speed relative to float, {what}"
        figures.append(svg_figures.leaderboard_figure(points, axis, metric, label, right_is_better=True))
    by_name = {m.name: m for m in page.models}
    rows = [
        {
            "letter": s.letter, "name": s.name, "bytes": size(s.bytes), "front": s.front,
            "smaller": "" if page.bytes_float is None else f"{page.bytes_float / max(1, s.bytes):.2f}×",
            "bits": "–" if s.bits_per_weight is None else f"{s.bits_per_weight:.2f}", "grade": s.grade,
            "error": "–" if s.error is None else f"{s.error:.3g}", "top1": None if s.top1 is None else f"{s.top1:.1%}",
            "speed": [f"{x.speed:.2f}× ({x.low:.2f}–{x.high:.2f})" for x in by_name[s.name].speed],
        }
        for s in some
    ]  # fmt: skip
    return {"rows": rows, "speeds": words, "metric": metric, "figures": [Markup(f) for f in figures],
            "top1": any(s.top1 is not None for s in some), "processor": page.processor,
            "rounds": page.rounds}  # fmt: skip


def _compared_kinds(page: Page) -> dict[str, Any]:
    """Bytes by kind of layer, a column per quantization."""
    by_kind = [{k.kind: k for k in m.kinds} for m in page.models]
    rows = []
    most = max((max(k.bytes, k.bytes_float or 0) for some in by_kind for k in some.values()), default=0) or 1
    for kind in (kind for kind in KINDS if any(kind in some for some in by_kind)):
        before = next((some[kind].bytes_float or 0 for some in by_kind if kind in some), 0)
        after = [some[kind].bytes if kind in some else 0 for some in by_kind]
        rows.append({
            "kind": kind, "before": f"{before:,}", "after": [f"{n:,}" for n in after],
            "wide_before": f"{100 * before / most:.2f}", "wide_after": [f"{100 * n / most:.2f}" for n in after],
        })  # fmt: skip
    return {"rows": rows, "names": [m.name for m in page.models], "exact": page.bytes_float is not None}


def _spoken(pairs: list[tuple[str, str]]) -> str:
    return "; ".join(f"{name} {text}" for name, text in pairs)


def _here(page: Page) -> tuple[float, float] | None:
    """This model's point beside others', if the page is about one."""
    m = page.models[0]
    if len(page.models) > 1 or m.comparison is None or m.comparison.kl is None or m.bits_per_weight is None:
        return None
    return (m.bits_per_weight, m.comparison.kl.mean) if m.comparison.kl.mean > 0 else None


# -- the table of layers ----------------------------------------------------------------------------------------------


def _tables(page: Page) -> dict[str, Any]:
    return _compared_table(page) if len(page.models) > 1 else _layer_table(page.models[0])


def _layer_table(m: Quantization) -> dict[str, Any]:
    errors = any(not math.isnan(w.weight_sqnr) for w in m.layers)
    sizes = list(dict.fromkeys(t.rows for times in m.latency.values() for t in times))
    columns = [("layer", True, "parameter"), ("shape", False, ""), ("scheme", True, "how it is stored"),
               ("bits", False, "bits per weight, with scales and padding"), ("bytes", False, "as stored")]  # fmt: skip
    if errors:
        columns.append(("weight dB", False, "SQNR of the weight"))
    if m.comparison is not None:
        columns.append(("layer dB", False, "SQNR of the output, both layers with the float model's input"))
        columns.append(("stream dB", False, "SQNR of the output, each layer in its own model"))
    columns += [(f"speed at {n}", False, f"float time divided by the layer's time, {n} rows") for n in sizes]
    rows = []
    for w in m.layers:
        name = f"{w.name} (tied to {w.tied})" if w.tied else w.name
        row = [
            _cell(name, w.name, "l name"),
            _cell("×".join(map(str, w.shape)), w.weights),
            _cell(w.short or "left alone", w.scheme, "l scheme", title=w.scheme),
            _cell(f"{w.bits_per_weight:.3f}", w.bits_per_weight),
            _cell(f"{w.bytes:,}", w.bytes),
        ]
        row += [_db(w.weight_sqnr)] if errors else []
        row += [_db(w.layer_sqnr, w.quantized), _db(w.stream_sqnr)] if m.comparison is not None else []
        times = {t.rows: t for t in m.latency.get(w.name, ())}
        row += [_cell(f"{times[n].speed:.2f}×", times[n].speed) if n in times else _cell("", -1) for n in sizes]
        rows.append(row)
    note = ""
    if m.comparison is not None:
        note = (
            "SQNR in dB, higher is better: of the weight; of the layer's output if both layers get the float "
            "model's input (the loss of this layer alone); and of its output if each runs in its own model "
            "(including the loss of the layers before it)."
        )
    return {"columns": _heads(columns), "rows": rows, "note": note}


def _compared_table(page: Page) -> dict[str, Any]:
    """One row per layer, one column per quantization."""
    by_name: list[Mapping[str, Layer]] = [{w.name: w for w in m.layers} for m in page.models]
    names = list(dict.fromkeys(w.name for m in page.models for w in m.layers))
    measured = page.models[0].comparison is not None
    errors = page.bytes_float is not None
    columns = [("layer", True, "parameter"), ("shape", False, "")]
    columns += [(m.name, False, "SQNR in dB, bits per weight" if errors else "bits per weight") for m in page.models]
    rows = []
    for name in names:
        first = next(d[name] for d in by_name if name in d)
        row = [_cell(name, name, "l name"), _cell("×".join(map(str, first.shape)), first.weights)]
        for entry in by_name:
            w = entry.get(name)
            if w is None or not w.quantized:
                row.append(_cell("–" if w is None else "float", 1e6))
                continue
            cell = _db(w.worst, True) if errors else _cell("", w.bits_per_weight)
            cell["text"] += f"{' · ' if errors else ''}{w.bits_per_weight:.1f} b"
            row.append(cell)
        rows.append(row)
    what = "of the layer's output with the float model's input" if measured else "of the weight"
    note = f"SQNR in dB {what}, and bits per weight." if errors else "Bits per weight."
    return {"columns": _heads(columns), "rows": rows, "note": note}


def _heads(columns: list[tuple[str, bool, str]]) -> list[dict[str, Any]]:
    return [{"name": n, "left": left, "help": h} for n, left, h in columns]


def _cell(text: str, sort: Any, style: str = "", grade: str = "", title: str = "") -> dict[str, str]:
    return {"text": text, "sort": str(sort), "style": style, "grade": grade, "mark": MARKS[grade], "title": title}


def _db(value: float | None, coloured: bool = False) -> dict[str, str]:
    shown = graded_cell(value)
    sort = 1e6 if value is None or math.isnan(value) else max(-1e5, min(1e5, value))
    return _cell(shown["text"], sort, "", shown["grade"] if coloured else "")
