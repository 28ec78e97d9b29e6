"""Size and latency budgets, and the allocation with the smallest loss within them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isinf

from ...planning.config_resolution import PlanError
from ...planning.configs import AOBaseConfig
from ...planning.quantize_report import duration, size, speed_of_float
from ...support.extras import install
from ..calibration.loop import parse_bytes

Budget = str | Sequence[str]
_BITS = re.compile(r"\s*([0-9]+\.?[0-9]*)\s*bpw\s*")
_SPEED = re.compile(r"\s*([0-9]+\.?[0-9]*)\s*x\s+latency\s*")
_TIME = re.compile(r"\s*([0-9]+\.?[0-9]*)\s*([mu]?)s\s*")
_SECONDS = {"": 1.0, "m": 1e-3, "u": 1e-6}
_KNOWN = '"4.25 bpw", "600 MB", "1.3x latency" or "20 ms"'


@dataclass(frozen=True)
class Option:
    """One config for one weight: its bytes, and the loss of the model with only this weight quantized.

    config    None: unchanged
    seconds   of its layers in one model call; None if not timed
    """

    config: AOBaseConfig | None
    scheme: str
    nbytes: int
    loss: float
    seconds: float | None = None
    scheme_short: str = ""  # for tables

    @property
    def short(self) -> str:
        """The scheme in as few words as a table has room for."""
        return self.scheme_short or self.scheme


Table = dict[str, list[Option]]  # by parameter


@dataclass(frozen=True)
class Base:
    """Reference values of budgets.

    numel, rest_bytes    number of elements of the searched weights; bytes of everything else in the model
    seconds, rest_seconds  of one call of the float model, and of its part outside the layers of these weights; None if
                         not timed
    """

    numel: int
    rest_bytes: int
    seconds: float | None = None
    rest_seconds: float = 0.0

    def text(self, seconds: float) -> str:
        """Text: time of a model call whose searched layers take these seconds."""
        whole = seconds + self.rest_seconds
        return (
            f"{duration(whole)} per call, {speed_of_float(self.seconds / whole)}" if whole and self.seconds else "0 s"
        )


@dataclass(frozen=True)
class Limits:
    """Limits for the searched weights: bytes, and seconds of their layers per call."""

    nbytes: float = inf
    seconds: float = inf


def require_scipy() -> None:
    """Raise ImportError, with the remedy, if scipy is not installed."""
    try:
        import scipy.optimize  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"pw.search needs scipy for its integer program: {install('search')}", name="scipy"
        ) from error


def parts(budget: Budget) -> tuple[str, ...]:
    """The budgets in one argument. Raises PlanError for an invalid budget."""
    some = (budget,) if isinstance(budget, str) else tuple(budget) if isinstance(budget, (list, tuple)) else ()
    if not some:
        raise PlanError(f"budget must be {_KNOWN}, or a list of these, got {budget!r}")
    for one in some:
        known = isinstance(one, str) and (is_latency(one) or _BITS.fullmatch(one) or one.rstrip().endswith("B"))
        if not known:
            raise PlanError(f"budget must be {_KNOWN}, got {one!r}")
    return some


def is_latency(budget: str) -> bool:
    """Whether this is a latency budget."""
    return bool(_SPEED.fullmatch(budget) or _TIME.fullmatch(budget))


def limits(budget: Budget, base: Base) -> Limits:
    """Limits that the budgets leave for the searched weights; the tightest applies. Raises PlanError for an invalid
    budget, and for a latency budget without timings."""
    nbytes = seconds = inf
    for one in parts(budget):
        if is_latency(one):
            seconds = min(seconds, _seconds(one, base))
        else:
            bits = _BITS.fullmatch(one)
            nbytes = min(nbytes, float(bits[1]) * base.numel / 8 if bits else parse_bytes(one) - base.rest_bytes)
    return Limits(nbytes, seconds)


def _seconds(budget: str, base: Base) -> float:
    if base.seconds is None:
        raise PlanError(f"{budget!r}: no layer was timed; pass a latency budget to search() itself")
    speed, time = _SPEED.fullmatch(budget), _TIME.fullmatch(budget)
    amount = float((speed or time)[1])  # type: ignore[index]
    if not amount > 0:
        raise PlanError(f"a latency budget must be positive, got {budget!r}")
    whole = base.seconds / amount if speed else amount * _SECONDS[time[2]]  # type: ignore[index]
    return whole - base.rest_seconds


def check(table: Table, limit: Limits, base: Base) -> None:
    """Raise PlanError with the best possible value if no allocation stays within one of the limits or both."""
    least = sum(min(o.nbytes for o in options) for options in table.values())
    if least > limit.nbytes:
        raise PlanError(
            f"the budget leaves {size(max(limit.nbytes, 0))} for these weights; the candidates need {size(least)}; "
            "raise the budget, or pass candidates with fewer bits"
        )
    if isinf(limit.seconds):
        return
    fastest = sum(min(o.seconds or 0.0 for o in options) for options in table.values())
    if fastest > limit.seconds:
        raise PlanError(
            f"the budget leaves {_allowed(limit, base)}; the fastest allocation of the candidates takes "
            f"{base.text(fastest)}, of which {duration(base.rest_seconds)} are outside these layers"
        )
    if not isinf(limit.nbytes):
        best = _solve(table, limit.nbytes, inf, by_time=True)
        within = sum(table[name][i].seconds or 0.0 for name, i in best.items())
        if within > limit.seconds * (1 + 1e-9):
            raise PlanError(
                f"the budget leaves {_allowed(limit, base)}; the fastest allocation within {size(limit.nbytes)} for "
                f"these weights takes {base.text(within)}"
            )


def _allowed(limit: Limits, base: Base) -> str:
    return f"{duration(max(limit.seconds + base.rest_seconds, 0))} per call"


def allocate(table: Table, limit: float | Limits, fused: Sequence[Sequence[str]] = ()) -> dict[str, int]:
    """The options that minimise the sum of losses within the limits (a number: bytes). Raises PlanError if no
    allocation stays within the bytes; see :func:`check`.

    fused: names of weights that share one choice, a list for each group.
    """
    limit = limit if isinstance(limit, Limits) else Limits(limit)
    merged, members = merge(table, fused)
    check(merged, Limits(limit.nbytes), Base(0, 0))
    chosen = _solve(merged, limit.nbytes, limit.seconds)
    each = {name: i for first, i in chosen.items() for name in members[first]}
    return {name: each[name] for name in table}


def merge(table: Table, fused: Sequence[Sequence[str]]) -> tuple[Table, dict[str, list[str]]]:
    """The table with the weights of each group in one entry, under the name of the first: bytes, losses and seconds
    are sums. And the names of each entry."""
    group_of = {name: tuple(group) for group in fused for name in group}
    members: dict[str, list[str]] = {}
    for name in table:
        first = next((n for n in group_of.get(name, ()) if n in table), name)
        members.setdefault(first, []).append(name)
    out: Table = {}
    for first, names in members.items():
        options = zip(*(table[name] for name in names), strict=True)
        out[first] = [
            replace(
                some[0], nbytes=sum(o.nbytes for o in some), loss=sum(o.loss for o in some),
                seconds=None if some[0].seconds is None else sum(o.seconds or 0.0 for o in some),
            )
            for some in options
        ]  # fmt: skip
    return out, members


def _solve(table: Table, nbytes: float, seconds: float, by_time: bool = False) -> dict[str, int]:
    """One option per weight, minimising the losses (``by_time``: the seconds), with the HiGHS solver."""
    import numpy as np

    require_scipy()
    from scipy.optimize import Bounds, LinearConstraint, milp

    flat = [o for options in table.values() for o in options]
    taken = np.array([o.seconds or 0.0 for o in flat])
    cost = taken if by_time else np.array([o.loss for o in flat])
    one_each = np.zeros((len(table), len(flat)))
    at = 0
    for i, options in enumerate(table.values()):
        one_each[i, at : at + len(options)] = 1
        at += len(options)
    # HiGHS's tolerances are absolute, so all values are scaled to about 1
    constraints = [LinearConstraint(one_each, 1, 1)]
    for amounts, limit in ((np.array([o.nbytes for o in flat]), nbytes), (taken, seconds)):
        if not isinf(limit):
            constraints.append(LinearConstraint(amounts[None] / (limit or 1.0), ub=1.0 if limit else 0.0))
    found = milp(
        cost / (cost.max() or 1.0),
        constraints=constraints,
        integrality=np.ones(len(flat)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-4},
    )
    if found.x is None:
        raise RuntimeError(f"the allocation could not be solved: {found.message}")
    chosen, at = {}, 0
    for name, options in table.items():
        chosen[name] = int(np.argmax(found.x[at : at + len(options)]))
        at += len(options)
    return chosen


def totals(table: Table, chosen: dict[str, int]) -> tuple[int, float, float | None]:
    """Bytes, loss and seconds of an allocation."""
    picked = [table[name][i] for name, i in chosen.items()]
    timed = [o.seconds for o in picked if o.seconds is not None]
    return sum(o.nbytes for o in picked), sum(o.loss for o in picked), sum(timed) if timed else None
