"""Proximal training: wraps any optimizer and pulls weights gradually to a quantization grid or a sparsity pattern.

After each step of the wrapped optimizer a weight w is set to prox_t(u) of a latent weight u, which accumulates the
updates. t increases from 0 (w = u) to 1 (w is on the grid, or has the pattern).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..algorithms.sparsify import SparsityPattern
from ..core import blocks
from ..core.formats import INT8
from ..core.numerics import encode, fake_quantize, store_qparams, stored_value
from ..core.qparams import choose
from ..core.spec import QuantSpec
from ..core.tensor import AffineQuantizedTensor
from ..distributed.dtensor import is_dtensor
from ..planning.config_resolution import Filter, PlanError
from ..planning.configs import AOBaseConfig, SpecConfig
from ..planning.plan import Plan, PlanRow, plan
from ..planning.quantize_report import Report
from ..quantize.pipeline import quantize_

Prox = Callable[[Tensor, float], Tensor]


def proximal_map(x: Tensor, spec: QuantSpec, t: float, rule: str | None = None, eps: float | None = None) -> Tensor:
    """x pulled to the grid of a spec: between two grid values a < b with midpoint m and half distance h,

        m + h clip((x - m) / (h (1 - t)), -1, 1)

    the proximal map of a piecewise affine regularizer (Jin et al. 2025, PARQ): the identity at t = 0, round-to-nearest
    at t = 1, bit-identical to :func:`pennyweight.quantize_`. rule, eps: as in quantization. Raises ValueError for
    learned formats.
    """
    if spec.format.kind == "learned":
        raise ValueError(f"{spec}: a learned format has no fixed grid to pull weights to")
    if t >= 1 or not x.numel():
        return fake_quantize(x, spec, rule, eps)
    if t <= 0:
        return x
    padded = blocks.pad(x, spec.block)
    _, seen = store_qparams(choose(padded, spec, rule, eps), spec)
    view = blocks.split(padded, blocks.counts(spec.block, padded.shape))
    codes = encode(view, spec, seen)
    here = stored_value(codes, spec, seen, torch.float32)
    numbers = spec.format.numbers(x.device)
    at = torch.searchsorted(numbers, spec.format.decode(codes, torch.float32))
    scale = None if seen.scale is None else blocks.expand(seen.scale).float()
    up = view.float() >= here
    up = up if scale is None else up == (scale >= 0)
    next_to = numbers[(at + torch.where(up, 1, -1)).clamp(0, len(numbers) - 1)] - numbers[at]
    half = (next_to if scale is None else next_to * scale) / 2  # 0 beyond the last value
    # The same formula relative to the rounded value, which with a coarse scale may be the second nearest.
    far = torch.minimum((view.float() - here).abs(), half.abs())
    out = (here + half.sign() * ((far - half.abs() * t) / (1 - t)).clamp(min=0)).reshape(padded.shape)
    for axis, n in enumerate(x.shape):
        out = out.narrow(axis, 0, n)
    return out.to(x.dtype)


class ProximalOptimizer(torch.optim.Optimizer):
    """``base`` with a proximal map applied to weights after each step. See :class:`QuantOptimizer` for an instance.

    base        any optimizer whose parameters include these weights; its groups, states and schedules are shared
    proxes      weight -> function of (latent weight, t)
    start, end  t increases linearly from 0 to 1 between these steps

    A latent weight takes as much memory as the weight. ``state_dict`` is that of the base plus latents and steps.
    """

    def __init__(
        self, base: torch.optim.Optimizer, proxes: Mapping[Tensor, tuple[str, Prox]], start: int, end: int
    ) -> None:
        if not 0 <= start < end:
            raise ValueError(f"start and end must be steps with 0 <= start < end; got {start}, {end}")
        groups = base.param_groups
        known = {id(p) for group in groups for p in group["params"]}
        absent = [name for p, (name, _) in proxes.items() if id(p) not in known]
        if absent:
            raise ValueError(
                f"{', '.join(absent[:3])}: not among the parameters of {type(base).__name__}, {len(absent)} in total; "
                "add them to it, or exclude them with filter_fn"
            )
        super().__init__([{"params": list(proxes)}], base.defaults)
        self.base, self.start, self.end, self.steps = base, start, end, 0
        self._proxes = dict(proxes)
        self._share()
        with torch.no_grad():
            self.latents = {p: p.detach().clone() for p in proxes}

    def _share(self) -> None:
        self.param_groups, self.state = self.base.param_groups, self.base.state

    @property
    def t(self) -> float:
        """Progress of the proximal map, 0 to 1."""
        return min(1.0, max(0.0, (self.steps - self.start) / (self.end - self.start)))

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The base's step on the latent weights, then the proximal map. closure: computes the loss with the current
        weights; the loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p, latent in self.latents.items():
            p.copy_(latent)
        self.base.step()
        self.steps += 1
        for p, latent in self.latents.items():
            latent.copy_(p)
        self._apply_proxes()
        return loss

    def _apply_proxes(self) -> None:
        for p, latent in self.latents.items():
            p.copy_(self._proxes[p][1](latent, self.t))

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the base. The proximal map is not applied to its weights."""
        if not hasattr(self, "base"):  # torch's own constructor
            super().add_param_group(param_group)
        else:
            self.base.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return {**self.base.state_dict(), "steps": self.steps, "latents": [*self.latents.values()]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of :meth:`state_dict`; also restores the weights. Raises ValueError if shapes differ."""
        rest = dict(state_dict)
        steps, latents = rest.pop("steps", None), rest.pop("latents", None)
        shapes = [list(p.shape) for p in self.latents]
        found = None if latents is None else [list(x.shape) for x in latents]
        if type(steps) is not int or found != shapes:
            raise ValueError(f"{type(self).__name__} expects steps and latents {shapes}, got {steps}, {found}")
        self.base.load_state_dict(rest)
        self._share()
        self.steps = steps
        for own, latent in zip(self.latents.values(), latents, strict=True):
            own.copy_(latent)
        self._apply_proxes()


class QuantOptimizer(ProximalOptimizer):
    """Pulls weights to their values under ``quantize_(model, config, filter_fn)``; afterwards :meth:`quantize_` gives
    exactly these. Activations are not quantized during training, even if the config quantizes them.

    optimizer = QuantOptimizer(torch.optim.AdamW(model.parameters()), model, config, start=100, end=900)
    """

    def __init__(
        self, base: torch.optim.Optimizer, model: nn.Module, config: AOBaseConfig, *, start: int = 0, end: int,
        filter_fn: Filter | None = None,
    ) -> None:  # fmt: skip
        self._quantize_args = model, config, filter_fn
        proxes = {}
        for row in _floats(plan(model, config, filter_fn)):
            assert row.tensor is not None
            proxes[row.tensor] = (row.name, _to_grid(row))
        super().__init__(base, proxes, start, end)

    def quantize_(self) -> Report:
        """Convert the model's weights to quantized tensors with the same values, from step ``end`` on. The latent
        weights remain in ``latents``. Raises ValueError before step ``end``."""
        if self.t < 1:
            raise ValueError(f"weights are on the grid from step {self.end} on; this is step {self.steps}")
        with torch.no_grad():
            for p, latent in self.latents.items():  # quantizing a grid value again may give another one
                p.copy_(latent)
        return quantize_(*self._quantize_args)


class PruneOptimizer(ProximalOptimizer):
    """Pulls weights to zero except the largest latent ones of each group of ``pattern`` ("2:4": keep 2 of every 4; a
    number: fraction of zeros in each row): w = (1 - t) u if u is not kept. The kept set may change until the end.

    optimizer = PruneOptimizer(torch.optim.AdamW(model.parameters()), model, "2:4", start=100, end=900)
    """

    def __init__(
        self, base: torch.optim.Optimizer, model: nn.Module, pattern: str | float = "2:4", *, start: int = 0, end: int,
        filter_fn: Filter | None = None,
    ) -> None:  # fmt: skip
        wanted, proxes = SparsityPattern.read(pattern), {}
        for row in _floats(plan(model, SpecConfig(QuantSpec(INT8, (-1,))), filter_fn)):
            assert row.tensor is not None
            wanted.check(row)
            proxes[row.tensor] = (row.name, _to_zero(row, wanted))
        super().__init__(base, proxes, start, end)


def _floats(todo: Plan) -> list[PlanRow]:
    """The selected rows. Raises PlanError if one is not a float weight on a single device."""
    rows = [row for row in todo.rows if row.active or row.already]
    for row in rows:
        if row.tensor is None or row.scheme is None:
            raise PlanError(f"{row.name} is converted as a module, not as a weight; exclude it with filter_fn")
        if row.scheme.sparsity:
            raise PlanError(
                f"{row.name}: its config prunes the weight ({row.scheme.sparsity}), which the grid does not; use "
                "PruneOptimizer, or a config that does not prune"
            )
        if isinstance(row.tensor, AffineQuantizedTensor):
            raise PlanError(f"{row.name} is already quantized ({row.tensor.spec}), so it has no latent weight")
        if is_dtensor(row.tensor):
            raise PlanError(
                f"{row.name} is sharded over ranks, and so may be its blocks; exclude it with filter_fn, or use a "
                "model that is complete on each rank (DDP)"
            )
    return rows


def _transposed(x: Tensor, row: PlanRow) -> Tensor:
    """Move the contracted axis last; its own inverse."""
    assert row.site is not None
    return x.transpose(-2, -1) if row.site.transposed else x


def _to_grid(row: PlanRow) -> Prox:
    scheme = row.scheme
    assert scheme is not None

    def prox(latent: Tensor, t: float) -> Tensor:
        return _transposed(proximal_map(_transposed(latent, row), scheme.weight, t, scheme.rule, scheme.eps), row)

    return prox


def _to_zero(row: PlanRow, pattern: SparsityPattern) -> Prox:
    assert row.site is not None
    unfolded = row.site.op == "convolution"

    def prox(latent: Tensor, t: float) -> Tensor:
        x = _transposed(latent, row)
        keep = pattern.keep(x.abs().flatten(1) if unfolded else x.abs().reshape(-1, x.shape[-1])).view(x.shape)
        return _transposed(torch.where(keep, x, (1 - t) * x), row)

    return prox
