"""quantize_(model, config): quantizes a model in place, one parameter at a time, and returns a Report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core import quantize_backends
from ..core.numerics import Parts, dequantize, quantize
from ..core.tensor import AffineQuantizedTensor, check_finite
from ..distributed.dtensor import distribute_like, full_tensor, is_fully_sharded, local_tensor
from .config_resolution import Filter, PlanError
from .configs import AOBaseConfig
from .freeze import thaw_
from .layer_timing import measure_, row_counts, skip_slower_, warn_slower
from .module_handlers import MODEL_HANDLERS, apply_callable, module_nbytes
from .parameters import places
from .plan import Plan, PlanRow, plan
from .report import Report, Row
from .save_pretrained import settle_saving_
from .scheme import Scheme

ON_SLOWER = ("keep", "skip")
Put = Callable[[PlanRow, Row, AffineQuantizedTensor, float, Any], None]
_CHUNK = 1 << 24  # elements quantized at a time; bounds the float32 temporaries


def quantize_(
    model: nn.Module,
    config: AOBaseConfig | Callable[[nn.Module], nn.Module],
    filter_fn: Filter | None = None,
    device: torch.device | str | None = None,
    *,
    dry_run: bool = False,
    on_indivisible: str = "pad",
    measure: bool | Sequence[int] = False,
    on_slower: str = "keep",
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Quantize the model's parameters in place and return a report.

    config          the scheme of each selected parameter
    filter_fn       (module, fqn) -> bool; default: linear modules
    device          move each selected module there; its weight is moved before it is quantized
    dry_run         only plan, and measure if requested
    on_indivisible  group sizes that do not divide: "pad" (exact), "largest_divisor", "skip", "error"
    measure         time each shape of linear layer against float, with these numbers of rows; True: 1 and 64
    on_slower       a layer slower than float at one of them: "keep" it and warn, or "skip" it, left unquantized
    progress        called with (done, total, name)

    All checks run before any change. Each float weight is freed before the next is read. Tied parameters stay tied.
    A parameter that already has the scheme is left unchanged. Raises PlanError (a ValueError).
    Parameters on the meta device are quantized there, without values, packed as for a CPU. Load a checkpoint into them
    with ``load_state_dict(..., assign=True)``, or with ``to_empty`` and ``load_state_dict``.
    """
    if not isinstance(config, AOBaseConfig) and callable(config):
        if measure or on_slower != "keep":
            raise PlanError("measure and on_slower need a config, got a function over modules")
        report = apply_callable(model, config, filter_fn, device)
        settle_saving_(model)
        return report
    run = partial(
        _quantize, filter_fn=filter_fn, device=device, dry_run=dry_run, on_indivisible=on_indivisible, measure=measure,
        on_slower=on_slower, progress=progress,
    )  # fmt: skip
    handler = MODEL_HANDLERS.get(type(config))
    report = run(model, config) if handler is None else handler(model, config, run)
    if not dry_run:
        settle_saving_(model, config)
    return report


def _quantize(
    model: nn.Module, config: AOBaseConfig, *, filter_fn: Filter | None, device: Any, dry_run: bool,
    on_indivisible: str, measure: bool | Sequence[int], on_slower: str, progress: Any, put: Put | None = None,
) -> Report:  # fmt: skip
    # Parameters created in inference mode cannot be used by autograd later.
    with torch.inference_mode(False), torch.no_grad():
        todo = checked_plan(
            model, config, filter_fn, device, dry_run=dry_run, on_indivisible=on_indivisible, measure=measure,
            on_slower=on_slower, meta=put is None,
        )  # fmt: skip
        report = todo.report()
        if not dry_run:
            _carry_out(model, todo, report, device, progress, put or put_)
    return report


