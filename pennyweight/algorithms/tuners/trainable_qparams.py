"""Trainable parameters of a quantized model, as functions of deltas that start at zero; the size does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from ...core import blocks
from ...core.numerics import part_value, stored_value, to_stored, unpermute_last_axis
from ...core.qparams import Params
from ...core.tensor import AffineQuantizedTensor
from ...planning.parameters import Place, places
from ..calibration.disk_offload import offloaded

SHARES = (0.45, 0.3, 0.15, 0.0)


def clamp_to_interval(x: Tensor, value: Tensor, reach: Tensor | float, same: Callable[[Tensor], Tensor]) -> Tensor:
    """Initial values of float weights that are trained behind codes chosen by another algorithm: points between
    ``value`` and x that round to the codes of ``value``, as close to x as possible.

    If x rounds to the chosen code: nine tenths of the way to x. Otherwise a point just inside the rounding interval,
    so that a small step changes the code.

    reach  upper bound of the distance to x if x is outside the interval: the step between neighbouring numbers
    same   points -> bool, whether they round to those codes
    """
    delta = x - value
    clamped = torch.minimum(torch.maximum(delta, -torch.as_tensor(reach)), torch.as_tensor(reach))
    found = value + 0.9 * delta
    for share in SHARES:
        found = torch.where(same(found), found, value + share * clamped)
    return found


class TrainableWeight:
    """A quantized weight as a function of the deltas of its scales, offsets and codes.

    scale s exp(a), offset o + b s, codes nearest to v + c step: v is the float weight in units of the format's values,
    clamped to the rounding cell of its code; step is the mean distance of values. The gradient of the rounding is the
    straight-through estimator (Bengio et al. 2013).

    weight  the float weight; None: codes are fixed. Weights that are exactly 0 keep their code

    Scales and offsets that are quantized themselves are fixed, and so are codes of learned tables.
    """

    def __init__(self, where: list[Place], w: AffineQuantizedTensor, weight: Tensor | None = None) -> None:
        self.where, self.w = where, w
        self.names = [p.name for p in where]
        self.plain: AffineQuantizedTensor = w.to_layout("plain")
        self.parts = self.plain.plain_parts()
        self.spec = self.plain.spec
        shape = blocks.counts(self.spec.block, self.plain.stored_shape)
        self.scale, self.offset = (
            None if part is None else part_value(part, kind, shape, torch.float32)
            for part, kind in ((self.parts.scale, self.spec.scale), (self.parts.offset, self.spec.offset))
        )
        self.scale_delta, self.offset_delta = _delta(self.parts.scale), _delta(self.parts.offset)
        self.deltas = [d for d in (self.scale_delta, self.offset_delta) if d is not None]
        self.codes: list[Tensor] = []  # delta of the codes, if they are trained
        if weight is not None and self.parts.table is None:
            self._init_codes(weight)

    def _view(self, x: Tensor) -> Tensor:
        return blocks.split(x, blocks.counts(self.spec.block, self.plain.stored_shape))

    @torch.no_grad()
    def _init_codes(self, weight: Tensor) -> None:
        f, axes = self.spec.format, self.plain.axes
        weight = weight.detach().float()
        weight = weight if axes is None else weight.permute(sorted(range(weight.ndim), key=axes.__getitem__))
        weight = blocks.pad(to_stored(weight, self.parts.perm, self.parts.pre_scale), self.spec.block)
        codes, params = self._view(self.parts.codes), self._params()
        self.was = f.decode(codes, torch.float32)
        off = self._view(weight) - stored_value(codes, self.spec, params)
        off = off if params.scale is None else off / blocks.expand(params.scale)
        off = torch.where(off.isfinite(), off, 0.0)
        numbers = f.decode(torch.unique(codes), torch.float32)
        self.step = float((numbers.max() - numbers.min()) / max(1, len(numbers) - 1)) or 1.0
        self.start = clamp_to_interval(self.was + off, self.was, self.step, lambda x: f.encode(x) == codes)
        self.free = (self._view(weight) != 0).float()
        self.codes = [torch.zeros_like(self.start).requires_grad_()]

    def _latent(self) -> Tensor:
        return self.start + self.step * self.free * self.codes[0]

    def value(self) -> Tensor:
        codes, params, shape = self._view(self.parts.codes), self._params(), self.plain.stored_shape
        x = stored_value(codes, self.spec, params)
        if self.codes:
            latent, f = self._latent(), self.spec.format
            now = latent + (f.decode(f.encode(latent.detach()), torch.float32) - latent).detach()
            x = x + (now - self.was) * (1.0 if params.scale is None else blocks.expand(params.scale))
        x = x.reshape(*self.parts.codes.shape[:-1], self.parts.codes.shape[-1] * self.spec.format.dim)
        for axis, n in enumerate(shape):
            x = x.narrow(axis, 0, n)
        if self.parts.perm is not None:
            x = unpermute_last_axis(x, self.parts.perm)
        if self.parts.pre_scale is not None:
            x = x * self.parts.pre_scale
        return (x if self.plain.axes is None else x.permute(self.plain.axes)).to(self.w.dtype)

    def _params(self) -> Params:
        scale, offset = self.scale, self.offset
        if scale is not None and offset is not None and self.offset_delta is not None:
            offset = offset + self.offset_delta * scale
        if scale is not None and self.scale_delta is not None:
            scale = scale * self.scale_delta.exp()
        return Params(scale, self.parts.zero_point, offset, self.parts.table)

    def store(self) -> None:
        params = self._params()
        parts = self.parts
        if params.scale is not None and self.scale_delta is not None:
            parts = parts._replace(scale=params.scale.to(parts.scale.dtype))
        if params.offset is not None and self.offset_delta is not None:
            parts = parts._replace(offset=params.offset.to(parts.offset.dtype))
        if self.codes:
            parts = parts._replace(codes=self.spec.format.encode(self._latent()).reshape(parts.codes.shape))
        self._put(offloaded(self.plain.with_(parts=parts).to_layout(self.w.spec.layout)))  # type: ignore[arg-type]

    def restore(self) -> None:
        self._put(self.w)

    def _put(self, w: AffineQuantizedTensor) -> None:
        value = nn.Parameter(w, requires_grad=False)
        for place in self.where:
            place.set(value)


def _delta(part: object) -> Tensor | None:
    """Trainable zeros for a part that is a plain tensor, else None."""
    return torch.zeros_like(part, dtype=torch.float32).requires_grad_() if isinstance(part, Tensor) else None


class TrainableVector:
    """A norm's weight g (1 + c), or a bias b + c."""

    codes: tuple[Tensor, ...] = ()

    def __init__(self, where: list[Place], x: Tensor, scaled: bool) -> None:
        self.where, self.x, self.scaled = where, x, scaled
        self.names = [p.name for p in where]
        self.was = x.detach().clone()
        self.delta = torch.zeros_like(self.was, dtype=torch.float32).requires_grad_()
        self.deltas = [self.delta]

    def value(self) -> Tensor:
        was = self.was.float()
        return (was * (1 + self.delta) if self.scaled else was + self.delta).to(self.was.dtype)

    def store(self) -> None:
        self.x.data.copy_(self.value())

    def restore(self) -> None:
        self.x.data.copy_(self.was)


