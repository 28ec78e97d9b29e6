"""Packing a quantized weight for the kernel that will run it."""

from __future__ import annotations

from typing import Any

import torch

from ..core.layouts import get_layout
from ..core.tensor import AffineQuantizedTensor
from ..kernels.table import Case, Kernel, case_of, select


def storage_layout(bits: int) -> str:
    """Where no kernel asks for a layout of its own: whole bytes plain, the rest as bit streams."""
    return "plain" if bits == 8 else "bits"


def choose_layout(case: Case, ops: tuple[str, ...] = ("linear",)) -> tuple[Kernel, str]:
    """The kernel of the first op and the layout to store the weight in, given every op that reads the weight.

    A tied weight has several: a packing that one of them could only read by unpacking everything is not taken.
    """
    plain = storage_layout(case.spec.format.bits)
    layouts = [plain]
    for op in ops:
        wanted = select(op, case, any_layout=True).layout
        if wanted is not None and wanted not in layouts:
            layouts.insert(0, wanted)
    for layout in layouts:
        stored = Case(case.spec.with_(layout=layout), *_rest(case))
        chosen = [select(op, stored) for op in ops]
        devices = get_layout(layout).devices
        fits = devices is None or case.device in devices
        if fits and (layout == plain or all(k.layout in (None, layout) and (k.rank >= 0) for k in chosen)):
            return chosen[0], layout
    raise AssertionError("the last layout always fits")


def _rest(case: Case) -> tuple[Any, ...]:
    return case.act, case.shape, case.dtype, case.device


def prepare(
    w: AffineQuantizedTensor, ops: tuple[str, ...] = ("linear",), dtype: torch.dtype | None = None
) -> AffineQuantizedTensor:
    """w in the layout of the kernel that will run ``ops``; the same values. dtype: of the input, default w's own."""
    case = case_of(w, dtype)
    _, layout = choose_layout(Case(case.spec.with_(layout="plain"), *_rest(case)), ops)
    return w.to_layout(layout)
