"""Collects the data of a report page from folders: loads, runs and times the models."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn

from ..core.describe_spec import shorten
from ..core.tensor import AffineQuantizedTensor
from ..io import open as open_checkpoint
from ..io.meta_model import load_tokenizer
from ..planning.layer_timing import ROTATED, ROWS, time_layer
from ..planning.parameters import Site, make_site
from ..planning.plan import PlanRow
from ..planning.quantize_report import Latency
from . import svg_figures
from .bytes_by_kind import KindBytes, model_kinds, stored_kinds
from .compare_models import compare, compare_weights
from .comparison import Comparison, Layer
from .error_sources import error_sources
from .evaluation_inputs import (
    input_batches,
    is_causal,
    kind_of_model,
    load_folder,
    pooling_of,
    read_texts,
    text_batches,
)
from .layers import Inputs, activations, check_one_model, model_bytes, pairs, unwrapped
from .model_speed import ROUNDS, model_speeds, processor, timed_batches
from .page import require_packages
from .page_data import Page, Quantization
from .suggestions import TRIALS, TRIALS_OF_SEVERAL, suggest
from .verdict import verdict
from .weight_errors import WeightErrors, weight_errors

Notify = Callable[[str], None]
FIGURES, FIGURES_OF_SEVERAL, ACTIVATIONS = 6, 3, 3  # layers shown
PATIENCE = 60.0  # seconds of trials if their number was not given


def gather(
    quantized: str | Sequence[str],
    float_dir: str = "",
    texts: Sequence[str] = (),
    *,
    command: str,
    batch: int,
    length: int,
    limit: int | None,
    inputs: str = "",
    measure: bool = False,
    speed: bool | None = None,
    rounds: int = ROUNDS,
    trials: int | None = None,
    pareto: Any = None,
    names: Sequence[str] = (),
    notify: Notify = lambda text: None,
) -> Page:
    """The page of one quantized checkpoint, or of several of one model.

    float_dir  the float model's folder; "": sizes and schemes only
    texts      text files to run the models on; inputs: instead, a safetensors file of the arguments of the model, see
               :func:`pennyweight.report.evaluation_inputs.input_batches`; neither: weights only
    measure    time each kind of linear layer against float
    speed      time the whole models in turn, ``rounds`` times; default: if there are several and inputs to run
    trials     suggestions tried by running both models; default: 8 for one checkpoint, 1 each for several, and none
               starts after a minute, or twice the time of the comparison if that is longer
    pareto     points of other models, see svg_figures.check_points
    names      of the checkpoints on the page; default: their folders' names
    notify     called with each progress message

    With several, all models are in memory at once. Raises ValueError (CheckpointError for files) and OSError.
    """
    require_packages()
    paths = [quantized] if isinstance(quantized, str) else list(quantized)
    if not paths:
        raise ValueError("a report needs at least one quantized checkpoint")
    names = names or _names(paths)
    points = None if pareto is None else svg_figures.check_points(pareto)
    title = names[0] if len(paths) == 1 else f"{len(paths)} quantizations of {_names([float_dir])[0] or 'a model'}"
    if not float_dir:
        stored = [_stored(path, name) for path, name in zip(paths, names, strict=True)]
        return Page(title, command, _versions(), stored, points=points)
    written = read_texts(texts)
    notify(f"loading {float_dir}")
    exact = load_folder(float_dir)
    batches: list[Any] = []
    if inputs:
        batches = input_batches(inputs, batch, limit)
    elif written:
        tokenizer = load_tokenizer(float_dir)
        batches = list(text_batches(exact, tokenizer, written, batch=batch, length=length, limit=limit))
    loaded = []
    for path in paths:
        notify(f"loading {path}")
        loaded.append(load_folder(path, float_dir))
        check_one_model(exact, loaded[-1], float_dir, path)
    several = len(paths) > 1
    patience = PATIENCE if trials is None else math.inf
    trials = (TRIALS_OF_SEVERAL if several else TRIALS) if trials is None else trials
    found = []
    for path, name, model in zip(paths, names, loaded, strict=True):
        found.append(
            _measured(
                exact, model, path, name, batches, float_dir, bool(inputs), measure, (trials, patience), several, notify
            )
        )
    timed = batches and (several if speed is None else speed)
    if timed:
        chosen = timed_batches(batches[0], is_causal(exact))
        for m, times in zip(
            found, model_speeds([exact, *loaded], chosen, rounds=rounds, notify=notify)[1:], strict=True
        ):
            m.speed = times
    for m, folder in zip(found, paths, strict=True):
        speeds = [s.speed for s in m.speed]
        m.verdict = verdict(
            m.comparison, m.layers, m.kinds, total=m.bytes, total_float=m.bytes_float, suggestions=m.suggestions,
            latency=m.latency, speed=min(speeds, default=None), tried=trials > 0 and _is_native(folder),
        )  # fmt: skip
    notify("drawing")
    return Page(
        title, command, _versions(), found, _sources_of_text(texts, inputs), _inputs(exact, batches) if batches else (),
        points, processor() if timed or measure else "", rounds if timed else 0, model_bytes(exact),
    )  # fmt: skip


def _measured(
    exact: nn.Module, model: nn.Module, path: str, name: str, batches: Sequence[Any], float_dir: str, given: bool,
    measure: bool, trials: tuple[int, float], several: bool, notify: Notify,
) -> Quantization:  # fmt: skip
    """All measurements of one quantization but the speed of the whole model. given: inputs instead of text;
    trials: their number, and the seconds after which none starts, or twice the time of the comparison."""
    comparison: Comparison | None = None
    found = Quantization(name, path, (), model_bytes(model), model_kinds(model, exact), model_bytes(exact))
    if batches:
        notify(f"comparing {path}")
        how: dict[str, Any] = {"pooling": pooling_of(float_dir)} | ({} if given else {"kind": kind_of_model(exact)})
        start = perf_counter()
        comparison = compare(exact, model, batches, **how)
        seconds = max(trials[1], 2 * (perf_counter() - start))
        found.layers, found.unmatched = comparison.layers, comparison.unmatched
        found.sources = error_sources(exact, model, batches)
        if trials[0] and _is_native(path):
            how["kind"] = comparison.kind
            found.suggestions = suggest(
                exact,
                model,
                comparison,
                batches,
                found.sources,
                trials=trials[0],
                seconds=seconds,
                notify=notify,
                **how,
            )
    else:
        found.layers, found.unmatched = compare_weights(exact, model)
    found.comparison = comparison
    found.errors = _errors(exact, model, found.layers, FIGURES_OF_SEVERAL if several else FIGURES)
    if measure:
        found.latency = time_layers(exact, model, progress=lambda name: notify(f"timing layers such as {name}"))
    return found


def _names(paths: Sequence[str]) -> list[str]:
    """The folders' names; whole paths if two are equal."""
    names = [os.path.basename(os.path.abspath(p)) or p for p in paths]
    return names if len(set(names)) == len(names) else list(paths)


