"""Checks whether a rewrite helps: divergence of the model with all weights rounded to nearest, before and after the
rewrite, on held-out data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...core.tensor import AffineQuantizedTensor
from ...distributed import all_reduce
from ...kernels.repack import choose_layout
from ...kernels.table import Case
from ...quantize.parameters import Place, Site, make_site, places
from ...quantize.pipeline import quantize_weight
from ...quantize.run_batch import run_batch, token_mask
from ...quantize.scheme import Scheme
from ..calibration.block_order import inference_mode
from ..tuners import losses

KEPT = 2**28  # limit in bytes of the float model's outputs; of larger outputs evenly spaced tokens are compared


class HeldOutCheck:
    """The divergence (:mod:`~pennyweight.algorithms.tuners.losses`) of a model, rounded to nearest, from its float
    state at construction.

    target  name of a weight -> its scheme, as in a rewrite
    guard   held-out batches

    Rounded weights are cached between trials: call :meth:`forget` for those whose float weight has changed, or
    :meth:`forget_all`. Memory: the quantized model next to the float one, and at most :data:`KEPT` bytes of outputs.
    """

    def __init__(self, model: nn.Module, target: Mapping[str, Scheme | None], guard: Sequence[Any]) -> None:
        self.model, self.target, self.guard = model, target, guard
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
        x: Tensor = losses.subsample(output)
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
                for place in where:
                    found.append((place, place.get()))
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
        made = made.transpose(-2, -1) if site.transposed else made  # type: ignore[assignment]
        self.rounded[id(w)] = w, made
        return made


def _layout(site: Site, scheme: Scheme) -> str:
    """Layout of the kernel that will run the weight, so that the measurement matches deployment."""
    case = Case(scheme.weight, scheme.act, site.shape, site.dtype, site.device)
    return choose_layout(case, (site.op,))[1]
