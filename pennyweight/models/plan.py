"""plan(): what quantize_ would do to every parameter, without doing it."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.tensor import AffineQuantizedTensor
from ..kernels.table import Case
from .configs import AOBaseConfig, FqnToConfig
from .prepare import choose_layout
from .report import Report, Row
from .scheme import Scheme
from .sites import Site, is_linear, kind_of, make_site, parameters

Filter = Callable[[nn.Module, str], bool]
ON_INDIVISIBLE = ("pad", "largest_divisor", "skip", "error")


class PlanError(ValueError):
    """A config that cannot be carried out as given; the message names the layer or pattern and the remedy."""


@dataclass
class PlanRow:
    """One parameter: where it is, what it becomes (scheme None: left alone, ``note`` says why)."""

    name: str
    module: str
    param: str
    tensor: Tensor = field(repr=False)
    type_name: str
    note: str = ""
    site: Site | None = None
    scheme: Scheme | None = None
    ops: tuple[str, ...] = ()
    kernel: str = ""
    layout: str = "plain"
    tied: tuple[str, ...] = ()  # further names of the same parameter
    handler: Any = None  # a user's handler that will transform the whole module instead
    handler_config: Any = None
    already: bool = False  # carries this very scheme

    @property
    def bytes_before(self) -> int:
        return int(self.tensor.nbytes)

    @property
    def bytes_after(self) -> int:
        """Predicted storage."""
        if self.scheme is None or self.site is None:
            return self.bytes_before
        layout = "plain" if self.layout == "plain" else "bits"
        extra = 4 * (self.scheme.act_scale is not None) + (self.scheme.act_zero_point is not None)
        return self.scheme.weight.with_(layout=layout).nbytes(self.site.shape) + extra


@dataclass
class Plan:
    """Rows of every parameter, in the model's order; a tied parameter appears once."""

    config: Any
    rows: list[PlanRow]

    @property
    def active(self) -> list[PlanRow]:
        """Rows that will be changed."""
        return [r for r in self.rows if r.handler is not None or (r.scheme is not None and not r.already)]

    def report(self) -> Report:
        """What the plan promises, as a report without SQNR."""
        return Report(
            str(self.config),
            [
                Row(
                    r.name, r.type_name, tuple(r.tensor.shape), "" if r.scheme is None else str(r.scheme), r.kernel,
                    r.bytes_before, r.bytes_after, None, r.note,
                )
                for r in self.rows
            ],
        )  # fmt: skip

    def __str__(self) -> str:
        return str(self.report())


def plan(
    model: nn.Module,
    config: AOBaseConfig,
    filter_fn: Filter | None = None,
    *,
    on_indivisible: str = "pad",
    handlers: dict[type, Any] | None = None,
    device: torch.device | str | None = None,
) -> Plan:
    """List every parameter with its site, scheme, kernel, bytes, and the reason where it is left alone. Pure.

    filter_fn(module, fqn) picks modules; default: linear ones. Works on the meta device. Raises PlanError where the
    plan quantizes nothing, a pattern matches nothing, or the config does not fit a layer.
    """
    if not isinstance(config, AOBaseConfig):
        raise PlanError(f"config must be an AOBaseConfig such as Int8WeightOnlyConfig(), got {config!r}")
    if on_indivisible not in ON_INDIVISIBLE:
        raise PlanError(f"on_indivisible must be one of {ON_INDIVISIBLE}, got {on_indivisible!r}")
    if isinstance(config, FqnToConfig) and filter_fn not in (None, is_linear):
        raise PlanError("FqnToConfig names its layers itself; leave filter_fn out, or use a None value to skip")
    rules = _Rules(config, filter_fn)
    rows: list[PlanRow] = []
    seen: dict[int, PlanRow] = {}
    for name, module_name, module, param, tensor in parameters(model):
        first = seen.get(id(tensor))
        if first is not None:
            _tie(first, name, module_name, module, param, tensor, rules)
            continue
        row = PlanRow(name, module_name, param, tensor, type(module).__name__)
        seen[id(tensor)] = row
        rows.append(row)
        _fill(row, module, rules, on_indivisible, handlers or {})
    for row in rows:
        _finish(row, device)
    rules.check(rows)
    return Plan(config, rows)


def _fill(row: PlanRow, module: nn.Module, rules: _Rules, on_indivisible: str, handlers: dict[type, Any]) -> None:
    chosen, named, why = rules.config_for(row.name, row.module, module)
    if chosen is None:
        site = make_site(row.name, row.module, module, row.param, row.tensor)
        row.note = why if isinstance(site, Site) else site
        return
    if type(chosen) in handlers:
        row.handler, row.handler_config = handlers[type(chosen)], chosen
        row.note = f"by handler {getattr(row.handler, '__name__', row.handler)}"
        return
    site = make_site(row.name, row.module, module, row.param, row.tensor, named=named)
    if isinstance(site, str):
        row.note = site
        return
    row.site, row.ops = site, (site.op,)
    try:
        row.scheme = chosen.scheme(site, on_indivisible)
    except ValueError as error:
        if on_indivisible == "skip" and "does not divide" in str(error):
            row.note = f"skipped: {str(error).split(';')[0].removeprefix(f'{row.name}: ')}"
            return
        raise PlanError(str(error) if row.name in str(error) else f"{row.name}: {error}") from error
    if 0 in site.shape:
        row.scheme, row.note = None, "empty"


