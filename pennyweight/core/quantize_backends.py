"""Fast conversions between floats and stored parts: one backend per device type, registered by the kernels.

Backends give the same bits as numerics.py. If a backend returns NotImplemented, the reference runs; likewise if memory
cannot be read (in a trace, under vmap, on the meta device).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .numerics import Parts, permute_last_axis, unpermute_last_axis
from .qparams import Params
from .spec import QuantSpec
from .tracing import in_memory


class QuantizeResult(NamedTuple):
    """Parts in the layout of their spec, and the sums of x**2 and (value - x)**2; not finite if x is not finite."""

    parts: Parts
    signal: float
    noise: float


@dataclass(frozen=True)
class QuantizeBackend:
    """Conversions on one device type. Each function may return NotImplemented.

    dequantize  (parts in the layout of spec, without perm and pre_scale; spec, stored shape, dtype) -> the tensor in
                stored order
    quantize    (x, spec, rule, eps) -> QuantizeResult
    finite      (x) -> whether x is free of NaN and inf
    squared_errors  (blocks [count, size], spec, stored parameters [count], weights [rows, size] or None) -> errors
                [count], see qparams_search.py
    """

    dequantize: Callable[[Parts, QuantSpec, Sequence[int], torch.dtype], Any]
    quantize: Callable[[Tensor, QuantSpec, str | None, float | None], Any]
    finite: Callable[[Tensor], Any]
    squared_errors: Callable[[Tensor, QuantSpec, Params, Tensor | None], Any]


CONVERSIONS: dict[str, QuantizeBackend] = {}


def dequantize(parts: Parts, spec: QuantSpec, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """The tensor of ``shape`` from a backend, or NotImplemented."""
    if torch.compiler.is_compiling() or not in_memory(parts.codes):
        return NotImplemented
    backend = CONVERSIONS.get(parts.codes.device.type)
    if backend is None:
        return NotImplemented
    pre = parts.pre_scale
    wide = dtype if pre is None else torch.promote_types(dtype, torch.float32)
    x = backend.dequantize(parts._replace(perm=None, pre_scale=None), spec, shape, wide)
    if x is NotImplemented:
        return x
    if pre is not None:  # as numerics.dequantize: rounded once
        limit = torch.finfo(dtype).max
        x = (x * permute_last_axis(pre, parts.perm)).to(dtype).clamp_(-limit, limit)
    return unpermute_last_axis(x, parts.perm)


def quantize(x: Tensor, spec: QuantSpec, rule: str | None = None, eps: float | None = None) -> Any:
    """Quantized x from a backend, or NotImplemented."""
    if torch.compiler.is_compiling() or not in_memory(x):
        return NotImplemented
    backend = CONVERSIONS.get(x.device.type)
    return NotImplemented if backend is None else backend.quantize(x, spec, rule, eps)


def finite(x: Tensor) -> Any:
    """Whether x is free of NaN and inf, or NotImplemented."""
    if torch.compiler.is_compiling() or not in_memory(x):
        return NotImplemented
    backend = CONVERSIONS.get(x.device.type)
    return NotImplemented if backend is None else backend.finite(x)


def squared_errors(x: Tensor, spec: QuantSpec, p: Params, weight: Tensor | None) -> Any:
    """The squared error of each block, or NotImplemented."""
    if torch.compiler.is_compiling() or not in_memory(x):
        return NotImplemented
    backend = CONVERSIONS.get(x.device.type)
    return NotImplemented if backend is None else backend.squared_errors(x, spec, p, weight)
