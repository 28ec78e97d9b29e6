"""The views that torchao's files can contain, in order of preference."""

from __future__ import annotations

from typing import Any

from ...core.tensor import AffineQuantizedTensor
from .block_views import MXTensor, NVFP4Tensor
from .float_views import Float8Tensor
from .int4_views import Int4OpaqueTensor, Int4Tensor
from .int_views import Int8Tensor, IntxUnpackedToInt8Tensor

__all__ = ["FILE_VIEWS", "find_view", "view_of"]

FILE_VIEWS: tuple[Any, ...] = (
    Int8Tensor, IntxUnpackedToInt8Tensor, Int4Tensor, Int4OpaqueTensor, Float8Tensor, MXTensor, NVFP4Tensor,
)  # fmt: skip


def find_view(w: AffineQuantizedTensor) -> Any:
    """The first view that can represent w, or None; no torchao class supports permuted channels."""
    return next((view for view in FILE_VIEWS if view.holds(w)), None) if w.perm is None else None


def view_of(w: AffineQuantizedTensor) -> Any:
    """The first view that can represent w. Raises ValueError naming the spec if torchao has no class for it."""
    view = find_view(w)
    if view is None:
        raise ValueError(
            f"torchao has no tensor class for {w.spec.with_(layout='plain')} of shape {tuple(w.shape)}"
            + ("" if w.act is None else f" with activation {w.act}")
            + ("" if w.perm is None else " with permuted channels")
            + "; save it with pennyweight.save"
        )
    return view
