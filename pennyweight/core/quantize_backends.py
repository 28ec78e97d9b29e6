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
from torch.autograd import forward_ad

from .numerics import Parts, unpermute_last_axis
from .spec import QuantSpec


class QuantizeResult(NamedTuple):
    """Parts in the layout of their spec, and the sums of x**2 and (value - x)**2; not finite where x is not."""

    parts: Parts
    signal: float
    noise: float


@dataclass(frozen=True)
class QuantizeBackend:
    """Of one type of device. Each function may answer NotImplemented.

    dequantize  (parts in the layout of spec, without perm; spec, stored shape, dtype) -> the tensor in stored order
    quantize    (x, spec, rule, eps) -> Quantized
    finite      (x) -> whether x holds neither NaN nor inf
    """

    dequantize: Callable[[Parts, QuantSpec, Sequence[int], torch.dtype], Any]
    quantize: Callable[[Tensor, QuantSpec, str | None, float | None], Any]
    finite: Callable[[Tensor], Any]


CONVERSIONS: dict[str, QuantizeBackend] = {}


def dequantize(parts: Parts, spec: QuantSpec, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """The tensor of ``shape`` by a fast way, or NotImplemented."""
    if torch.compiler.is_compiling() or not in_memory(parts.codes):
        return NotImplemented
    way = CONVERSIONS.get(parts.codes.device.type)
    if way is None:
        return NotImplemented
    x = way.dequantize(parts._replace(perm=None), spec, shape, dtype)
    return x if x is NotImplemented else unpermute_last_axis(x, parts.perm)


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
    """Whether t is memory that can be read at its address now.

    Not a tensor of a trace, a transform or another class, not on the meta device, not a negated or conjugated view, and
    no mode, tracer or transform has to see what is done with it. Not to be asked under torch.compile, which cannot
    trace it.
    """
    return (
        type(t) in (Tensor, torch.nn.Parameter)
        and t.layout is torch.strided
        and not (t.is_meta or t.is_nested or t.is_neg() or t.is_conj() or is_observed(t))
    )


def is_observed(*tensors: Tensor | None) -> bool:
    """Whether something has to see what is done with these tensors: a dispatch mode, torch.jit.trace, a transform of
    torch.func, or forward-mode differentiation of one of them.

    Where torch itself has called an op below those, they have seen it, and the answer is False.
    """
    if (
        torch._C._len_torch_dispatch_stack()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
    ):
        return True
    if forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():
        return False
    if torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.ADInplaceOrView):
        return False
    return any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)
