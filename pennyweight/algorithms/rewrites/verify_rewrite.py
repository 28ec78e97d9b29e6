"""Whether a model computes what it did: its outputs on a few samples, compared, and its parameters, put back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...quantize.run_batch import run_batch
from ..calibration.block_order import inference_mode

TOLERANCE = 1e-5  # |difference| / |outputs| of a model in float32


class SavedTensors:
    """Copies of tensors, to put back bit for bit."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.saved = [(t, t.detach().clone()) for t in {id(t): t for t in tensors}.values()]

    def restore(self) -> None:
        for t, was in self.saved:
            t.data.copy_(was)


def float_outputs(model: nn.Module, batch: Any) -> list[Tensor]:
    """The float tensors that the model puts out. Raises ValueError where it puts out none."""
    with inference_mode(model):
        found = [t.detach().clone() for t in tree_leaves(run_batch(model, batch)) if isinstance(t, Tensor)]
    found = [t for t in found if t.is_floating_point() and t.numel()]
    if not found:
        raise ValueError(
            f"{type(model).__name__} puts out no float tensors, so nothing shows whether a rewrite keeps its function; "
            "pass calibration batches for which it returns some"
        )
    return found


def probe_batch(batch: Any) -> Any:
    """The first two samples of a batch, where all its tensors have as many samples; else the whole."""
    leaves, rebuild = tree_flatten(batch)
    counts = {t.shape[0] if isinstance(t, Tensor) and t.ndim > 1 else 0 for t in leaves}
    if len(counts) != 1 or min(counts) < 3:
        return batch
    return tree_unflatten([t[:2] for t in leaves], rebuild)


def relative_difference(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    """The largest |a - b| / |a| over pairs of tensors; inf where shapes differ or numbers stop being finite."""
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
    """:data:`TOLERANCE`; sixteen steps of the coarsest dtype of its float parameters where that is no float32."""
    dtypes = {p.dtype for p in model.parameters() if p.dtype in (torch.float32, torch.bfloat16, torch.float16)}
    worst = max((torch.finfo(d).eps for d in dtypes), default=0.0)
    return TOLERANCE if worst <= torch.finfo(torch.float32).eps else 16 * worst
