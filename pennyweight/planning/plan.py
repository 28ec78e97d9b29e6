"""plan(): lists what quantize_ would do to every parameter. Changes nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..core import blocks
from ..core.model_arguments import ReturnedInPlaceOfModel, check_arguments
from ..core.numerics import quantize
from ..core.tensor import AffineQuantizedTensor, check_finite
from ..distributed.dtensor import local_tensor
from ..kernels.repack import choose_layout
from ..kernels.table import Case, case_of, get_kernel, select
from ..kernels.target import check_target, read_target, target_of
from ..support.arguments import did_you_mean
from .config_resolution import EMBEDDINGS, Choice, Filter, Left, PlanError, Rules, Skip, resolve_arguments, rules, skips
from .configs import AOBaseConfig, FqnToConfig
from .module_handlers import HANDLERS, PREVIEWS, Handler, module_nbytes, run_handler, takes_parameter_name
from .parameters import Indivisible, Place, Site, make_site, places
from .quantize_report import LARGER, Latency, Report, Row
from .scheme import Scheme, stored_scale

if TYPE_CHECKING:
    from pandas import DataFrame

ADAPTER = "part of a PEFT adapter, which is trained; merge it first, or name it in FqnToConfig"
ON_INDIVISIBLE = ("pad", "largest_divisor", "skip", "error")


@dataclass
class PlanRow:
    """One parameter and its scheme (scheme None: left alone, ``note`` gives the reason), or a module with its handler.

    tensor   the parameter; None for a handler's row
    places   every module attribute that holds it; the first gives the row's name; several if it is tied
    ops      kernel-table ops that read it
    already  True if it already has this scheme
    again    True if it has another scheme, so that its values were rounded before
    latency  of its layer, once measured
    call     the bound handler: (model, device=...) -> the new module; handled: its config
    left     "filtered" or "skipped" if the filter or the user's skip list leaves it alone
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    bytes_before: int
    bytes_after: int
    tensor: Tensor | None = field(default=None, repr=False)
    places: tuple[Place, ...] = field(default=(), repr=False)
    note: str = ""
    key: str = field(default="", repr=False)
    site: Site | None = None
    scheme: Scheme | None = None
    ops: tuple[str, ...] = ()
    kernel: str = ""
    layout: str = "plain"
    already: bool = False
    again: bool = False
    call: Any = field(default=None, repr=False)
    handled: AOBaseConfig | None = None
    latency: tuple[Latency, ...] = ()
    left: Left = ""

    @property
    def tied(self) -> tuple[str, ...]:
        """Its other names."""
        return tuple(p.name for p in self.places[1:])

    @property
    def active(self) -> bool:
        """True if quantize_ will change it."""
        return self.call is not None or (self.scheme is not None and not self.already)


