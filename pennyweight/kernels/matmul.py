"""Matrix products below autograd (``x @ w.t()``, mm, addmm, mv, bmm, grouped products), by kernels of the table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.numerics import permute_last_axis
from ..core.tensor import SLOTS, AffineQuantizedTensor, implements
from ..core.tracing import in_memory
from .activation import scale_input
from .aten_operands import dequantized, meta_result, misfit
from .graph_weight import LIBRARY, flatten, key_of, parse_key, weight_of
from .linear import linear, run_linear
from .linear_graph import traced_linear
from .table import case_of, reorders, select

aten = torch.ops.aten
QT = AffineQuantizedTensor


def _contracts_last(w: QT, dim: int) -> bool:
    """Whether logical axis ``dim`` is the stored last axis, along which the weight's blocks run."""
    return (range(w.ndim) if w.axes is None else w.axes)[dim] == w.ndim - 1


def _check(op: str, a: Any, b: Any, ndim: int) -> None:
    """Raise ArgumentError unless a [.., M, K] and b [.., K, N], of ``ndim`` axes both, can be multiplied."""
    if a.ndim != ndim or b.ndim != ndim:
        raise misfit(op, a, b, f"both must have {ndim} axes")
    if a.shape[-1] != b.shape[-2]:
        raise misfit(
            op, a, b, f"axis {ndim - 1} of the first is {a.shape[-1]}, axis {ndim - 2} of the second {b.shape[-2]}"
        )
    if a.shape[:-2] != b.shape[:-2]:
        raise misfit(op, a, b, f"batches of {a.shape[0]} and {b.shape[0]}, expected two of one size")
    if a.device != b.device:
        raise misfit(op, a, b, "both must be on one device")
    if not (a.is_floating_point() and b.is_floating_point()):
        raise misfit(op, a, b, "both must be floating point")


def _product(w: QT, x: Tensor) -> Tensor:
    """x [M, K] @ w [N, K].T, where w may be traced."""
    return traced_linear(x, w, None) if _traced(w) or not in_memory(x) else run_linear(x, w, None)


def _traced(w: QT) -> bool:
    return torch.compiler.is_compiling() or not in_memory(w._codes)


