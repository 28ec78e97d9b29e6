"""Statistics of the inputs of linear layers: magnitudes and outlier channels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..planning.run_batch import run_batch
from .layers import first_tensor, unwrapped, weights
from .outputs import batches_of, evaluating

# A channel is an outlier if its largest |x| exceeds this multiple of the median channel's
OUTLIER = 6.0
# Bins of log2 |x|: half an octave each; smaller and larger values go into the first and last
LOW, HIGH, BINS = -16, 16, 64


@dataclass
class Inputs:
    """One layer's inputs over all tokens: the largest |x| of each channel [K], and a histogram of log2 |x| (zeros go
    into the first bin)."""

    name: str
    channels: Tensor
    bins: Tensor

    @property
    def ratio(self) -> float:
        """The largest channel over the median one; 1 if all are zero."""
        median = float(self.channels.median())
        return float(self.channels.max()) / median if median > 0 else 1.0

    @property
    def outliers(self) -> list[int]:
        """Outlier channels, largest first."""
        order = self.channels.argsort(descending=True, stable=True).tolist()
        limit = OUTLIER * float(self.channels.median())
        return [c for c in order if float(self.channels[c]) > limit]


def activations(model: nn.Module, batches: Any) -> list[Inputs]:
    """Statistics of the inputs of each linear layer, strongest outliers first. Padding tokens are included, because
    they are quantized too."""
    model = unwrapped(model)
    found: dict[str, Inputs] = {}
    handles = []
    try:
        for where in weights(model):
            for place in where:
                w = place.get()
                if place.own and w.ndim == 2 and not isinstance(place.module, nn.Embedding):
                    hook = partial(_note, found, place.name)
                    handles.append(place.module.register_forward_pre_hook(hook, with_kwargs=True))
        with evaluating(model):
            for batch in batches_of(batches):
                run_batch(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return sorted(found.values(), key=lambda i: -i.ratio)


def _note(found: dict[str, Inputs], name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
    x = first_tensor((*args, *kwargs.values()))
    if x is None or not x.numel():
        return
    size = x.detach().float().abs().reshape(-1, x.shape[-1])
    largest = size.amax(0).cpu()
    at = ((size.log2() - LOW) * (BINS / (HIGH - LOW))).clamp(0, BINS - 1).nan_to_num(BINS - 1)
    bins = torch.bincount(at.long().flatten(), minlength=BINS).cpu()
    if name in found:
        here = found[name]
        here.channels, here.bins = torch.maximum(here.channels, largest), here.bins + bins
    else:
        found[name] = Inputs(name, largest, bins)
