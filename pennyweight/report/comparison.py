"""The result of pw.compare: metrics of the whole model and of each layer, worst first."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..planning.quantize_report import size
from ..support.tables import ANY, FLAG, REAL, TEXT, WHOLE, html_table, text_table, to_frame
from .metrics import Distribution

if TYPE_CHECKING:
    from pandas import DataFrame

# The name of the KL of each kind of output
KL_OF = {"logits": "KL(float || quantized)", "embeddings": "retrieval KL"}


@dataclass(frozen=True)
class Layer:
    """One weight and its layer (the module that holds it).

    weights       number of elements; bytes: as stored in a file, including codes, padding, scales and other parts
    weight_sqnr   of the weight itself, in dB
    layer_sqnr    of the layer's output if both layers get the float model's input: the loss of this layer alone
    stream_sqnr   of the layer's output if each runs in its own model: includes the loss of the layers before it
    calls         in all batches; 0: never called as a module, so its outputs are unknown
    tied          the name of the same tensor under which its bytes are counted; "" if not tied
    """

    name: str
    type: str
    shape: tuple[int, ...]
    scheme: str  # "" if it was left alone
    weights: int
    bytes_float: int
    bytes: int
    weight_sqnr: float
    layer_sqnr: float | None = None
    stream_sqnr: float | None = None
    calls: int = 0
    tied: str = ""
    scheme_short: str = ""  # for tables: "int4, groups of 64"

    @property
    def short(self) -> str:
        """The scheme in as few words as a table has room for."""
        return self.scheme_short or self.scheme

    @property
    def quantized(self) -> bool:
        return bool(self.scheme)

    @property
    def bits_per_weight(self) -> float:
        """8 · bytes / weights."""
        return 8 * self.bytes / max(1, self.weights)

    @property
    def worst(self) -> float:
        """The sort key of layers, in dB: layer_sqnr, or weight_sqnr if that is unknown."""
        return self.weight_sqnr if self.layer_sqnr is None else self.layer_sqnr


@dataclass(frozen=True)
class Perplexity:
    """exp of the mean -log probability of the labels: of the float model (reference), of the quantized one, their ratio
    and its 95 % interval."""

    reference: float
    quantized: float
    ratio: float
    interval: tuple[float, float] | None
    tokens: int


@dataclass(frozen=True, repr=False)
class Comparison:
    """Metrics of the outputs of two models on the same inputs; see :func:`pennyweight.compare`.

    kind         "logits", "embeddings" or "tensor"
    kl           in nats: of each token's (row's) distribution, or for embeddings the retrieval KL of each query. None
                 for tensors, which are not distributions
    kl_interval  of the mean: paired bootstrap over sequences, 95 %; None for a single sequence
    top1         share of tokens with the same top-1 prediction; for embeddings: with the same nearest neighbour
    cosine       of rows: mean and minimum
    error        |y_q - y| / |y| of all outputs; sqnr: the same in dB
    unmatched    weights that only one model has, or with different shapes: one sentence each
    wrong        why the second model cannot be the first one quantized: other weights, or the models are exchanged; ""
    reference    a sentence if weights of the float model are quantized themselves, else ""
    """

    kind: str
    sequences: int
    rows: int
    kl: Distribution | None
    kl_interval: tuple[float, float] | None
    top1: float | None
    perplexity: Perplexity | None
    cosine: tuple[float, float]
    error: float
    sqnr: float
    bytes_float: int
    bytes: int
    layers: tuple[Layer, ...]
    unmatched: tuple[str, ...] = ()
    wrong: str = ""
    reference: str = ""

    @property
    def quantized(self) -> tuple[Layer, ...]:
        """Layers whose weight is quantized, worst first."""
        return tuple(layer for layer in self.layers if layer.quantized)

    @property
    def bits_per_weight(self) -> float | None:
        """Over all quantized weights, each once: 8 · stored bytes of all parts / weights."""
        once = [layer for layer in self.quantized if not layer.tied]
        weights = sum(layer.weights for layer in once)
        return 8 * sum(layer.bytes for layer in once) / weights if weights else None

    def worst(self, count: int = 5) -> tuple[Layer, ...]:
        """The quantized layers that differ most from float, worst first."""
        return tuple(layer for layer in self.quantized if layer.worst < math.inf)[:count]

    # -- limits ----------------------------------------------------------------------------------------------------

    def check(
        self, *, max_kl: float | None = None, min_top1: float | None = None, max_error: float | None = None
    ) -> Comparison:
        """Raise ValueError with each metric beyond its limit and the worst layers. Returns itself.

        max_kl: of the mean, in nats; min_top1: a share between 0 and 1; max_error: of ``error``. NaN fails any limit.
        """
        bad = self.beyond(max_kl, min_top1, max_error)
        if bad:
            raise ValueError(f"{'; '.join(bad)}; {self.blame()}")
        return self

    def beyond(self, max_kl: float | None, min_top1: float | None, max_error: float | None) -> list[str]:
        """A clause for each metric beyond its limit. Raises ValueError for a limit on an unavailable metric."""
        for name, bound, figure in (("max_kl", max_kl, self.kl), ("min_top1", min_top1, self.top1)):
            if bound is not None and figure is None:
                raise ValueError(
                    f"{name} needs distributions, but the outputs were compared as {self.kind!r}: pass "
                    "kind='logits' or kind='embeddings' to compare, or use max_error"
                )
        bad = []
        if max_kl is not None and self.kl is not None and not self.kl.mean <= max_kl:
            bad.append(f"mean {KL_OF[self.kind]} is {self.kl.mean:.3g} nats, the limit is {max_kl:g}")
        if min_top1 is not None and self.top1 is not None and not self.top1 >= min_top1:
            bad.append(f"top-1 agreement is {self.top1:.2%}, the minimum is {min_top1:.2%}")
        if max_error is not None and not self.error <= max_error:
            bad.append(f"relative error of the outputs is {self.error:.3g}, the limit is {max_error:g}")
        return bad

    def blame(self, count: int = 5) -> str:
        """The worst layers, and a remedy."""
        some = ", ".join(f"{w.name} ({_db(w.worst)} dB as {w.short})" for w in self.worst(count))
        if not some:
            return "no quantized layer differs from float; do both models have the same weights?"
        return f"worst layers: {some}; give them more bits or skip them"

    # -- data and text -----------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; infinities and NaN are the strings "inf", "-inf", "nan"."""
        data = asdict(self)
        data["kl"] = None if self.kl is None else self.kl._asdict()
        for row, layer in zip(data["layers"], self.layers, strict=True):
            row["bits_per_weight"] = layer.bits_per_weight
            del row["scheme_short"]  # it follows from "scheme"
        data["cosine"] = {"mean": self.cosine[0], "min": self.cosine[1]}
        out: dict[str, Any] = _plain({"version": 1, "bits_per_weight": self.bits_per_weight, **data})
        return out

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def summary(self) -> list[tuple[str, str]]:
        """(name, text) of each metric of the whole model."""
        out = [(name, text) for name, text in (("WRONG", self.wrong), ("reference", self.reference)) if text]
        out.append(("compared", f"{self.rows:,} {_THINGS[self.kind]} of {self.sequences:,} sequences"))
        if self.kl is not None:
            interval = f" (95 %: {_range(self.kl_interval)})" if self.kl_interval else ""
            spread = f"median {self.kl.median:.3g}, p99 {self.kl.p99:.3g}, max {self.kl.max:.3g}"
            out.append((KL_OF[self.kind], f"mean {self.kl.mean:.3g} nats{interval}, {spread}"))
        if self.perplexity is not None:
            p = self.perplexity
            interval = f" (95 %: {_range(p.interval, '.5g')})" if p.interval else ""
            text = f"{p.reference:.5g} -> {p.quantized:.5g}, ratio {p.ratio:.5g}{interval}, {p.tokens:,} tokens"
            out.append(("perplexity", text))
        if self.top1 is not None:
            out.append(("top-1 agreement", f"{self.top1:.2%}"))
        out.append(("cosine", f"mean {self.cosine[0]:.6f}, min {self.cosine[1]:.6f}"))
        out.append(("relative error", f"{self.error:.3g} ({_db(self.sqnr)} dB)"))
        out.append(("stored", f"{size(self.bytes_float)} -> {size(self.bytes)}"))
        if self.bits_per_weight is not None:
            out.append(("bits per weight", f"{self.bits_per_weight:.3f}, scales and padding included"))
        return out

    def to_pandas(self) -> DataFrame:
        """A data frame with a row for each layer, worst first: scheme, weights, bytes, bits per weight, SQNR in dB of
        the weight, of the layer and in the stream. The metrics of the whole model are in its ``attrs``. Raises
        ImportError without pandas."""
        types = {
            "name": TEXT, "type": TEXT, "shape": ANY, "quantized": FLAG, "scheme": TEXT, "spec": TEXT,
            "weights": WHOLE, "bytes_float": WHOLE, "bytes": WHOLE, "bits_per_weight": REAL, "weight_sqnr_db": REAL,
            "layer_sqnr_db": REAL, "stream_sqnr_db": REAL, "calls": WHOLE, "tied": TEXT,
        }  # fmt: skip
        rows = [
            {**vars(w), "quantized": w.quantized, "scheme": w.short, "spec": w.scheme,
             "bits_per_weight": w.bits_per_weight, "weight_sqnr_db": w.weight_sqnr, "layer_sqnr_db": w.layer_sqnr,
             "stream_sqnr_db": w.stream_sqnr}
            for w in self.layers
        ]  # fmt: skip
        return to_frame(types, rows, **dict(self.summary()))

    def __repr__(self) -> str:
        facts = dict(self.summary())
        loss = "relative error" if self.kl is None else KL_OF[self.kind]
        some = [f"{loss} {facts[loss]}"] + ([] if self.top1 is None else [f"top-1 agreement {self.top1:.2%}"])
        wrong = f"{self.wrong}; " if self.wrong else ""
        return f"<Comparison: {wrong}{facts['compared']}; {'; '.join(some)}; stored {facts['stored']}>"

    def _repr_html_(self) -> str:
        columns, rows = self._cells(self.layers)
        figures = html_table((), [[f"{what}:", figure] for what, figure in self.summary()])
        notes = [f"not compared: {text}" for text in self.unmatched[:UNMATCHED]]
        return figures + html_table(columns, rows, notes=[*notes, _caption(0)], right=_RIGHT)

    def __str__(self) -> str:
        return self.table(full=len(self.layers) <= SHOWN)

    def table(self, *, full: bool = True) -> str:
        """Metrics, then layers, worst first; with ``full=False`` only as many as fit on a screen."""
        shown = self.layers if full else self.layers[:SHOWN]
        columns, rows = self._cells(shown)
        lines = [f"{what + ':':<24}{figure}" for what, figure in self.summary()]
        lines += [f"not compared: {text}" for text in self.unmatched[:UNMATCHED]]
        if len(self.unmatched) > UNMATCHED:
            lines.append(f"not compared: {len(self.unmatched) - UNMATCHED} more, see .unmatched")
        caption = _caption(len(self.layers) - len(shown))
        return "\n".join(lines) + "\n" + text_table(columns, rows, right=_RIGHT, caption=caption, drop=("shape",))

    def _cells(self, layers: tuple[Layer, ...]) -> tuple[list[str], list[list[str]]]:
        rows = []
        for w in layers:
            name = f"{w.name} (tied to {w.tied})" if w.tied else w.name
            figures = (f"{w.bits_per_weight:.3f}", _db(w.weight_sqnr), _db(w.layer_sqnr), _db(w.stream_sqnr))
            rows.append([name, "×".join(map(str, w.shape)), w.short or "left alone", *figures])
        return ["layer", "shape", "scheme", "bits", "weight dB", "layer dB", "stream dB"], rows


SHOWN = 24  # layers that are printed of a large model
UNMATCHED = 8
_RIGHT = ("shape", "bits", "weight dB", "layer dB", "stream dB")
_THINGS = {"logits": "distributions", "embeddings": "embeddings", "tensor": "rows"}


def _caption(left: int) -> str:
    more = f"{left} better layers are not shown; .table() prints all.\n" if left else ""
    return more + (
        "SQNR in dB, higher is better. weight: of the weight. layer: of the layer's output, both with the float "
        "model's input. stream: of its output, each in its own model."
    )


def _db(value: float | None) -> str:
    return "-" if value is None else "exact" if value == math.inf else f"{value:.1f}"


def _range(interval: tuple[float, float] | None, spec: str = ".3g") -> str:
    return "" if interval is None else f"{interval[0]:{spec}} to {interval[1]:{spec}}"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value
