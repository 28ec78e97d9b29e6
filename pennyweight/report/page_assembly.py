"""Collects the data of an HTML report from folders: loads, runs and times the models, draws the figures."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..core.tensor import AffineQuantizedTensor
from ..io import open as open_checkpoint
from ..planning.layer_timing import ROTATED, ROWS, time_layer
from ..planning.parameters import Site, make_site
from ..planning.plan import PlanRow
from ..planning.report import Latency
from . import svg_figures
from .compare_models import compare, compare_weights
from .comparison import Comparison, Layer
from .layers import activations, flat_values, model_bytes, pairs, unwrapped
from .loading import kind_of_model, load_folder, load_tokenizer, pooling_of, read_texts, text_batches
from .page import ACTIVATIONS, HISTOGRAMS, Page, require_packages

Told = Callable[[str], None]


def gather(
    quantized_dir: str,
    float_dir: str = "",
    texts: Sequence[str] = (),
    *,
    command: str,
    batch: int,
    length: int,
    limit: int | None,
    measure: bool = False,
    pareto: Any = None,
    told: Told = lambda text: None,
) -> Page:
    """The page of a quantized checkpoint.

    float_dir  the float model's folder; "": sizes and schemes only
    texts      text files to run both models on; none: weights only
    measure    time each kind of linear layer against float
    pareto     points of other models, see svg_figures.check_points
    told       called with each progress message

    Raises ValueError (CheckpointError for files) and OSError.
    """
    require_packages()
    title = os.path.basename(os.path.realpath(quantized_dir)) or quantized_dir
    points = None if pareto is None else svg_figures.check_points(pareto)
    if not float_dir:
        page = Page(title, command, _versions(), *_stored(quantized_dir))
        return _with_pareto(page, points)
    written = read_texts(texts)
    told(f"loading {float_dir}")
    exact = load_folder(float_dir)
    told(f"loading {quantized_dir}")
    found = load_folder(quantized_dir, float_dir)
    comparison: Comparison | None = None
    inputs = []
    if written:
        tokenizer = load_tokenizer(float_dir)
        batches = text_batches(exact, tokenizer, written, batch=batch, length=length, limit=limit)
        told("comparing")
        comparison = compare(exact, found, batches, kind=kind_of_model(exact), pooling=pooling_of(float_dir))
        layers, unmatched = comparison.layers, comparison.unmatched
        inputs = _inputs(exact, batches)
    else:
        layers, unmatched = compare_weights(exact, found)
    latency: dict[str, tuple[Latency, ...]] = {}
    if measure:
        latency = time_layers(exact, found, progress=lambda name: told(f"timing layers such as {name}"))
    told("drawing")
    page = Page(
        title, command, _versions(), layers, model_bytes(found), model_bytes(exact), comparison,
        ", ".join(os.path.basename(t) for t in texts), latency, _histograms(exact, found, layers), inputs,
        unmatched=unmatched,
    )  # fmt: skip
    return _with_pareto(page, points)


def _stored(folder: str) -> tuple[list[Layer], int]:
    """(layers of a checkpoint by its headers, bytes of all tensors)."""
    layers: list[Layer] = []
    with open_checkpoint(folder) as checkpoint:
        total = sum(held.nbytes for held in checkpoint.held.values())
        for name, held in checkpoint.held.items():
            shape, meta = tuple(held.kind.shape), held.meta
            if len(shape) < 2:
                continue
            scheme = ""
            if meta is not None:
                scheme = f"{meta.spec.with_(layout='plain')}{' perm' if meta.perm else ''}"
                scheme += "" if meta.act is None else f" × {meta.act}"
            count = math.prod(shape)
            unknown = count * held.kind.dtype.itemsize  # its size before quantization
            layers.append(Layer(name, "", shape, scheme, count, unknown, held.nbytes, math.nan))
    return layers, total


def _histograms(exact: nn.Module, found: nn.Module, layers: Sequence[Layer]) -> list[tuple[str, str, str]]:
    weights: dict[str, tuple[Tensor, Tensor]] = {p.name: (p.exact.get(), p.found.get()) for p in pairs(exact, found)[0]}
    out = []
    for w in [w for w in layers if w.quantized and not w.tied and w.worst < math.inf][:HISTOGRAMS]:
        a, b = (flat_values(t) for t in weights[w.name])
        error = f"weight {w.weight_sqnr:.1f} dB" + ("" if w.layer_sqnr is None else f", layer {w.layer_sqnr:.1f} dB")
        out.append((w.name, svg_figures.weight_histogram(a, b, f"Values of {w.name}"), f"{w.scheme}: {error}"))
    return out


def _inputs(exact: nn.Module, batches: Any) -> list[Any]:
    """The layers with the strongest outliers; layers that share an input appear once."""
    seen: set[object] = set()
    out: list[Any] = []
    for one in activations(exact, batches):
        key = (one.channels.numpy().tobytes(), one.bins.numpy().tobytes())
        if key not in seen and len(out) < ACTIVATIONS:
            seen.add(key)
            out.append((one, svg_figures.activation_figure(one, f"Inputs of {one.name}")))
    return out


def _with_pareto(page: Page, points: Any) -> Page:
    if points is None:
        return page
    here = None
    c = page.comparison
    if c is not None and c.kl is not None and c.bits_per_weight is not None and c.kl.mean > 0:
        here = (c.bits_per_weight, c.kl.mean)
    page.pareto = svg_figures.pareto_figure(points, here, "KL over bits per weight")
    return page


def _versions() -> str:
    from .. import __version__

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
