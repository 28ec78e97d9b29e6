"""Tuning what a quantized model has already: scales, offsets, norms and biases move until its outputs are nearer to the
float model's. No bit is added and nothing is done at run time that was not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core import blocks
from ..core.choose import Params
from ..core.numerics import stored_value, unordered
from ..core.spec import QuantSpec
from ..core.tensor import AffineQuantizedTensor
from ..models.calling import call
from ..models.sites import Place, places
from . import fidelity
from .base import Tuner, register
from .chain import quiet


@register("tune")
@dataclass(frozen=True)
class Tune(Tuner):
    """Distillation into the numbers that are stored beside the codes (after Hinton et al. 2015; scales only: 0 bits).

        minimise mean KL(float || quantized) over s = s0 exp(a), offset o0 + b s0, gamma = g0 (1 + c), bias = b0 + d

    steps, rate     of Adam on a, b, c, d; the rate falls to zero as a cosine
    batch           batches of calibration data in a step
    held_out        share of them that is not trained on but decides: where it got no better, all is put back
    norms           whether vectors (norm weights and biases) take part
    metric          see :mod:`pennyweight.algorithms.fidelity`

    Codes stay. Scales that are quantized themselves stay. Inputs are not quantized meanwhile, also where the scheme
    does so; what decides is measured as the model runs. Memory: the model in float32 with gradients, so for models
    that fit. Cost: about three forward passes and two backward ones a step.
    """

    steps: int = 80
    rate: float = 2e-3
    batch: int = 1
    held_out: float = 0.25
    norms: bool = True
    metric: str | None = None

    def tune(self, model: nn.Module, teacher: nn.Module, batches: Any) -> dict[str, str]:
        batches = list(batches)
        aside = max(1, round(self.held_out * len(batches))) if len(batches) > 1 else 0
        trained, guard = batches[: len(batches) - aside], batches[len(batches) - aside :] or batches
        with torch.inference_mode(False), torch.enable_grad():
            return self._tune(model, teacher, trained, guard)

    def _tune(
        self, model: nn.Module, teacher: nn.Module, trained: Sequence[Any], guard: Sequence[Any]
    ) -> dict[str, str]:
        expected = fidelity.references(teacher, guard)
        measure = fidelity.divergence(self.metric, _example(teacher, guard[0]))
        before = fidelity.mean(model, guard, expected, measure)
        levers = list(_levers(model, self.norms))
        knobs = [k for lever in levers for k in lever.knobs]
        if not knobs:
            raise ValueError("tune: the model has no quantized weight whose scales are plain numbers")
        optimizer = torch.optim.Adam(knobs, lr=self.rate)
        order = torch.Generator().manual_seed(0)
        with _modes(model):
            for step in range(self.steps):
                for group in optimizer.param_groups:
                    group["lr"] = self.rate * (1 + math.cos(math.pi * step / self.steps)) / 2
                for i in torch.randperm(len(trained), generator=order)[: self.batch].tolist():
                    with quiet(teacher):
                        target = fidelity.kept(call(teacher, trained[i]))
                    state = {name: lever.value() for lever in levers for name in lever.names}
                    output = torch.func.functional_call(model, state, *_arguments(trained[i]), tie_weights=False)
                    loss = measure(target, fidelity.kept(output), trained[i]) / self.batch
                    for knob, grad in zip(knobs, torch.autograd.grad(loss, knobs, allow_unused=True), strict=True):
                        if grad is not None:
                            knob.grad = grad if knob.grad is None else knob.grad + grad
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            for lever in levers:
                lever.store()
        after = fidelity.mean(model, guard, expected, measure)
        if not after < before:
            with torch.no_grad():
                for lever in levers:
                    lever.restore()
            told = f"tuning undone: held-out divergence {before:.3g} became {after:.3g}"
        else:
            told = f"tuned: held-out divergence {before:.3g} -> {after:.3g}"
        return {"": told}


def _arguments(batch: Any) -> tuple[Any, dict[str, Any]]:
    if isinstance(batch, dict) or hasattr(batch, "keys"):
        return (), dict(batch)
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def _example(model: nn.Module, batch: Any) -> Any:
    with quiet(model):
        return call(model, batch)


@contextmanager
def _modes(model: nn.Module) -> Iterator[None]:
    """Eval mode with gradients, and no cache of keys and values."""
    with quiet(model), torch.enable_grad():
        yield


class _Weight:
    """A quantized weight as a function of what it is multiplied and moved by."""

    def __init__(self, where: list[Place], w: AffineQuantizedTensor) -> None:
        self.where, self.w = where, w
        self.names = [p.name for p in where]
        self.plain: AffineQuantizedTensor = w.to_layout("plain")
        self.parts = self.plain.plain_parts()
        self.scale_by = torch.zeros_like(self.parts.scale, dtype=torch.float32).requires_grad_()
        self.knobs = [self.scale_by]
        self.move_by: Tensor | None = None
        if isinstance(self.parts.offset, Tensor):
            self.move_by = torch.zeros_like(self.parts.offset, dtype=torch.float32).requires_grad_()
            self.knobs.append(self.move_by)

    def value(self) -> Tensor:
        spec, parts = self.plain.spec, self.parts
        shape = self.plain.stored_shape
        view = blocks.split(parts.codes, blocks.counts(spec.block, shape))
        x = stored_value(view, spec, Params(*self._params(), parts.table))
        x = x.reshape(*parts.codes.shape[:-1], parts.codes.shape[-1] * spec.format.dim)
        for axis, n in enumerate(shape):
            x = x.narrow(axis, 0, n)
        if parts.perm is not None:
            x = unordered(x, parts.perm)
        return (x if self.plain.axes is None else x.permute(self.plain.axes)).to(self.w.dtype)

    def _params(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        scale = self.parts.scale.float()
        offset = None if self.move_by is None else self.parts.offset.float() + self.move_by * scale
        return scale * self.scale_by.exp(), self.parts.zero_point, offset

    def store(self) -> None:
        scale, _, offset = self._params()
        parts = self.parts._replace(scale=scale.to(self.parts.scale.dtype))
        if offset is not None:
            parts = parts._replace(offset=offset.to(self.parts.offset.dtype))
        self._put(self.plain.with_(parts=parts).to_layout(self.w.spec.layout))

    def restore(self) -> None:
        self._put(self.w)

    def _put(self, w: AffineQuantizedTensor) -> None:
        value = nn.Parameter(w, requires_grad=False)
        for place in self.where:
            place.set(value)


class _Vector:
    """A norm's weight or a bias."""

    def __init__(self, where: list[Place], x: Tensor, scaled: bool) -> None:
        self.x, self.scaled = x, scaled
        self.names = [p.name for p in where]
        self.was = x.detach().clone()
        self.by = torch.zeros_like(self.was, dtype=torch.float32).requires_grad_()
        self.knobs = [self.by]

    def value(self) -> Tensor:
        was = self.was.float()
        return (was * (1 + self.by) if self.scaled else was + self.by).to(self.was.dtype)

    def store(self) -> None:
        self.x.data.copy_(self.value())

    def restore(self) -> None:
        self.x.data.copy_(self.was)


def _levers(model: nn.Module, norms: bool) -> Iterator[_Weight | _Vector]:
    for where in places(model):
        x = where[0].get()
        if isinstance(x, AffineQuantizedTensor):
            if isinstance(x.spec.scale, torch.dtype) and not isinstance(x.spec.offset, QuantSpec):
                yield _Weight(where, x)
        elif norms and x.ndim == 1 and x.is_floating_point():
            yield _Vector(where, x, where[0].param == "weight")
