"""Native ``convolution`` with integer codes of 1 to 8 bits on a CPU, and the layout "cpu_conv".

An implicit matrix product over tiles of 16 output channels; the input is quantized once, with one scale per sample, to
int8 channels-last. With weights alone, a float32 input is split into three int8 limbs with a power-of-two scale per
sample, so every product is an exact integer product. See src/conv.h for the arithmetic. One and two dimensions, any
stride, padding, dilation and number of groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ...core import blocks
from ...core.formats import INT3, INT4, INT8, UINT4
from ...core.layouts import Layout, register_layout, require_fit
from ...core.numerics import Parts
from ...core.spec import INT8_ROW, ActivationSpec, QuantSpec
from ...core.tensor import AffineQuantizedTensor as QT
from ...core.tracing import in_memory
from ...support.errors import ArgumentError
from ..graph_weight import LIBRARY, flatten, key_of, nest, parse_key
from ..native import arguments
from ..native import conv as native_conv
from ..table import Case, Kernel, case_of, register_kernel
from ..target import target_of
from .abi import CONV_WEIGHT, FLOAT, NONE, Conv
from .int_linear import describe as describe_linear
from .int_linear import fits_input, map_groups, padded_columns, static_input, tile_rows, untile_rows
from .library import KINDS, usable
from .pack_ops import STEP, TILE, pack_codes, unpack_codes

MOST_COLUMNS = 1 << 15  # of one integer sum: 2**15 * 255 * 128 < 2**31
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class Sizes(NamedTuple):
    """A weight [o, c, *kernel]: ``sets`` of ``channels`` input channels that share a scale, ``taps`` of the kernel."""

    o: int
    c: int
    kernel: tuple[int, int]
    channels: int
    sets: int
    taps: int

    @property
    def direct(self) -> bool:
        """Whether each output channel has one input channel: codes are bytes [taps, o in whole tiles]."""
        return self.c == 1

    @property
    def columns(self) -> int:
        """Columns of packed codes: channels of a set in whole fours, all of them in whole steps."""
        return padded_columns(self.sets * self.taps * padded_columns(self.channels, 4), STEP)


def sizes(spec: QuantSpec, shape: Sequence[int]) -> Sizes:
    """Raises ValueError if blocks are not whole kernels of some input channels of one output channel."""
    if len(shape) not in (3, 4):
        raise ValueError("needs a convolution of one or two dimensions")
    if 0 in shape:
        raise ValueError("needs a weight that is not empty")
    o, c, *kernel = shape
    rows, channels, *inner = (1, c, *kernel) if spec.block is None else blocks.resolve(spec.block, shape)
    if rows != 1:
        raise ValueError("needs output channels that do not share scales")
    if inner != kernel:
        raise ValueError(f"needs scales for whole kernels, the weight has blocks of {[rows, channels, *inner]}")
    if c % channels or (channels != c and channels % 4):
        raise ValueError(f"needs scales for all input channels, or for groups of a multiple of 4, not of {channels}")
    found = Sizes(o, c, (1, *kernel)[-2:], channels, c // channels, math.prod(kernel))  # type: ignore[arg-type]
    if found.taps * padded_columns(channels, 4) > MOST_COLUMNS:
        raise ValueError(f"needs at most {MOST_COLUMNS} weights under one scale, whose integer sum fits 32 bits")
    return found


def fits(spec: QuantSpec, shape: Sequence[int]) -> bool | str:
    """True, or the reason why the layout does not support this."""
    if spec.format.kind != "int":
        return "needs integer codes"
    if spec.scale not in _FLOATS or spec.offset is not None:
        return "needs plain scales and no offsets"
    if spec.zero_point and (spec.block is None or spec.zero_point_format.bits > spec.format.bits):
        return "needs zero points per output channel, with no more bits than the codes"
    try:
        sizes(spec, shape)
    except ValueError as error:
        return str(error)
    return True


def pack(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """codes: uint8 [ceil(O/16), columns/32 * 64 * bits], or for one input channel [taps, O in whole 16]; scale and
    zero_point: [ceil(O/16), sets, 16]."""
    require_fit("cpu_conv", fits(spec, shape), spec, shape)
    z = sizes(spec, shape)
    codes = spec.format.to_unsigned(parts.codes).reshape(z.o, z.sets, z.channels, z.taps)
    if z.direct:
        packed = codes.new_zeros((z.taps, padded_columns(z.o, TILE)))
        packed[:, : z.o] = codes.view(z.o, z.taps).t()
    else:
        rows = codes.new_zeros((z.o, z.sets, z.taps, padded_columns(z.channels, 4)))
        rows[..., : z.channels] = codes.transpose(2, 3)
        packed = pack_codes(rows.view(z.o, -1), z.columns, spec.format.bits, 0)
    return map_groups(parts, spec, lambda p: tile_rows(p.reshape(z.o, z.sets)))._replace(codes=packed)


def unpack(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """Inverse of :func:`pack`, bit for bit."""
    z = sizes(spec, shape)
    if z.direct:
        codes = parts.codes[:, : z.o].t()
    else:
        wide = padded_columns(z.channels, 4)
        codes = unpack_codes(parts.codes, z.o, z.sets * z.taps * wide, z.columns, spec.format.bits, 0)
        codes = codes.view(z.o, z.sets, z.taps, wide)[..., : z.channels].transpose(2, 3)
    codes = spec.format.from_unsigned(codes.reshape(shape).contiguous())
    counts = blocks.counts(spec.block, shape)
    return map_groups(parts, spec, lambda p: untile_rows(p, z.o).reshape(counts))._replace(codes=codes)


def _padding(spec: QuantSpec, shape: Sequence[int]) -> int:
    """Bytes of codes and parts beyond those of whole kernels packed along the last axis."""
    z = sizes(spec, shape)
    rows = padded_columns(z.o, TILE)
    codes = rows * z.taps if z.direct else rows * z.columns * spec.format.bits // 8
    parts = sum(cast("torch.dtype", kind).itemsize for kind in spec.part_specs().values())
    extra = 0 if spec.block is None else (rows - z.o) * z.sets * parts
    return codes + extra - math.prod(shape[:-1]) * -(-shape[-1] * spec.format.bits // 8)


_ROW, _KERNELS = (-1, -1, -1), (4, -1, -1)
_EXAMPLES: tuple[tuple[QuantSpec, tuple[int, ...]], ...] = (
    (QuantSpec(INT8, _ROW), (17, 3, 3, 3)), (QuantSpec(INT8, _ROW), (33, 1, 3, 5)),
    (QuantSpec(INT3, _ROW), (16, 8, 1, 1)),
    (QuantSpec(INT4, _KERNELS, scale=torch.bfloat16), (5, 12, 3, 3)),
    (QuantSpec(UINT4, _ROW, zero_point=True), (20, 6, 2, 3)),
    (QuantSpec(INT4, (-1, -1)), (7, 9, 5)), (QuantSpec(INT8, None), (18, 5, 3)),
)  # fmt: skip
LAYOUT = register_layout(Layout("cpu_conv", pack, unpack, ("cpu",), _EXAMPLES, _padding))


# -- the kernel ------------------------------------------------------------------------------------------------------


def _activation(act: ActivationSpec | None, rank: int) -> bool | str:
    if act is None:
        return "weight-only: the input is not quantized"
    verdict = fits_input(act)
    if verdict is not True or act.mode == "static":
        return verdict
    return act.spec.block == (-1,) * (rank - 1) or "needs one activation scale per sample"


def _accepts(case: Case) -> bool | str:
    for verdict in (usable(), fits(case.spec, case.shape), _activation(case.act, len(case.shape))):
        if verdict is not True:
            return verdict
    return case.dtype in _FLOATS or f"for float32, bfloat16 and float16 inputs, not {case.dtype}"


def _accepts_float(case: Case) -> bool | str:
    if case.act is not None:
        return "the input is quantized"
    for verdict in (usable(), fits(case.spec, case.shape)):
        if verdict is not True:
            return verdict
    if case.dtype is not torch.float32:
        return f"faster than torch's float convolution for float32 only, not for {case.dtype}"
    return not sizes(case.spec, case.shape).direct or "torch's float convolution is faster with one input channel"


def describe(case: Case) -> Conv:
    """The case as the struct of src/abi.h."""
    spec, z, kinds = case.spec, sizes(case.spec, case.shape), cast("dict[Any, int]", KINDS)
    w = Conv(
        o=z.o, c=z.c, kh=z.kernel[0], kw=z.kernel[1], channels=z.channels, kp=z.columns, bits=spec.format.bits,
        center=spec.mid - int(spec.format.lo), scale=kinds[spec.scale], one_scale=spec.block is None,
        zero_point=KINDS[spec.zero_point_dtype] if spec.zero_point else NONE, x=KINDS[case.dtype],
    )  # fmt: skip
    if case.act is None:
        w.act, w.act_scale = FLOAT, KINDS[torch.float32]
        return w
    act = case.act if case.act.mode == "static" else replace(case.act, spec=case.act.spec.with_(block=(-1,)))
    token = describe_linear(Case(INT8_ROW, act, (1, STEP), case.dtype, "cpu"))  # a sample is quantized as a token is
    for name in ("act", "act_lo", "act_hi", "act_scale", "act_floor", "act_steps"):
        setattr(w, name, getattr(token, name))
    return w


class Bound(NamedTuple):
    """A convolution specialized for one case."""

    run: native_conv.ConvolutionProduct
    operand: Callable[[Any], arguments.Operand]


@lru_cache(maxsize=4096)
def bind(case: Case) -> Bound:
    """The kernel specialized for one case: a call, and parts of a weight -> its checked operand."""
    struct = describe(replace(case, spec=case.spec.with_(layout="plain")))
    check = arguments.operands(f"convolution {list(case.shape)} {case.spec}", arguments.extents(CONV_WEIGHT, struct), 0)

    def operand(w: Any) -> arguments.Operand:
        return check((w.codes, w.scale, w.zero_point), None, static_input(w, case.act))

    return Bound(native_conv.convolution(struct, case.dtype), operand)


def _call(x: Tensor, w: Any, case: Case, bias: Tensor | None, rest: Sequence[Any]) -> Tensor:
    """One call outside of tracing. w: any object with the parts as attributes. Raises RuntimeError as torch does."""
    run, operand = bind(case)
    stride, padding, dilation, _, _, groups = rest
    y = run(x, operand(w), bias, stride, padding, dilation, groups)
    if y is None and (type(x) is not Tensor or x.is_neg()):  # a subclass without its own dispatch; a negated view
        y = run(x.as_subclass(Tensor).resolve_neg(), operand(w), bias, stride, padding, dilation, groups)
    if y is not None:
        return y
    one = torch.zeros(1, dtype=torch.float32, device="cpu")
    shapes = [None if t is None else one.expand(t) for t in (x.shape, case.shape, None if bias is None else bias.shape)]
    torch.ops.aten.convolution.default(*shapes, *rest)  # raises what torch raises for such sizes
    raise ArgumentError(
        f"convolution: input {list(x.shape)} {x.dtype} on {x.device}"
        + ("" if bias is None else f", bias {list(bias.shape)} {bias.dtype} on {bias.device}")
        + f" and the quantized weight {list(case.shape)} ({case.spec}) with stride {list(stride)}, "
        f"padding {list(padding)}, dilation {list(dilation)} and {groups} groups do not fit"
    )


def run(x: Tensor, w: QT, bias: Tensor | None, *rest: Any) -> Tensor:
    """aten.convolution of quantize(x) with w in layout "cpu_conv"; ``rest`` are its arguments after the bias."""
    case = case_of(w, x.dtype)
    if torch.compiler.is_compiling() or not in_memory(w._codes) or not in_memory(x):
        stride, padding, dilation, _, _, groups = rest
        return torch.ops.pennyweight.convolution.default(
            x, flatten(w)[0], bias, stride, padding, dilation, groups, key_of(w)
        )
    return _call(x, w.parts, case, bias, rest)


# -- the op used in graphs -------------------------------------------------------------------------------------------


def _op(
    x: Tensor, parts: list[Tensor], bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    groups: int, key: str,
) -> Tensor:  # fmt: skip
    static = parse_key(key)
    case = Case(static.spec, static.act, static.shape, x.dtype, target_of(x.device))
    rest = (stride, padding, dilation, False, [0] * len(stride), groups)
    return _call(x, nest(static.tree, list(parts)), case, bias, rest)


def _fake(
    x: Tensor, parts: list[Tensor], bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    groups: int, key: str,
) -> Tensor:  # fmt: skip
    o, _, *kernel = parse_key(key).shape
    stride, padding, dilation = (v if len(v) > 1 else [*v] * len(kernel) for v in (stride, padding, dilation))
    out = native_conv.convolution_sizes(x.shape[2:], kernel, stride, padding, dilation)
    if x.ndim == 3:
        return x.new_empty((x.shape[0], o, *out))
    return x.new_empty((x.shape[0], o, *out)).contiguous(memory_format=native_conv.output_format(x))


LIBRARY.define(
    "convolution(Tensor x, Tensor[] parts, Tensor? bias, SymInt[] stride, SymInt[] padding, SymInt[] dilation, "
    "SymInt groups, str key) -> Tensor"
)
LIBRARY.impl("convolution", _op, "CompositeExplicitAutograd")
torch.library.register_fake("pennyweight::convolution", _fake, lib=LIBRARY)

# Integer sums are exact; scales are applied, and sets of channels are added, in float32.
register_kernel(Kernel("convolution", "cpu_conv", run, _accepts, ("cpu",), LAYOUT.name, rank=30, row_independent=True))
# Float inputs are rounded to 2**-22 of the largest magnitude of their sample.
register_kernel(
    Kernel("convolution", "cpu_conv_float", run, _accepts_float, ("cpu",), LAYOUT.name, rank=20, tolerance="fixed22",
           row_independent=True)
)  # fmt: skip
