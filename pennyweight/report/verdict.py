"""The verdict at the top of a report page: how good the quantization is, and the next steps by gain."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..planning.quantize_report import Latency, size
from .bytes_by_kind import KindBytes
from .comparison import KL_OF, Comparison, Layer
from .grades import GRADES, LAYER, graded
from .suggestions import Suggestion, pattern_of

LEVELS = {"good": "Good", "fine": "Fine", "watch": "Watch", "bad": "Bad", "": "Not measured"}
SHOWN = 5  # next steps


@dataclass(frozen=True)
class Step:
    """A next step: what to do (a command line's options, or ""), and why, with the measured effect."""

    text: str
    options: str = ""


@dataclass(frozen=True)
class Verdict:
    """grade: one of GRADES, or "" if no output was compared; text: one sentence; steps: the best first."""

    grade: str
    text: str
    steps: tuple[Step, ...] = field(default=())

    @property
    def title(self) -> str:
        return LEVELS[self.grade]

    def to_dict(self) -> dict[str, Any]:
        steps = [{"text": s.text, "options": s.options} for s in self.steps]
        return {"grade": self.grade, "text": self.text, "steps": steps}


def verdict(
    comparison: Comparison | None, layers: Sequence[Layer], kinds: Sequence[KindBytes], *, total: int,
    total_float: int | None, suggestions: Sequence[Suggestion] = (), latency: Mapping[str, Sequence[Latency]],
    speed: float | None = None, tried: bool = False,
) -> Verdict:  # fmt: skip
    """The verdict of one quantization.

    suggestions  measured ones, the best first; tried: whether any were looked for
    latency      of the layers, if measured; speed: of the whole model relative to float
    """
    stored = size(total) if total_float is None else f"{size(total)}, {total_float / max(1, total):.2f}× smaller"
    steps: list[Step] = []
    grade = ""
    if total_float is None:
        text = f"No float model was given, so no error is known. Stored: {stored}."
        steps.append(Step("The float model's folder shows the error of each weight.", "--float FLOAT_DIR"))
    elif comparison is None:
        text = f"{_weights_alone(layers)} No outputs were compared. Stored: {stored}."
        steps.append(Step("With text, the error of outputs and layers is measured.", "--text FILE"))
    else:
        scale, value = graded(comparison)
        grade = scale.grade(value)
        text = f"{_outputs(comparison)}; {stored}."
    steps += [_step(s, kinds, total) for s in suggestions]
    if comparison is not None and tried and not suggestions:
        steps.append(Step("None of the tried changes saves bytes or removes error worth its cost."))
    steps += _slower(latency, speed)
    steps += _largest(kinds, total) if comparison is None else []
    return Verdict(grade, text, tuple(steps[:SHOWN]))


def _outputs(c: Comparison) -> str:
    words = []
    if c.kl is not None:
        words.append(f"{KL_OF[c.kind].replace('(float || quantized)', '')} {c.kl.mean:.3g} nats")
    if c.top1 is not None:
        words.append(f"top-1 agreement {c.top1:.1%}")
    if c.kl is None:
        words.append(f"relative error of the output {c.error:.2%} ({c.sqnr:.1f} dB)")
    text = ", ".join(words)
    return f"{text[0].upper()}{text[1:]}"


def _weights_alone(layers: Sequence[Layer]) -> str:
    grades = [LAYER.grade(w.weight_sqnr) for w in layers if w.quantized]
    counts = [f"{grades.count(g)} {g}" for g in GRADES if g in grades]
    return f"Weights of {len(grades)} quantized layers: {', '.join(counts)}." if counts else "No layer is quantized."


def _step(s: Suggestion, kinds: Sequence[KindBytes], total: int) -> Step:
    """One sentence with the reason, the bytes and the error."""
    why = s.change.what
    if "--embeddings" in s.change.options:
        embeddings = sum(k.bytes for k in kinds if k.kind == "embeddings")
        why = f"embeddings are {embeddings / max(1, total):.0%} of the bytes"
    moved = (
        f"saves {size(s.saves)} ({_share(s.share)})" if s.saves > 0 else f"costs {size(-s.saves)} ({_share(-s.share)})"
    )
    before, after = f"{s.error_before:.3g}", f"{s.error_after:.3g}"
    effect = f"{s.metric} stays {before}" if before == after else f"{s.metric} {before} → {after} ({s.grade_after})"
    if s.saves <= 0:
        effect += f", {s.removes:.0%} less"
    note = f" {s.change.note[0].upper()}{s.change.note[1:]}." if s.change.note else ""
    return Step(f"{why[0].upper()}{why[1:]}: {moved}; {effect}.{note}", s.change.text)


def _share(value: float) -> str:
    return f"{value:.0%}" if value >= 0.1 else f"{value:.1%}"


def _slower(latency: Mapping[str, Sequence[Latency]], speed: float | None) -> list[Step]:
    out = []
    slow = {name for name, times in latency.items() if any(t.slower for t in times)}
    if slow:
        lost = _lost(latency)
        text = f"{len(slow)} of {len(latency)} layers are slower than float here"
        options = ""
        if lost:
            (key, label), (count, micros) = max(lost.items(), key=lambda item: item[1][1])
            rows = f"{label} row{'s' * (label != '1')}"
            some = f"these {count} are" if count > 1 else "this one is"
            text += f"; as float, {some} {micros:.3g} µs faster in all at {rows}"
            options = shlex.join(("--layer", f"{key}=none"))
        out.append(Step(f"{text}.", options))
    if speed is not None and speed < 0.95:
        out.append(Step(f"The model has {speed:.2f}× the speed of float here; pennyweight explain shows the kernels."))
    return out


def _lost(latency: Mapping[str, Sequence[Latency]]) -> dict[tuple[str, str], tuple[int, float]]:
    """(pattern, rows) -> (layers, microseconds that they lose to float), if all layers of that pattern are slower."""
    groups: dict[tuple[str, str], list[Latency]] = {}
    for name, times in latency.items():
        for t in times:
            groups.setdefault((pattern_of(name), t.label), []).append(t)
    lost = {key: (len(ts), sum(t.quantized_us - t.float_us for t in ts)) for key, ts in groups.items()
            if all(t.slower for t in ts)}  # fmt: skip
    # a pattern that wins at another number of rows is no clear loss
    net = {
        p: sum(t.quantized_us - t.float_us for key, ts in groups.items() if key[0] == p for t in ts) for p, _ in lost
    }
    return {key: value for key, value in lost.items() if net[key[0]] > 0}


def _largest(kinds: Sequence[KindBytes], total: int) -> list[Step]:
    """The largest kind of which nothing is quantized, if it is large."""
    left = [k for k in kinds if not k.quantized and k.kind != "norms" and k.bytes > 0.1 * total]
    if not left:
        return []
    most = max(left, key=lambda k: k.bytes)
    option = "--embeddings int8" if most.kind == "embeddings" else ""
    return [
        Step(f"{most.kind[0].upper()}{most.kind[1:]}: {most.bytes / total:.0%} of the bytes, not quantized.", option)
    ]
