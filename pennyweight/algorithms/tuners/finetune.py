"""improve(): reduces the error of an already quantized model at the same format and size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core import blocks
from ...core.model_arguments import check_arguments
from ...core.numerics import Parts, dequantize, part_value, to_stored
from ...core.qparams import Params
from ...core.tensor import AffineQuantizedTensor
from ...planning.config_resolution import PlanError
from ...planning.parameters import Place, places
from ...planning.quantize_report import Report, Row
from ...support.arguments import check_number
from ...support.progress import Progress, step
from ..base import Tuner
from ..calibration.batches import Batches, held_out, read
from ..calibration.collect_statistics import CollectedStatistics
from ..calibration.loop import HELD_OUT, CalibrationLoop
from ..solvers.gptq import inverse_cholesky, quantize_columns
from ..solvers.qparam_grid import make_grid
from ..solvers.refinement import BestCandidate, output_errors, refit_and_descend
from ..tied_weights import Trial, add_lookups, divergences, lookup_ratio


@check_arguments()
def improve(
    model: nn.Module,
    float_model: nn.Module,
    batches: Sequence[Any],
    *,
    sweeps: int = 2,
    damping: float = 0.01,
    tuner: Tuner | None = None,
    progress: Progress = None,
) -> Report:
    """Reduce the output error of a quantized model's layers in place; specs, layouts, sizes and names do not change.

    model           with quantized weights from any tool: loaded from GPTQ, AWQ, GGUF, ... (``pw.load``)
    float_model     the original float model, with parameters of the same names
    batches         calibration data, see :func:`quantize_`
    sweeps          of scale refitting (if scales are stored as floats) and of coordinate descent
    tuner           applied afterwards, such as ``Tune()``; default: none
    progress        a bar after two seconds by default; False: none; or a function, called with (done, total, name)

    Candidates for each weight, in the model's call order: the existing codes, second-order rounding onto the existing
    grid, and refinements of the better one. Each row keeps the candidate with the smallest output error tr(D H D^T), so
    no row gets worse on the calibration data. Returns a report whose "error" is a fraction of the error before.
    Raises PlanError if a weight has no counterpart of its shape in ``float_model``, or if nothing is quantized.
    """
    check_number("improve: sweeps", sweeps, 0, integer=True)
    found: dict[str, tuple[list[Place], AffineQuantizedTensor, Tensor]] = {}
    originals = dict(float_model.named_parameters(remove_duplicate=False))
    for where in places(model):
        w = where[0].get()
        if not isinstance(w, AffineQuantizedTensor):
            continue
        original = next((originals[p.name] for p in where if p.name in originals), None)
        if original is None or tuple(original.shape) != tuple(w.shape) or isinstance(original, AffineQuantizedTensor):
            has = "none" if original is None else f"{type(original).__name__} {list(original.shape)}"
            raise PlanError(
                f"{where[0].name} {list(w.shape)}: float_model has {has} of that name; pass the original float model"
            )
        found[where[0].name] = where, w, original.detach()
    if not found:
        raise PlanError("improve: the model has no quantized weight; quantize_ it first")
    batches = read(batches, "batches", together=True)
    if not batches:
        raise PlanError("improve needs calibration data; pass batches")
    rows: dict[str, Row] = {}
    with step("improve", progress) as advance, torch.inference_mode(False), torch.no_grad():
        weights = {id(w): name for name, (_, w, _) in found.items()}
        for names, seen in CalibrationLoop(model, weights, batches, ("hessian",)).stages():
            for name in names:
                it = seen.get(name, CollectedStatistics())
                improved = _improve_looked_up if it.looked_up and it.stats else _improve
                rows[name] = improved(*found[name], it, sweeps, damping, model, batches)
                advance(len(rows), len(found), name)
        for name in found.keys() - rows.keys():
            where, w, _ = found[name]
            rows[name] = _row(where, w, None, None, "no calibration data; unchanged")
        report = Report("improve", [rows[name] for name in found], verb="improved")
        if tuner is not None:
            report.notes += list(tuner.tune(model, float_model, batches).values())
    return report


def _improve(
    where: list[Place],
    w: AffineQuantizedTensor,
    original: Tensor,
    seen: CollectedStatistics,
    sweeps: int,
    damping: float,
    *_: Any,
) -> Row:
    hessian = seen.stats.get("hessian")
    why = f"has {w.ndim} axes" if w.ndim != 2 else "no calibration data" if hessian is None else ""
    why = why or ("learned format" if w.spec.format.kind == "learned" else "")
    f = None
    if hessian is not None and not why:
        h = hessian[0] if w.pre_scale is None else hessian[0] * w.pre_scale * w.pre_scale.unsqueeze(1)
        h = h if w.perm is None else h[w.perm][:, w.perm]
        f = inverse_cholesky(h, damping, True)
        why = "" if f is not None else "the Hessian is not positive definite at any damping"
    if why or f is None:
        return _row(where, w, None, None, f"{why}; unchanged")
    x = original.float() if w.axes is None else original.float().t()
    x = to_stored(x, w.perm, w.pre_scale)
    spec, shape, parts = w.spec.with_(layout="plain"), x.shape, w.plain_parts()._replace(perm=None, pre_scale=None)
    part_shape = blocks.counts(spec.block, shape)
    stored = Params(
        _stored(parts.scale, spec.scale, part_shape), parts.zero_point, _stored(parts.offset, spec.offset, part_shape)
    )
    g = make_grid(stored, spec, shape, stored)
    n, k = shape
    target, codes, values = (m.t().contiguous() for m in (x, parts.codes[:n, :k], dequantize(parts, spec, shape)))
    first = output_errors(values - target, h)
    best = BestCandidate(g, codes, values, first, shape)
    codes, values = map(f.in_own_order, quantize_columns(f.in_order(target), g, f)[:2])
    best.offer(g, codes, values, output_errors(values - target, h))
    refit_and_descend(best, target, h, sweeps)
    all_codes = parts.codes.clone()
    all_codes[:n, :k] = best.codes.t()
    parts = parts._replace(codes=all_codes)
    if best.grid is not g:
        kept = {"scale": best.grid.chosen.scale, "offset": best.grid.chosen.offset}
        parts = parts._replace(**{s: v.to(getattr(spec, s)) for s, v in kept.items() if v is not None})
    parts = parts._replace(perm=w.perm, pre_scale=w.pre_scale)
    new = w.with_(parts=parts, spec=spec, readonly=False).to_layout(w.spec.layout)
    value = nn.Parameter(new, requires_grad=w.requires_grad)
    for place in where:
        place.set(value)
    before, after = float(first.sum()), float(best.error.sum())
    return _row(where, new, new.error(original), after / before if before > 0 else 1.0, "")


def _improve_looked_up(
    where: list[Place], w: AffineQuantizedTensor, original: Tensor, seen: CollectedStatistics, sweeps: int,
    damping: float, model: nn.Module, batches: Sequence[Any],
) -> Row:  # fmt: skip
    """Of a weight that the model multiplies and looks up: for both, and kept if the outputs of the model get closer to
    those with the float weight on held-out data (see :mod:`pennyweight.algorithms.tied_weights`)."""
    data, guard = held_out(Batches(batches), HELD_OUT)
    if not guard:
        return _row(where, w, None, None, "looked up too, and one sample leaves no held-out data; unchanged")
    tensor = where[0].get()
    ratio = lookup_ratio(model, tensor, w, seen.stats, data, original=original, transposed=w.axes is not None)
    if not math.isfinite(ratio):
        return _row(where, w, None, None, "looked up too, and its products have no effect; unchanged")
    row = _improve(where, w, original, add_lookups(seen, ratio), sweeps, damping)
    new = where[0].get()
    before, after = divergences(model, new, [Trial(w), Trial(new)], guard, original)
    text = f"held-out divergence {before:.3g} -> {after:.3g}"
    if after < before:
        row.note = f"improved for its products and lookups; {text}"
        return row
    for place in where:
        place.set(tensor)
    return _row(where, w, None, None, f"looked up too, {text}; unchanged")


def _stored(part: Any, kind: Any, shape: tuple[int, ...]) -> Tensor | None:
    """A part in its stored dtype; in float32 if it is quantized itself."""
    return part_value(part, kind, shape, torch.float32) if isinstance(part, Parts) else part


def _row(where: list[Place], w: Any, sqnr: float | None, error: float | None, note: str) -> Row:
    kind = type(where[0].module).__name__
    spec = str(w.spec.with_(layout="plain"))
    return Row(where[0].name, kind, tuple(w.shape), spec, "", w.nbytes, w.nbytes, sqnr, note, error=error)
