"""Transposed convolutions of one and two dimensions with integer codes on a CPU, and the layout "cpu_conv_transposed".

Each position of the input multiplies the whole kernel, and the products are added where they overlap:

    columns[b, p, t, o] = sum over i of x[b, i, p] * w[i, o, t]        one linear product: x [B * P, I], w [T * O, I]
    y[b, o, s * p + d * t - padding] += columns[b, p, t, o]            for all positions p and taps t

with stride s and dilation d on each axis. The linear product is the native one (int_linear.py); the layout packs its
weight [taps * O, I]. Output channels are last while products are added, so each addition reads and writes
whole rows of memory. An input is quantized with one scale per position, or a static one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.formats import INT4, INT8, UINT4
from ...core.layouts import Layout, register_layout, require_fit
from ...core.numerics import Parts
from ...core.spec import ActivationSpec, QuantSpec
from ...core.tensor import AffineQuantizedTensor as QT
from ...core.tracing import in_memory
from ..graph_weight import LIBRARY, flatten, key_of, parse_key, weight_of
from ..linear import run_linear
from ..native import conv as native_conv
from ..reference import convolution as dequantized
from ..table import Case, Kernel, get_kernel, register_kernel
from . import int_linear

NAME = "cpu_conv_transposed"
OP = "transposed_convolution"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FEWEST = 128  # input channels of a float input: with fewer, writing the columns takes longer than torch's convolution


def as_matrix(spec: QuantSpec, shape: Sequence[int]) -> tuple[QuantSpec, tuple[int, int]]:
    """Spec and shape [taps * O, I] of the linear weight of a kernel [I, O, *taps]. Raises ValueError if blocks are not
    of one output channel, or are part of its taps."""
    if len(shape) not in (3, 4):
        raise ValueError("needs a transposed convolution of one or two dimensions")
    if 0 in shape:
        raise ValueError("needs a weight that is not empty")
    i, o, *taps = shape
    matrix = (math.prod(taps) * o, i)
    if spec.block is None:
        return spec.with_(layout=int_linear.LAYOUT.name), matrix
    inputs, outputs, *inner = blocks.resolve(spec.block, shape)
    if outputs != 1:
        raise ValueError("needs output channels that do not share scales")
    if inner not in (taps, [1] * len(taps)):
        raise ValueError(f"needs scales for whole kernels or for each tap, the weight has blocks of {inner}")
    block = (-1,) if inputs >= i else (inputs,)
    return spec.with_(layout=int_linear.LAYOUT.name, block=block), matrix


def fits(spec: QuantSpec, shape: Sequence[int]) -> bool | str:
    """True, or the reason why the layout does not support this."""
    if spec.scale not in _FLOATS or spec.offset not in (None, *_FLOATS):
        return "needs plain scales and offsets"
    try:
        return int_linear.fits(*as_matrix(spec, shape))
    except ValueError as error:
        return str(error)


def _rows(part: Tensor, taps: Sequence[int]) -> Tensor:
    """[I or sets, O, *taps or ones] -> [taps * O, I or sets]."""
    whole = part.expand(*part.shape[:2], *taps)
    return whole.movedim((0, 1), (-1, -2)).reshape(-1, part.shape[0])


def _kernels(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Inverse of :func:`_rows`. shape: of the result; ones where the taps are the same."""
    first, o, *taps = shape
    return rows[: math.prod(taps) * o].reshape(*taps, o, first).movedim((-1, -2), (0, 1)).contiguous()


