"""Fast ways between floats and stored parts: an entry for each type of device, put there by the kernels.

What an entry gives has the bits of numerics.py. It answers NotImplemented where it has no way of its own, and the
reference runs; so does it where no memory can be read: in a trace, under vmap, on the meta device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .numerics import Parts, unordered
from .spec import QuantSpec


class Quantized(NamedTuple):
    """Parts in the layout of their spec, and the sums of x**2 and (value - x)**2; not finite where x is not."""

    parts: Parts
    signal: float
    noise: float


@dataclass(frozen=True)
class Conversion:
    """Of one type of device. Each function may answer NotImplemented.

    dequantize  (parts in the layout of spec, without perm; spec, stored shape, dtype) -> the tensor in stored order
    quantize    (x, spec, rule, eps) -> Quantized
    finite      (x) -> whether x holds neither NaN nor inf
    """

    dequantize: Callable[[Parts, QuantSpec, Sequence[int], torch.dtype], Any]
    quantize: Callable[[Tensor, QuantSpec, str | None, float | None], Any]
    finite: Callable[[Tensor], Any]


CONVERSIONS: dict[str, Conversion] = {}


def dequantize(parts: Parts, spec: QuantSpec, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """The tensor of ``shape`` by a fast way, or NotImplemented."""
    if torch.compiler.is_compiling() or not in_memory(parts.codes):
        return NotImplemented
    way = CONVERSIONS.get(parts.codes.device.type)
    if way is None:
        return NotImplemented
    x = way.dequantize(parts._replace(perm=None), spec, shape, dtype)
    return x if x is NotImplemented else unordered(x, parts.perm)


def quantize(x: Tensor, spec: QuantSpec, rule: str | None = None, eps: float | None = None) -> Any:
    """Quantized x by a fast way, or NotImplemented."""
    if torch.compiler.is_compiling() or not in_memory(x):
        return NotImplemented
    way = CONVERSIONS.get(x.device.type)
    return NotImplemented if way is None else way.quantize(x, spec, rule, eps)


def finite(x: Tensor) -> Any:
    """Whether x holds neither NaN nor inf, or NotImplemented."""
    if torch.compiler.is_compiling() or not in_memory(x):
        return NotImplemented
    way = CONVERSIONS.get(x.device.type)
    return NotImplemented if way is None else way.finite(x)


def in_memory(t: Tensor) -> bool:
    """Whether t is memory that can be read now: no tensor of a trace, no batch of a vmap, and no mode that looks on.

    Not to be asked under torch.compile, which cannot trace it.
    """
    return (
        type(t) in (Tensor, torch.nn.Parameter)
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._functorch.is_functorch_wrapped_tensor(t)
    )
