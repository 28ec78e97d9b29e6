"""Repacks a quantized weight for the kernel that will run it."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..core.layouts import READABLE, compact_layout, get_layout, register_packing
from ..core.tensor import AffineQuantizedTensor
from .table import Case, Kernel, case_of, kernels, select
from .target import fits, target_of


def choose_layout(case: Case, ops: tuple[str, ...] = ("linear",)) -> tuple[Kernel, str]:
    """The kernel of the first op and the layout to store the weight in, given all ops that read it.

    A tied weight has several ops. A layout is not chosen if one of them would have to unpack the whole weight.
    """

    def kernels_in(layout: str) -> list[Kernel]:
        stored = replace(case, spec=case.spec.with_(layout=layout))
        return [select(op, stored) for op in ops]

    case = replace(case, spec=case.spec.with_(layout="plain"))
    wanted = (select(op, case, any_layout=True).layout for op in ops)
    for layout in dict.fromkeys(w for w in wanted if w is not None):
        devices = get_layout(layout).devices
        chosen = kernels_in(layout)
        if fits(devices, case.device) and all(k.layout == layout or layout in READABLE for k in chosen):
            return chosen[0], layout
    layout = compact_layout(case.spec, case.shape)
    return kernels_in(layout)[0], layout


def prepare(
    w: AffineQuantizedTensor, ops: tuple[str, ...] = ("linear",), dtype: torch.dtype | None = None
) -> AffineQuantizedTensor:
    """w in the layout of the kernel that will run ``ops``, with the same values. dtype: of the input, default w's."""
    packed = w.to_layout(choose_layout(case_of(w, dtype), ops)[1])
    packed.readers = ops
    return packed


def pack_for_kernel(w: AffineQuantizedTensor) -> AffineQuantizedTensor:
    """A shard packed for the kernel of its own shape, which may differ from that of the whole weight."""
    return prepare(w, ("bmm" if w.ndim == 3 else "linear",))


def _ops_of(layout: str) -> tuple[str, ...]:
    """The op that a tensor in a kernel's layout was packed for: "linear" where several read it."""
    ops = {k.op for k in kernels() if k.layout == layout}
    return ("linear",) if "linear" in ops else tuple(sorted(ops))[:1]


def _pack_moved(w: AffineQuantizedTensor, before: str | None) -> AffineQuantizedTensor:
    """w, just moved, in the layout of the kernel of its device. It stays portable if nothing tells what reads it: a
    matrix in a portable layout may be that of an embedding, which a layout for products would unpack at each lookup."""
    ops = w.readers or (() if before is None else _ops_of(before))
    return prepare(w, ops) if ops else w


register_packing(lambda devices, device: fits(devices, target_of(device)), _pack_moved)
