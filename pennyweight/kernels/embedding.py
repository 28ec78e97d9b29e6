"""Embedding lookup: gather the codes and parts of the requested rows and dequantize only those."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import blocks, fallback
from ..core.numerics import Parts, unpermute_last_axis
from ..core.ops.parts import to_sliceable
from ..core.tensor import AffineQuantizedTensor, each_part, implements
from .aten_operands import dequantized, misfit
from .table import Case, Kernel, case_of, register_kernel, reorders, select

QT = AffineQuantizedTensor


def _by_row(case: Case) -> bool | str:
    if isinstance(case.spec.scale, type(case.spec)) or isinstance(case.spec.offset, type(case.spec)):
        return "its scale is itself quantized"
    return blocks.resolve(case.spec.block, case.shape)[0] == 1 or "rows share scales, so they cannot be gathered alone"


def gather(index: Tensor, w: AffineQuantizedTensor, bias: None = None) -> Tensor:
    """w[index] as floats of w's dtype. index: int32 or int64, any shape, 0 to V - 1; w: [V, D] with parts per row."""
    w = to_sliceable(w)
    flat = index.reshape(-1)
    rows = each_part(Parts(*w.parts[:4]), lambda p: p.index_select(0, flat))._replace(table=w.table)
    picked = AffineQuantizedTensor(rows, w.spec, (flat.numel(), *w.shape[1:]), w.dtype)
    return picked._dequantize(w.dtype).reshape(*index.shape, *w.shape[1:])


def lookup(index: Tensor, w: AffineQuantizedTensor, bias: None = None) -> Tensor:
    """The reference: dequantize the table, then look up."""
    fallback.count("embedding/dequantize")
    return F.embedding(index, w._dequantize(w.dtype))


@implements(torch.ops.aten.embedding.default)
def _embedding(func: Any, args: Any, kwargs: Any) -> Any:
    w, index = args[:2]
    if isinstance(w, QT) and (index.device != w.device or index.dtype not in (torch.int32, torch.int64) or w.ndim != 2):
        raise misfit("embedding", index, w, "indices must be int32 or int64, the table [rows, width], on one device")
    if not isinstance(w, QT) or w.axes is not None:
        return dequantized(func, args, kwargs)
    if w._pre_scale is not None:
        rows = _embedding(func, (w.with_(pre_scale=None), *args[1:]), kwargs)
        return (rows * w._pre_scale).to(w.dtype)
    case = case_of(w)
    kernel = select("embedding", case)
    if not reorders(kernel, case):
        return kernel.run(index, w, None)
    return unpermute_last_axis(kernel.run(index, w.with_(perm=None), None), w._perm)


register_kernel(Kernel("embedding", "gather_rows", gather, _by_row, rank=10, tolerance="exact"))
register_kernel(Kernel("embedding", "dequantize", lookup, lambda case: True, rank=-1, tolerance="exact"))
