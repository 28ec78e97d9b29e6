"""``F.linear`` with a quantized weight: eager, under autograd, and in a traced graph.

Eager mode calls the kernel bound to the weight directly. If the call must be visible (``torch.compile``, export,
``torch.jit.trace``, ``make_fx``, fake tensors, dispatch modes), it is one op on plain tensors, see linear_graph.py.
``torch.func`` transforms and forward-mode differentiation use an autograd function that implements their rules.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _disable_current_modes

from ..core import fallback
from ..core.call_site import in_layer
from ..core.tensor import FUNCTIONS, AffineQuantizedTensor, foreign, implements
from ..core.tracing import in_memory, is_observed, untraced
from ..support.errors import ArgumentError
from .activation import autocast_dtype
from .bind_linear import Run, bind_kernel, unreadable
from .linear_graph import traced_linear
from .table import Bound as BoundKernel
from .table import case_of, select

QT = AffineQuantizedTensor
# K, the kernel, and its operand; operand None: the kernel gets the weight (storing it here would be a reference cycle).
Bound = tuple[int, Run, Any]

# bound here: looking them up through torch costs 0.02 µs each, per layer and call
_is_compiling, _is_grad_enabled = torch.compiler.is_compiling, torch.is_grad_enabled
_is_autocast_enabled = torch._C._is_any_autocast_enabled


def run_linear(x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
    """Run the kernel selected for this weight and input dtype, without autograd. Raises ArgumentError."""
    bound = w._bound.get(x.dtype) or bind(w, x.dtype)
    y = bound[1](x, bound[2] or w, bias)
    if y is not None:
        return y
    if type(x) is not Tensor or x.is_neg():  # a subclass without its own dispatch; a negated view
        x = x.as_subclass(Tensor).resolve_neg().contiguous()
    if bias is not None and (type(bias) is not Tensor or bias.is_neg()):
        bias = bias.as_subclass(Tensor).resolve_neg()
    y = bound[1](x, bound[2] or w, bias)
    if y is None:
        raise _misfit(x, w) if x.shape[-1:] != w.shape[-1:] else unreadable(x, w, bias)
    return y


def bind(w: QT, dtype: torch.dtype) -> Bound:
    """Select the kernel for this weight and input dtype, and cache it on the weight."""
    bound = w._bound[dtype] = _bind(w, dtype) if w._pre_scale is None else _bind_scaled(w, dtype)
    return bound


def _bind(w: QT, dtype: torch.dtype) -> Bound:
    case = case_of(w, dtype)
    found = bind_kernel(select("linear", case), case, w.device, w)
    if isinstance(found, BoundKernel):
        return (w.shape[-1], found.run, found.operand(w.parts))
    return (w.shape[-1], found, None)


def _bind_scaled(w: QT, dtype: torch.dtype) -> Bound:
    bare, pre = w.with_(pre_scale=None), w._pre_scale
    assert pre is not None
    k, run, operand = _bind(bare, dtype)

    def scaled(x: Tensor, w: Any, bias: Tensor | None) -> Tensor | None:
        if is_observed(x, bias) or x.device != pre.device or x.shape[-1:] != (k,):
            return None
        return run((x * pre).to(x.dtype), operand or bare, bias)

    return k, scaled, None


@implements(F.linear, table=FUNCTIONS)
def _f_linear(func: Any, args: Any, kwargs: Any) -> Any:
    if kwargs:
        args = (*args, *(kwargs[k] for k in ("input", "weight", "bias")[len(args) :] if k in kwargs))
    x, w, bias = args if len(args) == 3 else (*args, None)
    if type(w) is not QT or type(x) is QT or not isinstance(x, Tensor):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():  # saves 0.1 µs per op and attribute access on w
        return linear(x, w, bias)


def linear(x: Tensor, w: QT, bias: Tensor | None = None, eager: bool = False) -> Tensor:
    """x [.., K] @ w [N, K].T + bias, with the selected kernel; output in x's dtype.

    bias: [N], or any shape that ``F.linear`` broadcasts to the result. Backward: the gradient of x uses the dequantized
    weight (straight-through for a quantized activation); those of w and bias are as for a float weight. Raises
    ArgumentError if a shape, dtype or device does not fit. eager: whether the caller has checked that nothing compiles.
    """
    bound = w._bound.get(x.dtype)  # hot path, runs per layer and call: each line costs about 0.1 µs
    if bound is None or (not eager and _is_compiling()) or _is_autocast_enabled():
        return _general(x, w, bias)
    if _is_grad_enabled() and _wants_grad(x, w, bias):
        return _general(x, w, bias)
    y = bound[1](x, bound[2] or w, bias)
    return _general(x, w, bias) if y is None else y


def _wants_grad(x: Tensor, w: QT, bias: Tensor | None) -> bool:
    return x.requires_grad or w.requires_grad or (bias is not None and bias.requires_grad)


def _misfit(x: Tensor, w: QT) -> ArgumentError:
    return ArgumentError(
        f"linear{in_layer()}: input {tuple(x.shape)} does not fit the quantized weight {tuple(w.shape)} ({w.spec}); "
        f"the last axis of the input must be {w.shape[-1]}"
    )


def _check(x: Tensor, w: QT, bias: Tensor | None) -> None:
    """Raise ArgumentError if F.linear with the float weight would raise RuntimeError for shapes, dtypes or devices."""
    if x.ndim == 0 or x.shape[-1] != w.shape[-1]:
        raise _misfit(x, w)
    if not x.is_floating_point() or x.device != w.device:
        raise unreadable(x, w, bias)
    if bias is not None and (not bias.is_floating_point() or bias.device != w.device):
        raise unreadable(x, w, bias)


def _general(x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
    """The first call with a weight, and all calls that are not plain eager calls."""
    if bias is not None and not isinstance(bias, Tensor):
        raise TypeError(f"linear: bias must be a tensor or None, got {type(bias).__name__}")
    compiling = torch.compiler.is_compiling()
    if (foreign(type(x)) or (bias is not None and foreign(type(bias)))) and not compiling:
        return F.linear(x, w, bias)  # their class dispatches first; a kernel would read memory that they do not have
    if isinstance(bias, QT):
        bias = bias.dequantize(x.dtype)
    if x.is_meta and not w.is_meta and not compiling:  # as in torch: only shapes, for any device of the weight
        return F.linear(x, torch.empty(w.shape, dtype=x.dtype, device="meta"), bias)
    if w.ndim != 2 or x.is_nested or x.layout is not torch.strided:  # torch's own rules, with the dequantized weight
        fallback.count("linear/dequantize")
        return F.linear(x, w.dequantize(x.dtype), bias)
    with untraced():
        _check(x, w, bias)
        plain = bias is None or tuple(bias.shape) == (w.shape[0],)
    if (dtype := autocast_dtype(x)) is not None:
        x, bias = x.to(dtype), None if bias is None else bias.to(dtype)
    if w.axes is not None:  # a transposed weight contracts an axis that is not the one blocks run along
        fallback.count("linear/transposed")
        return F.linear(x, w.dequantize(x.dtype), bias)
    if bias is not None and not plain:
        return _broadcast(x, _general(x, w, None), w, bias)
    observed = not compiling and is_observed(x, bias)
    if observed and _in_transform():
        if w.requires_grad:
            raise NotImplementedError(
                f"torch.func transforms do not support a quantized weight {tuple(w.shape)} ({w.spec}) with "
                "requires_grad; call requires_grad_(False) first, or train it with backward()"
            )
        # a copy of the wrapper: w itself may be converted, or get other parts, before backward
        return _TransformedLinear.apply(x, _Constant(w.with_()), bias)
    if compiling or observed or not in_memory(w._codes):  # a graph, traced parts or another device: the registered op,
        # which has its own backward, but without a gradient of the weight
        return _Linear.apply(x, w, bias) if w.requires_grad else traced_linear(x, w, bias)
    if x.dtype not in w._bound:
        bind(w, x.dtype)
    if torch.is_grad_enabled() and _wants_grad(x, w, bias):
        return _Linear.apply(x, w, bias)
    return run_linear(x, w, bias)


def _in_transform() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is active, and no dispatch mode above it."""
    if torch._C._len_torch_dispatch_stack():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def _broadcast(x: Tensor, y: Tensor, w: QT, bias: Tensor) -> Tensor:
    """y + bias, if F.linear accepts a bias of this shape. Raises ArgumentError otherwise."""
    with _disable_current_modes():  # its rule depends on the strides of the input, so run it on meta tensors
        shapes = [torch.empty_strided(t.shape, t.stride(), dtype=y.dtype, device="meta") for t in (x, bias)]
        weight = torch.empty(w.shape, dtype=y.dtype, device="meta")
        try:
            F.linear(shapes[0], weight, shapes[1])
            if x.ndim <= 2 < bias.ndim:  # the meta device accepts it for inputs without rows
                raise RuntimeError("a bias of more axes than the result")
        except RuntimeError as error:
            raise ArgumentError(
                f"linear{in_layer()}: bias {tuple(bias.shape)} does not fit the result {tuple(y.shape)}; expected "
                f"({w.shape[0]},)"
            ) from error
    bias = bias.to(y.dtype)
    n, fits = y.shape[-1], len(bias.shape) <= y.ndim
    if fits and torch.broadcast_shapes(bias.shape[-1:], (n,)) == (n,) and _broadcasts(bias.shape, y.shape):
        return y + bias
    return (y.reshape(-1, n) + bias).reshape(y.shape)


