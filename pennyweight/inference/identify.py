"""Finds the formula of a norm or an activation by calling it with random inputs.

Structure decides, not the class: a module is RMSNorm because it computes x / sqrt(mean(x**2) + eps) * w.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..kernels.block import ACTIVATIONS, Norm, normalize
from .examples import Random
from .trace_block import Op, call_module

# Largest error against the formula, as a fraction of max |y|: float32 rounding, and cos, erf and tanh of other
# libraries. The two GELU formulas differ by 5e-4.
SAME = 2e-5


KINDS: tuple[Literal["layer", "rms"], ...] = ("layer", "rms")


@dataclass(frozen=True)
class NormForm:
    """A :class:`Norm` with the names of its parameters in the block; "" for none."""

    kind: Literal["layer", "rms"]
    eps: float
    weight: str
    bias: str
    offset: float
    width: int


def close(a: Tensor, b: Tensor, tolerance: float = SAME) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * b.abs().max().clamp_min(1e-30))


def norm_form(op: Op) -> NormForm | None:
    """The formula of a module that normalizes the last axis of its only input; None if it is not a norm."""
    module, inputs = op.module, op.inputs
    if module is None or op.product is not None or len(inputs) != 1 or len(op.outs) != 1:
        return None
    if op.args[:1] != (inputs[0],) or len(op.args) + len(op.kwargs) > 1 or op.outs[0].shape != inputs[0].shape:
        return None
    width, own_parameters = int(inputs[0].shape[-1]), {n: p for n, p in module._parameters.items() if p is not None}
    if not own_parameters.keys() <= {"weight", "bias"} or any(
        tuple(p.shape) != (width,) for p in own_parameters.values()
    ):
        return None
    random = Random(0)
    x = random.normal((5, width)) + 0.3
    parameters = {name: random.uniform((width,)) + 0.5 for name in own_parameters}
    weight, bias = parameters.get("weight"), parameters.get("bias")
    path = f"{op.path}." if op.path else ""
    for eps in _constants(module):
        small = x * eps**0.5  # mean(x**2) near eps shows it
        try:
            ys = [_plain(call_module(module, t, parameters=parameters)) for t in (x, small)]
        except (RuntimeError, TypeError, ValueError):
            return None
        for kind in KINDS:
            for offset in (0.0, 1.0) if weight is not None else (0.0,):
                norm = Norm(kind, eps, weight, bias, offset)
                if all(y is not None and close(y, normalize(t, norm)) for t, y in zip((x, small), ys, strict=True)):
                    names = [path + name if name in own_parameters else "" for name in ("weight", "bias")]
                    return NormForm(kind, eps, names[0], names[1], offset, width)
    return None


def _plain(y: Any) -> Tensor | None:
    return y.float() if isinstance(y, Tensor) else None


def _constants(module: nn.Module) -> Iterator[float]:
    """Candidates for eps: small numbers among the module's attributes; torch's default for RMSNorm."""
    for value in vars(module).values():
        if isinstance(value, float) and 0 < value <= 1e-2:
            yield value
    if getattr(module, "eps", 0.0) is None:
        yield torch.finfo(torch.float32).eps


def activation(x: Tensor, y: Tensor) -> str | None:
    """The name in ACTIVATIONS of the function that gives y for x, of the same shape; None if there is none."""
    return next((name for name, formula in ACTIVATIONS.items() if close(y, formula(x))), None)