def pack(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """As layout "cpu" packs the weight [taps * O, I]."""
    require_fit(NAME, fits(spec, shape), spec, shape)
    taps = shape[2:]
    rows = int_linear.map_groups(parts, spec, lambda p: _rows(p, taps))._replace(codes=_rows(parts.codes, taps))
    return int_linear.pack(rows, *as_matrix(spec, shape))


def unpack(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """Inverse of :func:`pack`, bit for bit."""
    rows = int_linear.unpack(parts, *as_matrix(spec, shape))
    counts = blocks.counts(spec.block, shape)
    codes = _kernels(rows.codes, blocks.padded(spec.block, shape))
    return int_linear.map_groups(rows, spec, lambda p: _kernels(p, counts))._replace(codes=codes)


def _extra(spec: QuantSpec, shape: Sequence[int]) -> int:
    return int_linear.LAYOUT.nbytes(*as_matrix(spec, shape)) - spec.with_(layout=NAME).nbytes(shape)


_EXAMPLES: tuple[tuple[QuantSpec, tuple[int, ...]], ...] = (
    (QuantSpec(INT8, (-1, 1, -1, -1)), (7, 5, 3, 2)), (QuantSpec(INT8, (-1, 1, -1)), (33, 17, 4)),
    (QuantSpec(INT4, (32, 1, 1, 1), scale=torch.bfloat16), (70, 3, 2, 2)),
    (QuantSpec(UINT4, (-1, 1, -1, -1), zero_point=True), (40, 6, 2, 3)), (QuantSpec(INT8, None), (18, 5, 3)),
)  # fmt: skip
LAYOUT = register_layout(Layout(NAME, pack, unpack, ("cpu",), _EXAMPLES, _extra))


# -- the kernel ------------------------------------------------------------------------------------------------------


def _activation(act: ActivationSpec | None, rank: int) -> ActivationSpec | None:
    """The activation of the linear product. Raises ValueError unless it has one scale per position or a static one."""
    if act is None or act.spec.block is None:
        return act
    inputs, *rest = act.spec.block if len(act.spec.block) == rank - 1 else (0, 0)
    if set(rest) != {1}:
        raise ValueError("needs one activation scale per position")
    return replace(act, spec=act.spec.with_(block=(inputs,)))


def _accepts(case: Case) -> bool | str:
    verdict = fits(case.spec, case.shape)
    if verdict is not True:
        return verdict
    spec, shape = as_matrix(case.spec, case.shape)
    if case.act is None and case.shape[0] < FEWEST:
        return f"torch's float transposed convolution is faster with fewer than {FEWEST} input channels"
    try:
        act = _activation(case.act, len(case.shape))
    except ValueError as error:
        return str(error)
    return get_kernel("linear", "cpu_int").refuses(Case(spec, act, shape, case.dtype, case.device)) or True


def _matrix(w: QT) -> QT:
    """The linear weight [taps * O, I], which shares the parts of w."""
    found: QT | None = w._bound.get(NAME)
    if found is None:
        spec, shape = as_matrix(w.spec, [int(n) for n in w.shape])
        found = QT(w.parts, spec, shape, w.dtype, _activation(w.act, w.ndim))
        if in_memory(w._codes):
            w._bound[NAME] = found
    return found


def run(
    x: Tensor, w: QT, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    transposed: bool, output_padding: Sequence[int], groups: int,
) -> Tensor:  # fmt: skip
    """aten.convolution, with ``transposed``, of quantize(x) with w in layout "cpu_conv_transposed".

    x [B, I, *positions], w [I, O, *taps]; y [B, O, (P - 1) * s - 2 * padding + d * (T - 1) + 1 + output_padding] in x's
    dtype. Products are added in float32. Groups of channels, and sizes that do not fit (with torch's RuntimeError), run
    on the dequantized weight.
    """
    rest = (stride, padding, dilation, transposed, output_padding, groups)
    n = w.ndim - 2
    stride, padding, dilation, more = (_each(v, n) for v in (stride, padding, dilation, output_padding))
    out = output_sizes(x.shape[2:], w.shape[2:], stride, padding, dilation, more)
    fits_torch = (
        x.ndim == w.ndim and x.shape[1] == w.shape[0] and min(*x.shape[2:], *out, *stride, *dilation) > 0
        and min(padding) >= 0 and all(0 <= m < max(s, d) for m, s, d in zip(more, stride, dilation, strict=True))
        and (bias is None or tuple(bias.shape) == (w.shape[1],))
    )  # fmt: skip
    if groups != 1 or not fits_torch:
        return dequantized(x, w, bias, *rest)
    if torch.compiler.is_compiling() or not in_memory(w._codes) or not in_memory(x):
        return torch.ops.pennyweight.transposed_convolution.default(
            x, flatten(w)[0], bias, stride, padding, dilation, more, key_of(w)
        )
    return _call(x, w, bias, stride, padding, dilation, more)


def _call(
    x: Tensor, w: QT, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    output_padding: Sequence[int],
) -> Tensor:  # fmt: skip
    n = w.ndim - 2
    out = output_sizes(x.shape[2:], w.shape[2:], stride, padding, dilation, output_padding)
    matrix, rows = _matrix(w), x.movedim(1, -1).contiguous()
    taps, o = w.shape[2:], w.shape[1]
    form = native_conv.output_format(x) if n == 2 else torch.contiguous_format
    apart = [*taps] == [*stride] and [*out] == [p * s for p, s in zip(x.shape[2:], stride, strict=True)]
    if apart and max(dilation) == 1 and not any(padding):  # no place gets two products
        columns = run_linear(rows, matrix, None if bias is None else bias.repeat(math.prod(taps)))
        columns = columns.unflatten(-1, (*taps, o))  # [B, *positions, *taps, O]
        pairs = [axis for i in range(1, n + 1) for axis in (i, i + n)]
        if form is torch.contiguous_format:
            return columns.permute(0, -1, *pairs).reshape(x.shape[0], o, *out).contiguous()
        return columns.permute(0, *pairs, -1).reshape(x.shape[0], *out, o).contiguous().movedim(-1, 1)
    columns = run_linear(rows, matrix, None).unflatten(-1, (math.prod(taps), o))  # [B, *positions, taps, O]
    y = add_columns(columns, bias, out, taps, stride, padding, dilation)
    return y.to(x.dtype).movedim(-1, 1).contiguous(memory_format=form)


def _each(value: Sequence[int], count: int) -> list[int]:
    """One number for each spatial axis."""
    return [*value] * count if len(value) == 1 else [*value]


def output_sizes(
    sizes: Sequence[int], taps: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    output_padding: Sequence[int],
) -> list[int]:  # fmt: skip
    """Size of the output on each axis: (n - 1) * stride - 2 padding + dilation (taps - 1) + 1 + output_padding."""
    every = zip(sizes, taps, stride, padding, dilation, output_padding, strict=False)
    return [(n - 1) * s - 2 * p + d * (t - 1) + 1 + m for n, t, s, p, d, m in every]


def add_columns(
    columns: Tensor, bias: Tensor | None, out: Sequence[int], taps: Sequence[int], stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    """y [B, *out, O] in float32: bias, plus columns [B, *positions, taps, O], each at its place in the output."""
    start = columns.new_zeros(1, dtype=torch.float32) if bias is None else bias.float()
    y = start.expand(columns.shape[0], *out, columns.shape[-1]).clone(memory_format=torch.contiguous_format)
    positions = columns.shape[1:-2]
    for index, tap in enumerate(product(*map(range, taps))):
        here: list[Any] = []  # where the products of this tap go
        span: list[Any] = []  # which of them lie in the output
        for size, s, d, p, t, m in zip(positions, stride, dilation, padding, tap, out, strict=True):
            first = d * t - p  # where position 0 goes
            begin, end = max(0, -(first // s)), min(size, (m - 1 - first) // s + 1)
            here.append(slice(first + s * begin, max(first + s * (end - 1) + 1, 0), s))
            span.append(slice(begin, end))
        if all(part.start < part.stop for part in span):
            y[(slice(None), *here)] += columns[(slice(None), *span, index)]
    return y


# -- the op used in graphs: to trace the sums of each tap takes seconds ------------------------------------------------


def _op(
    x: Tensor, parts: list[Tensor], bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    output_padding: list[int], key: str,
) -> Tensor:  # fmt: skip
    return _call(x, weight_of(key, parts), bias, stride, padding, dilation, output_padding)


def _fake(
    x: Tensor, parts: list[Tensor], bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    output_padding: list[int], key: str,
) -> Tensor:  # fmt: skip
    _, o, *taps = parse_key(key).shape
    out = output_sizes(x.shape[2:], taps, stride, padding, dilation, output_padding)
    form = native_conv.output_format(x) if len(taps) == 2 else torch.contiguous_format
    return x.new_empty((x.shape[0], o, *out)).contiguous(memory_format=form)


LIBRARY.define(
    "transposed_convolution(Tensor x, Tensor[] parts, Tensor? bias, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, SymInt[] output_padding, str key) -> Tensor"
)
LIBRARY.impl("transposed_convolution", _op, "CompositeExplicitAutograd")
torch.library.register_fake("pennyweight::transposed_convolution", _fake, lib=LIBRARY)

# Integer sums are exact. Float inputs are rounded to 2**-22 of the largest magnitude of their position.
register_kernel(
    Kernel(OP, "cpu_int_columns", run, _accepts, ("cpu",), NAME, rank=30, tolerance="fixed22", row_independent=True)
)