def _sources_of_text(texts: Sequence[str], inputs: str) -> str:
    return ", ".join(os.path.basename(t) for t in ([inputs] if inputs else texts))


def _is_native(path: str) -> bool:
    """Whether ``pennyweight quantize`` writes such files, so that its options can be suggested."""
    with open_checkpoint(path) as checkpoint:
        return checkpoint.format == "pennyweight"


def _stored(folder: str, name: str) -> Quantization:
    """A checkpoint by its headers."""
    layers: list[Layer] = []
    entries = []
    with open_checkpoint(folder) as checkpoint:
        total = sum(stored.nbytes for stored in checkpoint.held.values())
        for key, stored in checkpoint.held.items():
            shape, meta = tuple(stored.kind.shape), stored.meta
            count = math.prod(shape)
            entries.append((key, len(shape), stored.nbytes, count, meta is not None))
            if len(shape) < 2:
                continue
            scheme = short = ""
            if meta is not None:
                scheme = f"{meta.spec.with_(layout='plain')}{' perm' if meta.perm else ''}"
                scheme += " pre_scale" if meta.pre_scale else ""
                scheme += "" if meta.act is None else f" × {meta.act}"
                short = shorten(meta.spec, meta.act, len(meta.shape))
            unknown = count * stored.kind.dtype.itemsize  # its size before quantization
            layers.append(Layer(key, "", shape, scheme, count, unknown, stored.nbytes, math.nan, scheme_short=short))
    kinds: list[KindBytes] = stored_kinds(entries)
    said = verdict(None, layers, kinds, total=total, total_float=None, latency={})
    return Quantization(name, folder, layers, total, kinds, verdict=said)


def _errors(exact: nn.Module, found: nn.Module, layers: Sequence[Layer], count: int) -> list[WeightErrors]:
    """Of the worst layers whose weight has an error."""
    by_name = {p.name: p for p in pairs(exact, found)[0]}
    some = [w for w in layers if w.quantized and not w.tied and w.worst < math.inf][:count]
    with torch.no_grad():
        return [weight_errors(by_name[w.name]) for w in some]


def _inputs(exact: nn.Module, batches: Any) -> list[Inputs]:
    """The layers with the strongest outliers; layers that share an input appear once."""
    seen: set[object] = set()
    out: list[Inputs] = []
    for one in activations(exact, batches):
        key = (one.channels.numpy().tobytes(), one.bins.numpy().tobytes())
        if key not in seen and len(out) < ACTIVATIONS:
            seen.add(key)
            out.append(one)
    return out


def _versions() -> str:
    from ..support.version import __version__

    machine = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return f"Pennyweight {__version__}, torch {torch.__version__}, {machine}"


# -- speed of layers ---------------------------------------------------------------------------------------------------


def time_layers(
    exact: nn.Module, found: nn.Module, rows: Sequence[int] = ROWS, progress: Callable[[str], None] | None = None
) -> dict[str, tuple[Latency, ...]]:
    """Latency of each quantized linear layer by the name of its weight; equal layers are timed once."""
    exact, found = unwrapped(exact), unwrapped(found)
    limit = min(ROTATED, model_bytes(exact)), min(ROTATED, model_bytes(found))
    known: dict[object, tuple[Latency, ...]] = {}
    out: dict[str, tuple[Latency, ...]] = {}
    for pair in pairs(exact, found)[0]:
        w, plain = pair.found.get(), pair.exact.get()
        site = make_site(pair.exact, plain)
        if not isinstance(w, AffineQuantizedTensor) or not isinstance(site, Site) or site.op != "linear" or w.ndim != 2:
            continue
        bias = getattr(pair.exact.module, pair.exact.param.replace("weight", "bias"), None)
        key = (site.shape, site.transposed, w.spec, w.act, w.dtype, site.dtype, bias is None)
        if key not in known:
            if progress is not None:
                progress(pair.name)
            row = PlanRow(
                pair.name, site.type_name, tuple(w.shape), plain.nbytes, w.nbytes, plain, (pair.exact,), site=site
            )
            known[key] = time_layer(row, w, tuple(rows), limit)
        out[pair.name] = known[key]
    return out
