"""A kernel of ``linear`` bound to one weight's case and device: what eager calls (linear.py) and the op in graphs
(linear_graph.py) both run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.call_site import in_layer
from ..core.tensor import AffineQuantizedTensor
from ..core.tracing import is_observed
from ..support.errors import ArgumentError
from .gpu_arguments import on_device
from .table import Bound, Case, Kernel, reorders

QT = AffineQuantizedTensor
Run = Callable[[Tensor, Any, "Tensor | None"], "Tensor | None"]


def bind_kernel(kernel: Kernel, case: Case, device: torch.device, w: QT | None = None) -> Bound | Run:
    """The kernel for a case on a device: specialized if it can be, else as (x, weight, bias) -> y with all checks. Both
    give None if they cannot read x or bias.

    w: the weight, if it is the same at each call. Warns once if the kernel dequantizes at each call.
    """
    warn_dequantizes(kernel, case)
    if kernel.bind is None:
        return _checked(kernel, case, device, w.with_(perm=None) if w is not None and reorders(kernel, case) else None)
    bound = kernel.bind(replace(case, perm=False) if case.perm else case)
    return bound._replace(run=on_device(bound.run, device))


def _checked(kernel: Kernel, case: Case, device: torch.device, inner: QT | None) -> Run:
    """Wrap a kernel that uses torch ops: adds the checks that native kernels do themselves (native/linear.py), and
    permutes the input if the weight has a ``perm``.

    device  of the weight, with its index
    inner   the weight without ``perm``, if it is the same at each call
    """
    (n, k), order, run = case.shape, reorders(kernel, case), on_device(kernel.run, device)

    def checked(x: Tensor, w: Any, bias: Tensor | None) -> Tensor | None:
        if (
            is_observed(x, bias) or x.layout is not torch.strided or x.device != device or x.shape[-1:] != (k,)
            or (bias is not None and (tuple(bias.shape) != (n,) or not bias.is_floating_point()))
            or (bias is not None and bias.device != x.device)
        ):  # fmt: skip
            return None
        if not order:
            return run(x, w, bias)
        return run(x.index_select(-1, w.perm), w.with_(perm=None) if inner is None else inner, bias)

    return checked


_WARNED: set[str] = set()  # ops that were warned about in this process


def warn_dequantizes(kernel: Kernel, case: Case) -> None:
    """Warn, once in a process, that a device other than a CPU has no kernel for a weight.

    On a CPU ``plan`` and the report name the kernel; a weight that was moved has no report.
    """
    if kernel.rank >= 0 or case.device in ("cpu", "meta") or kernel.op in _WARNED:
        return
    _WARNED.add(kernel.op)
    warnings.warn(
        f"{kernel.op}{in_layer()}: no kernel for {case}; the weight is dequantized at each call, which takes more "
        "memory and time than a float layer (further weights do not warn). pennyweight.explain(x, weight) tells why; "
        "pennyweight.plan(model, config, device=...) names the kernel of each layer in advance",
        UserWarning,
        stacklevel=5,
    )


def unreadable(x: Tensor, w: QT, bias: Tensor | None) -> ArgumentError:
    """The error for an input or a bias on another device, or of another kind of dtype."""
    more = "" if bias is None else f", bias {tuple(bias.shape)} {bias.dtype} on {bias.device}"
    return ArgumentError(
        f"linear{in_layer()}: input {tuple(x.shape)} {x.dtype} on {x.device}{more} and the quantized weight "
        f"{tuple(w.shape)} ({w.spec}) on {w.device} do not fit; they must be on one device, with floating-point inputs"
    )
