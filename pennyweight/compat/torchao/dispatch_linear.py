"""Ways of one's own to compute ``F.linear`` with a quantized weight, tried before the kernel table."""

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
    """A condition or a way answers so to let the next one try."""


_WAYS: dict[Callable[..., bool], Callable[..., Tensor]] = {}
_TABLE = FUNCTIONS[F.linear]


def register_aqt_quantized_linear_dispatch(
    dispatch_condition: Callable[[Tensor, Any, Tensor | None], bool],
    impl: Callable[[Tensor, Any, Tensor | None], Tensor],
) -> None:
    """Let ``impl(input, weight, bias)`` compute linear where ``dispatch_condition(input, weight, bias)`` is true.

    In eager mode and under torch.compile; not in layers that freeze_ has bound to a kernel.
    """
    _WAYS[dispatch_condition] = impl
    FUNCTIONS[F.linear] = _linear


def deregister_aqt_quantized_linear_dispatch(dispatch_condition: Callable[[Tensor, Any, Tensor | None], bool]) -> None:
    """Undo it. A condition that is not registered is an error, a ValueError."""
    if dispatch_condition not in _WAYS:
        raise ValueError(f"no way is registered for {dispatch_condition}")
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
