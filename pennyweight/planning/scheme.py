"""Scheme: how one parameter is quantized."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..core.describe_spec import describe, describe_activation, shorten
from ..core.layouts import get_layout
from ..core.spec import ActivationSpec, QuantSpec


def stored_scale(scale: float | tuple[float, ...], device: torch.device | str) -> torch.Tensor:
    """``act_scale`` as it is stored: [1], or [rows, 1] for one per row."""
    values = torch.tensor(scale, dtype=torch.float32, device=device)
    return values.reshape(-1, 1) if isinstance(scale, tuple) else values.reshape(1)


@dataclass(frozen=True)
class Scheme:
    """How a weight is stored, how its input is quantized, and how the weight's qparams are chosen.

    rule, eps                   see :func:`pennyweight.core.qparams.choose`
    solver                      name of the algorithm that chooses codes and qparams if the caller names none; one that
                                needs no data. "": round-to-nearest
    sparsity                    pattern such as "2:4" to which the weight is pruned by magnitude first; "": none
    act_scale, act_zero_point   qparams of a static activation, one for the whole input; a tuple of scales: one per row,
                                for inputs of that many rows
    """

    weight: QuantSpec
    act: ActivationSpec | None = None
    rule: str | None = None
    eps: float | None = None
    act_scale: float | tuple[float, ...] | None = None
    act_zero_point: int | None = None
    solver: str = ""
    sparsity: str = ""

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
        scales = 0 if self.act_scale is None else len(self.act_scale) if isinstance(self.act_scale, tuple) else 1
        return parts + 4 * scales + (self.act_zero_point is not None)

    def __str__(self) -> str:
        return f"{self.weight}" + ("" if self.act is None else f" × {self.act}")

    def describe(self, rank: int = 0) -> str:
        """In words: "int4, groups of 64, symmetric, bf16 scales; inputs int8 per row, dynamic". rank: axes of the
        weight."""
        chosen = (f", by {self.solver}" if self.solver else "") + (f", {self.sparsity} sparse" if self.sparsity else "")
        return describe(self.weight, rank) + chosen + ("" if self.act is None else f"; {describe_activation(self.act)}")

    def shorten(self, rank: int = 0) -> str:
        """For tables: "int4, groups of 64", "int8 per row; inputs int8". rank: axes of the weight."""
        sparse = f", {self.sparsity} sparse" if self.sparsity else ""
        return shorten(self.weight, self.act, rank) + (f", by {self.solver}" if self.solver else "") + sparse
