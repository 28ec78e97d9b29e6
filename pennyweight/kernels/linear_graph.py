"""The op ``pennyweight::linear(x, parts, bias, key)``: linear with a quantized weight as one op on plain tensors.

It stands in graphs (``torch.compile``, export, ``torch.jit.trace``, ``make_fx``), and wherever fake tensors or dispatch
modes must see the call; :func:`traced_linear` puts it there. key: see graph_weight.py; it names the selected kernel.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.tensor import AffineQuantizedTensor
from ..core.tracing import untraced
from ..support.import_hooks import after_import
from .activation import scale_input
from .bind_linear import Run, bind_kernel, unreadable
from .graph_weight import LIBRARY, flatten, key_of, nest, parse_key, weight_of
from .table import Bound, Case, case_of, get_kernel, select
from .target import target_of

QT = AffineQuantizedTensor
LIBRARY.define("linear(Tensor x, Tensor[] parts, Tensor? bias, str key) -> Tensor")
LIBRARY.define("linear_grad_input(Tensor grad, Tensor[] parts, str key) -> Tensor")


def traced_linear(x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
    """``linear`` as one op on plain tensors. A ``pre_scale`` is a product before it, which a compiler fuses."""
    x, w = scale_input(x, w)
    with untraced():
        key = graph_key(w, x.dtype)
    return torch.ops.pennyweight.linear.default(x, flatten(w)[0], bias, key)


def graph_key(w: QT, dtype: torch.dtype) -> str:
    """All static properties of ``linear`` with this weight, including the selected kernel."""
    return key_of(w, select("linear", case_of(w, dtype)).name)


@lru_cache(maxsize=65536)
def _bound_to(key: str, dtype: torch.dtype, device: torch.device) -> tuple[Bound | Run, dict[str, Any]]:
    """The kernel of a key for an input dtype, and the tree of its parts."""
    static = parse_key(key)
    case = Case(static.spec, static.act, static.shape, dtype, target_of(device), "perm" in static.tree)
    return bind_kernel(get_kernel("linear", str(static.kernel)), case, device), static.tree


def _linear_op(x: Tensor, parts: list[Tensor], bias: Tensor | None, key: str) -> Tensor:
    if parts[0].device != x.device:
        raise unreadable(x, weight_of(key, parts), bias)
    bound, tree = _bound_to(key, x.dtype, x.device)
    if type(x) is not Tensor or x.is_neg():
        x = x.as_subclass(Tensor).resolve_neg().contiguous()
    if isinstance(bound, Bound):
        return bound.run_with(x, nest(tree, list(parts)), bias)
    w = weight_of(key, parts)
    y = bound(x, w, bias)
    if y is None:
        raise unreadable(x, w, bias)
    return y


def _linear_fake(x: Tensor, parts: list[Tensor], bias: Tensor | None, key: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], parse_key(key).shape[0]))


def _grad_input_op(grad: Tensor, parts: list[Tensor], key: str) -> Tensor:
    return grad @ weight_of(key, parts)._dequantize(grad.dtype)


def _grad_input_fake(grad: Tensor, parts: list[Tensor], key: str) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], parse_key(key).shape[1]))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    _, parts, bias, key = inputs
    ctx.save_for_backward(*parts)
    ctx.key, ctx.bias = key, None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    parts = list(ctx.saved_tensors)
    grad_x = torch.ops.pennyweight.linear_grad_input.default(grad, parts, ctx.key) if ctx.needs_input_grad[0] else None
    grad_bias = None
    if ctx.bias is not None and ctx.needs_input_grad[2]:
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias)
    return grad_x, [None] * len(parts), grad_bias, None


LIBRARY.impl("linear", _linear_op, "CompositeExplicitAutograd")
LIBRARY.impl("linear_grad_input", _grad_input_op, "CompositeExplicitAutograd")
torch.library.register_fake("pennyweight::linear", _linear_fake, lib=LIBRARY)
torch.library.register_fake("pennyweight::linear_grad_input", _grad_input_fake, lib=LIBRARY)
torch.library.register_autograd("pennyweight::linear", _backward, setup_context=_setup_context, lib=LIBRARY)


def _count_flops() -> None:
    """Register the FLOPs of the op for FlopCounterMode: 2 M K N, as for a float product."""
    from torch.utils.flop_counter import register_flop_formula

    @register_flop_formula(torch.ops.pennyweight.linear)
    def flops(x: Any, parts: Any, bias: Any, key: str, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 2 * math.prod(x[:-1]) * math.prod(parse_key(key).shape)

    @register_flop_formula(torch.ops.pennyweight.linear_grad_input)
    def gradient(grad: Any, parts: Any, key: str, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 2 * math.prod(grad[:-1]) * math.prod(parse_key(key).shape)


after_import("torch.utils.flop_counter", _count_flops)
