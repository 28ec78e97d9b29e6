"""Native products with integer and floating-point weights.

They are called millions of times, so their checks are split. The weight is checked once, when its
:class:`~.arguments.Operand` is created, and its byte counts again at each call. The input, the bias and active modes or
tracers are checked at each call, by attributes only. An input that is not plain CPU memory is not an error: ``run``
returns None, and the caller goes through torch's dispatcher, where modes, tracers and transforms see the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ...core.tracing import in_memory, is_observed
from ..cpu.abi import F32, FLOAT_WEIGHT, NONE, FloatLinear, IntLinear, LinearArgs
from .arguments import (
    CPU,
    FLOAT_KINDS,
    PLAIN,
    Operand,
    Part,
    address,
    changed_part,
    check_status,
    extents,
    native_function,
)


def float_parts(w: FloatLinear, outer_offset: bool) -> tuple[Part, ...]:
    """The parts of a weight, of which the offset of the scale is there or not."""
    parts = list(extents(FLOAT_WEIGHT, w))
    if not outer_offset:
        parts[3] = parts[3]._replace(kind=NONE)
    return tuple(parts)


Product = Callable[[Tensor, Operand, "Tensor | None"], "Tensor | None"]


def product(struct: IntLinear | FloatLinear, dtype: torch.dtype, keep: Any = None) -> Product:
    """(x [.., K], operand, bias [N] or None) -> y [.., N] of x's dtype, for weights that ``struct`` describes.

    ``run`` returns None if native code cannot read x or bias: another dtype or size, not plain CPU memory, or a mode,
    tracer or transform must see the call. Raises ArgumentError if a part lost its memory, and MemoryError.
    keep: owners of the memory that the addresses in ``struct`` point to.
    """
    integer = isinstance(struct, IntLinear)
    call = native_function("pw_int_linear" if integer else "pw_float_linear")
    weight, n, k = ctypes.addressof(struct), int(struct.n), int(struct.k)
    stack, tracing = torch._C._len_torch_dispatch_stack, torch._C._get_tracing_state
    transforms, threads, empty = torch._C._are_functorch_transforms_active, torch.get_num_threads, torch.empty_strided
    empties, strided, cpu, plain, kinds, dual = torch.empty, torch.strided, CPU, PLAIN, FLOAT_KINDS, forward_ad

    def run(x: Tensor, w: Operand, bias: Tensor | None, owners: Any = (struct, keep)) -> Tensor | None:
        if (  # hot path, runs per layer and call: each line costs about 0.05 µs
            type(x) not in plain or not x.is_cpu or x.dtype is not dtype or x.is_neg() or x.layout is not strided
            or ((stack() or tracing() is not None or transforms() or dual._current_level >= 0) and is_observed(x, bias))
        ):  # fmt: skip
            return None
        codes, codes_bytes, scale, scale_bytes, more, perm, static = w
        shape, strides = x.shape, x.stride()
        if not shape or shape[-1] != k:
            return None
        if perm is not None:
            x = x.index_select(-1, perm)
            strides = x.stride()
        b, b_kind = None, 0
        if bias is not None:
            if type(bias) not in plain or bias.ndim != 1 or bias.numel() != n or not bias.is_cpu or bias.is_neg():
                return None
            b_kind = kinds.get(bias.dtype, 0)
            if not b_kind or not bias.is_contiguous():
                if not bias.is_floating_point():
                    return None
                bias, b_kind = bias.float().contiguous(), F32
            b = bias.data_ptr()
        if len(shape) == 2 and strides[1] == 1:
            m, step = shape[0], strides[0]
            y = empty((m, n), (n, 1), dtype=dtype, device=cpu)
        else:
            if not x.is_contiguous():
                x = x.contiguous()
            m, step = x.numel() // k, k
            if len(shape) == 3:
                y = empty((shape[0], shape[1], n), (shape[1] * n, n, 1), dtype=dtype, device=cpu)
            else:
                y = empties((*shape[:-1], n), dtype=dtype, device=cpu)
        if codes.nbytes != codes_bytes or (scale is not None and scale.nbytes != scale_bytes):
            raise changed_part()
        if more is None:
            args = (None, None, None, None, None, 0) if integer else (None, None, None, None)
        else:
            above: list[Any] = []
            for part, size in more:
                if part is not None and part.nbytes != size:
                    raise changed_part()
                above.append(None if part is None else part.data_ptr())
            if integer:
                act_scale, act_zero = None, 0
                if static is not None:
                    s, kind, zero, shift = static
                    act_scale = s.to(kind).float()
                    act_zero = (0 if zero is None else int(zero)) - shift
                    above.append(address(act_scale, "linear: act_scale", (torch.float32,), 1, exact=True))
                else:
                    above.append(None)
                above.append(act_zero)
            args = tuple(above)
        status = call(
            weight, x.data_ptr(), m, step, y.data_ptr(), b, b_kind, codes.data_ptr(),
            None if scale is None else scale.data_ptr(), *args, threads(),
        )  # fmt: skip
        if status:
            check_status(status, f"linear: {m} rows of {k} columns")
        return y

    return run


def products(weights: Any, dtype: torch.dtype) -> Callable[..., list[Tensor] | None]:
    """As :func:`product`, for several integer weights (an array of IntLinear) with one input.

    (x, operands, biases) -> ys, or None if native code cannot read x or a bias. Operands have no static activation.
    """
    call, threads, count, k = native_function("pw_int_linears"), torch.get_num_threads, len(weights), int(weights[0].k)
    sizes, where = [int(w.n) for w in weights], ctypes.addressof(weights)

    def run(
        x: Tensor, operands: Sequence[Operand], biases: Sequence[Tensor | None], owners: Any = weights
    ) -> list[Tensor] | None:
        if len(operands) != count or len(biases) != count or not _readable(x, dtype) or x.shape[-1:] != (k,):
            return None
        for bias, n in zip(biases, sizes, strict=True):
            if bias is not None and (
                not in_memory(bias) or not bias.is_cpu or bias.shape != (n,) or not bias.dtype.is_floating_point
            ):
                return None
        flat = x if operands[0].perm is None else x.index_select(-1, operands[0].perm)
        if flat.ndim != 2 or flat.stride(1) != 1:
            flat = flat.reshape(-1, k).contiguous()
        at, m, step, n_threads = flat.data_ptr(), flat.shape[0], flat.stride(0), threads()
        ys, kept, rows = [], [], (LinearArgs * count)()
        for i, w in enumerate(operands):
            bias, b, kind = biases[i], None, 0
            y = torch.empty((*x.shape[:-1], sizes[i]), dtype=dtype, device=CPU)
            if bias is not None:
                if bias.dtype not in FLOAT_KINDS or not bias.is_contiguous():
                    bias = bias.float().contiguous()
                    kept.append(bias)
                b, kind = bias.data_ptr(), FLOAT_KINDS[bias.dtype]
            above = [None] * 4 if w.more is None else [None if p is None else p.data_ptr() for p, _ in w.more]
            parts = ((w.codes, w.codes_bytes), (w.scale, w.scale_bytes), *(w.more or ()))
            if w.static is not None or w.scale is None or any(p is not None and p.nbytes != b for p, b in parts):
                raise changed_part()
            rows[i] = LinearArgs(
                at, m, step, y.data_ptr(), b, w.codes.data_ptr(), w.scale.data_ptr(), *above, None, 0, kind, n_threads
            )
            ys.append(y)
        check_status(call(where, ctypes.addressof(rows), count), f"linear: {m} rows of {k} columns")
        return ys

    return run


def _readable(x: Tensor, dtype: torch.dtype) -> bool:
    return in_memory(x) and x.is_cpu and x.dtype is dtype
