"""The data of a report page, of one or several quantizations of a model."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..planning.quantize_report import Latency
from .bytes_by_kind import KindBytes
from .comparison import Comparison, Layer
from .error_sources import Source
from .grades import KL, LAYER, OUTPUT, Scale, graded
from .layers import OUTLIER, Inputs
from .leaderboard import Standing, letters, ranked
from .model_speed import Speed
from .suggestions import Suggestion
from .verdict import Verdict
from .weight_errors import WeightErrors


@dataclass
class Quantization:
    """What is known of one quantized model.

    name         its folder; path: as given
    layers       all layers, worst first; without a float model their errors are NaN
    bytes        of the weights as stored; bytes_float: None if unknown
    kinds        bytes by kind of layer
    comparison   if inputs were given; sources: of layers whose inputs are quantized
    errors       of the weights of the worst layers
    latency      by layer, if measured; speed: of the whole model, if measured
    unmatched    weights that only one model has: one sentence each
    """

    name: str
    path: str
    layers: Sequence[Layer]
    bytes: int
    kinds: Sequence[KindBytes]
    bytes_float: int | None = None
    comparison: Comparison | None = None
    errors: Sequence[WeightErrors] = ()
    sources: Mapping[str, Source] = field(default_factory=dict)
    latency: Mapping[str, tuple[Latency, ...]] = field(default_factory=dict)
    speed: Sequence[Speed] = ()
    suggestions: Sequence[Suggestion] = ()
    verdict: Verdict = field(default_factory=lambda: Verdict("", ""))
    unmatched: Sequence[str] = ()

    @property
    def bits_per_weight(self) -> float | None:
        """Of the quantized weights, each once: 8 · stored bytes of all parts / weights."""
        once = [w for w in self.layers if w.quantized and not w.tied]
        weights = sum(w.weights for w in once)
        return 8 * sum(w.bytes for w in once) / weights if weights else None

    def to_dict(self) -> dict[str, Any]:
        compared = None if self.comparison is None else self.comparison.to_dict()
        layers = [
            asdict(w) | {"bits_per_weight": w.bits_per_weight, "grade": LAYER.grade(w.worst)} for w in self.layers
        ]
        return {
            "name": self.name, "path": self.path, "verdict": self.verdict.to_dict(), "bytes": self.bytes,
            "bytes_float": self.bytes_float, "bits_per_weight": self.bits_per_weight, "comparison": compared,
            "suggestions": [s.to_dict() for s in self.suggestions], "kinds": [asdict(k) for k in self.kinds],
            "layers": layers, "weight_errors": [_errors(e) for e in self.errors],
            "error_sources": [asdict(s) | {"share_of_inputs": s.share} for s in self.sources.values()],
            "latency": {name: [t.to_dict() for t in times] for name, times in self.latency.items()},
            "speed": [s.to_dict() for s in self.speed], "unmatched": list(self.unmatched),
        }  # fmt: skip


@dataclass
class Page:
    """The data of a page.

    title      the model; command: reproduces this page; versions: of the software
    models     at least one; of several, the page compares them
    texts      what the models ran on, in words
    inputs     statistics of the float model's inputs, the strongest outliers first
    points     other models, see svg_figures.check_points; None: no such section
    processor  named if a speed was measured; rounds: of the speed of whole models
    bytes_float  of the float model; None: unknown
    """

    title: str
    command: str
    versions: str
    models: Sequence[Quantization]
    texts: str = ""
    inputs: Sequence[Inputs] = ()
    points: Sequence[dict[str, Any]] | None = None
    processor: str = ""
    rounds: int = 0
    bytes_float: int | None = None

    @property
    def standings(self) -> list[Standing]:
        """The leaderboard, the smallest error first."""
        out = []
        for m in self.models:
            c = m.comparison
            error, grade, top1 = None, "", None
            if c is not None:
                scale, value = graded(c)
                error, grade, top1 = c.kl.mean if c.kl is not None else c.error, scale.grade(value), c.top1
            speed = tuple(s.speed for s in m.speed)
            out.append(Standing("", m.name, m.bytes, m.bits_per_weight, error, grade, top1, speed))
        return [replace(s, letter=x) for x, s in zip(letters(len(out)), ranked(out), strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """All numbers of the page as plain data; infinities and NaN are the strings "inf", "-inf", "nan"."""
        data = {
            "version": 1, "title": self.title, "command": self.command, "versions": self.versions, "texts": self.texts,
            "bytes_float": self.bytes_float, "processor": self.processor, "rounds": self.rounds,
            "scales": {"layer": _scale(LAYER), "kl": _scale(KL), "output": _scale(OUTPUT)},
            "leaderboard": [s.to_dict() for s in self.standings] if len(self.models) > 1 else [],
            "models": [m.to_dict() for m in self.models],
            "inputs": [
                {"name": i.name, "ratio": i.ratio, "outlier_factor": OUTLIER, "outliers": i.outliers,
                 "channels": i.channels.tolist(), "bins": i.bins.tolist()}
                for i in self.inputs
            ],
            "points": self.points,
        }  # fmt: skip
        out: dict[str, Any] = _plain(data)
        return out

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)


def _scale(scale: Scale) -> dict[str, Any]:
    bounds = dict(zip(("good", "fine", "watch"), scale.bounds, strict=True))
    return {"metric": scale.name, "unit": scale.unit, "higher_is_better": scale.higher_is_better, "bounds": bounds}


def _errors(e: WeightErrors) -> dict[str, Any]:
    return {**vars(e), "channels": e.channels.tolist()}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value
