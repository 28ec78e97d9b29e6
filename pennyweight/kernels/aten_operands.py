"""What aten ops with quantized operands share: their error, shapes on the meta device, and the dequantizing call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core import fallback
from ..core.call_site import in_layer
from ..core.tensor import AffineQuantizedTensor
from ..support.errors import ArgumentError

QT = AffineQuantizedTensor


def meta_result(func: Any, args: Any, kwargs: Any) -> Any:
    """Meta result if the first argument is on the meta device and a weight is not, as in torch for these ops.

    For bmm, mv and embedding torch 2.13 returns uninitialized memory in this case, so they raise an error instead.
    """
    first = args[0]
    if isinstance(first, QT) or not first.is_meta or all(w.is_meta for w in args if isinstance(w, QT)):
        return NotImplemented
    dtype = first.dtype if first.is_floating_point() else torch.float32
    plain = [
        torch.empty_strided(a.shape, a.stride(), dtype=dtype, device="meta") if isinstance(a, QT) else a for a in args
    ]
    return func(*plain, **kwargs)


def misfit(op: str, a: Any, b: Any, expected: str) -> ArgumentError:
    """The error for two operands that do not go together; ``expected``: what does not hold, or must hold."""

    def text(t: Any) -> str:
        kind = f"quantized {t.spec}" if isinstance(t, QT) else str(t.dtype)
        return f"{list(t.shape)} ({kind}, {t.device.type})"

    return ArgumentError(f"{op}{in_layer()}: {text(a)} and {text(b)} do not fit: {expected}")


def dequantized(func: Any, args: Any, kwargs: Any) -> Any:
    """Dequantizing fallback for ops without other kernels: counted, without a warning."""
    fallback.count(f"{func.overloadpacket.__name__}/dequantize")
    dtype = next(
        (a.dtype for a in args if isinstance(a, Tensor) and not isinstance(a, QT) and a.is_floating_point()), None
    )
    return func(*(a._dequantize(dtype or a.dtype) if isinstance(a, QT) else a for a in args), **kwargs)
