"""The section of docs/benchmarks.md about whole models, and its picture, from measured data only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.tables import limits_of, machine_of, markdown

from .cases import TRAINED
from .costs import describe
from .rows import Row, Verdict, rows_of, verdicts

HEADING = "## Whole models"
PLOT = "benchmarks-models.svg"
MEASURED = Path(__file__).with_name("measured.json")
FLOATS = 4  # significant digits that are kept
CALM = 0.05

METHOD = """\
Method: {rounds} rounds. Each round runs every way and every limit once, one process at a time, each with the same
number of threads; a visit takes {visit_ms:g} ms or one call, its figure is the median of its calls, and the second
best visit counts. MiniLM is all-MiniLM-L6-v2, batch x tokens of text without padding; all models have their published
shapes. With random weights times are those of the model, errors are not those of a trained one. Float around the
layers is float32, in the language model bfloat16. onnxruntime and OpenVINO run torch's own ONNX export, quantized by
their own tools: per-channel int8 with dynamic inputs, nncf's int8 weights, for convolutions static int8 calibrated on
32 images. OpenVINO's default float is bfloat16 on this processor where it has it. Llama 0.85B (hidden 2048, 16
layers, ffn 5632, 32 heads, 8 key-value heads, vocabulary 32000) runs in transformers; llama.cpp through
llama-cpp-python. Decoding is at the context named, the head is computed for the last token only. "Load and first
token": from a file in the page cache to the logits after one token, with the libraries imported before. "File to
file": from the bfloat16 file to the quantized one.

Error: mean |difference| / mean |float| of the last hidden state, of the logits for images and the language model
(random weights amplify it). A way above its bound has no time. Of the limit: the time to read all weights of linear
layers and convolutions, scales included, and the cache once at the measured bandwidth, or to compute all products at
the measured peak of the arithmetic used (products of activations at bfloat16's, in float32 models at float32's),
whichever is longer, divided by the measured time. Weights that fit into the last-level cache are read faster than the
limit says. For "file to file": the time to read the one and write as many bytes as the other. Limits measured in the
rounds: {limits}."""

REALTIME = "\n\nVisits took precedence over other processes of the machine (`--realtime`)."

SUMMARY = """\
The fastest peer, and at the same bits of a weight our fastest way whose error is at most 1.1 times the peer's (our
fastest way, if none is). "x peer", "x float": above 1, pennyweight is faster. "of the limit": of the speed that the
machine allows."""

PICTURE = """\
Left: speed relative to the fastest peer at the same bits. Right: fraction of the model's own limit."""

EVERY = "Milliseconds of a call (a prompt, a token of every sequence, a batch)."


def merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Two runs on one machine with the same versions; a case of the second replaces that of the first."""
    clash = {k for k in a["versions"].keys() & b["versions"].keys() if a["versions"][k] != b["versions"][k]}
    if a["machine"] | {"date": ""} != b["machine"] | {"date": ""} or clash:
        raise ValueError("runs of different machines or versions cannot be merged into one table")
    return {
        **b,
        "versions": a["versions"] | b["versions"],
        "competitors": a["competitors"] | b["competitors"],
        "missing": {k: why for k, why in a["missing"].items() if k in b["missing"]},
        "command": "`, `".join((a["command"], b["command"])),
        "cases": list(({c["name"]: c for c in a["cases"]} | {c["name"]: c for c in b["cases"]}).values()),
    }


def dump(d: dict[str, Any], path: Path) -> None:
    """As JSON, one case a line."""
    head = json.dumps({k: v for k, v in d.items() if k != "cases"}, indent=1)
    cases = ",\n".join("  " + json.dumps(_short(c)) for c in d["cases"])
    path.write_text(f'{head[:-2]},\n "cases": [\n{cases}\n ]\n}}\n', encoding="utf-8")


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{FLOATS}g}")
    if isinstance(value, dict):
        return {k: _short(v) for k, v in value.items()}
    return [_short(v) for v in value] if isinstance(value, list | tuple) else value


def section(d: dict[str, Any]) -> list[str]:
    return [
        HEADING,
        summary_table(d),
        SUMMARY,
        f"![speed relative to the fastest peer, and fraction of the limit]({PLOT})",
        PICTURE,
        "### Every way",
        EVERY,
        *way_tables(d),
        "### Models: left out or disturbed",
        left_out(d),
        "### Models: how they were measured",
        METHOD.format(**d["method"], limits=limits_of(d)) + (REALTIME if d["method"].get("realtime") else ""),
        machine_of(d),
    ]


def all_verdicts(d: dict[str, Any]) -> list[Verdict]:
    return [v for c in d["cases"] for v in verdicts(c, d["competitors"])]


def summary_table(d: dict[str, Any]) -> str:
    rows = []
    for v, weights in ((v, weights_of(c)) for c in d["cases"] for v in verdicts(c, d["competitors"])):
        rows.append([
            v.case, weights, str(v.bits), v.ours.name.removeprefix("pennyweight "), milliseconds(v.ours),
            _fraction(v.ours), _error(v.ours), *(["", "", "", ""] if v.peer is None else
                              [v.peer.name, milliseconds(v.peer), _fraction(v.peer), _error(v.peer)]),
            _ratio(v.ratio), _ratio(v.ours.x_float),
        ])  # fmt: skip
    header = ["", "weights", "bits", "pennyweight", "ms", "of the limit", "error", "fastest peer", "ms", "of the limit",
              "error", "x peer", "x float"]  # fmt: skip
    return markdown(header, rows)


def weights_of(case: dict[str, Any]) -> str:
    return "trained" if case["model"] in TRAINED else "random"


def way_tables(d: dict[str, Any]) -> list[str]:
    out = []
    for c in d["cases"]:
        body = [
            [r.name, str(r.bits), milliseconds(r), f"{r.rate:.1f}" if r.rate else "", _ratio(r.x_float),
             _ratio(r.x_peer), f"{_fraction(r)} {r.limit}".strip(), _error(r),
             f"{r.nbytes / 1e6:.0f}" if r.nbytes else "", r.note]
            for r in rows_of(c, d["competitors"])
            if r.seconds is not None
        ]  # fmt: skip
        header = ["", "bits", "ms", "per second", "x float", "x peer", "of the limit", "error", "MB", ""]
        out += [f"**{c['name']}** ({weights_of(c)} weights): {describe(c['cost'])}", markdown(header, body)]
    return out


def milliseconds(r: Row) -> str:
    if r.seconds is None:
        return ""
    ms = r.seconds * 1e3
    return f"{ms:.2f}" if ms < 10 else f"{ms:.1f}" if ms < 100 else f"{ms:.0f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _fraction(r: Row) -> str:
    return _ratio(r.fraction)


def _error(r: Row) -> str:
    return "" if r.error is None else f"{r.error:.3f}"


def left_out(d: dict[str, Any]) -> str:
    lines = [f"- {family}: {why}" for family, why in d["missing"].items()]
    seen: dict[str, list[str]] = {}
    for c in d["cases"]:
        for r in rows_of(c, d["competitors"]):
            if r.seconds is None:
                seen.setdefault(f"{r.name}: {r.note}", []).append(c["name"])
    disturbed = [c["name"] for c in d["cases"] if c["others"] and sorted(c["others"])[len(c["others"]) // 2] > CALM]
    if disturbed:
        lines.append(f"- Other processes used more than 5 % of the processor in most rounds of: {', '.join(disturbed)}")
    lines += [f"- {what} ({', '.join(at)})" for what, at in seen.items()]
    return "\n".join(lines) or "Nothing."


def plot(d: dict[str, Any], path: Path) -> None:
    """A line for each case and number of bits."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pennyweight"  # the same data give the same file
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    found = [v for v in all_verdicts(d) if v.ratio is not None and v.peer is not None]
    at = list(range(len(found), 0, -1))
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(10, 1.2 + 0.26 * len(found)), sharey=True, layout="constrained", width_ratios=(3, 2)
    )
    ratios = [v.ratio or 1.0 for v in found]
    colors = ["tab:blue" if r >= 1 else "tab:red" for r in ratios]
    left.barh(at, [r - 1 for r in ratios], left=1, color=colors, height=0.6)
    left.axvline(1, color="grey", linewidth=0.8)
    left.set_xscale("log")
    ticks = [t for t in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 4, 8, 16) if min(ratios, default=1) / 2 < t < max(
        [2.0, *ratios]) * 1.5]  # fmt: skip
    left.xaxis.set_major_locator(FixedLocator(ticks))
    left.xaxis.set_minor_locator(NullLocator())
    left.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    left.set_yticks(at, [f"{v.case}, {v.bits} bits" for v in found], fontsize=8)
    left.set_xlabel("speed / fastest peer at the same bits")
    for name, rows, marker in (
        ("pennyweight", [v.ours for v in found], "o"), ("fastest peer", [v.peer for v in found], "x")
    ):  # fmt: skip
        points = [(r.fraction, y) for r, y in zip(rows, at, strict=True) if r and r.fraction is not None]
        right.scatter([p[0] for p in points], [p[1] for p in points], marker=marker, s=22, label=name)
    right.axvline(1, color="grey", linewidth=0.8)
    right.set_xlim(left=0)
    right.set_xlabel("fraction of the measured limit")
    for axis in (left, right):
        axis.grid(alpha=0.3, axis="x")
    right.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