@dataclass(repr=False)
class Plan(ReturnedInPlaceOfModel):
    """One row per parameter, in the model's order; a tied parameter appears once. ``print(plan)`` shows a table."""

    config: Any
    rows: list[PlanRow]
    filter_fn: Filter | None = field(default=None, repr=False)
    skip: Skip = field(default=(), repr=False)
    on_indivisible: str = field(default="pad", repr=False)

    def check_model(self, model: nn.Module) -> None:
        """Raise PlanError if this is the plan of a model with other parameters."""
        planned = {row.name: list(row.shape) for row in self.rows if row.call is None}
        found = {name: list(p.shape) for name, p in model.named_parameters()}
        handled = any(row.call is not None for row in self.rows)  # such rows stand for parameters without naming them
        for name in {**planned, **({} if handled else found)}:
            before, now = planned.get(name, "not there"), found.get(name, "not there")
            if before != now:
                raise PlanError(
                    f"the plan is of another model: {name} was {before}, here it is {now}; call plan with this one"
                )

    @property
    def active(self) -> list[PlanRow]:
        """Rows that will be changed."""
        return [r for r in self.rows if r.active]

    def report(self) -> Report:
        """The plan as a report without SQNR."""
        rows = []
        for r in self.rows:
            scheme = type(r.handled).__name__ if r.call is not None else "" if r.scheme is None else str(r.scheme)
            sizes = (r.bytes_before, r.bytes_after)
            row = Row(r.name, r.type_name, r.shape, scheme, r.kernel, *sizes, None, r.note, r.latency)
            if r.call is None and r.scheme is not None:
                rank = len(r.shape)
                row.scheme_text, row.scheme_short = r.scheme.describe(rank), r.scheme.shorten(rank)
            rows.append(row)
        return Report(str(self.config), rows, notes=self._notes())

    def _notes(self) -> list[str]:
        again = [r.name for r in self.rows if r.again]
        if not again:
            return []
        listed = ", ".join(again[:3]) + (", ..." if len(again) > 3 else "")
        return [
            f"{len(again)} parameters were quantized before ({listed}): their values are rounded again, and SQNR and "
            "error compare with the quantized values, not with the float ones. Quantize the float model to lose less"
        ]

    def to_pandas(self) -> DataFrame:
        """As :meth:`Report.to_pandas`."""
        return self.report().to_pandas()

    def _planned(self) -> Report:
        report = self.report()
        report.verb = "would be quantized"
        return report

    def __repr__(self) -> str:
        return repr(self._planned()).replace("<Report", "<Plan", 1)

    def __str__(self) -> str:
        return str(self._planned())

    def _repr_html_(self) -> str:
        return self._planned()._repr_html_()


