"""Where torch functions meet the kernel table: linear, matrix products, embedding, convolution.

In eager mode ``F.linear`` goes straight to the kernel bound to the weight. Under ``torch.compile`` and export the graph
holds one op on plain tensors, ``pennyweight::linear(x, parts, bias, key)``; key is JSON that says all that is static.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import fallback
from ..core.numerics import Parts, dequantize
from ..core.spec import DTYPES, ActivationSpec, QuantSpec
from ..core.tensor import FUNCTIONS, SLOTS, AffineQuantizedTensor, implements, static_json
from .table import case_of, get_kernel, select

aten = torch.ops.aten
QT = AffineQuantizedTensor


def _contracts_last(w: QT, dim: int) -> bool:
    """Whether logical axis ``dim`` is the stored last axis, along which the weight's blocks run."""
    rank = w.ndim
    return (dim % rank if w.axes is None else w.axes[dim]) == rank - 1


# -- linear ----------------------------------------------------------------------------------------------------------


def bind(op: str, w: QT, dtype: torch.dtype) -> Any:
    """The kernel of this weight for inputs of a dtype, remembered on the weight."""
    run = select(op, case_of(w, dtype)).run
    w._bound[op, dtype] = run
    return run


def _run_linear(x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
    run = w._bound.get(("linear", x.dtype)) or bind("linear", w, x.dtype)
    return run(x, w, bias)


def linear(x: Tensor, w: QT, bias: Tensor | None = None) -> Tensor:
    """x [.., K] @ w [N, K].T + bias, by the selected kernel; output in x's dtype.

    Backward: to x through the dequantized weight (straight-through for a quantized activation); to w as to a float
    weight; to bias. Raises ValueError where K does not match.
    """
    if x.shape[-1] != w.shape[-1] or w.ndim != 2:
        raise ValueError(
            f"linear: input {tuple(x.shape)} does not fit the quantized weight {tuple(w.shape)} ({w.spec}); "
            f"the last axis of the input must be {w.shape[-1]}"
        )
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
        bias = None if bias is None else bias.to(x.dtype)
    if w.axes is not None:  # a transposed weight contracts the axis its blocks do not run along
        fallback.count("linear/transposed")
        return F.linear(x, w.dequantize(x.dtype), bias)
    if torch.compiler.is_compiling():
        return _traced_linear(x, w, bias)
    if torch.is_grad_enabled() and (x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad)):
        return _Linear.apply(x, w, bias)
    return _run_linear(x, w, bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if w.requires_grad else None, w)
        ctx.bias = None if bias is None else bias.dtype
        return _run_linear(x, w, bias)

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


@implements(F.linear, table=FUNCTIONS)
def _f_linear(func: Any, args: Any, kwargs: Any) -> Any:
    x, w, *rest = args if not kwargs else (*args, *(kwargs[k] for k in ("input", "weight", "bias") if k in kwargs))
    if type(w) is not QT or type(x) is QT:
        return NotImplemented
    return linear(x, w, rest[0] if rest else None)


# -- the op that graphs hold -----------------------------------------------------------------------------------------

LIBRARY = torch.library.Library("pennyweight", "DEF")
LIBRARY.define("linear(Tensor x, Tensor[] parts, Tensor? bias, str key) -> Tensor")
LIBRARY.define("linear_grad_input(Tensor grad, Tensor[] parts, str key) -> Tensor")


