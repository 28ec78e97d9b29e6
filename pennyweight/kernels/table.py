"""The kernel table: which code runs an op, for which specs, on which device.

Selection is a pure function of static data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ..core import blocks
from ..core.spec import ActivationSpec, QuantSpec
from ..core.tensor import AffineQuantizedTensor
from ..support.arguments import did_you_mean
from ..support.errors import ArgumentError
from .target import device_type, fits, read_target, target_of


@dataclass(frozen=True)
class Case:
    """The inputs of kernel selection; independent of the data and the batch size.

    spec    the weight's spec, with its current layout; "plain" while planning
    shape   stored shape of the weight, contracted axis last
    dtype   dtype of the input and output
    device  what it runs on: "cpu", "cuda:sm_90", see target.py
    perm    whether the contracted axis is permuted. Kernels do not handle this: the caller permutes the input (or for
            an embedding, the result)
    pre_scale  whether the weight has a ``pre_scale``. Kernels do not handle this either: the caller scales
    """

    spec: QuantSpec
    act: ActivationSpec | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    perm: bool = False
    pre_scale: bool = False

    def __str__(self) -> str:
        act = "" if self.act is None else f", activation {self.act}"
        act = f" with permuted channels{act}" if self.perm else act
        act = f" with a scaled input{act}" if self.pre_scale else act
        return f"weight {list(self.shape)} {self.spec}{act}, {str(self.dtype).removeprefix('torch.')} on {self.device}"


class Bound(NamedTuple):
    """A kernel specialized for one case, with everything static precomputed.

    run      (x, operand, bias) -> y, or None if the kernel cannot read x or bias: see kernels/native/linear.py
    operand  parts of a weight -> the checked operand that ``run`` takes
    """

    run: Callable[[torch.Tensor, Any, torch.Tensor | None], torch.Tensor | None]
    operand: Callable[[Any], Any]

    def run_with(self, x: torch.Tensor, parts: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """y of one call. Raises ArgumentError if the kernel cannot read x or bias."""
        y = self.run(x, self.operand(parts), bias)
        if y is None:
            raise ArgumentError(
                f"linear: the kernel cannot read an input {list(x.shape)} {x.dtype} on {x.device}"
                + ("" if bias is None else f" with a bias {list(bias.shape)} {bias.dtype} on {bias.device}")
            )
        return y


class Together(NamedTuple):
    """A kernel call for several weights with the same input.

    run       (x, operands, biases) -> list of y, or None if the kernel cannot read x or a bias
    operands  for each weight: its parts -> the checked operand that ``run`` takes
    """

    run: Callable[..., list[torch.Tensor] | None]
    operands: Sequence[Callable[[Any], Any]]


@dataclass(frozen=True)
class Kernel:
    """One row of the table.

    run        (x, weight, bias) -> y for op "linear"; see kernels/matmul.py for the other ops
    layout     layout its weight must be in; None: any
    accepts    case -> True, or the reason for rejecting it
    devices    targets: "cuda", "cuda:sm_90", "cuda:sm_89+", see :func:`pennyweight.kernels.target.fits`; None: any
    rank       higher wins; -1 dequantizes and computes, and is counted when it runs
    tolerance  how close to the reference: "exact"; "float32", "bfloat16": the relative error of that arithmetic;
               "fixed22": float32, with inputs rounded to 2**-22 of the largest magnitude of their token (convolutions:
               of their sample)
    bind       case -> :class:`Bound`. Such kernels handle the weight's ``perm`` themselves
    together   cases of weights with the same input -> :class:`Together`, or None if one call cannot run them; each y is
               bit-identical to that of ``run``
    row_independent  whether a row of the output has the same bits for any other rows and any number of threads, if its
               input is not quantized jointly with other rows: see :func:`row_independent`
    grouped    (x, weight, ends) -> y for op "bmm" with the rows of all groups in one input; None: not supported
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
    grouped: Callable[..., torch.Tensor] | None = None

    def refuses(self, case: Case, *, any_layout: bool = False) -> str | None:
        """The reason for rejecting the case, or None."""
        if self.devices is not None and not fits(self.devices, case.device):
            return f"runs on {', '.join(self.devices)} only, the weight is on {case.device}"
        if case.perm and self.rank >= 0:  # kernels that dequantize undo perm anyway
            verdict = _takes_reordered(self.op, case)
            if verdict is not True:
                return verdict or "rejected"
        if case.pre_scale and self.rank >= 0 and self.op not in ("linear", "bmm", "embedding"):
            return "the weight has a pre_scale"
        verdict = self.accepts(case)
        if verdict is not True:
            return verdict or "rejected"
        if not any_layout and self.layout not in (None, case.spec.layout):
            return f'reads layout "{self.layout}", the weight is in "{case.spec.layout}"'
        return None


