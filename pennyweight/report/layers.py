"""Weights of two models, matched, with their stored bytes and differences; statistics of the inputs of layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.describe_spec import shorten
from ..core.tensor import AffineQuantizedTensor
from ..io.state_dict import items
from ..planning.parameters import Place, places
from ..planning.run_batch import run_batch
from .metrics import decibels, energies
from .outputs import batches_of, evaluating

_PART = 1 << 24  # elements of a weight in float64 at a time


@dataclass(frozen=True)
class Pair:
    """One weight of both models. tied: the first name of the same tensor in the quantized model, "" if this is it."""

    name: str
    exact: Place
    found: Place
    tied: str = ""

    @property
    def scheme(self) -> str:
        """How it is stored, "" if it is not quantized."""
        w = self.found.get()
        if not isinstance(w, AffineQuantizedTensor):
            return ""
        act = "" if w.act is None else f" × {w.act}"
        order = " perm" if w.perm is not None else ""
        scaled = " pre_scale" if w.pre_scale is not None else ""
        return f"{w.spec.with_(layout='plain')}{order}{scaled}{act}"

    @property
    def short(self) -> str:
        """The same in as few words as a table has room for."""
        w = self.found.get()
        return shorten(w.spec, w.act, w.ndim) if isinstance(w, AffineQuantizedTensor) else ""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside a torch.compile wrapper, which bypasses the layers' hooks and prefixes their names."""
    return getattr(model, "_orig_mod", model)


def weights(model: nn.Module, every: bool = False) -> Iterator[list[Place]]:
    """Every weight of a registered layer type and every quantized parameter, with all places. every: all matrices."""
    for where in places(model):
        quantized = every or isinstance(where[0].get(), AffineQuantizedTensor)
        kept = [p for p in where if p.get().ndim > 1 and (p.own or quantized)]
        if kept:
            yield kept


def pairs(exact: nn.Module, found: nn.Module) -> tuple[list[Pair], tuple[str, ...]]:
    """(weights with equal name and shape in both; a sentence for each of the others), in the float model's order.

    A module with two names is one layer, under the first of them.
    """
    exact_places = {p.name: p for where in weights(exact, every=True) for p in _once(where)}
    ours = {p.name: (p, where[0].name) for where in weights(found) for p in _once(where)}
    known = {p.name: p for where in weights(found, every=True) for p in _once(where)}
    both, apart = [], []
    order = {name: i for i, (name, _) in enumerate(exact.named_modules(remove_duplicate=False))}
    for name, place in sorted(exact_places.items(), key=lambda item: order.get(item[1].module_name, 0)):
        if name not in ours:
            if place.own or name not in known:
                apart.append(f"{name}: only the float model has it")
        elif place.get().shape != ours[name][0].get().shape:
            shapes = f"{list(place.get().shape)} and {list(ours[name][0].get().shape)}"
            apart.append(f"{name}: the models have shapes {shapes}")
        else:
            first = ours[name][1]
            both.append(Pair(name, place, ours[name][0], "" if first == name else first))
    apart += [f"{name}: only the quantized model has it" for name in known if name not in exact_places]
    return both, tuple(apart)


def doubts(exact: nn.Module, found: nn.Module, both: list[Pair]) -> tuple[str, str]:
    """(why the second model cannot be the first one quantized; that weights of the float model are quantized
    themselves), a sentence each, or ""."""
    names = [p.name for (p, *_) in weights(exact) if isinstance(p.get(), AffineQuantizedTensor)]
    reference = f"{len(names)} weights of the float model are quantized ({names[0]})" if names else ""
    places = list(weights(found))
    if names and not any(isinstance(p.get(), AffineQuantizedTensor) for (p, *_) in places):
        return f"{reference}, and none of the other model; exchange them, the float model first", ""
    if 2 * len(both) < len(places):
        wrong = (
            f"only {len(both)} of {len(places)} weights have the same name and shape in the float model: these are "
            "different models; compare with the float model that was quantized"
        )
        return wrong, ""
    return "", f"{reference}: errors are relative to them" if reference else ""


def check_one_model(exact: nn.Module, found: nn.Module, exact_path: str, path: str) -> None:
    """Raise ValueError if the second folder cannot hold the model of the first, quantized."""
    wrong, _ = doubts(exact, found, pairs(exact, found)[0])
    if wrong:
        raise ValueError(f"{exact_path} (float) and {path}: {wrong}")


def _once(where: list[Place]) -> list[Place]:
    """The places without duplicates of one attribute of one module."""
    return list({(id(p.module), p.param): p for p in reversed(where)}.values())[::-1]


def stored_bytes(tensor: Tensor) -> int:
    """Bytes in a file written by pw.save, including bit-packed codes, padding, scales and other parts."""
    if isinstance(tensor, AffineQuantizedTensor):
        return sum(item.nbytes for item in items({"w": tensor}))
    return int(tensor.nbytes)


def model_bytes(model: nn.Module) -> int:
    """Stored bytes of a model's state dict; tied weights count once."""
    tensors: dict[int, Tensor] = {id(p): p for p in model.parameters()}
    for module in model.modules():
        lasting = module._buffers.keys() - module._non_persistent_buffers_set
        tensors |= {id(b): b for n in lasting if (b := module._buffers[n]) is not None}
    return sum(stored_bytes(t) for t in tensors.values())


def weight_sqnr(exact: Tensor, found: Tensor) -> float:
    """SQNR of a weight against the float one, in dB; computed in pieces, so that float64 copies stay small."""
    a, b = (w.dequantize() if isinstance(w, AffineQuantizedTensor) else w.detach() for w in (exact, found))
    signal = noise = 0.0
    step = max(1, _PART // max(1, a[0].numel() if len(a) else 1))
    for start in range(0, len(a), step):
        s, n = energies(a[start : start + step], b[start : start + step])
        signal, noise = signal + s, noise + n
    return decibels(signal, noise)


def first_tensor(value: Any) -> Tensor | None:
    """The first floating-point tensor of a layer's output."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() else None
    if isinstance(value, (tuple, list)):
        return next((t for t in map(first_tensor, value) if t is not None), None)
    return None


def same_shape(weight: Tensor, value: Any) -> Any:
    """Inputs converted for a layer with that weight: its dtype for floating-point tensors, its device."""
    if isinstance(value, Tensor):
        return value.to(weight.device, weight.dtype if value.is_floating_point() else value.dtype)
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        return type(value)(same_shape(weight, v) for v in value)
    if type(value) is dict:
        return {k: same_shape(weight, v) for k, v in value.items()}
    return value


# -- inputs of linear layers -------------------------------------------------------------------------------------------

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
