"""Repacks a quantized weight for the kernel that will run it."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..core.layouts import READABLE, compact_layout, get_layout
from ..core.tensor import AffineQuantizedTensor
from .table import Case, Kernel, case_of, select


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
        if (devices is None or case.device in devices) and all(
            k.layout == layout or layout in READABLE for k in chosen
        ):
            return chosen[0], layout
    layout = compact_layout(case.spec, case.shape)
    return kernels_in(layout)[0], layout


def prepare(
    w: AffineQuantizedTensor, ops: tuple[str, ...] = ("linear",), dtype: torch.dtype | None = None
) -> AffineQuantizedTensor:
    """w in the layout of the kernel that will run ``ops``, with the same values. dtype: of the input, default w's."""
    return w.to_layout(choose_layout(case_of(w, dtype), ops)[1])


def pack_for_kernel(w: AffineQuantizedTensor) -> AffineQuantizedTensor:
    """A shard packed for the kernel of its own shape, which may differ from that of the whole weight."""
    return prepare(w, ("bmm" if w.ndim == 3 else "linear",))