def _takes_reordered(op: str, case: Case) -> bool | str:
    if op not in ("linear", "bmm", "embedding"):
        return "the weight's channels are permuted"
    if op == "embedding" or case.act is None or not case.shape:
        return True
    groups = blocks.counts(case.act.spec.block, (1,) * (len(case.shape) - 1) + case.shape[-1:])[-1]
    return groups <= 1 or "the input is quantized in groups of channels, but the weight's channels are permuted"


def reorders(kernel: Kernel, case: Case) -> bool:
    """Whether the caller must permute channels to the order of the weight before it runs the selected kernel."""
    return case.perm and kernel.rank >= 0


def row_independent(kernel: Kernel, case: Case) -> bool | str:
    """True if a row of the output depends, bit for bit, only on its row of the input and not on the batch or the number
    of threads; else the reason."""
    if case.act is not None and case.act.mode == "dynamic" and case.act.spec.block is None:
        return "the input is quantized with one scale for all rows"
    return kernel.row_independent or "its summation order depends on the batch and the threads"


_TABLE: dict[str, list[Kernel]] = {}
_LATER: dict[str, Callable[[], object]] = {}  # device type -> imports the files that register rows for it


def register_kernel(kernel: Kernel) -> Kernel:
    """Add a row. Raises ValueError if the name is in use for the same op."""
    rows = _TABLE.setdefault(kernel.op, [])
    if any(k.name == kernel.name for k in rows):
        raise ValueError(f"kernel {kernel.op}/{kernel.name} is registered already")
    rows.append(kernel)
    rows.sort(key=lambda k: -k.rank)
    _select.cache_clear()
    return kernel


def register_later(kind: str, load: Callable[[], object]) -> None:
    """Register rows for devices of a type by the function that imports their files. It is called once: with the first
    case for such a device, or when all rows are listed."""
    _LATER[kind] = load


def _load(kind: str) -> None:
    load = _LATER.get(kind)
    if load is not None:
        load()
        _LATER.pop(kind, None)  # only now: another thread must not select from half of the rows


def _load_all() -> None:
    for kind in list(_LATER):
        _load(kind)


def kernels(op: str | None = None) -> list[Kernel]:
    """Rows of one op, or of all ops, best first."""
    _load_all()
    return [k for name, rows in _TABLE.items() if op in (None, name) for k in rows]


def get_kernel(op: str, name: str) -> Kernel:
    """The row with that name. Raises ValueError listing the known rows."""
    for load in (False, True):
        if load:
            _load_all()
        for k in _TABLE.get(op, []):
            if k.name == name:
                return k
    raise ValueError(f"no kernel {op}/{name}; known: {', '.join(k.name for k in _TABLE.get(op, []))}")


@lru_cache(maxsize=65536)
def _select(op: str, case: Case, any_layout: bool) -> Kernel:
    if _LATER:
        _load(device_type(case.device))
    for k in _TABLE.get(op, []):
        if k.refuses(case, any_layout=any_layout) is None:
            return k
    raise NotImplementedError(f"no kernel for {op} with {case}")


def select(op: str, case: Case, *, any_layout: bool = False) -> Kernel:
    """The best row for a case. ``any_layout``: for planning, when the weight can still be repacked."""
    return _select(op, case, any_layout)


def case_of(w: AffineQuantizedTensor, dtype: torch.dtype | None = None) -> Case:
    """The case of a weight. Symbolic sizes of a trace become numbers, because a weight's sizes are static."""
    shape = tuple(int(n) for n in w.stored_shape)
    perm, pre_scale = w._perm is not None, w._pre_scale is not None
    return Case(w.spec, w.act, shape, dtype or w.dtype, target_of(w.device), perm, pre_scale)


def moved(case: Case, target: str) -> Case:
    """The case of the same weight on a target. There it is packed on arrival, so ask with ``any_layout``."""
    return replace(case, spec=case.spec.with_(layout="plain"), device=target)