def _broadcasts(shape: torch.Size, whole: torch.Size) -> bool:
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(whole), strict=False))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if w.requires_grad else None, w.in_graph())
        ctx.bias = None if bias is None else bias.dtype
        return _below_autograd(x, w, bias)

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


def _below_autograd(x: Tensor, w: QT, bias: Tensor | None) -> Tensor:
    if torch.compiler.is_compiling() or not (in_memory(w._codes) and not is_observed(x, bias)):
        return traced_linear(x, w, bias)
    return run_linear(x, w, bias)


class _Constant:
    """Hides a weight from transforms, so that they do not wrap it."""

    def __init__(self, w: QT) -> None:
        self.w = w


class _TransformedLinear(torch.autograd.Function):
    """As _Linear for a frozen weight, with the rules that torch.func and forward-mode differentiation need."""

    @staticmethod
    def forward(x: Tensor, constant: _Constant, bias: Tensor | None) -> Tensor:
        return _below_autograd(x, constant.w, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, _Constant, Tensor | None], output: Tensor) -> None:
        _, ctx.constant, bias = inputs
        ctx.bias, ctx.shape, ctx.dtype = None if bias is None else bias.dtype, output.shape, output.dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        grad_bias = None
        if ctx.bias is not None and ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0).to(ctx.bias)
        return (grad @ ctx.constant.w._dequantize(grad.dtype) if ctx.needs_input_grad[0] else None), None, grad_bias

    @staticmethod
    def jvp(ctx: Any, x_t: Tensor | None, _: None, bias_t: Tensor | None) -> Tensor | None:
        terms = [] if x_t is None else [F.linear(x_t, ctx.constant.w._dequantize(x_t.dtype))]
        if bias_t is not None:
            terms.append(bias_t.to(ctx.dtype).expand(ctx.shape))
        return sum(terms[1:], terms[0]) if terms else None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, None, int | None], x: Tensor, constant: _Constant, bias: Tensor | None
    ) -> tuple[Tensor, int]:
        x_dim, _, bias_dim = in_dims
        x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)
        if bias is None or bias_dim is None:
            return linear(x, constant.w, bias), 0
        bias = bias.movedim(bias_dim, 0)
        return linear(x, constant.w) + bias.reshape(bias.shape[0], *(1,) * (x.ndim - 2), -1), 0
