"""Checks that a rewrite preserves a model's function: compares outputs on a few samples and restores parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...planning.run_batch import run_batch
from ..calibration.block_order import inference_mode

TOLERANCE = 1e-5  # |difference| / |outputs| of a model in float32


class SavedTensors:
    """Copies of tensors, restored bit for bit."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.saved = [(t, t.detach().clone()) for t in {id(t): t for t in tensors}.values()]

    def restore(self) -> None:
        for t, was in self.saved:
            t.data.copy_(was)


def float_outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """The float tensors of the model's output. Raises ValueError if there are none."""
    with inference_mode(model):
        found = [t.detach().clone() for t in tree_leaves(run_batch(model, batch)) if isinstance(t, Tensor)]
    found = [t for t in found if t.is_floating_point() and t.numel()]
    if not found:
        raise ValueError(
            f"{type(model).__name__} returns no float tensors, so it cannot be checked that a rewrite preserves its "
            "function; pass calibration batches for which it returns some"
        )
    return found


def probe_batch(batch: Any) -> Any:
    """The first two samples of a batch if all its tensors have the same number of samples; else the whole batch."""
    leaves, rebuild = tree_flatten(batch)
    counts = {t.shape[0] if isinstance(t, Tensor) and t.ndim > 1 else 0 for t in leaves}
    if len(counts) != 1 or min(counts) < 3:
        return batch
    return tree_unflatten([t[:2] for t in leaves], rebuild)


def relative_difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The largest |a - b| / |a| over pairs of tensors; inf if shapes differ or values become non-finite."""
    worst = 0.0 if len(a) == len(b) else math.inf
    for x, y in zip(a, b, strict=False):
        if x.shape != y.shape:
            return math.inf
        x, y = x.double(), y.double()
        same = x == y  # -inf of a mask is -inf
        norm = torch.linalg.vector_norm(torch.where(x.isfinite(), x, 0.0))
        off = torch.linalg.vector_norm(torch.where(same, 0.0, x - y))
        ratio = float(off / norm) if norm > 0 else float(off)
        worst = max(worst, ratio if math.isfinite(ratio) else math.inf)
    return worst


def tolerance(model: nn.Module) -> float:
    """:data:`TOLERANCE`; for other dtypes sixteen steps of the coarsest dtype of its float parameters."""
    dtypes = {p.dtype for p in model.parameters() if p.dtype in (torch.float32, torch.bfloat16, torch.float16)}
    worst = max((torch.finfo(d).eps for d in dtypes), default=0.0)
    return TOLERANCE if worst <= torch.finfo(torch.float32).eps else 16 * worst