def _finish(row: PlanRow, device: Any) -> None:
    """Kernel, layout, notes."""
    if row.scheme is None or row.site is None:
        return
    site, spec = row.site, row.scheme.weight
    kind = torch.device(device).type if device is not None else site.device
    case = Case(spec.with_(layout="plain"), row.scheme.act, site.shape, site.dtype, "cpu" if kind == "meta" else kind)
    kernel, row.layout = choose_layout(case, row.ops)
    row.kernel = kernel.name
    notes = [row.note] if row.note else []
    k = site.shape[-1]
    padded = spec.nbytes(site.shape) and _padded_last(spec.block, site.shape)
    if padded != k:
        notes.append(f"{k} inputs padded to {padded}")
    if isinstance(row.tensor, AffineQuantizedTensor):
        same = row.tensor.spec.with_(layout="plain") == spec.with_(layout="plain") and row.tensor.act == row.scheme.act
        row.already = same
        notes.append("already so" if same else f"was {row.tensor.spec.with_(layout='plain')}; went through float once")
    if row.tied:
        notes.append(f"tied: {', '.join(row.tied)}")
    row.note = "; ".join(notes)


def _padded_last(block: Any, shape: tuple[int, ...]) -> int:
    from ..core.blocks import padded

    return padded(block, shape)[-1]


def _tie(
    row: PlanRow, name: str, module_name: str, module: nn.Module, param: str, tensor: Tensor, rules: _Rules
) -> None:
    """A further name of a parameter that has a row: its op must be able to read the weight too."""
    row.tied += (name,)
    chosen, named, _ = rules.config_for(name, module_name, module)
    site = make_site(name, module_name, module, param, tensor, named=named)
    if not isinstance(site, Site):
        return
    if row.scheme is None and row.handler is None and chosen is not None:
        _fill(row, module, rules, "pad", {})  # the first name was not asked for, this one is
        row.site = row.site or site
        if row.scheme is None:
            row.scheme, row.site, row.note = chosen.scheme(site), site, ""
    if row.scheme is not None and site.op not in row.ops:
        row.ops += (site.op,)


class _Rules:
    """Which config a parameter gets; remembers which patterns matched."""

    def __init__(self, config: AOBaseConfig, filter_fn: Filter | None) -> None:
        self.config, self.filter = config, filter_fn or is_linear
        self.table = dict(config.fqn_to_config) if isinstance(config, FqnToConfig) else None
        self.used: set[str] = set()
        self.names: set[str] = set()

    def config_for(self, name: str, module_name: str, module: nn.Module) -> tuple[AOBaseConfig | None, bool, str]:
        """(config, asked for by parameter name, reason where None)."""
        self.names |= {name, module_name}
        if self.table is None:
            kind = kind_of(module)
            if self.filter(module, module_name):
                return self.config, False, ""
            default = kind is not None and kind.default
            return None, False, "filtered out" if default else f"{type(module).__name__} is not asked for"
        kind = kind_of(module)
        own = kind is not None and name.rpartition(".")[2] in kind.params
        for key, value in sorted(self.table.items(), key=lambda item: _is_pattern(item[0])):  # stable: exact first
            if key == "_default":
                continue
            by_param = _matches(key, name)
            if by_param or (_matches(key, module_name) and (own or kind is None)):
                self.used.add(key)
                return value, by_param or kind is None, f"skipped by {key!r}"
        if "_default" in self.table and kind is not None and kind.default:
            self.used.add("_default")
            return self.table["_default"], False, "skipped by '_default'"
        return None, False, "no pattern matches"

    def check(self, rows: list[PlanRow]) -> None:
        """Raise PlanError for patterns that matched nothing and for a plan that does nothing."""
        if self.table is not None:
            for key in self.table.keys() - self.used - {"_default"}:
                close = difflib.get_close_matches(key, sorted(self.names - {""}), n=3, cutoff=0.5)
                hint = f"; did you mean {' or '.join(repr(c) for c in close)}?" if close else ""
                raise PlanError(f"pattern {key!r} matches no module or parameter{hint}")
        if not any(r.scheme is not None or r.handler is not None for r in rows):
            reasons = sorted({f"{r.type_name}: {r.note}" for r in rows if r.note and r.tensor.ndim > 1})
            raise PlanError(
                "nothing would be quantized; "
                + ("; ".join(reasons[:6]) if reasons else "the model has no parameters with two or more axes")
                + ". Choose modules with filter_fn=lambda module, fqn: ..., or parameters by name with FqnToConfig"
            )


def _is_pattern(key: str) -> bool:
    return key.startswith("re:") or any(c in key for c in "*?[")


def _matches(key: str, name: str) -> bool:
    """Exact, glob, or ``re:`` over the whole name. Patterns come from code, never from files."""
    if key.startswith("re:"):
        return re.fullmatch(key[3:], name) is not None
    return key == name or (_is_pattern(key) and fnmatch.fnmatchcase(name, key))
