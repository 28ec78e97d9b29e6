"""explain(): which kernel runs a weight, or what runs in each layer of a model, fused blocks and nets included."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn

from ..core import fallback
from ..core.model_arguments import check_arguments
from ..core.tensor import AffineQuantizedTensor
from ..kernels import table
from ..kernels.table import Explanation, case_of, explain_case, moved, op_of
from ..kernels.target import check_target, read_target
from ..planning.parameters import Site, make_site, places
from ..support.arguments import show
from ..support.errors import ArgumentTypeError
from ..support.tables import html_table
from .fused_module import FusedModule

Device = torch.device | str | None


@dataclass(frozen=True)
class LayerKernel:
    """What runs for one block, convolution net or parameter.

    name    of the block, net or parameter
    op      "block", "net", an op of the kernel table, or "" for a float parameter that no kernel of the table reads
    kernel  the kernel; "block" for one native call of a fused block; "chains" for those of a fused convolution net; ""
            if it is float
    note    for a fused block or net its layers; for a layer in it, what runs if a call is not fused; for a kernel why
            better ones do not run; for a float parameter why it has none
    """

    name: str
    op: str
    kernel: str
    note: str = ""


@dataclass(frozen=True, repr=False)
class ModelExplanation:
    """What runs in a model. Meant to be printed.

    rows      a row for each fused block or net and each weight that is or could be quantized, in the model's order
    unfused   calls that ran the own forward of a fused block or net since the last ``reset_fallbacks()``: reason ->
              number
    """

    dtype: torch.dtype
    rows: tuple[LayerKernel, ...]
    unfused: dict[str, int]

    def __repr__(self) -> str:
        counts = Counter(row.kernel or "float" for row in self.rows)
        name = str(self.dtype).removeprefix("torch.")
        return f"<ModelExplanation: inputs in {name}; {', '.join(f'{n} × {k}' for k, n in counts.most_common())}>"

    def _repr_html_(self) -> str:
        rows = [[row.name, row.op or "-", row.kernel or "float", row.note] for row in self.rows]
        title = f"inputs in {str(self.dtype).removeprefix('torch.')}"
        return html_table(("layer", "op", "kernel", "note"), rows, title=title, notes=self._unfused())

    def _unfused(self) -> list[str]:
        what = " and ".join(f"{kind}s" for kind in ("block", "net") if any(row.op == kind for row in self.rows))
        calls = ((reason, f"{count} call{'s' * (count > 1)}") for reason, count in self.unfused.items())
        return [f"not fused in {number} of fused {what}: {reason}" for reason, number in calls]

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        widths = [max((len(getattr(r, part)) for r in self.rows), default=0) for part in ("name", "op", "kernel")]
        lines = [f"inputs in {name}:"]
        for row in self.rows:
            cells = zip((row.name, row.op or "-", row.kernel or "float"), widths, strict=True)
            lines.append(f"  {'  '.join(f'{cell:<{max(width, 5)}}' for cell, width in cells)}  {row.note}".rstrip())
        return "\n".join([*lines, *self._unfused()])


@overload
def explain(x: Any, w: Tensor, op: str = ..., *, device: Device = ...) -> Explanation: ...
@overload
def explain(x: Any, w: nn.Module, op: str = ..., *, device: Device = ...) -> ModelExplanation: ...
@check_arguments(device=check_target)
def explain(
    x: Any, w: Tensor | nn.Module | None = None, op: str = "", *, device: Device = None
) -> Explanation | ModelExplanation:
    """What runs for a weight, a layer or a model, and why nothing faster does. Meant to be printed.

    x   the input, or its dtype
    w   a quantized weight: every kernel for it, with RUNS or the reason why it is rejected. A module: a row for each
        fused block or net and each weight, with the kernel that runs in it
    op  of a weight; default: what its shape and blocks are made for, "linear" for a matrix
    device  a device, or a target that this machine need not have ("cuda:sm_90", "hip:gfx942"): as if the weights were
            moved there, where they are packed on arrival. Default: where they are

    >>> import torch, pennyweight as pw
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.LayerNorm(8))
    >>> report = pw.quantize_(model, "int8")
    >>> [(row.name, row.op) for row in pw.explain(torch.float32, model).rows]
    [('0.weight', 'linear')]
    >>> [verdict for kernel, rank, verdict in pw.explain(torch.float32, model[0].weight).rows].count("RUNS")
    1
    """
    if isinstance(x, nn.Module) or not isinstance(x, (Tensor, torch.dtype)):
        order = f", and w is {show(w)}; exchange them" if isinstance(x, nn.Module) else ""
        if w is None:
            order = "; the model comes second: explain(torch.float32, model)"
        raise ArgumentTypeError(
            f"explain: x must be the input (a tensor), or its dtype such as torch.float32, got {show(x)}{order}"
        )
    if not isinstance(w, (nn.Module, AffineQuantizedTensor)):
        remedy = "; quantize the model first: pw.quantize_(model, config)" if isinstance(w, Tensor) else ""
        raise ArgumentTypeError(f"explain: w must be a quantized weight or a model, got {show(w)}{remedy}")
    if not isinstance(w, nn.Module):
        return table.explain(x, w, op, device=device)
    dtype = x if isinstance(x, torch.dtype) else x.dtype
    target = None if device is None else read_target(device)
    fused: dict[str, Any] = {
        name: module
        for name, module in w.named_modules()
        if isinstance(module, FusedModule) and target in (None, "cpu")  # nothing is fused on other devices
    }
    inside = {f"{name}.{own}".lstrip("."): name for name, m in fused.items() for own in m.fused_kind.weights(m)}
    rows: list[LayerKernel] = []
    named: set[str] = set()
    for where in places(w):
        around = next((name for name in fused if _within(where[0].module_name, name)), None)
        if around is not None and around not in named:
            named.add(around)
            rows.append(_fused(around, fused[around]))
        row = _weight(where, dtype, target)
        if row is not None:
            own = next((p.name for p in where if p.name in inside), None)
            rows.append(row if own is None else _inside(row, inside[own], fused[inside[own]]))
    counts: Counter[str] = Counter()
    for kind in {module.fused_kind.name for module in fused.values()}:
        found = fallback.fallbacks().items()
        counts.update({k.partition(": ")[2]: n for k, n in found if k.startswith(f"fused {kind}: ")})
    return ModelExplanation(dtype, tuple(rows), dict(counts))


def _within(name: str, fused: str) -> bool:
    return not fused or name == fused or name.startswith(f"{fused}.")


def _fused(name: str, module: Any) -> LayerKernel:
    """The row of a fused block or net."""
    cls, kind = type(module), module.fused_kind
    note = f"{cls.thawed.__name__}: {kind.about(module)}"
    if cls.bound is None:
        note += "; bound again at its next call"
    return LayerKernel(name or "model", kind.name, kind.kernel, note)


def _inside(row: LayerKernel, name: str, module: Any) -> LayerKernel:
    """The row of a weight in a fused block or net."""
    note = f"in {name or f'the {module.fused_kind.name}'}; {row.kernel} in calls that are not fused"
    return LayerKernel(row.name, row.op, module.fused_kind.kernel, note)


def _weight(where: list[Any], dtype: torch.dtype, target: str | None) -> LayerKernel | None:
    """The row of a parameter, on ``target`` if given; None for vectors and others that are never quantized."""
    tensor, place = where[0].get(), next((p for p in where if p.own), where[0])
    site = make_site(place, tensor, named=isinstance(tensor, AffineQuantizedTensor))
    if not isinstance(tensor, AffineQuantizedTensor):
        return LayerKernel(where[0].name, "", "", "not quantized") if isinstance(site, Site) and place.own else None
    op = site.op if isinstance(site, Site) else op_of(tensor.spec, tensor.stored_shape)
    case = case_of(tensor, dtype)
    explanation = explain_case(op, case if target is None else moved(case, target), any_layout=target is not None)
    verdicts = explanation.rows
    chosen = next(i for i, (_, _, verdict) in enumerate(verdicts) if verdict == "RUNS")
    better = [f"{name}: {why}" for name, rank, why in verdicts[:chosen] if rank > verdicts[chosen][1]]
    name, rank, _ = verdicts[chosen]
    dequantizes = ["dequantizes the weight at each call"] if rank < 0 else []
    return LayerKernel(where[0].name, op, name, "; ".join([*dequantizes, *(better if rank < 0 else [])]))