Trainable = TrainableWeight | TrainableVector


def trainable_parameters(model: nn.Module, norms: bool, teacher: nn.Module | None) -> Iterator[Trainable]:
    """Quantized weights with trainable parts; with ``norms`` also vectors; with a teacher also codes."""
    floats = {} if teacher is None else dict(teacher.named_parameters())
    for where in places(model):
        x = where[0].get()
        if isinstance(x, AffineQuantizedTensor):
            weight = floats.get(where[0].name)
            found = TrainableWeight(where, x, None if weight is None or weight.shape != x.shape else weight)
            if found.deltas or found.codes:
                yield found
        elif norms and x.ndim == 1 and x.is_floating_point():
            yield TrainableVector(where, x, where[0].param == "weight")


def make_restore(model: nn.Module) -> Callable[[], None]:
    """A function that restores the current state of all trainable parameters. Quantized weights are not copied, because
    training replaces them with new tensors."""
    weights, vectors = [], []
    for where in places(model):
        x = where[0].get()
        if isinstance(x, AffineQuantizedTensor):
            weights.append((where, x))
        elif x.ndim == 1 and x.is_floating_point():
            vectors.append((x, x.detach().clone()))

    def restore() -> None:
        for where, w in weights:
            for place in where:
                place.set(w)
        for x, was in vectors:
            x.data.copy_(was)

    return restore
