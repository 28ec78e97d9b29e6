"""together(x, layers): runs layers that share their input in one call: q, k and v of attention, gate and up of an MLP.

With a few rows a small layer spends most of its time on overhead: quantizing its input, waking threads and waiting for
them. One call does that once. The caller states that the input is shared; nothing is cached between calls, because a
weight, a bias or the input can be changed without a trace (``.data``, a NumPy array over the same memory, an inference
tensor, which has no version counter).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _modules

from ..core.tensor import AffineQuantizedTensor
from ..core.tracing import in_memory
from ..kernels.activation import autocast_dtype
from ..kernels.native.arguments import PLAIN
from ..kernels.table import Case, Together, case_of, select
from ..support.arguments import show
from ..support.errors import ArgumentTypeError
from .freeze import FrozenLinear

ROWS = 16  # with more rows the matrix products take most of the time
_PLAIN_FORWARD = (nn.Linear.forward, FrozenLinear.forward)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{name}" for name in _HOOKS)


def together(x: Tensor, layers: Sequence[nn.Module]) -> list[Tensor]:
    """[layer(x) for layer in layers], bit-identical, in one native call if possible.

    x: [.., K]. The native call needs at most 16 rows in all, no gradient, and two or more linear layers without hooks
    whose quantized weights share a kernel that takes several weights (those with integer codes) and differ only in
    their number of rows.
    """
    if not hasattr(layers, "__len__"):
        raise ArgumentTypeError(f"together: layers must be a list of modules, got {show(layers)}; write [layer, ...]")
    ys = _in_one_call(x, layers)
    return [layer(x) for layer in layers] if ys is None else ys


def _in_one_call(x: Tensor, layers: Sequence[Any]) -> list[Tensor] | None:
    if (
        torch.compiler.is_compiling() or not in_memory(x) or len(layers) < 2 or x.ndim == 0
        or x.numel() > ROWS * x.shape[-1] or autocast_dtype(x) is not None
        or any(getattr(_modules, hooks) for hooks in _GLOBAL_HOOKS) or torch._C._len_torch_function_stack()
    ):  # fmt: skip
        return None
    weights: list[AffineQuantizedTensor] = []
    biases: list[Tensor | None] = []
    for layer in layers:
        forward, parameters = type(layer).forward, layer._parameters
        w, bias = parameters.get("weight"), parameters.get("bias")
        if (
            forward not in _PLAIN_FORWARD or "forward" in layer.__dict__ or "bias" not in parameters
            or any(getattr(layer, hooks) for hooks in _HOOKS) or type(w) is not AffineQuantizedTensor
        ):  # fmt: skip
            return None
        weights.append(w)
        biases.append(bias)
    with torch._C.DisableTorchFunctionSubclass():  # saves 0.1 µs per attribute access on a weight
        if not all(_joins(x, w, bias) for w, bias in zip(weights, biases, strict=True)) or not _one_order(weights):
            return None
        run = _bind(tuple(case_of(w, x.dtype) for w in weights))
        if run is None:
            return None
        operands = [operand(w.parts) for operand, w in zip(run.operands, weights, strict=True)]
        return run.run(x, operands, biases)


def _joins(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None) -> bool:
    """Whether a layer can be part of the call; otherwise its own forward computes the result or raises the error."""
    plain = w.ndim == 2 and w.axes is None and x.shape[-1] == w.shape[1] and x.device == w.device
    if bias is not None:
        plain = plain and type(bias) in PLAIN and bias.shape == w.shape[:1] and bias.device == x.device
    wants_grad = x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad)
    return plain and not (wants_grad and torch.is_grad_enabled())


def _one_order(weights: list[AffineQuantizedTensor]) -> bool:
    """Whether all weights have the same channel order, and none scales its input."""
    if any(w._pre_scale is not None for w in weights):
        return False
    first, *others = [w._perm for w in weights]
    if first is None:
        return all(perm is None for perm in others)
    return all(perm is not None and (perm is first or torch.equal(first, perm.to(first.dtype))) for perm in others)


@lru_cache(maxsize=4096)
def _bind(cases: tuple[Case, ...]) -> Together | None:
    """How to run these weights in one call, or None if that is impossible."""
    kernels = {kernel.name: kernel for case in cases for kernel in [select("linear", case)]}
    kernel = next(iter(kernels.values()))
    if len(kernels) > 1 or kernel.together is None:
        return None
    return kernel.together(tuple(replace(case, perm=False) for case in cases))
