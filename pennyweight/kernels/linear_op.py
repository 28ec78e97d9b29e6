"""The op ``pennyweight::linear(x, parts, bias, key)``: linear with a quantized weight as one op on plain tensors.

It stands in graphs (``torch.compile``, export, ``torch.jit.trace``, ``make_fx``), and wherever fake tensors or dispatch
modes must see the call. key is JSON with all static properties of the weight, including its kernel.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..core.call_site import in_layer
from ..core.numerics import Parts
from ..core.spec import DTYPES, ActivationSpec, QuantSpec
from ..core.tensor import SLOTS, AffineQuantizedTensor, static_json
from ..core.tracing import is_observed
from ..support.errors import ArgumentError
from ..support.import_hooks import after_import
from .gpu_arguments import on_device
from .table import Bound as BoundKernel
from .table import Case, Kernel, case_of, get_kernel, reorders, select
from .target import target_of

QT = AffineQuantizedTensor
LIBRARY = torch.library.Library("pennyweight", "DEF")
LIBRARY.define("linear(Tensor x, Tensor[] parts, Tensor? bias, str key) -> Tensor")
LIBRARY.define("linear_grad_input(Tensor grad, Tensor[] parts, str key) -> Tensor")


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


def checked_kernel(
    kernel: Kernel, case: Case, device: torch.device, inner: QT | None = None
) -> Callable[[Tensor, Any, Tensor | None], Tensor | None]:
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
        stacklevel=4,
    )


def unreadable(x: Tensor, w: QT, bias: Tensor | None) -> ArgumentError:
    more = "" if bias is None else f", bias {tuple(bias.shape)} {bias.dtype} on {bias.device}"
    return ArgumentError(
        f"linear{in_layer()}: input {tuple(x.shape)} {x.dtype} on {x.device}{more} and the quantized weight "
        f"{tuple(w.shape)} ({w.spec}) on {w.device} do not fit; they must be on one device, with floating-point inputs"
    )


def traced_linear(x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
    """``linear`` as one op on plain tensors."""
    with untraced():
        key = graph_key(w, x.dtype)
    return torch.ops.pennyweight.linear.default(x, _flatten(w)[0], bias, key)


def _flatten(w: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Plain tensors of a weight, and the tree of slot names to rebuild it."""
    tensors: list[Tensor] = []
    tree: dict[str, Any] = {}
    for name, part in zip(SLOTS, w.parts, strict=True):
        if isinstance(part, QT):
            inner, tree[name] = _flatten(part)
            tensors += inner
        elif part is not None:
            tensors.append(part)
            tree[name] = None
    return tensors, tree


def _nest(tree: dict[str, Any], tensors: list[Tensor]) -> Parts:
    parts: dict[str, Any] = {n: tensors.pop(0) if sub is None else _nest(sub, tensors) for n, sub in tree.items()}
    return Parts(**parts)


def graph_key(w: QT, dtype: torch.dtype) -> str:
    """All static properties of ``linear`` with this weight, including the selected kernel."""
    kernel = select("linear", case_of(w, dtype)).name
    return json.dumps({"kernel": kernel, "tree": _flatten(w)[1], "weight": json.loads(static_json(w))})


@lru_cache(maxsize=65536)
def _parse_key(key: str) -> tuple[Any, ...]:
    data = json.loads(key)
    w = data["weight"]
    act = None if w["act"] is None else ActivationSpec.from_dict(w["act"])
    spec = QuantSpec.from_dict(w["spec"])
    return get_kernel("linear", data["kernel"]), data["tree"], spec, tuple(w["shape"]), DTYPES[w["dtype"]], act


@lru_cache(maxsize=65536)
def _bound_to(
    key: str, dtype: torch.dtype, device: torch.device
) -> tuple[BoundKernel | Callable[..., Tensor | None], dict[str, Any]]:
    """The kernel of a key for an input dtype, and the tree of its parts."""
    kernel, tree, spec, shape, _, act = _parse_key(key)
    case = Case(spec, act, shape, dtype, target_of(device), "perm" in tree)
    warn_dequantizes(kernel, case)
    if kernel.bind is None:
        return checked_kernel(kernel, case, device), tree
    bound = kernel.bind(replace(case, perm=False))
    return bound._replace(run=on_device(bound.run, device)), tree


def _weight(key: str, parts: list[Tensor]) -> tuple[Any, QT]:
    kernel, tree, spec, shape, dtype, act = _parse_key(key)
    return kernel, QT(_nest(tree, list(parts)), spec, shape, dtype, act)


def _linear_op(x: Tensor, parts: list[Tensor], bias: Tensor | None, key: str) -> Tensor:
    if parts[0].device != x.device:
        raise unreadable(x, _weight(key, parts)[1], bias)
    bound, tree = _bound_to(key, x.dtype, x.device)
    if type(x) is not Tensor or x.is_neg():
        x = x.as_subclass(Tensor).resolve_neg().contiguous()
    if isinstance(bound, BoundKernel):
        return bound.run_with(x, _nest(tree, list(parts)), bias)
    w = _weight(key, parts)[1]
    y = bound(x, w, bias)
    if y is None:
        raise unreadable(x, w, bias)
    return y


def _linear_fake(x: Tensor, parts: list[Tensor], bias: Tensor | None, key: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], _parse_key(key)[3][0]))


def _grad_input_op(grad: Tensor, parts: list[Tensor], key: str) -> Tensor:
    _, w = _weight(key, parts)
    return grad @ w._dequantize(grad.dtype)


def _grad_input_fake(grad: Tensor, parts: list[Tensor], key: str) -> Tensor:
    return grad.new_empty((*grad.shape[:-1], _parse_key(key)[3][1]))


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
        return 2 * math.prod(x[:-1]) * math.prod(_parse_key(key)[3])

    @register_flop_formula(torch.ops.pennyweight.linear_grad_input)
    def gradient(grad: Any, parts: Any, key: str, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return 2 * math.prod(grad[:-1]) * math.prod(_parse_key(key)[3])


after_import("torch.utils.flop_counter", _count_flops)