@check_arguments(device=check_target)
def plan(
    model: nn.Module,
    config: AOBaseConfig | str,
    filter_fn: Filter | None = None,
    *,
    skip: Skip = (),
    on_indivisible: str = "pad",
    handlers: Mapping[type, Handler] | None = None,
    device: torch.device | str | None = None,
) -> Plan:
    """List every parameter with its site, scheme, kernel, bytes, and the reason if it is left alone. Changes nothing.

    config     a config, its short name ("int4"), or the path of its file ("mixed.yaml")
    filter_fn  (module, fqn) -> bool selects modules; default: linear ones
    skip       modules and parameters to leave alone: names, ends of names ("lm_head"), globs; or a function, see
               :func:`pennyweight.planning.config_resolution.skips`
    handlers   default: the registered ones
    device     where the weights will lie: kernels and bytes are those of this device, or of a target that this machine
               need not have ("cuda:sm_90", "hip:gfx942"). Default: where they are

    Works on the meta device. Raises PlanError if the plan quantizes nothing, a key or an entry of ``skip`` matches
    nothing, the config does not fit a layer, or the model is frozen.

    >>> import torch, pennyweight as pw
    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(torch.nn.Linear(4096, 4096), torch.nn.LayerNorm(4096))
    >>> planned = pw.plan(model, pw.Int4WeightOnlyConfig(group_size=128)).report()
    >>> [row.name for row in planned.quantized], [row.name for row in planned.skipped][-2:]
    (['0.weight'], ['1.weight', '1.bias'])
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps a module and puts its own prefix on names
    config, skip, on_indivisible = resolve_arguments(config, skip, on_indivisible)
    if on_indivisible not in ON_INDIVISIBLE:
        guess = did_you_mean(on_indivisible, ON_INDIVISIBLE, 1)
        raise PlanError(f"on_indivisible must be one of {', '.join(ON_INDIVISIBLE)}, got {on_indivisible!r}{guess}")
    if device is not None and str(device).partition(":")[0] == "meta":
        raise PlanError("device='meta' would discard the weights; leave device out")
    fixed = [(name, module.plan_error) for name, module in model.named_modules() if hasattr(module, "plan_error")]
    if fixed:
        name, (state, remedy) = fixed[0]
        raise PlanError(f"{name or 'model'} {state} ({len(fixed)} layers in all); {remedy}")
    chosen = rules(config, filter_fn)
    everywhere = list(places(model))
    handlers = HANDLERS if handlers is None else handlers
    flat = [place for where in everywhere for place in where]
    chosen.check_keys(flat, [name for name, _ in model.named_modules()], handlers)
    adapters, skipped = adapter_modules(model), skips(skip, flat)
    choices = [chosen.choose(where) for where in everywhere]
    excluded = {
        id(where[0].get()): why
        for where, choice in zip(everywhere, choices, strict=True)
        if (why := skipped(where, choice))
    }
    rows, taken, refused = _handled(model, chosen, handlers, adapters, excluded)
    for where, choice in zip(everywhere, choices, strict=True):
        tensor = where[0].get()
        if id(tensor) in excluded:
            choice = choice._replace(config=None, why=excluded[id(tensor)], left="skipped")
        if id(tensor) in taken:
            continue
        handler = handlers.get(type(choice.config))
        if choice.config is not None and not choice.named and id(choice.place.module) in adapters:
            choice = choice._replace(config=None, why=ADAPTER)
        if handler is not None and choice.named:
            rows.append(_handled_parameter(choice, tensor, handler))
            continue
        if handler is not None:  # a handler for whole modules that was not selected for this module
            module, tells = choice.place.module, PREVIEWS.get(type(choice.config))
            why = refused.get(id(tensor)) or (tells(module, choice.config)[1] if tells is not None else "")
            choice = choice._replace(config=None, why=why or f"{type(module).__name__}: not selected by default")
        row = _row(where, tensor, choice, on_indivisible, device)
        if isinstance(config, FqnToConfig) and row.key in config.notes:
            row.note = "; ".join(filter(None, (row.note, config.notes[row.key])))
        rows.append(row)
    _check(rows)
    return Plan(config, rows, filter_fn, skip, on_indivisible)


# -- parameters ------------------------------------------------------------------------------------------------------


def _row(where: list[Place], tensor: Tensor, choice: Choice, on_indivisible: str, device: Any) -> PlanRow:
    name, kind = where[0].name, type(where[0].module).__name__
    if nn.parameter.is_lazy(tensor):
        raise PlanError(f"{name} is a lazy parameter without values; run the model on one batch first")
    size = int(tensor.nbytes)
    row = PlanRow(name, kind, tuple(tensor.shape), size, size, tensor, tuple(where), key=choice.key, left=choice.left)
    site = make_site(choice.place, tensor, named=choice.named)
    if isinstance(site, str) or choice.config is None:
        row.note = site if isinstance(site, str) and choice.left != "skipped" else choice.why
        return row
    try:
        row.site = choice.config.site(site)
        _decide(row, choice.config, on_indivisible, device)
        if row.site.op == "bmm" and not choice.named and row.scheme is not None and not row.already:
            _check_batched(row)
    except Indivisible as error:
        if on_indivisible != "skip":
            raise PlanError(str(error)) from error
        row.note = f"skipped: {str(error).split(';')[0].removeprefix(f'{site.name}: ')}"
    except (ValueError, NotImplementedError) as error:
        text = str(error)
        if site.op == "bmm" and not choice.named:
            why = f"experts stay float: {text.removeprefix(f'{site.name}: ')}"
            return PlanRow(name, kind, row.shape, size, size, tensor, tuple(where), why, choice.key)
        raise PlanError(text if text.startswith(f"{site.name}: ") else f"{site.name}: {text}") from error
    return row


def _check_batched(row: PlanRow) -> None:
    """Raise ValueError for experts that could only run through a dequantized copy of all of them."""
    if get_kernel(row.ops[0], row.kernel).rank < 0:
        raise ValueError(
            f"no batched kernel supports this scheme; FqnToConfig({{{row.name!r}: config}}) quantizes them anyway"
        )


def _decide(row: PlanRow, config: AOBaseConfig, on_indivisible: str, device: Any) -> None:
    """Fill in scheme, ops, kernel, layout, bytes and notes."""
    site, tensor = row.site, row.tensor
    assert site is not None
    assert tensor is not None
    scheme = config.scheme(site, on_indivisible)
    if 0 in site.shape:
        row.note = "empty"
        return
    found = (make_site(p, tensor) for p in row.places)
    row.ops = tuple(dict.fromkeys([site.op, *(s.op for s in found if isinstance(s, Site))]))
    if row.ops == ("embedding",):
        scheme = scheme.weight_only()
    *rows, width = blocks.padded(scheme.weight.block, site.shape)
    _try(scheme, len(site.shape), site.dtype)
    row.scheme, notes = scheme, []
    if tuple(rows) != site.shape[:-1]:
        notes.append(f"{list(site.shape)} padded to {[*rows, width]}")
    elif width != site.shape[-1]:
        notes.append(f"{site.shape[-1]} inputs padded to {width}")
    if scheme.weight.block is not None and len(scheme.weight.block) == 1 and scheme.weight.block[0] > site.shape[-1]:
        notes.append(f"one group per row of {site.shape[-1]}")
    part = local_tensor(tensor)
    if part is not tensor:
        notes.append(f"quantized in full on each rank, then sharded: {', '.join(map(str, tensor.placements))}")  # type: ignore[attr-defined]
    if isinstance(part, AffineQuantizedTensor):
        row.already = _has_scheme(part, scheme)
        row.again = not row.already
        notes.append("already quantized" if row.already else f"was {part.spec.with_(layout='plain')}, requantized")
    if row.already and isinstance(part, AffineQuantizedTensor) and device is None:
        row.layout, row.kernel = part.spec.layout, select(row.ops[0], case_of(part)).name
    else:
        target = target_of(site.device) if device is None else read_target(device)
        case = Case(scheme.weight, scheme.act, site.shape, site.dtype, "cpu" if target == "meta" else target)
        kernel, row.layout = choose_layout(case, row.ops)
        row.kernel, row.bytes_after = kernel.name, scheme.nbytes(site.shape, row.layout)
        notes += _larger(row, scheme)
    if row.tied:
        notes.append(f"tied: {', '.join(row.tied)}")
    row.note = "; ".join(notes)


def _larger(row: PlanRow, scheme: Scheme) -> list[str]:
    """That a weight is larger than float, or that one of fewer bits is larger than int8 with a scale per channel."""
    assert row.site is not None
    numel, rows = math.prod(row.site.shape), row.site.shape[0]
    if row.bytes_after > numel * row.site.dtype.itemsize:
        return [f"{LARGER} float: {8 * row.bytes_after / numel:.1f} bits per weight"]
    if scheme.weight.format.bits < 8 and row.bytes_after > numel + 4 * rows:
        return [f"{LARGER} int8: {8 * row.bytes_after / numel:.1f} bits per weight"]
    return []


@lru_cache(maxsize=4096)
def _try(scheme: Scheme, rank: int, dtype: torch.dtype) -> None:
    """Raise ValueError if the scheme does not support a weight of that rank. Quantizes a single zero to find out.

    Does not use the meta device: its first operation makes torch import modules for a second.
    """
    quantize(torch.zeros((1,) * rank, dtype=dtype, device="cpu"), scheme.weight, scheme.rule, scheme.eps)


def _has_scheme(w: AffineQuantizedTensor, scheme: Scheme) -> bool:
    if scheme.sparsity:  # whether it was pruned cannot be told from its spec
        return False
    same = w.spec.with_(layout="plain") == scheme.weight.with_(layout="plain") and w.act == scheme.act
    if not same or scheme.act_scale is None or w.act_scale is None or w.act_scale.is_meta:
        return same
    zero = None if w.act_zero_point is None else w.act_zero_point.item()
    return torch.equal(w.act_scale.cpu(), stored_scale(scheme.act_scale, "cpu")) and zero == scheme.act_zero_point


# -- PEFT adapters: quantize_ does not quantize them, because they are trained ----------------------------------------


def adapter_modules(model: nn.Module) -> set[int]:
    """Ids of the adapter modules: lora_A, lora_B and others, and the copies of ``modules_to_save``.

    PEFT layers list them in ``adapter_layer_names``.
    """
    found: set[int] = set()
    for layer in model.modules():
        if not type(layer).__module__.startswith("peft."):
            continue
        for name in getattr(layer, "adapter_layer_names", ()):
            part = getattr(layer, name, None)
            if isinstance(part, nn.Module):
                found |= {id(m) for m in part.modules()}
    return found


# -- modules with handlers -------------------------------------------------------------------------------------------


def _handled(
    model: nn.Module, chosen: Rules, handlers: Mapping[type, Handler], adapters: set[int], excluded: Mapping[int, str]
) -> tuple[list[PlanRow], set[int], dict[int, str]]:
    """(rows of the modules that a handler will transform, ids of their parameters, {id: reason} for the parameters of
    modules that the handler rejects)."""
    rows: list[PlanRow] = []
    taken: set[int] = set()
    refused: dict[int, str] = {}
    inside: list[str] = []
    for name, module in model.named_modules() if handlers else ():
        if id(module) in adapters or any(name.startswith(prefix) for prefix in inside):
            continue
        config = chosen.of_module(name, module)
        handler = handlers.get(type(config))
        if handler is None:
            continue
        if any(id(p) in excluded for p in module.parameters()):
            why = f"{name or 'the model'} holds a skipped parameter, and its handler transforms it as a whole"
            refused |= {id(p): why for p in module.parameters()}
            continue
        takes, note = PREVIEWS[type(config)](module, config) if type(config) in PREVIEWS else (True, "")
        if not takes:
            refused |= {id(p): note for p in module.parameters(recurse=False)}
            continue
        inside.append(f"{name}." if name else "")
        taken |= {id(p) for p in module.parameters()}
        parameter = "weight" if takes_parameter_name(handler) else None
        row = _call_row(name, name, module, config, handler, parameter, module_nbytes(module))
        row.note = note or row.note
        rows.append(row)
    return rows, taken, refused


def _handled_parameter(choice: Choice, tensor: Tensor, handler: Handler) -> PlanRow:
    """The row of a handler selected by a parameter's own name."""
    place = choice.place
    if not takes_parameter_name(handler):
        raise PlanError(
            f"{place.name}: the handler of {type(choice.config).__name__} takes no parameter_name, so the key must "
            "name a module, not a parameter"
        )
    size = int(tensor.nbytes)
    row = _call_row(place.name, place.module_name, place.module, choice.config, handler, place.param, size)
    row.shape, row.key = tuple(tensor.shape), choice.key
    return row


