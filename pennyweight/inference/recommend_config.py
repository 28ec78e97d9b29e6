"""recommend(): tries configs to find the fastest for a model on this machine, within size and error bounds."""

from __future__ import annotations

import copy
import logging
import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..algorithms.mixed_precision.latency import time_plan
from ..core.model_arguments import check_arguments
from ..planning.config_resolution import Filter, PlanError, read_candidates, rules
from ..planning.configs import AOBaseConfig, FqnToConfig
from ..planning.configs.by_name import FASTEST
from ..planning.layer_timing import layer_calls, least_seconds, wait_for
from ..planning.module_handlers import HANDLERS
from ..planning.plan import plan
from ..planning.quantize_report import NOISE, size
from ..planning.run_batch import run_batch
from ..quantize.pipeline import quantize_
from ..support.arguments import check_number
from ..support.progress import Progress, step
from .fuse import FusedBlock, fuse_
from .fuse_conv_net import FusedConvNet
from .plan_conv_chains import quantized
from .recommendation import BUSY, Candidate, Recommendation, best, counted, verdict

_LOG = logging.getLogger(__name__)
SECONDS = 0.5  # to time one candidate against float
TURN = 0.05  # seconds of consecutive calls of one model, so that a model that fits into a cache stays there, as in use
TRIES = 3  # repeated timings of one candidate on a busy machine

Choices = dict[str, tuple[AOBaseConfig, float | None]]  # by parameter: config, and speed relative to float if measured


@check_arguments()
def recommend(
    model: nn.Module,
    example_inputs: Any,
    *,
    max_bytes: int | None = None,
    max_error: float | None = None,
    candidates: Sequence[AOBaseConfig | str] | None = None,
    seconds: float = SECONDS,
    fuse: bool = False,
    filter_fn: Filter | None = None,
    progress: Progress = None,
) -> Recommendation:
    """The fastest config for this model, these inputs and this machine within the bounds.

    example_inputs  a tensor, a tuple of arguments, or a mapping of keyword arguments; use a realistic size
    max_bytes       of parameters and buffers
    max_error       of the outputs, relative to the unchanged model: ||y - y_float|| / ||y_float||
    candidates      configs to try; default: int8 dynamic and weight-only, int4 in groups of 128 and 32, int8 dynamic
                    on int4. The unchanged model is always a candidate
    seconds         to time each candidate
    fuse            run quantized candidates with :func:`~pennyweight.fuse_`, as the model will be run then
    filter_fn       (module, name) -> whether to quantize it, as for ``quantize_``; default: linear layers. Needed for
                    convolutions. Recommended configs then name the parameters, so quantize_ needs no filter
    progress        a bar after two seconds by default; False: none; or a function, called with (done, total, name)

    A mixed-precision config is tried last: each linear layer and selected convolution gets the fastest config at the
    sizes of its inputs, float included; if the result is too large, float is excluded. Among the candidates within 5 %
    of the fastest the most accurate one is chosen. The model runs in eval mode and is not changed. Copies share its
    parameters, so memory is needed for one quantized copy at a time (a full copy if a config has a handler), and to
    measure layers. A candidate outside the bounds is not timed. Raises ValueError for invalid inputs or bounds; a
    config that cannot be applied gets a row with the reason.

    >>> import torch, pennyweight as pw
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    >>> best = pw.recommend(model, torch.randn(4, 64), candidates=["int8", "int4"], seconds=0.01)
    >>> best.config is None or pw.plan(model, best.config) is not None  # None: float is the fastest here
    True
    """
    for name, bound in (("max_bytes", max_bytes), ("max_error", max_error)):
        if bound is not None:
            check_number(name, bound, positive=True)
    check_number("seconds", seconds, positive=True)
    configs = read_candidates(candidates, FASTEST)
    with step("recommend", progress) as advance, torch.inference_mode(False), torch.no_grad():
        trial = _Trial(model, example_inputs, max_bytes, max_error, seconds, fuse, filter_fn)
        total = len(configs) + 2  # with float and a mixture
        found = [trial.floating()]
        for config in configs:
            advance(len(found), total, str(config))
            found.append(trial.run(config))
        for config, name in trial.mixtures(found[1:]):
            advance(len(configs) + 1, total, "a mixture")
            found.append(trial.run(config, name))
            if found[-1].fits:
                break
    chosen = best(found)
    _LOG.info("recommend: %s of %d candidates", None if chosen is None else chosen.name, len(found))
    return Recommendation(chosen, found, verdict(chosen, found, max_bytes, max_error), torch.get_num_threads())


