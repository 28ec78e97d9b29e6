"""calibrate(): scales of static activation quantization, from calibration data."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sized
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...core import blocks
from ...core.arguments import check_arguments, check_number, did_you_mean, show
from ...core.numerics import dequantize, quantize
from ...core.progress import Progress, step
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
from ...planning.run_batch import run_batch, token_mask
from ...planning.scheme import Scheme
from .batches import each
from .block_order import inference_mode
from .input_hooks import InputHooks, require_finite
from .statistics import HISTOGRAM, Bins, State, bins

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

    Runs the float model once over the data. Raises PlanError with the names of layers that no input reached.
    """
    if method not in METHODS:
        guess = did_you_mean(method, METHODS, 1)
        raise PlanError(f"calibrate: method must be one of {', '.join(METHODS)}, got {method!r}{guess}")
    check_number("calibrate: percentile", percentile)
    if not 50 < percentile <= 100:
        raise PlanError(f"calibrate: percentile must be above 50 and at most 100, got {percentile}")
    make = _maker(config)
    todo = plan(model, make(1.0, 0), filter_fn)
    rows = {row.name: row for row in todo.rows if row.scheme is not None and row.scheme.act is not None}
    weights = {name: row.tensor for name, row in rows.items() if row.tensor is not None}
    seen = observe_ranges(model, weights, batches, progress)
    table: dict[str, AOBaseConfig | None] = {}
    for name, row in rows.items():
        assert row.scheme is not None
        assert row.scheme.act is not None
        act = row.scheme.act
        way = "minmax" if method in ("mse", "histogram") and not act.has_fixed_range else method
        p = range_qparams(METHODS[way](seen[name], act, percentile), act)
        assert p.scale is not None
        table[_key(row)] = make(float(p.scale), 0 if p.zero_point is None else int(p.zero_point))
    return FqnToConfig(table)


def observe_ranges(
    model: nn.Module, weights: Mapping[str, Tensor], batches: Any, progress: Progress = None
) -> dict[str, Bins]:
    """Histograms of the inputs multiplied by these weights, by the given names. The model is not changed.

    Raises PlanError for weights that no input reached, ValueError for inputs that are not finite.
    """
    states: dict[str, State] = {}

    def see(name: str, x: Tensor) -> None:
        require_finite(name, x)
        states[name] = HISTOGRAM.update(states.get(name) or HISTOGRAM.init(1, 1), x.reshape(1, -1, 1).cpu())

    ids = {id(tensor): name for name, tensor in weights.items()}
    total = len(batches) if isinstance(batches, Sized) else 0  # 0: an iterator, whose end is not known
    with step("calibrate", progress) as told, inference_mode(model):
        for done, batch in enumerate(each(batches, "batches"), 1):
            with InputHooks(ids, see, token_mask(batch), unfold=False):
                run_batch(model, batch)
            told(done, total, "")
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


def _mse(b: Bins, act: ActivationSpec, percentile: float) -> tuple[float, float]:
    """Tries fractions of the range: of both ends together, then of each end alone."""
    where = b.counts > 0
    middles, counts = b.middles[where].float(), b.counts[where]

    def error(ends: tuple[float, float]) -> float:
        parts = quantize(middles, act.spec, params=range_qparams(ends, act))
        return float((counts * (dequantize(parts, act.spec, middles.shape) - middles).double().square()).sum())

    best = (b.least, b.greatest)
    least = error(best)
    shares = [2.0 ** (-i / 16) for i in range(1, 129)]  # down to 1/256 of the range
    for low, high in ((True, True), (True, False), (False, True)):
        start = best
        for share in shares if act.spec.zero_point or (low and high) else ():
            ends = (start[0] * share if low else start[0], start[1] * share if high else start[1])
            found = error(ends)
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


# -- configs -----------------------------------------------------------------------------------------------------------


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
