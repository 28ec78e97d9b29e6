"""``F.conv1d`` and ``F.conv2d`` with a quantized weight in eager mode: calls the bound kernel directly.

Anything else (gradients, autocast, tracing, modes, other layouts) goes through torch's dispatcher to the handler of
``aten.convolution`` in ops.py, which selects from the same table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.tensor import FUNCTIONS, AffineQuantizedTensor, implements
from .cpu import conv
from .table import case_of, select

QT = AffineQuantizedTensor
_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DEFAULTS = (None, None, None, 1, 0, 1, 1)


def _each(value: Any, count: int) -> tuple[int, ...]:
    """One number for each spatial axis."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * count if len(values) == 1 else values


@implements(torch.conv1d, torch.conv2d, table=FUNCTIONS)
def _convolution(func: Any, args: Any, kwargs: Any) -> Any:
    rest = list(zip(_NAMES, _DEFAULTS, strict=True))[len(args) :]
    given: list[Any] = [*args] + [kwargs.get(name, value) for name, value in rest]
    x, w, bias, stride, padding, dilation, groups = given
    if (
        type(w) is not QT or type(x) not in (Tensor, torch.nn.Parameter) or torch.compiler.is_compiling()
        or torch._C._is_any_autocast_enabled() or isinstance(padding, str)
    ):  # fmt: skip
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        if w.spec.layout != conv.LAYOUT.name or w.axes is not None or x.ndim != w.ndim:
            return NotImplemented
        if torch.is_grad_enabled() and (
            x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad)
        ):
            return NotImplemented
        bound = w._bound.get(("convolution", x.dtype))
        if bound is None:
            case = case_of(w, x.dtype)
            if select("convolution", case).layout != conv.LAYOUT.name:
                return NotImplemented
            run, operand = conv.bind(case)
            bound = w._bound["convolution", x.dtype] = (run, operand(w.parts))
        n = x.ndim - 2
        y = bound[0](x, bound[1], bias, _each(stride, n), _each(padding, n), _each(dilation, n), groups)
        return NotImplemented if y is None else y