class _Trial:
    """One model, its reference outputs, and the bounds."""

    def __init__(
        self, model: nn.Module, inputs: Any, max_bytes: int | None, max_error: float | None, seconds: float, fuse: bool,
        filter_fn: Filter | None,
    ) -> None:  # fmt: skip
        self.model, self.inputs, self.seconds, self.fuse, self.filter = model, inputs, seconds, fuse, filter_fn
        self.max_bytes, self.max_error = max_bytes, max_error
        self.base = _copy(model, None)
        self.rows, output = layer_calls(self.base, lambda: self.call(self.base))
        self.exact = _floats(output)
        if not self.exact:
            raise ValueError(
                f"the model returns no floating-point tensor for these inputs, got {type(output).__name__}"
            )
        self.wait, self.quickest = wait_for(self.exact[0].device), math.inf

    def call(self, model: nn.Module) -> Any:
        return run_batch(model, self.inputs)

    def floating(self) -> Candidate:
        """The unchanged model."""
        out = Candidate("as it is", None, _nbytes(self.base), _error(self.exact, _floats(self.call(self.base))))
        out.why = self._misfit(out)
        if out.fits:
            out.seconds = out.float_seconds = self._timed(self.base)[0]
        return out

    def run(self, config: AOBaseConfig, name: str = "") -> Candidate:
        """Try one config on a copy."""
        out, model = Candidate(name or str(config), config, _nbytes(self.base)), _copy(self.model, config)
        try:
            config = out.config = self._selected(config)
            quantize_(model, config)
        except PlanError as error:
            out.why = f"cannot be applied: {error}"
            return out
        if self.fuse:
            report = fuse_(model, self.inputs)
            out.fused = sum(isinstance(module, FusedBlock) for module in model.modules())
            out.fused_nets = sum(isinstance(module, FusedConvNet) for module in model.modules())
            left = [row for row in report.skipped if not row.shape]  # rows of blocks and nets have no shape
            kinds = ("net" if quantized(model.get_submodule(row.name)) else "block" for row in left)
            reasons = Counter((kind, row.note) for kind, row in zip(kinds, left, strict=True))
            texts = [f"{counted(n, kind)} not fused: {why}" for (kind, why), n in reasons.most_common()]
            out.unfused = "; ".join([*texts, *report.notes])
        out.nbytes, out.error = _nbytes(model), _error(self.exact, _floats(self.call(model)))
        out.why = self._misfit(out)
        if out.fits:
            out.float_seconds, out.seconds = self._timed(self.base, model)
        return out

    def _selected(self, config: AOBaseConfig) -> AOBaseConfig:
        """The config for the parameters that the filter selects, by their names."""
        if self.filter is None or isinstance(config, FqnToConfig):
            return config
        if _has_handler(config):
            raise PlanError("a config with a handler for modules takes no filter_fn here; name them in FqnToConfig")
        return FqnToConfig({row.name: config for row in plan(self.base, config, self.filter).active})

    def _timed(self, *models: nn.Module) -> list[float]:
        """Seconds of a call of each; the first is the unchanged model. Repeats the measurement a few times while the
        first takes much longer than its best time so far, because the machine is then busy."""
        calls = [partial(self.call, model) for model in models]
        found = [math.inf]
        for _ in range(TRIES):
            took = least_seconds(calls, self.seconds, self.wait, TURN)
            self.quickest = min(self.quickest, took[0])
            found = min(found, took)
            if found[0] <= BUSY * self.quickest:
                break
        return found

    def _misfit(self, c: Candidate) -> str:
        too = []
        if self.max_bytes is not None and c.nbytes > self.max_bytes:
            too.append(f"{size(c.nbytes)} > {size(self.max_bytes)}")
        if self.max_error is not None and (c.error is None or not c.error <= self.max_error):
            too.append(f"error {c.error:.2g} > {self.max_error:.2g}")
        return "; ".join(too)

    # -- mixtures ----------------------------------------------------------------------------------------------------

    def mixtures(self, tried: list[Candidate]) -> list[tuple[AOBaseConfig, str]]:
        """(config, name) of the fastest candidate for each layer: float included, then excluded.

        Only candidates within the error bound take part, and a mixture equal to one of them is dropped. Layers that
        cannot be timed or are not called keep the scheme of the fastest candidate.
        """
        exact = [c for c in tried if c.error is not None and (self.max_error is None or c.error <= self.max_error)]
        exact.sort(key=lambda c: -(c.speed or 0))
        choices = [self._choices(c.config) for c in exact if c.config is not None and not _has_handler(c.config)]
        known = [{}, *({name: config for name, (config, _) in some.items()} for some in choices)]
        made: list[tuple[AOBaseConfig, str]] = []
        for least_speed in (NOISE, 0.0) if self.max_bytes is not None else (NOISE,):
            table = fastest_per_layer(choices, least_speed)
            if table not in known:
                known.append(table)
                counts = Counter(map(str, table.values()))
                left = len(dict.fromkeys(name for some in choices for name in some)) - len(table)
                texts = [f"{n} × {text}" for text, n in counts.items()] + [f"{left} × float"] * (left > 0)
                made.append((FqnToConfig(table), f"mixed: {', '.join(texts)}"))
        return made

    def _choices(self, config: AOBaseConfig) -> Choices:
        """The config of each parameter, and its speed."""
        out, chooses = plan(self.base, config), rules(config, None)
        found: Choices = {}
        for row, slow, fast in time_plan(out, self.rows):
            choice = chooses.choose(list(row.places))
            assert choice.config is not None
            found[choice.place.name] = (choice.config, slow / fast if row.latency else None)
        return found