def _call_row(
    name: str, module_name: str, module: nn.Module, config: Any, handler: Handler, parameter: str | None, size: int
) -> PlanRow:
    call = partial(run_handler, handler=handler, module_name=module_name, config=config, parameter=parameter)
    note = f"by {getattr(handler, '__name__', type(handler).__name__)}"
    kind = type(module).__name__
    return PlanRow(name or "model", kind, (), size, size, note=note, kernel="-", call=call, handled=config)


# -- checks ----------------------------------------------------------------------------------------------------------


def _check(rows: list[PlanRow]) -> None:
    """Raise PlanError for a key that quantizes nothing, and for a plan that does nothing."""
    for key in dict.fromkeys(r.key for r in rows if r.key not in ("", "_default", EMBEDDINGS)):
        matched = [r for r in rows if r.key == key]
        if not any(r.site is not None or r.call is not None or r.left == "skipped" for r in matched):
            raise PlanError(f"{key!r} matches nothing that can be quantized: {matched[0].name}: {matched[0].note}")
    if not any(r.scheme is not None or r.call is not None for r in rows):
        reasons = sorted(
            {
                r.note if r.note.startswith(r.type_name) else f"{r.type_name}: {r.note}"
                for r in rows if r.note and len(r.shape) > 1
            }
        )  # fmt: skip
        kinds = [r.type_name for r in rows if r.note.endswith("not selected by default") and hasattr(nn, r.type_name)]
        select = f"isinstance(module, torch.nn.{kinds[0]})" if kinds else "..."
        raise PlanError(
            "nothing would be quantized; "
            + ("; ".join(reasons[:6]) if reasons else "the model has no parameters with two or more axes")
            + f". Select modules with filter_fn=lambda module, fqn: {select}, or parameters by name with FqnToConfig"
        )


def check_values(todo: Plan, meta: bool) -> None:
    """Raise PlanError for NaN and inf, and for parameters without values unless ``meta`` permits them."""
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
