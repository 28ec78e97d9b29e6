"""User-defined implementations of ``F.linear`` with a quantized weight, tried before the kernel table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...core.tensor import FUNCTIONS

__all__ = [
    "QuantizedLinearNotImplementedError", "deregister_aqt_quantized_linear_dispatch",
    "register_aqt_quantized_linear_dispatch",
]  # fmt: skip


class QuantizedLinearNotImplementedError(NotImplementedError):
    """Raised by a condition or an implementation to continue with the next one."""


_WAYS: dict[Callable[..., bool], Callable[..., Tensor]] = {}
_TABLE = FUNCTIONS[F.linear]


def register_aqt_quantized_linear_dispatch(
    dispatch_condition: Callable[[Tensor, Any, Tensor | None], bool],
    impl: Callable[[Tensor, Any, Tensor | None], Tensor],
) -> None:
    """Use ``impl(input, weight, bias)`` for linear if ``dispatch_condition(input, weight, bias)`` is true.

    In eager mode and under torch.compile; not in layers bound to a kernel by freeze_.
    """
    _WAYS[dispatch_condition] = impl
    FUNCTIONS[F.linear] = _linear


def deregister_aqt_quantized_linear_dispatch(dispatch_condition: Callable[[Tensor, Any, Tensor | None], bool]) -> None:
    """Undo it. Raises ValueError for a condition that is not registered."""
    if dispatch_condition not in _WAYS:
        raise ValueError(f"no implementation is registered for {dispatch_condition}")
    del _WAYS[dispatch_condition]
    if not _WAYS:
        FUNCTIONS[F.linear] = _TABLE


def _linear(func: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    three = given["input"], given["weight"], given.get("bias")
    for condition, impl in _WAYS.items():
        try:
            if condition(*three):
                return impl(*three)
        except QuantizedLinearNotImplementedError:
            continue
    return _TABLE(func, args, kwargs)
