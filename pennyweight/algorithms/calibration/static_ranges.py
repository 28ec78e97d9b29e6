"""calibrate(): scales of static activation quantization, from calibration data."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core import blocks
from ...core.model_arguments import check_arguments
from ...core.numerics import dequantize, quantize
from ...core.qparams import Params, choose
from ...core.spec import ActivationSpec, QuantSpec
from ...planning.config_resolution import Filter, PlanError
from ...planning.configs import (
    AOBaseConfig,
    Float8StaticActivationFloat8WeightConfig,
    FqnToConfig,
    Int8StaticActivationInt8WeightConfig,
    NVFP4DynamicActivationNVFP4WeightConfig,
    SpecConfig,
)
from ...planning.granularity import MappingType
from ...planning.parameters import kind_of
from ...planning.plan import PlanRow, plan
from ...planning.run_batch import token_mask, user_level
from ...planning.scheme import Scheme
from ...support.arguments import check_number, did_you_mean, show
from ...support.progress import Progress, step
from .batches import each
from .block_order import inference_mode
from .float32_products import run_batch
from .input_hooks import InputHooks, require_finite
from .statistics import HISTOGRAM, Bins, State, bins

GAIN = 0.9  # a zero point has to lower the squared error by a tenth: it is one more number per layer in files

# Per static config: the fields of scale and zero point, and whether its other fields select a zero point
_STATIC: dict[type, tuple[str, str | None, Callable[[Mapping[str, Any]], bool]]] = {
    Int8StaticActivationInt8WeightConfig: (
        "act_quant_scale",
        "act_quant_zero_point",
        lambda given: given.get("act_mapping_type") is MappingType.ASYMMETRIC,
    ),
    Float8StaticActivationFloat8WeightConfig: ("scale", None, lambda given: False),
    NVFP4DynamicActivationNVFP4WeightConfig: ("act_scale", None, lambda given: False),
    SpecConfig: (
        "act_scale",
        "act_zero_point",
        lambda given: isinstance(given.get("act"), ActivationSpec) and given["act"].spec.zero_point,
    ),
}


@check_arguments()
def calibrate(
    model: nn.Module,
    batches: Any,
    config: Any,
    method: str = "mse",
    *,
    filter_fn: Filter | None = None,
    percentile: float = 99.99,
    progress: Progress = None,
) -> FqnToConfig:
    """A config per layer with its static input scale computed from data, for :func:`quantize_`. Changes nothing.

    batches     as in :func:`quantize_`; tokens whose ``attention_mask`` is 0 do not count
    config      a static config's class, ``functools.partial(class, option=...)``, or an instance, whose scale is
                replaced; or a Scheme
    method      how the range is chosen from the histogram of the inputs (16384 bins, 128 KB per layer):
                "minmax": the full range; "percentile": ``percentile`` of the magnitudes (of both ends if there is a
                zero point); "mse": the range with the smallest squared error of the values; "histogram": the method of
                torch.ao's HistogramObserver, which narrows the range from the ends as long as the error decreases.
                Inputs with block scales of their own (NVFP4), whose error a histogram cannot tell, get the full range
                under the last two
    progress    a bar after two seconds by default; False: none; or a function, called with (done, total, name)

    Inputs of Int8StaticActivationInt8WeightConfig get a zero point, layer by layer, where that has less than
    :data:`GAIN` of the squared error on this data and the same kernel runs; unless the class or partial is given
    ``act_mapping_type``, or an instance, which has one. Reports say "static, asymmetric" of these.

    Warns (AccuracyWarning, also a note in the report) of layers whose tokens differ so much in size that one integer
    scale for all loses most of the small ones: root mean square over tokens of |x - Q(x)| / |x| above :data:`LOST`, and
    above :data:`TIMES` what dynamic scales, one per token, have. Both are estimated from the step of the codes as
    step sqrt(n / 12) / |x| over the n elements that are not 0, at most 1.

    Runs the float model once over the data. Raises PlanError with the names of layers that no input reached.
    """
    if method not in METHODS:
        guess = did_you_mean(method, METHODS, 1)
        raise PlanError(f"calibrate: method must be one of {', '.join(METHODS)}, got {method!r}{guess}")
    check_number("calibrate: percentile", percentile)
    if not 50 < percentile <= 100:
        raise PlanError(f"calibrate: percentile must be above 50 and at most 100, got {percentile}")
    makers = [_maker(one) for one in _mappings(config)]
    plans = [_with_static_inputs(model, make, filter_fn) for make in makers]
    rows = plans[0]
    weights = {name: row.tensor for name, row in rows.items() if row.tensor is not None}
    sizes = {name: TokenSizes(row) for name, row in rows.items()}
    seen = observe_ranges(model, weights, batches, progress, sizes)
    table: dict[str, AOBaseConfig | None] = {}
    notes: dict[str, str] = {}
    for name, row in rows.items():
        options = [
            (_settled(seen[name], p[name], method, percentile), make)
            for p, make in zip(plans, makers, strict=True)
            if p[name].kernel == row.kernel
        ]
        chosen = options[0]
        for other in options[1:]:
            chosen = other if other[0].error < GAIN * chosen[0].error else chosen
        (scale, zero_point, _), make = chosen
        table[_key(row)] = make(scale, zero_point)
        note = sizes[name].warning(scale)
        notes |= {_key(row): note} if note else {}
    if notes:
        text = "; ".join(f"{name}: {note}" for name, note in notes.items())
        warnings.warn(f"calibrate: {text}; {REMEDY}", AccuracyWarning, stacklevel=user_level())
    return FqnToConfig(table).with_notes({name: f"{note}; {REMEDY}" for name, note in notes.items()})


def _with_static_inputs(
    model: nn.Module, make: Callable[[float, int], AOBaseConfig], filter_fn: Filter | None
) -> dict[str, PlanRow]:
    rows = plan(model, make(1.0, 0), filter_fn).rows
    return {row.name: row for row in rows if row.scheme is not None and row.scheme.act is not None}


class _Settled(NamedTuple):
    """Parameters of a static input, and the squared error of the observed values."""

    scale: float
    zero_point: int
    error: float


def _settled(b: Bins, row: PlanRow, method: str, percentile: float) -> _Settled:
    assert row.scheme is not None
    assert row.scheme.act is not None
    act = row.scheme.act
    way = "minmax" if method in ("mse", "histogram") and not act.has_fixed_range else method
    ends = METHODS[way](b, act, percentile)
    p = range_qparams(ends, act)
    assert p.scale is not None
    error = _squared_errors(b, act, [ends])[0] if act.has_fixed_range else 0.0
    return _Settled(float(p.scale), 0 if p.zero_point is None else int(p.zero_point), error)


def observe_ranges(
    model: nn.Module, weights: Mapping[str, Tensor], batches: Any, progress: Progress = None,
    sizes: Mapping[str, TokenSizes] | None = None,
) -> dict[str, Bins]:  # fmt: skip
    """Histograms of the inputs multiplied by these weights, by the given names; ``sizes`` also observe them. The model
    is not changed.

    Raises PlanError for weights that no input reached, ValueError for inputs that are not finite.
    """
    states: dict[str, State] = {}

    def see(name: str, x: Tensor) -> None:
        require_finite(name, x)
        states[name] = HISTOGRAM.update(states.get(name) or HISTOGRAM.init(1, 1), x.reshape(1, -1, 1).cpu())
        if sizes is not None:
            sizes[name].update(x)

    ids = {id(tensor): name for name, tensor in weights.items()}
    total = len(batches) if isinstance(batches, Sized) else 0  # 0: an iterator, whose end is not known
    with step("calibrate", progress) as advance, inference_mode(model):
        for done, batch in enumerate(each(batches, "batches"), 1):
            with InputHooks(ids, see, token_mask(batch), unfold=False):
                run_batch(model, batch)
            advance(done, total, "")
    never = [name for name in weights if name not in states or not states[name][1]]
    if never:
        raise PlanError(f"no input reached {', '.join(never)}; use calibration data that does, or exclude them")
    return {name: bins(HISTOGRAM.finish(state)) for name, state in states.items()}


def range_qparams(ends: tuple[float, float], act: ActivationSpec) -> Params:
    """Scale and zero point of a range, by the rule of a dynamic activation whose values span it. Of an activation with
    quantized block scales: the scale of those, for a block that spans the range."""
    x = blocks.pad(torch.tensor(ends, dtype=torch.float32, device="cpu"), act.spec.block)
    found = choose(x, act.spec, act.rule, act.eps)
    if not isinstance(act.spec.scale, QuantSpec):
        return found
    assert found.scale is not None
    return choose(found.scale, act.spec.scale)


# -- ranges ------------------------------------------------------------------------------------------------------------


def _minmax(b: Bins, act: ActivationSpec, percentile: float) -> tuple[float, float]:
    return b.least, b.greatest


def _percentile(b: Bins, act: ActivationSpec, percentile: float) -> tuple[float, float]:
    """Percentile of the magnitudes, or with a zero point of both ends."""
    share = percentile / 100
    if not act.spec.zero_point:
        order = b.middles.abs().argsort()
        reached = b.counts[order].cumsum(0) >= share * b.counts.sum()
        limit = float(b.middles.abs()[order][int(reached.nonzero()[0])]) + b.width / 2
        return max(b.least, -limit), min(b.greatest, limit)
    total = b.counts.cumsum(0) / b.counts.sum()
    low = int((total > (1 - share) / 2).nonzero()[0])
    high = int((total >= 1 - (1 - share) / 2 - 1e-12).nonzero()[0])
    return max(b.least, float(b.middles[low]) - b.width / 2), min(b.greatest, float(b.middles[high]) + b.width / 2)


_AT_ONCE = 1 << 16  # numbers: what fits in a core's cache


def _squared_errors(b: Bins, act: ActivationSpec, ranges: Sequence[tuple[float, float]]) -> list[float]:
    """For each range, the sum of (Q(x) - x)^2 over the observed values, each at the middle of its bin."""
    where = b.counts > 0
    middles, counts = b.middles[where].float(), b.counts[where]
    spec = act.spec if act.spec.block is not None else act.spec.with_(block=(-1,))  # each range is a row
    rows, found = max(1, _AT_ONCE // len(middles)), []
    for some in (ranges[i : i + rows] for i in range(0, len(ranges), rows)):
        x = blocks.pad(torch.tensor(some, dtype=torch.float32, device="cpu"), spec.block)
        each = middles.expand(len(some), -1)
        parts = quantize(each, spec, params=choose(x, spec, act.rule, act.eps))
        squares = (dequantize(parts, spec, each.shape) - each).double().square()
        # row by row: the order of a sum must not depend on how many ranges there are
        found += [float((counts * row).sum()) for row in squares]
    return found


def _mse(b: Bins, act: ActivationSpec, percentile: float) -> tuple[float, float]:
    """Tries fractions of the range: of both ends together, then of each end alone."""
    best = (b.least, b.greatest)
    least = _squared_errors(b, act, [best])[0]
    shares = [2.0 ** (-i / 16) for i in range(1, 129)]  # down to 1/256 of the range
    for low, high in ((True, True), (True, False), (False, True)) if act.spec.zero_point else ((True, True),):
        tried = [(best[0] * share if low else best[0], best[1] * share if high else best[1]) for share in shares]
        for ends, found in zip(tried, _squared_errors(b, act, tried), strict=True):
            if found < least:
                best, least = ends, found
    return best


_TRIM_BINS = 2048  # torch.ao's number of bins
_TRIM = 1e-5  # fraction of the values per step of narrowing the range


def _histogram(b: Bins, act: ActivationSpec, percentile: float) -> tuple[float, float]:
    """torch.ao's HistogramObserver: narrow the range at the end that skips more bins, until the error grows.

    The error assumes that values are uniform within their bins and that levels are evenly spaced between the ends.
    """
    edges, counts = _coarse(b)
    width = float(edges[1] - edges[0])
    total = counts.cumsum(0)
    levels = max(2, 2 ** min(8, act.spec.format.bits))

    def error(first: int, last: int) -> float:
        """Sum over bins of the integral of (x - nearest level)**2, with the ends at the edges of these bins."""
        step = width * (last - first + 1) / (levels - 1)
        if step == 0:
            return 0.0
        begin = (torch.arange(len(counts), dtype=torch.int64, device="cpu") - first) * width
        end = begin + width
        low, high = (begin / step + 0.5).floor().clamp(0, levels - 1), (end / step + 0.5).floor().clamp(0, levels - 1)
        density = counts / width
        near = torch.where(
            low == high,
            _cube(begin - low * step, end - low * step),
            _cube(begin - low * step, torch.full_like(begin, step / 2))
            + (high - low - 1)
            * _cube(
                torch.tensor(-step / 2, dtype=torch.float32, device="cpu"),
                torch.tensor(step / 2, dtype=torch.float32, device="cpu"),
            )
            + _cube(torch.full_like(begin, -step / 2), end - high * step),
        )
        return float((density * near).sum())

    steps = torch.arange(round(1 / _TRIM) + 1, dtype=torch.float64, device="cpu") * _TRIM * total[-1]
    lefts, rights = torch.searchsorted(total, steps).tolist(), torch.searchsorted(total, total[-1] - steps).tolist()
    first, last, least = 0, len(counts) - 1, float("inf")
    low, high = 0, 0  # steps narrowed at each end
    while low + high < len(lefts) - 1:
        left, right = max(first, lefts[low + 1]), min(last, rights[high + 1])
        if left - first > last - right:
            new, low = (left, last), low + 1
        else:
            new, high = (first, right), high + 1
        if new == (first, last):
            continue
        if new[0] >= new[1]:
            break
        found = error(*new)
        if found > least:
            break
        least, (first, last) = found, new
    return max(b.least, float(edges[first])), min(b.greatest, float(edges[last + 1]))


def _cube(begin: Tensor, end: Tensor) -> Tensor:
    """The integral of x**2."""
    return (end**3 - begin**3) / 3


def _coarse(b: Bins) -> tuple[Tensor, Tensor]:
    """Edges and counts of 2048 equal bins from the smallest value to the largest."""
    span = b.greatest - b.least
    if span <= 0:
        return torch.tensor([b.least, b.least], dtype=torch.float32, device="cpu"), b.counts.sum().view(1)
    at = ((b.middles - b.least) / span * _TRIM_BINS).long().clamp(0, _TRIM_BINS - 1)
    counts = torch.zeros(_TRIM_BINS, dtype=torch.float64, device="cpu").index_add_(0, at, b.counts)
    return b.least + span / _TRIM_BINS * torch.arange(_TRIM_BINS + 1, dtype=torch.float64, device="cpu"), counts


METHODS: dict[str, Callable[[Bins, ActivationSpec, float], tuple[float, float]]] = {
    "minmax": _minmax,
    "percentile": _percentile,
    "mse": _mse,
    "histogram": _histogram,
}


# -- tokens of different sizes -----------------------------------------------------------------------------------------

LOST, TIMES = (
    0.15,
    4.0,
)  # of resemblyzer's LSTM and of MiniLM, whose outputs static inputs spoil and do not (docs/log.md)
REMEDY = "use dynamic int8 inputs there, Int8DynamicActivationInt8WeightConfig"
_OCTAVE = 4  # bins of the mean square per factor of two
_LEAST_SIZE, _MOST_SIZE = -150 * _OCTAVE, 150 * _OCTAVE


class AccuracyWarning(UserWarning):
    """A quantization that loses much more than another of the same size."""


class TokenSizes:
    """How much integer codes of a layer's inputs lose, token by token, with one scale for all and with one for each.

    A token is a row; of a convolution a sample, of a transposed one a position: what a dynamic scale covers.
    """

    def __init__(self, row: PlanRow) -> None:
        assert row.site is not None
        assert row.scheme is not None
        assert row.scheme.act is not None
        self.op, self.rank, spec = row.site.op, len(row.site.shape), row.scheme.act.spec
        applies = spec.format.kind == "int" and row.scheme.act.mode == "static" and spec.block is None
        self.steps = float(spec.format.hi - spec.format.lo) if applies else 0.0
        # Tokens by the mean square of their elements other than 0, and the sum of the dynamic errors
        self.counts = torch.zeros(_MOST_SIZE - _LEAST_SIZE + 1, dtype=torch.float64, device="cpu")
        self.dynamic = 0.0

    def _tokens(self, x: Tensor) -> Tensor:
        """[tokens, elements]."""
        if self.op == "convolution":
            return x.flatten(1) if x.ndim == self.rank else x.reshape(1, -1)
        x = x.movedim(1 - self.rank, -1) if self.op == "transposed_convolution" else x
        return x.reshape(-1, x.shape[-1])

    def update(self, x: Tensor) -> None:
        if not self.steps or not x.numel():
            return
        x = self._tokens(x)
        used = (x != 0).sum(1)
        some = used > 0
        x, used = x[some], used[some].double()
        square = x.double().square().sum(1) / used
        at = (square.log2() * _OCTAVE).round().clamp(_LEAST_SIZE, _MOST_SIZE).long() - _LEAST_SIZE
        self.counts += torch.bincount(at.cpu(), minlength=len(self.counts))
        step = x.abs().amax(1).double() * 2 / self.steps
        self.dynamic += float((step.square() / 12 / square).clamp(max=1).sum())

    def warning(self, scale: float) -> str:
        """A note if one scale, with this step, loses much more than scales of their own; else ""."""
        count = float(self.counts.sum())
        if not count:
            return ""
        sizes = torch.arange(_LEAST_SIZE, _MOST_SIZE + 1, dtype=torch.float64, device="cpu") / _OCTAVE
        static = math.sqrt(float((self.counts * (scale**2 / 12 / 2.0**sizes).clamp(max=1)).sum()) / count)
        dynamic = math.sqrt(self.dynamic / count)
        if not (static > LOST and static > TIMES * dynamic):
            return ""
        what = "sample" if self.op == "convolution" else "position" if self.op == "transposed_convolution" else "token"
        return (
            f"its static input scale loses {static:.0%} of an input {what} (root mean square), dynamic scales "
            f"{dynamic:.1%}"
        )


# -- configs -----------------------------------------------------------------------------------------------------------


def _mappings(config: Any) -> list[Any]:
    """The config; of a static int8 config without ``act_mapping_type`` also the one with a zero point."""
    cls = config.func if isinstance(config, partial) else config
    if cls is not Int8StaticActivationInt8WeightConfig:
        return [config]
    given = inspect.signature(cls).bind_partial(*config.args, **config.keywords).arguments if config is not cls else {}
    if "act_mapping_type" in given:
        return [config]
    return [config, partial(config, act_mapping_type=MappingType.ASYMMETRIC)]


def _maker(config: Any) -> Callable[[float, int], AOBaseConfig]:
    """A function (scale, zero point) -> config."""
    if isinstance(config, Scheme):
        config = SpecConfig(config.weight, config.act, config.rule, config.eps, config.act_scale, config.act_zero_point)
    given: Mapping[str, Any] = {}
    cls = config
    if isinstance(config, partial):
        cls = config.func
        given = inspect.signature(cls).bind_partial(*config.args, **config.keywords).arguments
    elif not isinstance(config, type):
        cls = type(config)
        given = {f.name: getattr(config, f.name) for f in fields(config)} if cls in _STATIC else {}
    if cls not in _STATIC:
        names = ", ".join(c.__name__ for c in _STATIC)
        raise PlanError(
            f"calibrate: config must be a static config ({names}) as class, functools.partial or instance; got "
            f"{show(config)}; dynamic and weight-only configs need no calibrate: pass them to quantize_"
        )
    scale_field, zero_field, has_zero = _STATIC[cls]
    act = given.get("act")
    if cls is SpecConfig and (not isinstance(act, ActivationSpec) or act.mode != "static"):
        raise PlanError(f"calibrate: SpecConfig needs act=ActivationSpec(spec, 'static'), got act={act}")

    def make(scale: float, zero_point: int) -> AOBaseConfig:
        values = {**given, scale_field: scale}
        if zero_field is not None:
            values[zero_field] = zero_point if has_zero(given) else None
        made = cls(**values)
        assert isinstance(made, AOBaseConfig)
        return made

    return make


def _key(row: PlanRow) -> str:
    """The module's name if the module has a single weight, else the parameter's."""
    assert row.site is not None
    place = next(p for p in row.places if p.name == row.site.name)
    kind = kind_of(place.module)
    single = kind is not None and len(kind.params) == 1 and place.own
    return place.module_name if single and place.module_name else place.name