def _flatten(w: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Plain tensors of a weight and the tree of slot names that puts them back."""
    tensors: list[Tensor] = []
    tree: dict[str, Any] = {}
    for name in SLOTS:
        part = getattr(w, name)
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


def _weight(key: str, parts: list[Tensor]) -> tuple[Any, QT]:
    kernel, tree, spec, shape, dtype, act = _parse_key(key)
    return kernel, QT(_nest(tree, list(parts)), spec, shape, dtype, act)


def _linear_op(x: Tensor, parts: list[Tensor], bias: Tensor | None, key: str) -> Tensor:
    kernel, w = _weight(key, parts)
    return kernel.run(x, w, bias)


def _linear_fake(x: Tensor, parts: list[Tensor], bias: Tensor | None, key: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], _parse_key(key)[3][0]))


def _grad_input_op(grad: Tensor, parts: list[Tensor], key: str) -> Tensor:
    _, w = _weight(key, parts)
    return grad @ dequantize(w.plain_parts(), w.spec, w.shape, grad.dtype)


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


def _traced_linear(x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
    return torch.ops.pennyweight.linear.default(x, _flatten(w)[0], bias, graph_key(w, x.dtype))


# -- matrix products, below autograd ---------------------------------------------------------------------------------


def _product(w: QT, x: Tensor) -> Tensor:
    """x [M, K] @ w [N, K].T where w may stand in a graph being traced."""
    traced = isinstance(w.codes, torch._subclasses.FakeTensor) or torch.compiler.is_compiling()
    return _traced_linear(x, w, None) if traced else _run_linear(x, w, None)


def _plain(func: Any, args: Any, kwargs: Any) -> Any:
    """The dequantizing row of an op that has no other: counted, not warned about."""
    fallback.count(f"{func.overloadpacket.__name__}/dequantize")
    dtype = next(
        (a.dtype for a in args if isinstance(a, Tensor) and not isinstance(a, QT) and a.is_floating_point()), None
    )
    return func(*(a._dequantize(dtype or a.dtype) if isinstance(a, QT) else a for a in args), **kwargs)


@implements(aten.mm.default)
def _mm(func: Any, args: Any, kwargs: Any) -> Any:
    a, b = args
    if isinstance(b, QT) and not isinstance(a, QT) and _contracts_last(b, 0):
        return _product(b.with_(axes=None, shape=b.stored_shape), a)
    if isinstance(a, QT) and not isinstance(b, QT) and _contracts_last(a, 1):
        return _product(a, b.t()).t()
    return _plain(func, args, kwargs)


@implements(aten.linear.default)
def _aten_linear(func: Any, args: Any, kwargs: Any) -> Any:
    x, w, bias = (*args, None)[:3]
    if not isinstance(w, QT) or isinstance(x, QT) or isinstance(bias, QT) or w.axes is not None or w.ndim != 2:
        return _plain(func, args, kwargs)
    y = _product(w, x)
    return y if bias is None else y + bias


@implements(aten.matmul.default)
def _matmul(func: Any, args: Any, kwargs: Any) -> Any:
    """Batches of rows against one matrix are one product; everything else takes torch's own decomposition."""
    a, b = args
    if isinstance(b, QT) and not isinstance(a, QT) and b.ndim == 2 and a.ndim > 2:
        return aten.mm.default(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[1])
    if isinstance(a, QT) and not isinstance(b, QT) and a.ndim == 2 and b.ndim > 2:
        return _matmul(func, (b.transpose(-1, -2), a.t()), {}).transpose(-1, -2)
    return NotImplemented


@implements(aten.addmm.default)
def _addmm(func: Any, args: Any, kwargs: Any) -> Any:
    bias, a, b = args
    if isinstance(bias, QT) or any(kwargs.get(k, 1) != 1 for k in ("alpha", "beta")):
        return _plain(func, args, kwargs)
    return _mm(aten.mm.default, (a, b), {}) + bias


@implements(aten.mv.default)
def _mv(func: Any, args: Any, kwargs: Any) -> Any:
    a, v = args
    if isinstance(a, QT) and not isinstance(v, QT) and a.ndim == 2:
        return _mm(aten.mm.default, (a, v.unsqueeze(1)), {}).squeeze(1)
    return _plain(func, args, kwargs)


def _only(w: QT) -> QT:
    """The 2-d weight that an expanded [E, N, K] repeats."""
    return w.with_(shape=w.shape[1:], **{slot: p[0] for slot in SLOTS[:4] if (p := getattr(w, slot)) is not None})


@implements(aten.bmm.default)
def _bmm(func: Any, args: Any, kwargs: Any) -> Any:
    a, b = args
    for w, x, flip in ((b, a, False), (a, b, True)):
        if isinstance(w, QT) and not isinstance(x, QT) and _contracts_last(w, 2 if flip else 1):
            axes = (0, 1, 2) if w.axes is None else w.axes
            rest = axes[:1] + ((axes[1],) if flip else (axes[2],))
            if rest != (0, 1):
                break
            stored = w.with_(axes=None, shape=w.stored_shape)
            if stored.codes.stride(0) == 0:  # one weight expanded over the batch: one product
                x = x.transpose(1, 2) if flip else x
                y = _product(_only(stored), x.reshape(-1, x.shape[-1])).reshape(*x.shape[:2], -1)
                return y.transpose(1, 2) if flip else y
            run = select("bmm", case_of(stored, x.dtype)).run
            y = run(x.transpose(1, 2) if flip else x, stored, None)
            return y.transpose(1, 2) if flip else y
    return _plain(func, args, kwargs)


@implements(
    aten.baddbmm.default, aten.addmv.default, aten.dot.default, aten.convolution_backward.default,
    aten._grouped_mm.default,
)  # fmt: skip
def _dequantized(func: Any, args: Any, kwargs: Any) -> Any:
    return _plain(func, args, kwargs)


@implements(aten.convolution.default)
def _convolution(func: Any, args: Any, kwargs: Any) -> Any:
    x, w, bias, *rest = args
    transposed = rest[3]
    if not isinstance(w, QT) or isinstance(x, QT) or isinstance(bias, QT) or w.axes is not None or transposed:
        return _plain(func, args, kwargs)
    return select("convolution", case_of(w, x.dtype)).run(x, w, bias, *rest)


@implements(aten.embedding.default)
def _embedding(func: Any, args: Any, kwargs: Any) -> Any:
    w, index = args[:2]
    if not isinstance(w, QT) or w.axes is not None:
        return _plain(func, args, kwargs)
    return select("embedding", case_of(w)).run(index, w, None)