def checked_plan(
    model: nn.Module, config: AOBaseConfig, filter_fn: Filter | None, device: torch.device | str | None, *,
    dry_run: bool, on_indivisible: str, measure: bool | Sequence[int], on_slower: str, meta: bool = False,
) -> Plan:  # fmt: skip
    """The plan of :func:`quantize_`, fully checked, with layers timed if requested. Changes nothing.

    meta: whether parameters may be on the meta device.
    """
    counts = row_counts(measure)
    if on_slower not in ON_SLOWER:
        raise PlanError(f"on_slower must be one of {ON_SLOWER}, got {on_slower!r}")
    if on_slower == "skip" and not counts:
        raise PlanError("on_slower='skip' needs measure=True, or numbers of rows such as measure=(1, 64)")
    todo = plan(model, config, filter_fn, on_indivisible=on_indivisible, device=device)
    if not dry_run and any(map(is_fully_sharded, model.modules())):
        raise PlanError(
            "fully_shard manages parameters of this model, so they cannot be replaced; call quantize_ first, then "
            "fully_shard"
        )
    if counts or not dry_run:
        _check_values(todo, meta and not counts)
    if counts:
        measure_(todo, lambda row: counts, lambda row: solve(row, device)[0])
        (skip_slower_ if on_slower == "skip" else warn_slower)(todo)
    return todo


def _check_values(todo: Plan, meta: bool) -> None:
    for row in todo.active:
        if row.tensor is None or (meta and row.tensor.is_meta):
            continue
        if row.tensor.is_meta:
            raise PlanError(
                f"{row.name} is on the meta device and has no values to measure or calibrate; load the weights first"
            )
        if isinstance(row.tensor, AffineQuantizedTensor):
            continue
        try:
            check_finite(local_tensor(row.tensor.detach()), row.name)
        except ValueError as error:
            raise PlanError(str(error)) from error


def _carry_out(model: nn.Module, todo: Plan, report: Report, device: Any, progress: Any, put: Put) -> None:
    total, done = len(todo.active), 0
    for row, out in zip(todo.rows, report.rows, strict=True):
        if row.call is not None:
            run_handler_row(model, row, out, device)
        elif row.active:
            w, sqnr = solve(row, device)
            put(row, out, w, sqnr, device)
        row.tensor = None  # frees the float weight before the next is read
        if row.active:
            done += 1
            if progress is not None:
                progress(done, total, row.name)


def run_handler_row(model: nn.Module, row: PlanRow, out: Row, device: Any) -> None:
    """Transform the module of a row that has a handler."""
    new = row.call(model, device=device)
    out.type, out.bytes_after = type(new).__name__, _nbytes_after(new, row)


def put_(row: PlanRow, out: Row, w: AffineQuantizedTensor, sqnr: float, device: Any) -> None:
    """Replace the parameter by its quantized weight in every place, fill in the report row, free the float weight."""
    out.sqnr, out.bytes_after = (None if w.is_meta else sqnr), w.nbytes
    if w.is_meta:
        out.note = "; ".join(filter(None, (out.note, "on the meta device, without values")))
    replace_(row, distribute_like(w, row.tensor))
    _move_rest(row, device)
    row.tensor = None


def _nbytes_after(new: nn.Module, row: PlanRow) -> int:
    return int(getattr(new, row.name.rpartition(".")[2]).nbytes) if row.shape else module_nbytes(new)


def solve(row: PlanRow, device: torch.device | str | None = None) -> tuple[AffineQuantizedTensor, float]:
    """Round-to-nearest of one planned parameter: (tensor in its kernel's layout and logical order, SQNR in dB)."""
    assert row.scheme is not None
    assert row.site is not None
    assert row.tensor is not None
    x = full_tensor(row.tensor.detach())
    if isinstance(x, AffineQuantizedTensor):
        x = x.dequantize()
    if device is not None:
        x = x.to(device)
    flip = row.site.transposed
    w, sqnr = quantize_weight(x.transpose(-2, -1) if flip else x, row.scheme, row.name, row.layout)
    return (w.transpose(-2, -1) if flip else w), sqnr  # type: ignore[return-value]


