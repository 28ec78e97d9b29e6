"""The kernel table: which code runs an op, for which specs, on which device.

Selection is a pure function of static data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..core import blocks
from ..core.errors import ArgumentError
from ..core.spec import ActivationSpec, QuantSpec
from ..core.tensor import AffineQuantizedTensor


@dataclass(frozen=True)
class Case:
    """All that selection may look at: nothing of the data, nothing of the batch.

    spec    the weight's spec; its layout is that of the tensor at hand, "plain" while planning
    shape   stored shape of the weight, contracted axis last
    dtype   dtype of the input, which is also the output's
    perm    whether the contracted axis lies in another order. Kernels do not see that: the caller puts the input (or
            for a table, the result) into the order of the weight
    """

    spec: QuantSpec
    act: ActivationSpec | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    perm: bool = False

    def __str__(self) -> str:
        act = "" if self.act is None else f", activation {self.act}"
        act = f" in another order of channels{act}" if self.perm else act
        return f"weight {list(self.shape)} {self.spec}{act}, {str(self.dtype).removeprefix('torch.')} on {self.device}"


class Bound(NamedTuple):
    """How weights of one case are run, with all that is static worked out once.

    run      (x, operand, bias) -> y, or None where x or bias is nothing that the kernel reads: see kernels/gate.py
    operand  parts of a weight -> what ``run`` reads of them, checked
    """

    run: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor | None]
    operand: Callable[[Any], Any]

    def run_with(self, x: torch.Tensor, parts: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """y of one call. Raises ArgumentError where x or bias is nothing that the kernel reads."""
        y = self.run(x, self.operand(parts), bias)
        if y is None:
            raise ArgumentError(
                f"linear: the kernel does not read an input {list(x.shape)} {x.dtype} on {x.device}"
                + ("" if bias is None else f" with a bias {list(bias.shape)} {bias.dtype} on {bias.device}")
            )
        return y


class Together(NamedTuple):
    """How weights that share their input are run in one call.

    run       (x, operands, biases) -> list of y, or None where x or a bias is nothing that the kernel reads
    operands  for each weight: its parts -> what ``run`` reads of them, checked
    """

    run: Callable[..., list[torch.Tensor] | None]
    operands: Sequence[Callable[[Any], Any]]


@dataclass(frozen=True)
class Kernel:
    """One row of the table.

    run        (x, weight, bias) -> y for op "linear"; see kernels/ops.py for the other ops
    layout     layout its weight must be in; None: any
    accepts    case -> True, or the sentence that refuses it
    rank       higher wins; -1 dequantizes and computes, and is counted when it runs
    tolerance  how close to the reference: "exact"; "float32", "bfloat16": the relative error of that arithmetic;
               "fixed22": float32, of inputs rounded at 2**-22 of the greatest of their token
    bind       case -> :class:`Bound`. Such kernels see to the order of the weight's channels (perm) themselves
    together   cases of weights that share their input -> :class:`Together`, or None where they cannot be one call; each
               y has the bits that ``run`` gives
    row_independent  whether a row of the output has the same bits whatever other rows there are and on any number of
               threads, as long as its input is not quantized together with theirs: see :func:`row_independent`
    """

    op: str
    name: str
    run: Callable[..., torch.Tensor]
    accepts: Callable[[Case], bool | str]
    devices: tuple[str, ...] | None = None
    layout: str | None = None
    rank: int = 0
    tolerance: str = "float32"
    bind: Callable[[Case], Bound] | None = None
    together: Callable[[tuple[Case, ...]], Together | None] | None = None
    row_independent: bool = False

    def refuses(self, case: Case, *, any_layout: bool = False) -> str | None:
        """The sentence that refuses the case, or None."""
        if self.devices is not None and case.device not in self.devices:
            return f"runs on {', '.join(self.devices)} only, the weight is on {case.device}"
        if case.perm and self.rank >= 0:  # the others dequantize, and with that put the channels back
            verdict = _takes_reordered(self.op, case)
            if verdict is not True:
                return verdict or "refused"
        verdict = self.accepts(case)
        if verdict is not True:
            return verdict or "refused"
        if not any_layout and self.layout not in (None, case.spec.layout):
            return f'reads layout "{self.layout}", the weight is in "{case.spec.layout}"'
        return None


def _takes_reordered(op: str, case: Case) -> bool | str:
    if op not in ("linear", "bmm", "embedding"):
        return "the weight's channels lie in another order"
    if op == "embedding" or case.act is None or not case.shape:
        return True
    groups = blocks.counts(case.act.spec.block, (1,) * (len(case.shape) - 1) + case.shape[-1:])[-1]
    return groups <= 1 or "the input is quantized in groups of channels, the weight's lie in another order"


def reorders(kernel: Kernel, case: Case) -> bool:
    """Whether the caller of a kernel selected for a case has to put channels into the order of the weight."""
    return case.perm and kernel.rank >= 0


def row_independent(kernel: Kernel, case: Case) -> bool | str:
    """True where a row of the output depends on nothing but its row of the input, bit for bit: neither on the batch nor
    on the number of threads. Else the reason why it may."""
    if case.act is not None and case.act.mode == "dynamic" and case.act.spec.block is None:
        return "the input is quantized under one scale for all its rows"
    return kernel.row_independent or "its sums are added up in an order that changes with the batch and the threads"


_TABLE: dict[str, list[Kernel]] = {}


def register_kernel(kernel: Kernel) -> Kernel:
    """Add a row. Raises ValueError for a name in use under the same op."""
    rows = _TABLE.setdefault(kernel.op, [])
    if any(k.name == kernel.name for k in rows):
        raise ValueError(f"kernel {kernel.op}/{kernel.name} is registered already")
    rows.append(kernel)
    rows.sort(key=lambda k: -k.rank)
    _select.cache_clear()
    return kernel


def kernels(op: str | None = None) -> list[Kernel]:
    """Rows of one op, or all, best first."""
    return [k for name, rows in _TABLE.items() if op in (None, name) for k in rows]


def get_kernel(op: str, name: str) -> Kernel:
    """The row of that name. Raises ValueError that lists the known ones."""
    for k in _TABLE.get(op, []):
        if k.name == name:
            return k
    raise ValueError(f"no kernel {op}/{name}; known: {', '.join(k.name for k in _TABLE.get(op, []))}")


@lru_cache(maxsize=65536)
def _select(op: str, case: Case, any_layout: bool) -> Kernel:
    for k in _TABLE.get(op, []):
        if k.refuses(case, any_layout=any_layout) is None:
            return k
    raise NotImplementedError(f"no kernel for {op} with {case}")


def select(op: str, case: Case, *, any_layout: bool = False) -> Kernel:
    """The best row for a case. ``any_layout``: while planning, when the weight can still be packed."""
    return _select(op, case, any_layout)


def case_of(w: AffineQuantizedTensor, dtype: torch.dtype | None = None) -> Case:
    """The case that a weight is. Sizes that a trace holds as symbols become numbers there: a weight's are static."""
    shape = tuple(int(n) for n in w.stored_shape)
    return Case(w.spec, w.act, shape, dtype or w.dtype, w.device.type, w._perm is not None)


