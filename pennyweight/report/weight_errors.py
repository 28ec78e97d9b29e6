"""The error of a quantized weight: its distribution, by output channel, and its worst blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import blocks
from ..core.tensor import AffineQuantizedTensor
from ..planning.parameters import Site, make_site
from .layers import Pair

BINS, REACH = 61, 1.5  # of the histogram; errors beyond the reach go into the first and last bin
ROUNDED = 1e-3  # up to this share of errors above half a step, all weights count as rounded to nearest
TOP = 3  # worst channels and blocks


@dataclass(frozen=True)
class WeightErrors:
    """The error e = Wq - W of a weight.

    unit       of the histogram: "std", the standard deviation of the weight; "step", the distance of two codes, if
               weights of an integer format were not rounded to nearest (rounded errors in steps are uniform, and show
               nothing)
    counts     [BINS] from -reach to reach units
    reach      REACH for steps; for std the largest |e|
    beyond     share of elements with |e| above half a step (with a margin of 1 %); None for formats without a uniform
               step. Rounding to nearest stays within it; clipped values and solvers such as GPTQ exceed it
    channels   [C] of each output channel: |e| / |W|, Euclidean norms; 0 for a channel of zeros without error
    worst      the TOP channels with the most |e|^2: (channel, |e| / |W|)
    blocks     the TOP blocks with the most |e|^2: (channel, first input, last input, share of the total |e|^2)
    share      of the total |e|^2 in the TOP channels with the most
    """

    name: str
    unit: str
    counts: tuple[int, ...]
    reach: float
    beyond: float | None
    channels: Tensor
    worst: tuple[tuple[int, float], ...]
    blocks: tuple[tuple[int, int, int, float], ...]
    share: float


def weight_errors(pair: Pair) -> WeightErrors:
    """The errors of a quantized weight of any layer: linear, convolution, embedding or experts."""
    w = pair.found.get()
    assert isinstance(w, AffineQuantizedTensor)
    exact = pair.exact.get().detach()
    exact = exact.dequantize() if isinstance(exact, AffineQuantizedTensor) else exact
    exact = exact.to(w.device, torch.float32)
    error = w.dequantize().float() - exact
    step, tiny = _step(w), torch.finfo(torch.float32).tiny
    beyond = None
    if step is not None:
        relative = error / step.clamp(min=tiny)
        beyond = float((relative.abs() > 0.505).float().mean())
    if beyond is not None and beyond > ROUNDED:
        unit, reach = "step", REACH
    else:
        unit, relative = "std", error / exact.std(correction=0).clamp(min=tiny)
        reach = max(float(relative.abs().max()), 1e-12)
    counts = torch.histc(relative.clamp(-reach, reach), BINS, -reach, reach).long().tolist()
    site = make_site(pair.exact, exact)
    e, x = (_matrix(t, site) for t in (error, exact))
    noise, signal = e.square().sum(1), x.square().sum(1)
    total = max(float(noise.sum()), 1e-300)
    relative_channels = torch.where(noise == 0, torch.zeros_like(noise), (noise / signal).sqrt())
    order = noise.argsort(descending=True, stable=True)[:TOP].tolist()
    worst = tuple((c, float(relative_channels[c])) for c in order)
    return WeightErrors(
        pair.name, unit, tuple(counts), reach, beyond, relative_channels.cpu(), worst, _blocks(e, w, total),
        float(noise[order].sum()) / total,
    )  # fmt: skip


def _step(w: AffineQuantizedTensor) -> Tensor | None:
    """The distance of two neighbouring codes of each element, in logical order; None for formats that have no uniform
    one, and for inputs in another order (``perm``)."""
    scale = w.scale
    if w.spec.format.kind != "int" or scale is None or w.perm is not None:
        return None
    scale = scale.dequantize() if isinstance(scale, AffineQuantizedTensor) else scale
    whole = blocks.padded(w.spec.block, w.stored_shape)
    like = torch.zeros(whole, device=w.device, dtype=torch.float32)
    step = (blocks.split(like, scale.shape) + blocks.expand(scale.float().abs())).reshape(whole)
    step = step[tuple(slice(0, n) for n in w.stored_shape)]
    return step if w.axes is None else step.permute(w.axes)


def _matrix(x: Tensor, site: Site | str) -> Tensor:
    """[output channels, everything else]; the experts of a stack have channels of their own."""
    if isinstance(site, Site) and site.transposed:
        x = x.transpose(-2, -1)
    if isinstance(site, Site) and site.op == "transposed_convolution":  # [inputs, outputs, ..]
        x = x.transpose(0, 1)
    experts = x.ndim == 3 and (not isinstance(site, Site) or site.op == "bmm")
    return x.reshape(-1, x.shape[-1]) if experts else x.reshape(len(x), -1)


def _blocks(e: Tensor, w: AffineQuantizedTensor, total: float) -> tuple[tuple[int, int, int, float], ...]:
    """The worst blocks of consecutive inputs in a channel: those of a matrix that share a scale, or 128 inputs."""
    size = blocks.resolve(w.spec.block, w.stored_shape)[-1] if w.ndim == 2 else 0
    size = size if 1 < size < e.shape[1] else min(128, e.shape[1])
    padded = torch.nn.functional.pad(e, (0, -e.shape[1] % size)).reshape(len(e), -1, size)
    noise = padded.square().sum(-1)
    out = []
    for at in noise.flatten().argsort(descending=True, stable=True)[:TOP].tolist():
        channel, block = divmod(at, noise.shape[1])
        end = min((block + 1) * size, e.shape[1]) - 1
        out.append((channel, block * size, end, float(noise[channel, block]) / total))
    return tuple(out)
