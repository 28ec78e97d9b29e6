"""explain(): which kernel runs a weight, or what runs in each layer of a model, fused blocks included."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core import fallback
from ..core.tensor import AffineQuantizedTensor
from ..kernels import table
from ..kernels.table import Explanation, case_of, explain_case, op_of
from ..planning.parameters import Site, make_site, places
from .fuse import FusedBlock

FUSED = "fused block"  # prefix of its counts in fallbacks()


@dataclass(frozen=True)
class LayerKernel:
    """What runs for one block or parameter.

    name    of the block or parameter
    op      "block", an op of the kernel table, or "" for a float parameter that no kernel of the table reads
    kernel  the kernel; "block" for one native call of a fused block; "" if it is float
    note    for a fused block its layers; for a layer in it, what runs if a call is not fused; for a kernel why better
            ones do not run; for a float parameter why it has none
    """

    name: str
    op: str
    kernel: str
    note: str = ""


@dataclass(frozen=True)
class ModelExplanation:
    """What runs in a model. Meant to be printed.

    rows      a row for each fused block and each weight that is or could be quantized, in the model's order
    unfused   calls that ran the own forward of a fused block since the last ``reset_fallbacks()``: reason -> number
    """

    dtype: torch.dtype
    rows: tuple[LayerKernel, ...]
    unfused: dict[str, int]

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        widths = [max((len(getattr(r, part)) for r in self.rows), default=0) for part in ("name", "op", "kernel")]
        lines = [f"inputs in {name}:"]
        for row in self.rows:
            cells = zip((row.name, row.op or "-", row.kernel or "float"), widths, strict=True)
            lines.append(f"  {'  '.join(f'{cell:<{max(width, 5)}}' for cell, width in cells)}  {row.note}".rstrip())
        for reason, count in self.unfused.items():
            lines.append(f"not fused in {count} call{'s' * (count > 1)} of fused blocks: {reason}")
        return "\n".join(lines)


def explain(x: Any, w: AffineQuantizedTensor | nn.Module, op: str = "") -> Explanation | ModelExplanation:
    """What runs for a weight, a layer or a model, and why nothing faster does. Meant to be printed.

    x   the input, or its dtype
    w   a quantized weight: every kernel for it, with RUNS or the reason why it is rejected. A module: a row for each
        fused block and each weight, with the kernel that runs in it
    op  of a weight; default: what its shape and blocks are made for, "linear" for a matrix
    """
    if not isinstance(w, nn.Module):
        return table.explain(x, w, op)
    dtype = x if isinstance(x, torch.dtype) else x.dtype
    blocks = {name: module for name, module in w.named_modules() if isinstance(module, FusedBlock)}
    inside = {f"{name}.{path}".lstrip("."): name for name, block in blocks.items() for path in _products(block)}
    rows: list[LayerKernel] = []
    told: set[str] = set()
    for where in places(w):
        block = next((b for b in blocks if _within(where[0].module_name, b)), None)
        if block is not None and block not in told:
            told.add(block)
            rows.append(_block(block, blocks[block]))
        row = _weight(where, dtype)
        if row is not None:
            own = next((p.name for p in where if p.name in inside), None)
            rows.append(row if own is None else _in_block(row, inside[own]))
    counts = {k.partition(": ")[2]: n for k, n in fallback.fallbacks().items() if k.startswith(f"{FUSED}: ")}
    return ModelExplanation(dtype, tuple(rows), counts if blocks else {})


def _within(name: str, block: str) -> bool:
    return not block or name == block or name.startswith(f"{block}.")


def _products(block: Any) -> list[str]:
    return [product[0] for product in type(block).recipe.products()]


def _block(name: str, block: Any) -> LayerKernel:
    kind = type(block)
    count = len(_products(block))
    note = f"{kind.thawed.__name__}: one native call for {count} linear layers and what lies between them"
    if kind.bound is None:
        note += "; bound again at its next call"
    return LayerKernel(name or "model", "block", "block", note)


def _in_block(row: LayerKernel, block: str) -> LayerKernel:
    note = f"in {block or 'the block'}; {row.kernel} in calls that are not fused"
    return LayerKernel(row.name, row.op, "block", note)


def _weight(where: list[Any], dtype: torch.dtype) -> LayerKernel | None:
    """The row of a parameter; None for vectors and others that are never quantized."""
    tensor, place = where[0].get(), next((p for p in where if p.own), where[0])
    site = make_site(place, tensor, named=isinstance(tensor, AffineQuantizedTensor))
    if not isinstance(tensor, AffineQuantizedTensor):
        return LayerKernel(where[0].name, "", "", "not quantized") if isinstance(site, Site) and place.own else None
    op = site.op if isinstance(site, Site) else op_of(tensor.spec, tensor.stored_shape)
    told = explain_case(op, case_of(tensor, dtype))
    chosen = next(i for i, (_, _, verdict) in enumerate(told.rows) if verdict == "RUNS")
    better = [f"{name}: {why}" for name, rank, why in told.rows[:chosen] if rank > told.rows[chosen][1]]
    name, rank, _ = told.rows[chosen]
    dequantizes = ["dequantizes the weight at each call"] if rank < 0 else []
    return LayerKernel(where[0].name, op, name, "; ".join([*dequantizes, *(better if rank < 0 else [])]))
