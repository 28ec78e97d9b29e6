"""Scheme: what a parameter becomes."""

from __future__ import annotations

from dataclasses import dataclass

from ..core.spec import ActivationSpec, QuantSpec


@dataclass(frozen=True)
class Scheme:
    """How a weight is stored, how its input is quantized, and how the weight's parameters are chosen.

    rule, eps                   see :func:`pennyweight.core.choose.choose`
    act_scale, act_zero_point   stored parameters of a static activation, one for the whole input
    """

    weight: QuantSpec
    act: ActivationSpec | None = None
    rule: str | None = None
    eps: float | None = None
    act_scale: float | None = None
    act_zero_point: int | None = None

    def __str__(self) -> str:
        return f"{self.weight}" + ("" if self.act is None else f" × {self.act}")