@implements(aten.mm.default)
def _mm(func: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():  # otherwise each attribute access on a weight costs 1 µs
        return _matrix_product(func, args, kwargs)


def _matrix_product(func: Any, args: Any, kwargs: Any) -> Any:
    if (shapes := meta_result(func, args, kwargs)) is not NotImplemented:
        return shapes
    a, b = args
    _check("mm", a, b, 2)
    if isinstance(b, QT) and not isinstance(a, QT) and _contracts_last(b, 0):
        return _product(b.with_(axes=None, shape=b.stored_shape), a)
    if isinstance(a, QT) and not isinstance(b, QT) and _contracts_last(a, 1):
        return _product(a, b.t()).t()
    return dequantized(func, args, kwargs)


@implements(aten.linear.default)
def _aten_linear(func: Any, args: Any, kwargs: Any) -> Any:
    x, w, bias = (*args, None)[:3]
    if not isinstance(w, QT) or isinstance(x, QT):
        return dequantized(func, args, kwargs)
    return linear(x, w, bias)


@implements(aten.matmul.default)
def _matmul(func: Any, args: Any, kwargs: Any) -> Any:
    """Batches of rows times one matrix are one product; everything else uses torch's own decomposition."""
    a, b = args
    if isinstance(b, QT) and not isinstance(a, QT) and b.ndim == 2 and a.ndim > 2:
        _check("matmul", a.flatten(0, -2), b, 2)
        return aten.mm.default(a.reshape(-1, a.shape[-1]), b).reshape(*a.shape[:-1], b.shape[1])
    if isinstance(a, QT) and not isinstance(b, QT) and a.ndim == 2 and b.ndim > 2:
        if a.shape[1] != b.shape[-2]:
            raise misfit("matmul", a, b, f"{a.shape[1]} columns of the first, {b.shape[-2]} rows of the second")
        return _matmul(func, (b.transpose(-1, -2), a.t()), {}).transpose(-1, -2)
    return NotImplemented


@implements(aten.addmm.default)
def _addmm(func: Any, args: Any, kwargs: Any) -> Any:
    if (shapes := meta_result(func, args, kwargs)) is not NotImplemented:
        return shapes
    bias, a, b = args
    _check("addmm", a, b, 2)
    shape = (a.shape[0], b.shape[1])
    if bias.ndim > 2 or not all(n in (1, m) for n, m in zip(reversed(bias.shape), reversed(shape), strict=False)):
        raise misfit("addmm", bias, b, f"the first must broadcast to the product {list(shape)}")
    if bias.device != b.device or not bias.is_floating_point():
        raise misfit("addmm", bias, b, "both must be floating point on one device")
    if isinstance(bias, QT) or any(kwargs.get(k, 1) != 1 for k in ("alpha", "beta")):
        return dequantized(func, args, kwargs)
    y = _mm(aten.mm.default, (a, b), {})
    return y + bias.to(y.dtype)


@implements(aten.mv.default)
def _mv(func: Any, args: Any, kwargs: Any) -> Any:
    a, v = args
    if a.ndim != 2 or v.ndim != 1 or a.shape[1] != v.shape[0]:
        raise misfit("mv", a, v, "expected a matrix [M, K] and a vector [K]")
    if isinstance(a, QT) and not isinstance(v, QT):
        return _mm(aten.mm.default, (a, v.unsqueeze(1)), {}).squeeze(1)
    return dequantized(func, args, kwargs)


def _only(w: QT) -> QT:
    """The 2-d weight that an expanded weight [E, N, K] repeats."""
    return w.with_(
        shape=w.shape[1:], **{slot: p[0] for slot, p in zip(SLOTS[:4], w.parts, strict=False) if p is not None}
    )


@implements(aten.bmm.default)
def _bmm(func: Any, args: Any, kwargs: Any) -> Any:
    a, b = args
    _check("bmm", a, b, 3)
    for w, x, flip in ((b, a, False), (a, b, True)):
        if isinstance(w, QT) and not isinstance(x, QT) and _contracts_last(w, 2 if flip else 1):
            axes = (0, 1, 2) if w.axes is None else w.axes
            rest = axes[:1] + ((axes[1],) if flip else (axes[2],))
            if rest != (0, 1):
                break
            stored = w.with_(axes=None, shape=w.stored_shape)
            if stored._codes.stride(0) == 0:  # one weight expanded over the batch: one product
                x = x.transpose(1, 2) if flip else x
                y = _product(_only(stored), x.flatten(0, 1)).unflatten(0, x.shape[:2])
                return y.transpose(1, 2) if flip else y
            y = _batch(x.transpose(1, 2) if flip else x, stored, None)
            return y.transpose(1, 2) if flip else y
    return dequantized(func, args, kwargs)


def _batch(x: Tensor, w: QT, ends: Tensor | None) -> Tensor:
    """x [E, M, K] @ w [E, N, K].T per batch, or with ``ends`` a grouped product of x [T, K] with those group ends."""
    x, w = scale_input(x, w)
    case = case_of(w, x.dtype)
    kernel = select("bmm", case)
    if reorders(kernel, case):
        x, w = permute_last_axis(x, w._perm), w.with_(perm=None)
    if kernel.layout is not None and (_traced(w) or not in_memory(x) or not (ends is None or in_memory(ends))):
        return torch.ops.pennyweight.experts.default(x, flatten(w)[0], ends, key_of(w, kernel.name))
    if ends is None:
        return kernel.run(x, w, None)
    assert kernel.grouped is not None  # see _grouped_mm
    return kernel.grouped(x, w, ends)


def _experts_op(x: Tensor, parts: list[Tensor], ends: Tensor | None, key: str) -> Tensor:
    return _batch(x, weight_of(key, parts), ends)


def _experts_fake(x: Tensor, parts: list[Tensor], ends: Tensor | None, key: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], parse_key(key).shape[1]))


LIBRARY.define("experts(Tensor x, Tensor[] parts, Tensor? ends, str key) -> Tensor")
LIBRARY.impl("experts", _experts_op, "CompositeExplicitAutograd")
torch.library.register_fake("pennyweight::experts", _experts_fake, lib=LIBRARY)


@implements(aten._grouped_mm.default)
def _grouped_mm(func: Any, args: Any, kwargs: Any) -> Any:
    given = [*args, *(kwargs.get(name) for name in ("offs", "bias", "out_dtype")[len(args) - 2 :])]
    x, w, ends, *rest = given
    if (
        not isinstance(w, QT) or isinstance(x, QT) or ends is None or any(r is not None for r in rest) or x.ndim != 2
        or w.ndim != 3 or w.axes != (0, 2, 1)
    ):  # fmt: skip
        return dequantized(func, args, kwargs)
    if x.shape[1] != w.shape[1] or x.device != w.device or not x.is_floating_point():
        raise misfit("grouped_mm", x, w, "expected an input [rows, K] and weights [groups, K, N] on one device")
    if ends.ndim != 1 or ends.shape[0] != w.shape[0] or ends.dtype is not torch.int32 or ends.device != w.device:
        raise misfit("grouped_mm", ends, w, f"offs must be int32 [{w.shape[0]}], the end of each group of rows")
    stored = w.with_(axes=None, shape=w.stored_shape)
    if select("bmm", case_of(stored, x.dtype)).grouped is None:
        return dequantized(func, args, kwargs)
    return _batch(x, stored, ends)


@implements(
    aten.baddbmm.default, aten.addmv.default, aten.dot.default, aten.convolution_backward.default,
)  # fmt: skip
def _without_kernels(func: Any, args: Any, kwargs: Any) -> Any:
    return dequantized(func, args, kwargs)
