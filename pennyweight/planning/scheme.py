"""Scheme: how one parameter is quantized."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..core.layouts import get_layout
from ..core.spec import SHORT, ActivationSpec, QuantSpec


@dataclass(frozen=True)
class Scheme:
    """How a weight is stored, how its input is quantized, and how the weight's qparams are chosen.

    rule, eps                   see :func:`pennyweight.core.qparams.choose`
    solver                      name of the algorithm that chooses codes and qparams if the caller names none; one that
                                needs no data. "": round-to-nearest
    act_scale, act_zero_point   qparams of a static activation, one for the whole input
    """

    weight: QuantSpec
    act: ActivationSpec | None = None
    rule: str | None = None
    eps: float | None = None
    act_scale: float | None = None
    act_zero_point: int | None = None
    solver: str = ""

    def __post_init__(self) -> None:
        static = self.act is not None and self.act.mode == "static"
        if static != (self.act_scale is not None):
            raise ValueError(
                "a static activation needs act_scale; calibrate to get one, or use a dynamic activation"
                if static
                else f"act_scale={self.act_scale} needs a static activation, got {self.act}"
            )
        asymmetric = static and self.act is not None and self.act.spec.zero_point
        if asymmetric != (self.act_zero_point is not None):
            raise ValueError("act_zero_point must be given exactly if a static activation's spec has zero_point=True")

    def weight_only(self) -> Scheme:
        """This scheme without the activation, for ops that have none, such as an embedding."""
        return self if self.act is None else replace(self, act=None, act_scale=None, act_zero_point=None)

    def nbytes(self, shape: tuple[int, ...], layout: str) -> int:
        """Predicted bytes of a weight of that shape."""
        parts = get_layout(layout).nbytes(self.weight, shape)
        return parts + 4 * (self.act_scale is not None) + (self.act_zero_point is not None)

    def __str__(self) -> str:
        return f"{self.weight}" + ("" if self.act is None else f" × {self.act}")

    def describe(self) -> str:
        """In words: "int4, groups of 64, symmetric, bf16 scales; inputs int8 per row, dynamic"."""
        chosen = f", by {self.solver}" if self.solver else ""
        return describe(self.weight) + chosen + ("" if self.act is None else f"; {describe_activation(self.act)}")


def describe(spec: QuantSpec) -> str:
    """A spec in words: "int4, groups of 64, symmetric, bf16 scales"."""
    terms = [str(spec.format), _granularity(spec)]
    if spec.format.kind == "int":
        terms.append("asymmetric" if spec.zero_point or spec.offset is not None else "symmetric")
    if isinstance(spec.scale, QuantSpec):
        above = spec.scale.scale
        nested = "" if above is None else f" ({_granularity(spec.scale)}, {_short(above)} scales)"
        terms.append(f"{spec.scale.format} scales{nested}")
    elif spec.scale is not None:
        terms.append(f"{_short(spec.scale)} scales")
    return ", ".join(terms)


def describe_activation(act: ActivationSpec) -> str:
    """An activation in words: "inputs int8 per row, dynamic", "inputs int8 in groups of 128 columns, dynamic"; of a
    convolution "per sample", of a transposed one "per position"."""
    block, how = act.spec.block, _granularity(act.spec)
    if block is not None and len(block) == 1 and block[0] > 1:
        how = f"in groups of {block[0]} columns"
    elif block is not None and len(block) > 1 and block[0] == -1 and len(set(block[1:])) == 1:
        how = {-1: "per sample", 1: "per position"}.get(block[1], how)
    return f"inputs {act.spec.format} {how}, {act.mode}"


def _granularity(spec: QuantSpec) -> str:
    block = spec.block
    if block is None:
        return "per tensor"
    last, others = block[-1], set(block[:-1])
    if others <= {1}:
        return "per row" if last == -1 else "per element" if last == 1 else f"groups of {last}"
    if block[0] > 1 and set(block[1:]) == {1}:  # of a transposed convolution
        return f"groups of {block[0]}"
    kernels, rest = block[0], set(block[2:] if len(block) > 2 and block[1] == 1 else block[1:])
    if rest == {-1}:  # whole kernels, as convolutions have them
        return "per output channel" if kernels == -1 else f"groups of {kernels} input channels"
    return f"blocks of {'×'.join('all' if size == -1 else str(size) for size in block)}"


def _short(kind: Any) -> str:
    return str(kind.format) if isinstance(kind, QuantSpec) else SHORT[kind]
