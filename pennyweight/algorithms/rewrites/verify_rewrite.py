"""Checks of a rewrite: the model's function is preserved (outputs on a few samples), and the model rounded to nearest
gets closer to the float model on held-out data. Restores parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from ...core.tensor import AffineQuantizedTensor
from ...distributed import all_reduce
from ...kernels.repack import choose_layout
from ...kernels.table import Case
from ...kernels.target import target_of
from ...planning.parameters import Place, Site, make_site, places
from ...planning.run_batch import token_mask
from ...planning.scheme import Scheme
from ..calibration.block_order import inference_mode
from ..calibration.disk_offload import copy_of, offloaded
from ..calibration.float32_products import run_batch
from ..solvers.rtn import quantize_weight
from ..tuners import losses

TOLERANCE = 1e-5  # |difference| / |outputs| of a model in float32
KEPT = 2**28  # limit in bytes of the float model's outputs; of larger outputs evenly spaced tokens are compared


class SavedTensors:
    """Copies of tensors, restored bit for bit."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.saved = [(t, copy_of(t)) for t in {id(t): t for t in tensors}.values()]

    def restore(self) -> None:
        for t, was in self.saved:
            t.data.copy_(was)


def float_outputs(model: nn.Module, batch: Any, before: bool = False) -> list[Tensor]:
    """The float tensors of the model's output. Raises ValueError if there are none, and ``before`` a rewrite for NaN,
    with which nothing can be compared."""
    with inference_mode(model):
        found = [t.detach().clone() for t in tree_leaves(run_batch(model, batch)) if isinstance(t, Tensor)]
    found = [t for t in found if t.is_floating_point() and t.numel()]
    if not found:
        raise ValueError(
            f"{type(model).__name__} returns no float tensors, so it cannot be checked that a rewrite preserves its "
            "function; pass calibration batches for which it returns some"
        )
    bad = sum(int(t.isnan().sum()) for t in found) if before else 0
    if bad:
        raise ValueError(
            f"{type(model).__name__} returns {bad} NaN of {sum(t.numel() for t in found)} values on the calibration "
            "data before quantization, so it cannot be checked that a rewrite preserves its function; use data with "
            "finite outputs"
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


# -- held-out divergence -----------------------------------------------------------------------------------------------


def schemes_by_name(model: nn.Module, target: Mapping[str, Scheme | None]) -> dict[str, Scheme | None]:
    """``target`` under every name of each parameter: it has a tied one under one name, and a rewrite may untie it."""
    found = dict(target)
    for where in places(model):
        known = [target[p.name] for p in where if p.name in target]
        found.update((p.name, known[0]) for p in where if known)
    return found


class HeldOutCheck:
    """The divergence (:mod:`~pennyweight.algorithms.tuners.losses`) of a model, rounded to nearest, from its float
    state at construction.

    target  name of a weight -> its scheme, as in a rewrite
    guard   held-out batches

    Rounded weights are cached between trials: call :meth:`forget` for those whose float weight has changed, or
    :meth:`forget_all`. Memory: the quantized model next to the float one, and at most :data:`KEPT` bytes of outputs.
    """

    def __init__(self, model: nn.Module, target: Mapping[str, Scheme | None], guard: Sequence[Any]) -> None:
        self.model, self.target, self.guard = model, schemes_by_name(model, target), guard
        self.rounded: dict[int, tuple[Tensor, AffineQuantizedTensor]] = {}  # id of a float weight -> itself, rounded
        self.room = KEPT // max(1, len(guard))
        with inference_mode(model):
            first = run_batch(model, guard[0])
            self.measure = losses.divergence(None, first)
            del first
            self.expected = [
                losses.finite(self._picked(run_batch(model, batch), batch), model, None) for batch in guard
            ]

    def _picked(self, output: Any, batch: Any) -> Tensor:
        """The compared tensor: valid tokens only, subsampled to the memory limit."""
        x: Tensor = losses.compared_tensor(output)
        mask = token_mask(batch)
        if x.ndim > 2:
            x = x[mask] if mask is not None and mask.shape == x.shape[:2] else x.flatten(0, 1)
        if x.nbytes > self.room and len(x) > 1:
            count = max(1, self.room * len(x) // x.nbytes)
            x = x[torch.linspace(0, len(x) - 1, count, dtype=torch.float32, device="cpu").round().long().to(x.device)]
        return x.clone()

    def forget(self, tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            self.rounded.pop(id(t), None)

    def forget_all(self) -> None:
        self.rounded.clear()

    def divergence(self) -> float:
        """Divergence of the current model, rounded, from the initial one; inf if not finite. The same on all ranks. The
        float weights are restored."""
        found: list[tuple[Place, Tensor]] = []
        try:
            for where in list(places(self.model)):
                scheme = next((s for p in where if (s := self.target.get(p.name)) is not None), None)
                w = where[0].get()
                rounded = None if scheme is None else self._rounded(where[0], w, scheme)
                if rounded is None:
                    continue
                value = nn.Parameter(rounded, requires_grad=False)
                for place in where:  # not place.get(): of a module with two names the second has the value by then
                    found.append((place, w))
                    place.set(value)
            with inference_mode(self.model):
                total = sum(
                    float(self.measure(expected, self._picked(run_batch(self.model, batch), batch), None))
                    for batch, expected in zip(self.guard, self.expected, strict=True)
                )
        finally:
            for place, w in found:
                place.set(w)
        total, count = all_reduce.reduce_sum(
            torch.tensor([total, len(self.guard)], dtype=torch.float64, device="cpu")
        ).tolist()
        return total / count if math.isfinite(total) else math.inf

    def _rounded(self, place: Place, w: Tensor, scheme: Scheme) -> AffineQuantizedTensor | None:
        known = self.rounded.get(id(w))
        if known is not None and known[0] is w:
            return known[1]
        x = w.detach()
        site = make_site(place, w, named=True)
        if isinstance(site, str):
            return None
        x = x.dequantize() if isinstance(x, AffineQuantizedTensor) else x
        x = x.transpose(-2, -1) if site.transposed else x
        made = quantize_weight(x, scheme, place.name, _layout(site, scheme))[0]
        made = offloaded(made.transpose(-2, -1) if site.transposed else made)  # type: ignore[assignment]
        self.rounded[id(w)] = w, made
        return made


def _layout(site: Site, scheme: Scheme) -> str:
    """Layout of the kernel that will run the weight, so that the measurement matches deployment."""
    case = Case(scheme.weight, scheme.act, site.shape, site.dtype, target_of(site.device))
    return choose_layout(case, (site.op,))[1]
