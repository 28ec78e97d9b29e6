"""Next steps for a quantized model, each tried: its bytes and its error are those of the model with the change.

A trial quantizes the float model's weights by the suggested options, exactly as ``pennyweight quantize`` would without
an algorithm, puts them into the quantized model, compares, and puts the old weights back.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from ..algorithms.solve import solve
from ..core.tensor import AffineQuantizedTensor
from ..planning.config_resolution import PlanError
from ..planning.configs.by_name import by_name
from ..planning.configs.files import layer_config
from ..planning.parameters import places
from ..planning.plan import plan
from .compare_models import compare
from .comparison import Comparison, Layer
from .error_sources import Source
from .grades import graded
from .layers import model_bytes, unwrapped

TRIALS = 8  # of one model; large float weights come first
TRIALS_OF_SEVERAL = 1  # of each
LARGE = 0.05  # share of the bytes from which float weights are worth a trial
FEWER = 0.2  # share of the error that more bits must remove to be suggested
SMALLER = 0.02  # share of the bytes that fewer bits must save


@dataclass(frozen=True)
class Change:
    """Options of ``pennyweight quantize``. whole: they replace --config; otherwise they are added to the command. note:
    what else must change in the command."""

    options: tuple[str, ...]
    what: str
    whole: bool = False
    note: str = ""

    @property
    def text(self) -> str:
        """As typed in a shell."""
        return shlex.join(self.options)


@dataclass(frozen=True)
class Suggestion:
    """A change and its measured effect.

    saves         bytes that the change saves, negative: it costs; share: of the bytes before
    metric        "KL" or "relative error" of the outputs, on the page's inputs: error_before and error_after
    grade_before  of the outputs; grade_after: with the change
    """

    change: Change
    saves: int
    share: float
    metric: str
    error_before: float
    error_after: float
    grade_before: str
    grade_after: str

    @property
    def removes(self) -> float:
        """Share of the error that it removes; negative: it adds."""
        return 1 - self.error_after / self.error_before if self.error_before > 0 else 0.0

    @property
    def gain(self) -> float:
        """Halvings of the error plus halvings of the bytes: log2(error_before / error_after) - log2(1 - share)."""
        if min(self.error_before, self.error_after) <= 0:
            return math.inf if self.error_after < self.error_before else 0.0
        return math.log2(self.error_before / self.error_after) - math.log2(max(1e-9, 1 - self.share))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "removes": self.removes, "gain": self.gain}


def suggest(
    exact: nn.Module, found: nn.Module, comparison: Comparison, batches: Sequence[Any],
    sources: Mapping[str, Source], *, kind: str, pooling: str, trials: int = TRIALS,
    seconds: float = math.inf, notify: Callable[[str], None] = lambda text: None,
) -> list[Suggestion]:  # fmt: skip
    """Suggestions that were measured to help, best first.

    A suggestion either removes at least a fifth of the error, or saves at least 2 % of the bytes with outputs that are
    still good or fine, or not more than 5 % worse. Order: :attr:`Suggestion.gain`. ``trials`` limits the runs of both
    models; none starts after ``seconds``. None that another one beats in both bytes and error.
    """
    out = []
    end = perf_counter() + seconds
    for change in _candidates(found, comparison, sources)[:trials]:
        if perf_counter() > end:
            notify("no time for more trials; --trials N sets their number")
            break
        notify(f"trying {change.text}")
        tried = try_change(exact, found, comparison, batches, change, kind=kind, pooling=pooling)
        if tried is not None and _helps(tried):
            out.append(tried)
    return sorted(_distinct(out), key=lambda s: -s.gain)


def try_change(
    exact: nn.Module, found: nn.Module, comparison: Comparison, batches: Sequence[Any], change: Change, *, kind: str,
    pooling: str,
) -> Suggestion | None:  # fmt: skip
    """Measure a change; None if it changes nothing or its options do not fit the model."""
    exact, found = unwrapped(exact), unwrapped(found)
    weights = _weights(exact, found, change)
    if not weights:
        return None
    with replaced(found, weights):
        size = model_bytes(found)
        after = compare(exact, found, batches, kind=kind, pooling=pooling, layers=False)
    saves = comparison.bytes - size
    scale, value = graded(comparison)
    _, new = graded(after)
    metric = "KL" if comparison.kl is not None else "relative error"
    errors = (value, new) if comparison.kl is not None else (comparison.error, after.error)
    share = saves / max(1, comparison.bytes)
    return Suggestion(change, saves, share, metric, *errors, scale.grade(value), scale.grade(new))


@contextmanager
def replaced(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """The model with other weights, by name; the old ones return afterwards."""
    old = []
    try:
        for place in [p for where in places(model) for p in where if p.name in weights]:
            old.append((place, place.get()))
            place.set(weights[place.name])
        yield
    finally:
        for place, tensor in reversed(old):  # a module with two names is replaced twice
            place.set(tensor)


def _weights(exact: nn.Module, found: nn.Module, change: Change) -> dict[str, Tensor]:
    """name -> the weight under a change, for each weight of the quantized model that differs from it."""
    given: dict[str, list[str]] = {}
    for option, value in zip(change.options[::2], change.options[1::2], strict=True):
        given.setdefault(option, []).append(value)
    size = given.get("--group-size")
    rest = by_name(given["--config"][0], int(size[0]) if size else None) if "--config" in given else None
    config = layer_config(given.get("--layer", ()), next(iter(given.get("--embeddings", ())), None), rest)
    current = {p.name: p.get() for where in places(found) for p in where}
    try:
        rows = plan(exact, config).rows
    except (PlanError, ValueError):  # such as a model with layers that this config does not support
        return {}
    out: dict[str, Tensor] = {}
    for row in rows:
        here = current.get(row.name)
        if here is None or not row.active or not row.places:
            continue
        was_quantized = isinstance(here, AffineQuantizedTensor)
        if change.whole and not was_quantized:
            continue  # whatever the command left alone, such as --skip
        w = solve(row).weight
        same = was_quantized and w.spec.with_(layout="plain") == here.spec.with_(layout="plain") and w.act == here.act
        if not same:
            out |= {p.name: w for p in row.places if p.name in current}
    return out


# -- candidates --------------------------------------------------------------------------------------------------------


def _candidates(found: nn.Module, comparison: Comparison, sources: Mapping[str, Source]) -> list[Change]:
    """Changes worth a trial, the likeliest first."""
    scale, value = graded(comparison)
    grade = scale.grade(value)
    more = [] if grade == "good" else _more_bits(comparison, sources)
    return [*_left_float(found, comparison), *(_fewer_bits(comparison, grade)), *more]


def _left_float(found: nn.Module, comparison: Comparison) -> list[Change]:
    """Embeddings and matrices that are still float and large."""
    floats = [w for w in comparison.layers if not w.quantized and not w.tied]
    least = LARGE * comparison.bytes
    out = []
    tables = [w for w in floats if w.type == "Embedding"]
    if sum(w.bytes for w in tables) >= least:
        tied = [w.name.removesuffix(".weight") for w in comparison.layers if w.tied in {t.name for t in tables}]
        # by default a tied weight is quantized with its linear layer, so the command excludes that layer
        note = f"leave out the option that excludes {tied[0]}" if tied else ""
        out.append(Change(("--embeddings", "int8"), "the embeddings are float", note=note))
    for w in sorted(floats, key=lambda w: -w.bytes):
        if w.type == "Linear" and w.bytes >= least:
            out.append(Change(("--layer", f"{_module(w)}=int8"), f"{_module(w)} is float"))
    return out[:3]


def _fewer_bits(comparison: Comparison, grade: str) -> list[Change]:
    if grade != "good" or (comparison.bits_per_weight or 0) <= 6.5:
        return []
    if not _uniform(comparison):
        return []
    acts = any(" × " in w.scheme for w in comparison.quantized)
    config = ("--config", "8da4w") if acts else ("--config", "int6")
    small = [Change(config, "the error leaves room for fewer bits", True)]
    return small if acts else [*small, Change(("--config", "int4", "--group-size", "32"), small[0].what, True)]


def _more_bits(comparison: Comparison, sources: Mapping[str, Source]) -> list[Change]:
    """More bits where the error per byte is largest: kinds of layers, the worst layers, and everywhere."""
    once = [w for w in comparison.quantized if not w.tied and w.type != "Embedding" and w.layer_sqnr is not None]
    worst = sorted(once, key=lambda w: -_noise(w))
    narrow = [w for w in worst if w.bits_per_weight < 7.5]
    out = _finer(comparison, narrow) if _uniform(comparison) else []
    inputs = [w for w in worst if w.name in sources and sources[w.name].share > 0.5]
    if inputs:
        pairs = [(_module(w), "int8" if w.bits_per_weight > 7 else "int4:32") for w in inputs[:4]]
        options = tuple(x for name, config in pairs for x in ("--layer", f"{name}={config}"))
        out.append(Change(options, "quantized inputs cause most of the error of these layers"))
    groups: dict[str, list[Layer]] = {}
    for w in narrow:
        groups.setdefault(pattern_of(w.name), []).append(w)
    ranked = sorted(groups, key=lambda k: -sum(map(_noise, groups[k])) / sum(w.bytes for w in groups[k]))
    for key in ranked[:2]:
        if len(groups[key]) > 1:
            what = f"these {len(groups[key])} layers have a large error per byte"
            out.append(Change(("--layer", f"{key}=int8"), what))
    for count in (2, 4):
        if len(narrow) > count:
            options = tuple(x for w in narrow[:count] for x in ("--layer", f"{_module(w)}=int8"))
            out.append(Change(options, f"these {count} layers have the largest error"))
    return out


def _finer(comparison: Comparison, narrow: list[Layer]) -> list[Change]:
    """Other configs for all layers."""
    out, bits = [], comparison.bits_per_weight or 8
    if bits < 6.5:
        acts = any(" × " in w.scheme for w in comparison.quantized)
        out.append(Change(("--config", "int8-dynamic" if acts else "int6"), "more bits everywhere", True))
    groups = ("--config", "int4", "--group-size", "32")
    if 4 <= bits < 6.5 and any("[128]" in w.scheme or "[64]" in w.scheme for w in narrow):
        out.append(Change(groups, "smaller groups follow the weights better", True))
    elif bits < 4:
        out.append(Change(groups, "fewer than 4 bits cost much", True))
    return out


def _uniform(comparison: Comparison) -> bool:
    """Whether one --config explains all layers but the embeddings: then another one can replace it."""
    return len({w.scheme for w in comparison.quantized if w.type != "Embedding" and not w.tied}) == 1


def _noise(w: Layer) -> float:
    """Noise of a layer's output relative to its signal."""
    return 10.0 ** (-(w.layer_sqnr or 0.0) / 10)


def _module(w: Layer) -> str:
    return w.name.removesuffix(".weight")


def pattern_of(name: str) -> str:
    """A --layer pattern for a layer at all depths: the name of its module, with * for its first number."""
    parts = name.removesuffix(".weight").split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return ".".join(parts if at is None else [*parts[:at], "*", *parts[at + 1 :]])


# -- choice ------------------------------------------------------------------------------------------------------------


def _helps(s: Suggestion) -> bool:
    if s.saves > 0:
        calm = s.grade_after in ("good", "fine")
        return s.share >= SMALLER and (calm or s.removes >= -0.05)
    return s.removes >= FEWER


def _distinct(some: list[Suggestion]) -> list[Suggestion]:
    """Without those that another beats in both bytes and error."""

    def better(o: Suggestion, s: Suggestion) -> bool:
        here, there = (s.saves, -s.error_after), (o.saves, -o.error_after)
        return here != there and all(a <= b for a, b in zip(here, there, strict=True))

    return [s for s in some if not any(better(o, s) for o in some)]
