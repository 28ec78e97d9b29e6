"""Modes, tracers and transforms: whether they must see an operation, and how to compute constants outside of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from ..support.errors import ArgumentError
from .call_site import in_layer


def in_memory(t: Tensor) -> bool:
    """Whether the memory of t can be read directly at its address.

    False for tensors of a trace, a transform or another class, on the meta device, for negated or conjugated views, and
    if a mode, tracer or transform must observe operations on t. Do not call under torch.compile, which cannot trace it.
    """
    return (
        type(t) in (Tensor, torch.nn.Parameter)
        and t.layout is torch.strided
        and not (t.is_meta or t.is_nested or t.is_neg() or t.is_conj() or is_observed(t))
    )


def is_observed(*tensors: Tensor | None) -> bool:
    """Whether operations on these tensors must be visible to a dispatch mode, torch.jit.trace, a torch.func transform,
    or forward-mode differentiation of one of them.

    False if torch has called an op below those, because they have already observed it.
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


def refuse_jit_trace(op: str, w: Any) -> None:
    """Raise ArgumentError under torch.jit.trace, for ops on a quantized tensor that take lists of sizes.

    Below its dispatch key, such a list fails an assertion of torch's tracer, and may stay behind, so that the next
    trace fails.
    """
    if torch._C._get_tracing_state() is not None:
        raise ArgumentError(
            f"{op}{in_layer()}: torch.jit.trace cannot record a quantized weight ({w.spec}); use torch.export.export "
            "or torch.compile, or trace the float model of dequantize_(model)"
        )


def untraced() -> Any:
    """A context where sizes are numbers: under torch.jit.trace they are tensors, and comparing them warns."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is None:
        return nullcontext()
    return _paused_trace()


@contextmanager
def _paused_trace() -> Iterator[None]:
    state, put = torch._C._get_tracing_state(), torch._C._set_tracing_state  # type: ignore[attr-defined]
    put(None)
    try:
        yield
    finally:
        put(state)


@contextmanager
def plain_tensors() -> Iterator[None]:
    """Tensors created within this context are plain: not affected by modes, torch.func transforms or inference mode.

    Otherwise a cached table created under ``torch.func.grad`` would be a tensor of that transform and outlive it.
    Specify dtype and device explicitly: changed defaults apply here too.
    """
    with (
        _disable_current_modes(), torch._C.DisableTorchFunction(), torch._C._DisableFuncTorch(),
        torch.inference_mode(False), torch.no_grad(),
    ):  # fmt: skip
        yield