def fastest_per_layer(choices: Sequence[Choices], least_speed: float) -> dict[str, AOBaseConfig]:
    """The fastest config for each parameter; no entry if none is faster than ``least_speed`` times float.

    A parameter that was not timed keeps its config from the first of ``choices``.
    """
    table = {}
    for name in dict.fromkeys(name for some in choices for name in some):
        timed = [(speed, config) for some in choices if name in some for config, speed in [some[name]] if speed]
        if timed:
            speed, config = max(timed, key=lambda pair: pair[0])
            if speed > least_speed:
                table[name] = config
        elif name in choices[0]:
            table[name] = choices[0][name][0]
    return table


# -- running models --------------------------------------------------------------------------------------------------


def _has_handler(config: AOBaseConfig) -> bool:
    inner = config.fqn_to_config.values() if isinstance(config, FqnToConfig) else ()
    return any(type(c) in HANDLERS for c in (config, *inner))


def _copy(model: nn.Module, config: AOBaseConfig | None) -> nn.Module:
    """A copy in eval mode that shares the parameters (quantize_ replaces them); a full copy if a config has a handler,
    which may change them in place."""
    shared = {} if config is not None and _has_handler(config) else {id(p): p for p in model.parameters()}
    return copy.deepcopy(model, shared).eval()


def _nbytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, each once."""
    return sum(int(t.nbytes) for t in {id(t): t for t in (*model.parameters(), *model.buffers())}.values())


def _floats(output: Any) -> list[Tensor]:
    return [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.is_floating_point()]


def _error(exact: list[Tensor], found: list[Tensor]) -> float:
    """||found - exact|| / ||exact|| over the finite elements of exact (masks hold -inf); inf if the shapes differ."""
    if [t.shape for t in exact] != [t.shape for t in found]:
        return math.inf
    noise = signal = 0.0
    for a, b in zip(exact, found, strict=True):
        finite = torch.isfinite(a)
        a, b = a[finite].double(), b[finite].double()
        signal += float(a.square().sum())
        noise += float((b - a).square().sum())
    return math.sqrt(noise / signal) if signal and math.isfinite(noise) else (math.inf if noise else 0.0)
