"""``F.linear`` with a quantized weight: eager, under autograd, and in a traced graph.

Eager mode goes straight to the kernel bound to the weight. Under ``torch.compile`` and export the graph holds one op on
plain tensors, ``pennyweight::linear(x, parts, bias, key)``; key is JSON that says all that is static.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import fallback
from ..core.numerics import Parts
from ..core.spec import DTYPES, ActivationSpec, QuantSpec
from ..core.tensor import FUNCTIONS, SLOTS, AffineQuantizedTensor, foreign, implements, static_json
from .activation import autocast_dtype
from .table import Case, Kernel, case_of, get_kernel, reorders, select

QT = AffineQuantizedTensor
PLAIN = (Tensor, torch.nn.Parameter)  # what surely has memory to read
# K, the kernel, and the parts that it reads; None: it reads the weight, which must not refer to itself.
Bound = tuple[int, Callable[..., Tensor], Parts | None]


def run_linear(x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
    """The kernel selected for this weight and dtype of input, outside autograd."""
    bound = w._bound.get(x.dtype) or bind(w, x.dtype)
    return bound[1](x, bound[2] or w, bias)


def bind(w: QT, dtype: torch.dtype) -> Bound:
    """What runs this weight for inputs of a dtype, remembered on the weight."""
    case = case_of(w, dtype)
    kernel = select("linear", case)
    inner = w.with_(perm=None) if reorders(kernel, case) and kernel.bind is None else None
    w._bound[dtype] = bound = (w.shape[-1], _runs(kernel, case, inner), None if kernel.bind is None else w.parts)
    return bound


def _runs(kernel: Kernel, case: Case, inner: QT | None = None) -> Callable[..., Tensor]:
    """As ``Kernel.bound``, with the input put into the order of the weight's channels where it has one of its own.

    inner  the weight without that order, where it is the same at each call and the kernel reads more than parts
    """
    if not reorders(kernel, case):
        return kernel.bound(case)
    run = kernel.bound(replace(case, perm=False))
    if kernel.bind is not None:
        return lambda x, parts, bias: run(x.index_select(-1, parts.perm), parts, bias)
    return lambda x, w, bias: run(x.index_select(-1, w.perm), w.with_(perm=None) if inner is None else inner, bias)


@implements(F.linear, table=FUNCTIONS)
def _f_linear(func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs:
        args = (*args, *(kwargs[k] for k in ("input", "weight", "bias")[len(args) :] if k in kwargs))
    x, w, bias = args if len(args) == 3 else (*args, None)
    if type(w) is not QT or type(x) is QT:
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():  # a tenth of a µs less for each op and each question put to w
        return linear(x, w, bias)


def linear(x: Tensor, w: QT, bias: Tensor | None = None) -> Tensor:
    """x [.., K] @ w [N, K].T + bias, by the selected kernel; output in x's dtype.

    Backward: to x through the dequantized weight (straight-through for a quantized activation); to w as to a float
    weight; to bias. Raises ValueError where K does not match.
    """
    bound = w._bound.get(x.dtype)  # every line here costs each layer of each step of a model: 0.1 µs apiece
    if (
        bound is None or type(x) is not Tensor or (bias is not None and type(bias) not in PLAIN)
        or torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()
    ):  # fmt: skip
        return _unbound_linear(x, w, bias)
    if x.shape[-1] != bound[0]:
        raise _misfit(x, w)
    if torch.is_grad_enabled() and _wants_grad(x, w, bias):
        return _Linear.apply(x, w, bias)
    return bound[1](x, bound[2] or w, bias)


def _wants_grad(x: Tensor, w: QT, bias: Tensor | None) -> bool:
    return x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad)


def _misfit(x: Tensor, w: QT) -> ValueError:
    return ValueError(
        f"linear: input {tuple(x.shape)} does not fit the quantized weight {tuple(w.shape)} ({w.spec}); "
        f"the last axis of the input must be {w.shape[-1]}"
    )


def _unbound_linear(x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
    """The first call of a weight, and whatever is not plain eager mode."""
    if (foreign(type(x)) or (bias is not None and foreign(type(bias)))) and not torch.compiler.is_compiling():
        return F.linear(x, w, bias)  # their class is asked first; a kernel would look for memory that they have not
    if w.ndim != 2:
        return F.linear(x, w.dequantize(x.dtype), bias)
    if x.shape[-1] != w.shape[-1]:
        raise _misfit(x, w)
    if (dtype := autocast_dtype(x)) is not None:
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    if w.axes is not None:  # a transposed weight contracts the axis its blocks do not run along
        fallback.count("linear/transposed")
        return F.linear(x, w.dequantize(x.dtype), bias)
    if torch.compiler.is_compiling():  # the op in the graph has a backward of its own, but none to the weight
        return _Linear.apply(x, w, bias) if w.requires_grad else traced_linear(x, w, bias)
    if x.dtype not in w._bound:
        bind(w, x.dtype)
    if torch.is_grad_enabled() and _wants_grad(x, w, bias):
        return _Linear.apply(x, w, bias)
    return run_linear(x, w, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if w.requires_grad else None, w)
        ctx.bias = None if bias is None else bias.dtype
        return traced_linear(x, w, bias) if torch.compiler.is_compiling() else run_linear(x, w, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, w = ctx.saved_tensors
        need_x, need_w, need_bias = ctx.needs_input_grad
        flat = grad.reshape(-1, grad.shape[-1])
        return (
            grad @ w._dequantize(grad.dtype) if need_x else None,
            (flat.t() @ x.reshape(-1, x.shape[-1]).to(grad.dtype)).to(w.dtype) if need_w else None,
            flat.sum(0).to(ctx.bias) if need_bias and ctx.bias is not None else None,
        )


# -- the op that graphs hold -----------------------------------------------------------------------------------------

LIBRARY = torch.library.Library("pennyweight", "DEF")
LIBRARY.define("linear(Tensor x, Tensor[] parts, Tensor? bias, str key) -> Tensor")
LIBRARY.define("linear_grad_input(Tensor grad, Tensor[] parts, str key) -> Tensor")


def traced_linear(x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
    """As one op on plain tensors."""
    return torch.ops.pennyweight.linear.default(x, _flatten(w)[0], bias, graph_key(w, x.dtype))


def _flatten(w: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Plain tensors of a weight and the tree of slot names that puts them back."""
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
    """All that is static about ``linear`` with this weight, the kernel selected for it included."""
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
def _bound_to(key: str, dtype: torch.dtype, device: str) -> tuple[Callable[..., Tensor], dict[str, Any], bool]:
    """Kernel of a key for inputs of a dtype, the tree of its parts, and whether parts are all it needs of a weight."""
    kernel, tree, spec, shape, _, act = _parse_key(key)
    return _runs(kernel, Case(spec, act, shape, dtype, device, "perm" in tree)), tree, kernel.bind is not None


def _weight(key: str, parts: list[Tensor]) -> tuple[Any, QT]:
    kernel, tree, spec, shape, dtype, act = _parse_key(key)
    return kernel, QT(_nest(tree, list(parts)), spec, shape, dtype, act)


def _linear_op(x: Tensor, parts: list[Tensor], bias: Tensor | None, key: str) -> Tensor:
    run, tree, parts_do = _bound_to(key, x.dtype, x.device.type)
    return run(x, _nest(tree, list(parts)) if parts_do else _weight(key, parts)[1], bias)


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