def quantize_weight(
    x: Tensor, scheme: Scheme, name: str = "weight", layout: str = "plain"
) -> tuple[AffineQuantizedTensor, float]:
    """Quantize x [.., contracted] under a scheme: (tensor in ``layout``, SQNR in dB). Raises ValueError for NaN or inf.

    Without a fast kernel for the device it works on chunks of rows, so that temporaries stay small.
    """
    spec = scheme.weight.with_(layout=layout)
    fast = quantize_backends.quantize(x, spec, scheme.rule, scheme.eps)
    if fast is not NotImplemented and math.isfinite(fast.signal):
        parts = fast.parts._replace(**static_parts(scheme, x.device))
        return AffineQuantizedTensor(parts, spec, x.shape, x.dtype, scheme.act), decibels(fast.signal, fast.noise)
    check_finite(x, name)
    spec = spec.with_(layout="plain")
    step = max(1, x.shape[0] if x.ndim else 1)
    if x.ndim > 1 and x.shape[0] > 1 and spec.rows_independent(x.shape):
        step = min(step, max(1, _CHUNK // max(1, x[0].numel())))
    pieces, signal, noise = [], 0.0, 0.0
    for start in range(0, max(1, x.shape[0] if x.ndim else 1), step):
        piece = x[start : start + step] if x.ndim else x
        parts = quantize(piece, spec, scheme.rule, scheme.eps)
        pieces.append(parts)
        if not (x.is_meta or isinstance(x, torch._subclasses.FakeTensor)):  # these have no values
            exact = piece.float()
            signal += float(torch.linalg.vector_norm(exact)) ** 2
            noise += float(torch.linalg.vector_norm(dequantize(parts, spec, piece.shape).sub_(exact))) ** 2
    parts = pieces[0] if len(pieces) == 1 else Parts(*map(_join, zip(*pieces, strict=True)))
    parts = parts._replace(**static_parts(scheme, x.device))
    w = AffineQuantizedTensor(parts, spec, x.shape, x.dtype, scheme.act).to_layout(layout)
    return w, decibels(signal, noise)


def decibels(signal: float, noise: float) -> float:
    """10 log10(signal / noise); inf where either is zero."""
    return 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else math.inf


def _join(slot: tuple[Any, ...]) -> Any:
    if isinstance(slot[0], Parts):
        return Parts(*map(_join, zip(*slot, strict=True)))
    return None if slot[0] is None else torch.cat(slot)


def static_parts(scheme: Scheme, device: torch.device) -> dict[str, Tensor]:
    """Stored parameters of a static activation."""
    parts = {}
    if scheme.act_scale is not None:
        parts["act_scale"] = torch.tensor([scheme.act_scale], dtype=torch.float32, device=device)
    if scheme.act_zero_point is not None and scheme.act is not None:
        dtype = scheme.act.spec.zero_point_dtype
        parts["act_zero_point"] = torch.tensor([scheme.act_zero_point], dtype=dtype, device=device)
    return parts


def replace_(row: PlanRow, tensor: Tensor) -> None:
    """Put one tensor in all places of a row, as one Parameter, or as a plain tensor if a place held one."""
    value = nn.Parameter(tensor, requires_grad=False)
    for place in row.places:
        place.set(value)


def _move_rest(row: PlanRow, device: Any) -> None:
    """Move the other tensors of a row's modules (a bias) to the device of the weight."""
    for place in row.places if device is not None else ():
        for p in place.module._parameters.values():
            if p is not None and not isinstance(p, AffineQuantizedTensor):
                p.data = p.data.to(device)
        for name, b in place.module._buffers.items():
            place.module._buffers[name] = None if b is None else b.to(device)


def dequantize_(model: nn.Module) -> Report:
    """Dequantize every quantized parameter in place; ties are kept. Returns a report.

    A frozen model is thawed first. requires_grad is copied from the quantized parameter (quantize_ leaves it False).
    """
    rows = []
    thaw_(model)
    with torch.inference_mode(False), torch.no_grad():
        for where in list(places(model)):
            w = where[0].get()
            if not isinstance(w, AffineQuantizedTensor):
                continue
            value = nn.Parameter(w.dequantize().contiguous(), requires_grad=w.requires_grad)
            for place in where:
                place.set(value)
            name, kind = where[0].name, type(where[0].module).__name__
            float_name, note = str(w.dtype).removeprefix("torch."), f"was {w.spec.with_(layout='plain')}"
            rows.append(Row(name, kind, tuple(w.shape), float_name, "", w.nbytes, value.nbytes, None, note))
    settle_saving_(model)
    return Report("dequantize_", rows, verb="dequantized")
