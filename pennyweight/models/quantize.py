"""quantize_(model, config): in place, one parameter at a time, and a Report of what happened."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core import blocks
from ..core.layouts import get_layout
from ..core.numerics import Parts, dequantize, quantize
from ..core.tensor import AffineQuantizedTensor, check_finite
from .configs import AOBaseConfig
from .plan import Filter, Plan, PlanError, PlanRow, plan
from .report import Report, Row
from .scheme import Scheme

HANDLERS: dict[type, Callable[..., nn.Module]] = {}
_CHUNK = 1 << 24  # elements quantized at a time, so that float32 temporaries stay small beside the weight


def register_quantize_module_handler(
    config_type: type,
) -> Callable[[Callable[..., nn.Module]], Callable[..., nn.Module]]:
    """Decorate ``handler(module, config) -> module`` to make it run for every module chosen under a config of yours.

    A handler that also takes ``parameter_name`` is told which parameter was named. Raises ValueError for a type that
    has a handler.
    """

    def add(handler: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        if config_type in HANDLERS:
            raise ValueError(f"{config_type.__name__} has a handler already: {HANDLERS[config_type].__name__}")
        HANDLERS[config_type] = handler
        return handler

    return add


def quantize_(
    model: nn.Module,
    config: AOBaseConfig | Callable[[nn.Module], nn.Module],
    filter_fn: Filter | None = None,
    device: torch.device | str | None = None,
    *,
    dry_run: bool = False,
    on_indivisible: str = "pad",
    progress: Callable[[int, int, str], None] | None = None,
) -> Report:
    """Quantize the model's parameters in place and say what happened.

    config          what each chosen parameter becomes
    filter_fn       (module, fqn) -> bool; default: linear modules
    device          move each weight there before it is quantized
    dry_run         only plan
    on_indivisible  group sizes that do not divide: "pad" (exact), "largest_divisor", "skip", "error"
    progress        called with (done, total, name)

    Everything is checked before anything is changed. Each float weight is freed before the next is read; tied
    parameters stay tied; a parameter that has the scheme already is left as it is. Raises PlanError (a ValueError).
    """
    if not isinstance(config, AOBaseConfig) and callable(config):
        return _apply_callable(model, config, filter_fn, device)
    todo = plan(model, config, filter_fn, on_indivisible=on_indivisible, handlers=HANDLERS, device=device)
    report = todo.report()
    if dry_run:
        return report
    for row in todo.active:
        if row.scheme is not None and row.tensor.device.type == "meta" and device in (None, "meta"):
            raise PlanError(f"{row.name} is on the meta device and has no values; load the weights first")
        if row.scheme is not None and not isinstance(row.tensor, AffineQuantizedTensor):
            check_finite(row.tensor.detach(), row.name)
    _carry_out(model, todo, report, device, progress)
    return report


def _carry_out(model: nn.Module, todo: Plan, report: Report, device: Any, progress: Any) -> None:
    active = {id(r) for r in todo.active}
    done, handled = 0, set()
    for i, row in enumerate(todo.rows):
        out = report.rows[i]
        if id(row) in active:
            if row.handler is not None:
                if row.module not in handled:
                    handled.add(row.module)
                    _handle(model, row, out, device)
            else:
                w, out.sqnr = solve(row, device)
                out.bytes_after = w.nbytes
                _replace(model, row, w)
            done += 1
            if progress is not None:
                progress(done, len(active), row.name)
        elif row.already and isinstance(row.tensor, AffineQuantizedTensor):
            out.bytes_after = row.tensor.nbytes
        row.tensor = torch.empty(0, device="meta")  # the float weight is free before the next is read


def solve(row: PlanRow, device: Any = None) -> tuple[AffineQuantizedTensor, float]:
    """Round-to-nearest of one planned parameter: (tensor in its kernel's layout and logical order, SQNR in dB)."""
    assert row.scheme is not None and row.site is not None
    x = row.tensor.detach()
    if isinstance(x, AffineQuantizedTensor):
        x = x.dequantize()
    if device is not None:
        x = x.to(device)
    w, sqnr = quantize_weight(x.t() if row.site.transposed else x, row.scheme, row.name)
    w = w.to_layout(row.layout)
    return (w.t() if row.site.transposed else w), sqnr  # type: ignore[return-value]


def quantize_weight(x: Tensor, scheme: Scheme, name: str = "weight") -> tuple[AffineQuantizedTensor, float]:
    """x [.., contracted] under a scheme, in rows so that temporaries stay small: (plain tensor, SQNR in dB)."""
    check_finite(x, name)
    spec = scheme.weight.with_(layout="plain")
    rows = x.shape[0] if x.ndim else 1
    independent = x.ndim > 1 and blocks.resolve(spec.block, x.shape)[0] == 1 and not _nested(spec)
    step = max(1, _CHUNK // max(1, x[0].numel())) if independent else rows
    pieces, signal, noise = [], 0.0, 0.0
    for start in range(0, max(rows, 1), max(step, 1)):
        piece = x[start : start + step] if independent else x
        parts = quantize(piece, spec, scheme.rule, scheme.eps)
        pieces.append(parts)
        if x.device.type != "meta":
            exact = piece.float()
            signal += float(exact.square().sum(dtype=torch.float64))
            noise += float((dequantize(parts, spec, piece.shape) - exact).square().sum(dtype=torch.float64))
    parts = pieces[0] if len(pieces) == 1 else Parts(*(_join(slot) for slot in zip(*pieces, strict=True)))
    if scheme.act_scale is not None:
        zero = None if scheme.act_zero_point is None else torch.tensor([scheme.act_zero_point], dtype=torch.int8)
        scale = torch.tensor([scheme.act_scale], dtype=torch.float32, device=x.device)
        parts = parts._replace(act_scale=scale, act_zero_point=None if zero is None else zero.to(x.device))
    parts = get_layout("plain").pack(parts, spec, x.shape)
    sqnr = 10 * math.log10(signal / noise) if noise > 0 and signal > 0 else math.inf
    return AffineQuantizedTensor(parts, spec, x.shape, x.dtype, scheme.act), sqnr


def _nested(spec: Any) -> bool:
    return not (isinstance(spec.scale, torch.dtype) and (spec.offset is None or isinstance(spec.offset, torch.dtype)))


def _join(slot: tuple[Any, ...]) -> Any:
    return None if slot[0] is None else torch.cat(slot)


def owners(model: nn.Module, row: PlanRow) -> list[tuple[nn.Module, str]]:
    """(module, parameter name) of every name of a row."""
    found = []
    for name in (row.name, *row.tied):
        module_name, _, param = name.rpartition(".")
        found.append((model.get_submodule(module_name), param))
    return found


def _replace(model: nn.Module, row: PlanRow, w: Tensor) -> None:
    """Put one tensor in the place of all names of a row: a Parameter, or a plain attribute where it was one."""
    value: Any = nn.Parameter(w, requires_grad=False)
    for module, param in owners(model, row):
        if param in module._parameters:
            module._parameters[param] = value
        else:
            setattr(module, param, value.data)


def _handle(model: nn.Module, row: PlanRow, out: Row, device: Any) -> None:
    """Run a user's handler on a module and put what it returns in the module's place."""
    module = model.get_submodule(row.module)
    if device is not None:
        module = module.to(device)
    takes_name = "parameter_name" in inspect.signature(row.handler).parameters
    new = row.handler(module, row.handler_config, **({"parameter_name": row.param} if takes_name else {}))
    if not isinstance(new, nn.Module):
        raise PlanError(f"{row.module or 'model'}: handler {row.handler.__name__} must return a module, got {new!r}")
    if new is not module:
        parent, _, child = row.module.rpartition(".")
        if not row.module:
            raise PlanError("a handler returned another module for the root; wrap the model in nn.Sequential first")
        setattr(model.get_submodule(parent), child, new)
    out.scheme, out.kernel = type(row.handler_config).__name__, "-"
    out.bytes_after = sum(int(p.nbytes) for p in new.parameters(recurse=False))


def _apply_callable(model: nn.Module, fn: Callable[..., Any], filter_fn: Filter | None, device: Any) -> Report:
    """torchao before 0.10: the second argument was a function over modules."""
    from .sites import is_linear

    warnings.warn(
        "quantize_(model, callable) is the spelling of torchao before 0.10; pass a config such as "
        "Int8WeightOnlyConfig(), or register a handler with register_quantize_module_handler",
        DeprecationWarning,
        stacklevel=3,
    )
    pick = filter_fn or is_linear
    rows = []
    for name, module in list(model.named_modules()):
        if not pick(module, name):
            continue
        before = sum(int(p.nbytes) for p in module.parameters())
        new = fn(module.to(device) if device is not None else module)
        if new is not module:
            if not name:
                raise PlanError("the function returned another module for the root; wrap the model in nn.Sequential")
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, new)
        after = sum(int(p.nbytes) for p in new.parameters())
        rows.append(Row(name, type(new).__name__, (), getattr(fn, "__name__", "callable"), "-", before, after))
    if not rows:
        raise PlanError("the filter matched no module, so nothing was quantized")
    return Report(f"{getattr(fn, '__name__', fn)}", rows)


def dequantize_(model: nn.Module) -> Report:
    """Undo: every quantized parameter becomes the float tensor it stands for; ties are kept. Returns what was done.

    requires_grad stays as it is on the quantized parameter (quantize_ leaves it False).
    """
    from .sites import parameters

    rows, new = [], {}
    for name, _, module, param, tensor in list(parameters(model)):
        if not isinstance(tensor, AffineQuantizedTensor):
            continue
        if id(tensor) not in new:
            value = tensor.detach().dequantize()
            new[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad), tensor
            rows.append(
                Row(name, type(module).__name__, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), "",
                    tensor.nbytes, value.nbytes, None, f"was {tensor.spec.with_(layout='plain')}")
            )  # fmt: skip
        replacement = new[id(tensor)][0]
        if param in module._parameters:
            module._parameters[param] = replacement
        else:
            setattr(module, param, replacement.data)
    return Report("dequantize_", rows)