@dataclass(frozen=True)
class Explanation:
    """Every row of the table for one case, with its verdict; printing it is the point."""

    op: str
    case: Case
    rows: tuple[tuple[str, int, str], ...]  # name, rank, verdict
    row_independent: bool | str = True  # of the one that runs; see the function of this name

    def __str__(self) -> str:
        width = max((len(name) for name, _, _ in self.rows), default=0)
        lines = [f"{self.op}: {self.case}"]
        lines += [f"  {name:<{width}}  rank {rank:>3}  {verdict}" for name, rank, verdict in self.rows]
        if self.op in ("linear", "bmm"):
            kept = self.row_independent
            lines.append(
                "  each row of the output depends on its row of the input alone"
                if kept is True
                else f"  a row of the output may change with its batch and the threads: {kept}"
            )
        return "\n".join(lines)


def explain(x: Any, w: AffineQuantizedTensor, op: str = "linear") -> Explanation:
    """Which kernel runs ``op(x, w)`` and the sentence that refuses each better one. x: the input, or its dtype."""
    case = case_of(w, x if isinstance(x, torch.dtype) else x.dtype)
    return explain_case(op, case)


def explain_case(op: str, case: Case, *, any_layout: bool = False) -> Explanation:
    """As :func:`explain`, for a case."""
    rows: list[tuple[str, int, str]] = []
    chosen: Kernel | None = None
    for k in kernels(op):
        reason = k.refuses(case, any_layout=any_layout)
        if reason is None:
            reason, chosen = ("RUNS", k) if chosen is None else ("would do, a better one runs", chosen)
        rows.append((k.name, k.rank, reason))
    return Explanation(op, case, tuple(rows), chosen is None or row_independent(chosen, case))
