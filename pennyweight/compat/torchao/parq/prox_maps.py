"""Proximal maps: how far a weight has moved onto its values Q after some number of steps."""

from __future__ import annotations

import importlib
import math
from abc import ABC, abstractmethod
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....distributed.dtensor import is_dtensor
from ....optim.parq import nearest_value, pull_to_values

__all__ = [
    "ProxBinaryRelax", "ProxHardQuant", "ProxMap", "ProxPARQ", "amp_custom_fwd", "channel_bucketize",
    "instantiate_module", "is_dtensor", "normalized_mirror_sigmoid",
]  # fmt: skip


def channel_bucketize(input: Tensor, boundaries: Tensor, right: bool = False) -> Tensor:
    """``torch.bucketize`` with ascending boundaries of its own for each row. input [rows, k], boundaries [rows, n]."""
    return torch.searchsorted(boundaries.contiguous(), input.contiguous(), right=right)


def instantiate_module(module_path: str, module_suffix: str) -> Any:
    """The name ``module_suffix`` of the module ``module_path``. Only for paths that you wrote yourself."""
    return getattr(importlib.import_module(module_path), module_suffix)


def amp_custom_fwd(cast_inputs: torch.dtype | None = None) -> Any:
    """``torch.amp.custom_fwd`` for CUDA with this dtype of the inputs."""
    return partial(torch.amp.custom_fwd, device_type="cuda", cast_inputs=cast_inputs)


class ProxMap(ABC):
    """Interface of proximal maps."""

    @abstractmethod
    def apply_(self, p: Tensor, q: Tensor | None, Q: Tensor, step_count: int, dim: int | None = None) -> float | None:
        """Move p, in place. q: p rounded to the values Q, or None: to be found. Q: [n], with ``dim`` -1 [rows, n].

        Returns the inverse slope of the map (1: the identity, 0: rounding) if it has one.
        """


def _round_(p: Tensor, q: Tensor | None, values: Tensor) -> Tensor:
    return p.copy_(nearest_value(p, values) if q is None else q)


class ProxHardQuant(ProxMap):
    """Rounds to the nearest value at every step (straight-through training)."""

    @torch.no_grad()
    def apply_(self, p: Tensor, q: Tensor | None, Q: Tensor, step_count: int, dim: int | None = None) -> None:
        _round_(p, q, Q)


def _check_steps(owner: Any, start: int, end: int) -> None:
    if not start < end:
        raise ValueError(f"{type(owner).__name__}: anneal_start must be before anneal_end, got {start} and {end}")


class ProxBinaryRelax(ProxMap):
    """(1 - t) p + t q, with t increasing linearly from 0 at step anneal_start to 1 at anneal_end (Yin et al. 2018)."""

    def __init__(self, anneal_start: int, anneal_end: int) -> None:
        _check_steps(self, anneal_start, anneal_end)
        self.anneal_start, self.anneal_end = anneal_start, anneal_end

    @torch.no_grad()
    def apply_(self, p: Tensor, q: Tensor | None, Q: Tensor, step_count: int, dim: int | None = None) -> None:
        if step_count < self.anneal_start:
            return
        if step_count >= self.anneal_end:
            _round_(p, q, Q)
            return
        t = (step_count - self.anneal_start) / (self.anneal_end - self.anneal_start)
        q = nearest_value(p, Q) if q is None else q
        p.mul_(1 - t).add_(q, alpha=t)


def normalized_mirror_sigmoid(t: float, t1: float, t2: float, s: float, c: float) -> float:
    """Decreases from 1 at t1 to 0 at t2 like a mirrored sigmoid of steepness s centred at the fraction c of the way.

    The bounds 1 and 0 are exact for c = 0.5. Raises ValueError for t outside t1 <= t < t2.
    """
    if not t1 <= t < t2:
        raise ValueError(f"normalized_mirror_sigmoid needs t1 <= t < t2, got {t1} <= {t} < {t2}")

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(x))

    first, last = sigmoid(-0.5 * s), sigmoid(0.5 * s)
    return (sigmoid(s * ((t - t1) / (t2 - t1) - c)) - last) / (first - last)


class ProxPARQ(ProxMap):
    """The map of a piecewise affine regularizer (Jin et al. 2025), :func:`pennyweight.optim.parq.pull_to_values`.

    Its slope goes from 1 at step anneal_start (the identity) to infinity at anneal_end (rounding); the inverse slope
    is :func:`normalized_mirror_sigmoid` of ``steepness`` and ``anneal_center``.
    """

    def __init__(
        self, anneal_start: int, anneal_end: int, steepness: float = 10, anneal_center: float = 0.5
    ) -> None:  # fmt: skip
        _check_steps(self, anneal_start, anneal_end)
        if not steepness > 0:
            raise ValueError(f"ProxPARQ: steepness must be positive, got {steepness}")
        self.anneal_start, self.anneal_end = anneal_start, anneal_end
        self.steepness, self.anneal_center = steepness, anneal_center

    @torch.no_grad()
    def apply_(self, p: Tensor, q: Tensor | None, Q: Tensor, step_count: int, dim: int | None = None) -> float:
        if step_count < self.anneal_start:
            return 1.0
        if step_count >= self.anneal_end:
            _round_(p, q, Q)
            return 0.0
        slope = normalized_mirror_sigmoid(
            step_count, self.anneal_start, self.anneal_end, self.steepness, self.anneal_center
        )
        slope = max(torch.finfo(p.dtype).tiny, slope)
        p.copy_(pull_to_values(p, Q, slope))
        return slope