@dataclass(frozen=True, repr=False)
class Explanation:
    """Every row of the table for one case, with its verdict. Meant to be printed.

    rows       (name, rank, verdict) of the kernels for devices of this type, best first
    elsewhere  names of kernels for other types of devices only
    """

    op: str
    case: Case
    rows: tuple[tuple[str, int, str], ...]  # name, rank, verdict
    row_independent: bool | str = True  # of the selected kernel; see the function of this name
    elsewhere: tuple[str, ...] = ()

    def __repr__(self) -> str:
        runs = next((name for name, _, verdict in self.rows if verdict == "RUNS"), "nothing")
        return f"<Explanation: {runs} runs {self.op}: {self.case}>"

    def _repr_html_(self) -> str:
        from ..support.tables import html_table

        rows = [[name, str(rank), verdict] for name, rank, verdict in self.rows]
        runs = next((i for i, row in enumerate(rows) if row[2] == "RUNS"), None)
        note = str(self).splitlines()[1 + len(rows) :]
        title = f"{self.op}: {self.case}"
        return html_table(("kernel", "rank", "verdict"), rows, title=title, notes=note, right=("rank",), bold=runs)

    def __str__(self) -> str:
        width = max((len(name) for name, _, _ in self.rows), default=0)
        lines = [f"{self.op}: {self.case}"]
        lines += [f"  {name:<{width}}  rank {rank:>3}  {verdict}" for name, rank, verdict in self.rows]
        if self.elsewhere and self.case.device != "cpu":  # who asks about a CPU has no use for the names of GPU kernels
            lines.append(f"  for other devices: {', '.join(self.elsewhere)}")
        if self.op in ("linear", "bmm"):
            kept = self.row_independent
            lines.append(
                "  each row of the output depends on its row of the input alone"
                if kept is True
                else f"  a row of the output may change with the batch and the threads: {kept}"
            )
        return "\n".join(lines)


def _on(kind: str, devices: Sequence[str] | None) -> bool:
    """Whether any of these targets is a device of that type."""
    return devices is None or kind in map(device_type, devices)


def op_of(spec: QuantSpec, shape: Sequence[int]) -> str:
    """The op that reads a weight of that stored shape, if nothing else is known: by its axes and blocks.

    A matrix is that of a linear layer. Blocks over all inner axes are those of a convolution, and blocks over the first
    axis and not the second those of a transposed one (see planning/parameters.py). Other weights of three axes are
    batches of matrices.
    """
    block = () if spec.block is None else spec.block
    if len(shape) < 3:
        return "linear"
    if len(block) == len(shape) and block[1] == 1:
        return "transposed_convolution"
    return "bmm" if len(shape) == 3 and len(block) < 2 else "convolution"


def explain(x: Any, w: AffineQuantizedTensor, op: str = "", *, device: torch.device | str | None = None) -> Explanation:
    """Which kernel runs ``op(x, w)``, and why each better one is rejected.

    x       the input, or its dtype
    op      default: :func:`op_of`
    device  a device, or a target such as "cuda:sm_90" that this machine need not have: as if the weight were moved
            there, where it would be packed on arrival. Default: where it is, in the layout that it has

    Raises ValueError for an op without kernels, ArgumentError for a wrong device.
    """
    case = case_of(w, x if isinstance(x, torch.dtype) else x.dtype)
    if device is not None:
        case = moved(case, read_target(device))
    op = op or op_of(w.spec, case.shape)
    if op not in _TABLE:
        raise ValueError(f"no kernels for op {op!r}{did_you_mean(op, _TABLE)}; known: {', '.join(_TABLE)}")
    return explain_case(op, case, any_layout=device is not None)


def explain_case(op: str, case: Case, *, any_layout: bool = False) -> Explanation:
    """As :func:`explain`, for a case."""
    rows: list[tuple[str, int, str]] = []
    elsewhere: list[str] = []
    chosen: Kernel | None = None
    kind = device_type(case.device)
    for k in kernels(op):
        if not _on(kind, k.devices):
            elsewhere.append(k.name)
            continue
        reason = k.refuses(case, any_layout=any_layout)
        if reason is None:
            reason, chosen = ("RUNS", k) if chosen is None else ("works, but a better one runs", chosen)
        rows.append((k.name, k.rank, reason))
    return Explanation(op, case, tuple(rows), chosen is None or row_independent(chosen, case), tuple(elsewhere))
