"""Native ``linear`` for codes that are not integers (small floats, tables) on a CPU, and the layout "cpu_float".

Integers with groups too small for int_linear.py are also treated as tables.

One kernel serves all formats, through their table of numbers. See src/float_microkernel.h for the arithmetic and
src/pack.h for the packing. Quantized scales stay quantized and are decoded in the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.formats import DYNAMIC4, DYNAMIC8, E2M1, E3M2, E4M3, E5M2, E8M0, INT8, NF4, UINT5, UINT8, Format
from ...core.layouts import Layout, register_layout, require_fit
from ...core.numerics import Parts
from ...core.spec import NF4_DOUBLE, SPECS, QuantSpec
from ...core.tensor import AffineQuantizedTensor
from ...core.tracing import plain_tensors
from ..native import arguments
from ..native import linear as native_linear
from ..table import Bound, Case, Kernel, case_of, register_kernel
from . import abi
from .abi import INTEGER, SMALL_FLOAT, TABLE16, TABLE256, FloatLinear
from .int_linear import coded_fits, is_coded_scale, packed_columns, padded_columns, tile_rows, untile_rows
from .library import KINDS, usable
from .pack_ops import STEP, TILE, pack_codes, pack_stream, unpack_codes

HALF = 16  # group sizes are multiples of this
SUM_BLOCK = 256  # maximum columns of one float32 sum: longer ones lose precision
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_NESTED = {E8M0: abi.E8M0, E4M3: abi.E4M3, INT8: abi.I8}  # in addition to coded scales


# -- the layout ------------------------------------------------------------------------------------------------------


def _scale(spec: QuantSpec, shape: Sequence[int]) -> bool | str:
    """True, or the reason why the kernel does not support these scales and offsets."""
    kind = spec.scale
    if spec.offset is not None and (spec.block is None or _row_block(spec, shape)):
        return "needs offsets per row or group"
    if kind is None or kind in _FLOATS or (is_coded_scale(kind) and not _row_block(spec, shape)):
        return coded_fits(spec, shape)
    plain = isinstance(kind, QuantSpec) and not (kind.zero_point or kind.mid) and kind.layout == "plain"
    if not isinstance(kind, QuantSpec) or kind.format not in _NESTED or not plain:
        return "needs plain scales, scales in e8m0 or e4m3, or integer scales with plain outer scales"
    if spec.block is None or _row_block(spec, shape):
        return "needs plain scales if rows share them"
    if spec.offset is not None:
        return "needs scales and offsets that are both plain, or both integers with plain outer scales"
    outer = (kind.scale, kind.offset)
    if outer == (None, None):
        return True
    if kind.scale is torch.float64 and kind.offset is None and kind.block is None:
        return True  # a single number, rounded to float32: scales may differ from the reference in the last bit
    if kind.scale is not torch.float32 or kind.offset not in (None, torch.float32):
        return "needs quantized scales with float32 outer scales"
    if kind.block is None:
        return True
    rows, own = _outer_rows(spec, shape), blocks.counts(spec.block, shape)[0]
    return own % rows == 0 or f"needs outer scales of one row, or of rows that divide {own}, not of {rows}"


# Cases that SPECS does not cover.
_E8M0_SCALE, _E4M3_SCALE = QuantSpec(E8M0, (1,), scale=None), QuantSpec(E4M3, (1,), scale=None)
_MORE = (
    QuantSpec(E5M2, (-1,), scale=torch.bfloat16), QuantSpec(E3M2, (32,), scale=_E8M0_SCALE),
    QuantSpec(E2M1, (16,), scale=_E4M3_SCALE), QuantSpec(NF4, (16,), scale=torch.float16), QuantSpec(E4M3, (16, 64)),
    QuantSpec(E2M1, (16,), scale=QuantSpec(E4M3, None, torch.float64)),
    NF4_DOUBLE.with_(block=(16,), scale=QuantSpec(INT8, (4,), offset=torch.float32)), QuantSpec(DYNAMIC4, None),
    NF4_DOUBLE.with_(block=(32,), scale=QuantSpec(INT8, (2, 8), offset=torch.float32)),
    QuantSpec(DYNAMIC8, (48,)), QuantSpec(DYNAMIC8, None, scale=None),
    QuantSpec(UINT8, (16,), mid=128, scale=torch.bfloat16), QuantSpec(UINT5, (48,), offset=torch.float16),
    QuantSpec(NF4, (-1,), offset=torch.bfloat16),
)  # fmt: skip


def fits(spec: QuantSpec, shape: Sequence[int]) -> bool | str:
    """True, or the reason why the layout does not support this."""
    if len(shape) != 2 or 0 in shape:
        return "needs a non-empty 2-d weight"
    if spec.format.kind == "int" and not _small_groups(spec, shape):
        return f"is for non-integer formats, and for integers with group sizes that are not multiples of {STEP}"
    if (
        spec.format is E8M0
        or spec.format.kind == "learned"
        or not (spec.offset in (None, *_FLOATS) or is_coded_scale(spec.offset))
    ):
        return "needs a format with a fixed table, and offsets that are plain or integers with plain outer scales"
    if spec.block is not None and spec.scale is not None:
        rows, group = blocks.resolve(spec.block, shape)
        if rows != 1 and rows < shape[0] and rows % TILE:
            return f"needs blocks of one row or of multiples of {TILE}, the weight has {rows}"
        if group < shape[1] and group % HALF:
            return f"needs groups that are multiples of {HALF}, the weight has {group}"
    return _scale(spec, shape)


def _small_groups(spec: QuantSpec, shape: Sequence[int]) -> bool:
    """Whether integer codes have group sizes that int_linear.py does not support: not a multiple of its STEP."""
    if spec.block is None or spec.scale is None or spec.zero_point:
        return False
    rows, group = blocks.resolve(spec.block, shape)
    return rows == 1 and group < shape[1] and group % STEP != 0


def _row_block(spec: QuantSpec, shape: Sequence[int]) -> int:
    """Rows that share a scale, in whole tiles; 0: one scale per row or per tensor."""
    if spec.block is None:
        return 0
    rows = blocks.resolve(spec.block, shape)[0]
    return 0 if rows == 1 else padded_columns(rows, TILE)


def _outer_rows(spec: QuantSpec, shape: Sequence[int]) -> int:
    """Rows that share an outer scale of quantized scales. The kernel reads one per row, so packing repeats them."""
    kind = spec.scale
    if not isinstance(kind, QuantSpec) or kind.scale is None or kind.block is None:
        return 1
    return blocks.resolve(kind.block, blocks.counts(spec.block, shape))[0]


def _scales(
    scale: Any, spec: QuantSpec, shape: Sequence[int], fn: Callable[[Tensor], Tensor],
    each: Callable[[Tensor, int], Tensor],
) -> Any:  # fmt: skip
    """Apply fn to per-row and per-group numbers. scale: a scale or offset; quantized ones are Parts.

    each(numbers, rows) is applied to outer numbers that several rows share.
    """
    if isinstance(scale, AffineQuantizedTensor):
        scale = scale.parts
    if scale is None or spec.block is None:
        return scale
    if _row_block(spec, shape):  # unchanged, but contiguous: those of a slice may not be
        return scale.map(Tensor.contiguous) if isinstance(scale, Parts) else scale.contiguous()
    if not isinstance(scale, Parts):
        return fn(scale)
    if not isinstance(spec.scale, QuantSpec) or spec.scale.block is None:
        return scale._replace(codes=fn(scale.codes))
    outer = _outer_rows(spec, shape)
    if outer == 1:
        return scale.map(fn)
    above = {name: each(p, outer) for name in ("scale", "offset") if (p := getattr(scale, name)) is not None}
    return scale._replace(codes=fn(scale.codes), **above)


def pack(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """codes: uint8 [tiles of rows, K/32 * 64 * bits]; scales of rows and groups: [tiles of rows, groups, 16]."""
    require_fit("cpu_float", fits(spec, shape), spec, shape)
    columns, bits = packed_columns(spec, shape), spec.format.bits
    packed = pack_codes(spec.format.to_unsigned(parts.codes.contiguous()), columns, bits, 0)
    return _tiled(parts, spec, shape, packed)


def from_bits(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """As :func:`pack`, from parts in layout "bits"."""
    require_fit("cpu_float", fits(spec, shape), spec, shape)
    width = spec.codes_shape(shape)[-1]
    return _tiled(parts, spec, shape, pack_stream(parts.codes, width, packed_columns(spec, shape), spec.format.bits, 0))


def _tiled(parts: Parts, spec: QuantSpec, shape: Sequence[int], codes: Tensor) -> Parts:
    def each(p: Tensor, rows: int) -> Tensor:
        return tile_rows(p.repeat_interleave(rows, 0))

    scale, offset = (_scales(p, spec, shape, tile_rows, each) for p in (parts.scale, parts.offset))
    return parts._replace(codes=codes, scale=scale, offset=offset)


def unpack(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """Inverse of :func:`pack`, bit for bit."""
    n, k = blocks.padded(spec.block, shape)
    codes = unpack_codes(parts.codes, n, k, packed_columns(spec, shape), spec.format.bits, 0)

    def untile(p: Tensor) -> Tensor:
        return untile_rows(p, shape[0])

    def each(p: Tensor, rows: int) -> Tensor:
        return untile(p)[::rows].contiguous()

    scale, offset = (_scales(p, spec, shape, untile, each) for p in (parts.scale, parts.offset))
    return parts._replace(codes=spec.format.from_unsigned(codes), scale=scale, offset=offset)


def _padding(spec: QuantSpec, shape: Sequence[int]) -> int:
    """Bytes of padding rows and columns in tiles."""
    n, k = blocks.padded(spec.block, shape)
    bits = spec.format.bits
    extra = padded_columns(n, TILE) * packed_columns(spec, shape) * bits // 8 - n * -(-k * bits // 8)
    more = padded_columns(shape[0], TILE) - shape[0]
    if spec.block is None or _row_block(spec, shape):
        return extra
    groups = blocks.counts(spec.block, shape)[-1]
    for kind in spec.part_specs().values():
        if not isinstance(kind, QuantSpec):
            extra += more * groups * kind.itemsize
        else:
            extra += more * (groups if kind.block is None else kind.nbytes((1, groups)))
    outer = _outer_rows(spec, shape)
    if outer > 1 and isinstance(spec.scale, QuantSpec):  # one per row instead of one per ``outer`` rows
        extra += (shape[0] - shape[0] // outer) * (spec.scale.nbytes((1, groups)) - groups)
    return extra


_EXAMPLES = tuple(
    (spec, shape) for spec in (*SPECS.values(), *_MORE) for shape in ((16, 256), (33, 100)) if fits(spec, shape) is True
)
LAYOUT = register_layout(Layout("cpu_float", pack, unpack, ("cpu",), _EXAMPLES, _padding, from_bits))


# -- the kernel ------------------------------------------------------------------------------------------------------


def _accepts(case: Case) -> bool | str:
    for verdict in (usable(), fits(case.spec, case.shape), case.act is None or "the activation is quantized"):
        if verdict is not True:
            return verdict
    return case.dtype in _FLOATS or f"for float32, bfloat16 and float16 inputs, not {case.dtype}"


@lru_cache(maxsize=256)
def numbers(f: Format, mid: int = 0) -> tuple[Tensor, Tensor, int, int]:
    """The number of each code minus ``mid`` (float32 [256]), its bfloat16 bytes (all low, then all high bytes),
    exponent and mantissa bits. The latter are 0 unless codes are sign, exponent and mantissa as in src/float_codes.h.
    """
    with plain_tensors():
        count = len(f.values) or 1 << f.bits
        values = torch.zeros(256, dtype=torch.float32, device="cpu")  # the kernel keeps its address
        values[:count] = (
            f.decode(
                f.from_unsigned(torch.arange(count, dtype=torch.int64, device="cpu").to(torch.uint8)), torch.float32
            )
            - mid
        )
        halves = values.to(torch.bfloat16).view(torch.uint8).reshape(256, 2).t().contiguous()
        if f.kind != "float" or f.bits < 5:
            return values, halves, 0, 0
        mantissa = int(((values >= 1) & (values < 2)).sum()).bit_length() - 1
        exponent = f.bits - 1 - mantissa
        code = torch.arange(1 << f.bits, dtype=torch.int64, device="cpu")
        e, m = (code >> mantissa) & ((1 << exponent) - 1), (code & ((1 << mantissa) - 1)) / (1 << mantissa)
        sign = 1 - 2 * (code >> (f.bits - 1))
        plain = sign * torch.ldexp(torch.where(e > 0, 1 + m, m), e.clamp(min=1) - (1 << (exponent - 1)) + 1)
        finite = plain.abs() <= f.hi
        same = torch.equal(plain[finite], values[: 1 << f.bits][finite])
        return values, halves, *((exponent, mantissa) if same else (0, 0))


def _group(spec: QuantSpec, shape: Sequence[int]) -> int:
    """Columns per scale; 0: one per row; -1: one per tensor, or none. Scales shared by rows are applied in the sum."""
    if spec.block is None or spec.scale is None:
        return -1
    group = blocks.resolve(spec.block, shape)[-1]
    if group < shape[1]:
        return group
    return padded_columns(shape[1], HALF) if _row_block(spec, shape) or spec.offset is not None else 0


def describe(case: Case) -> FloatLinear:
    """The case as the struct of src/abi.h."""
    spec, (n, k) = case.spec, case.shape
    values, halves, exponent, mantissa = numbers(spec.format, spec.mid)
    integer = spec.format.kind == "int" and spec.format.bits in (5, 6)
    group, kind = _group(spec, case.shape), spec.scale
    w = FloatLinear(
        n=n, k=k, kp=packed_columns(spec, case.shape), bits=spec.format.bits, group=group, block=SUM_BLOCK,
        values=arguments.address(values, "numbers of the codes", (torch.float32,), 256), exponent=exponent,
        low=arguments.address(halves[0], "low bytes of the numbers", (torch.uint8,), 256),
        high=arguments.address(halves[1], "high bytes of the numbers", (torch.uint8,), 256),
        mantissa=mantissa, limit=spec.format.hi, row_block=_row_block(spec, case.shape), x=KINDS[case.dtype],
        decode=TABLE16 if spec.format.bits <= 4 else SMALL_FLOAT if exponent else INTEGER if integer else TABLE256,
        scale=_number_kind(kind), offset=_number_kind(spec.offset),
    )  # fmt: skip
    if group > 0:
        w.block = next(b for b in range(min(SUM_BLOCK, group) // HALF * HALF, 0, -HALF) if group % b == 0)
    counts = blocks.counts(spec.block, case.shape)
    w.scale_groups = counts[-1]
    if isinstance(kind, QuantSpec):
        w.scale_groups = blocks.padded(kind.block, counts)[-1]
        if kind.scale is not None:
            w.outer_kind = _number_kind(torch.float32 if kind.scale is torch.float64 else kind.scale)
            w.outer = -1 if kind.block is None else blocks.resolve(kind.block, counts)[-1]
            w.outer_groups = blocks.counts(kind.block, counts)[-1]
    return w


def _number_kind(kind: Any) -> int:
    if not isinstance(kind, QuantSpec):
        return KINDS[kind]
    return _NESTED[kind.format] if kind.format in _NESTED else KINDS[kind.format.code_dtype]


@lru_cache(maxsize=4096)
def bind(case: Case) -> Bound:
    """The kernel specialized for one case; see :class:`pennyweight.kernels.table.Bound`."""
    struct, kind = describe(case), case.spec.scale
    outer_offset = isinstance(kind, QuantSpec) and kind.offset is not None
    expected, outer = native_linear.float_parts(struct, outer_offset), struct.outer != 0
    nested, coded_offset = isinstance(kind, QuantSpec), isinstance(case.spec.offset, QuantSpec)
    check = arguments.operands(f"linear {list(case.shape)} {case.spec}", expected, struct.k)

    def operand(w: Any) -> arguments.Operand:
        scale, offset = w.scale, w.offset
        above: Any = scale.scale if outer else None
        if above is not None and above.dtype is torch.float64:  # a single number, read as float32
            above = above.float()
        parts = (
            w.codes, scale.codes if nested else scale, above, scale.offset if outer_offset else None,
            offset.codes if coded_offset else offset, offset.scale if coded_offset else None,
        )  # fmt: skip
        return check(parts, w.perm)

    return Bound(native_linear.product(struct, case.dtype, numbers(case.spec.format, case.spec.mid)), operand)


def run(x: Tensor, w: Any, bias: Tensor | None) -> Tensor:
    """y = x @ w.T + bias. x: [.., K]; w: in layout "cpu_float"."""
    return bind(case_of(w, x.dtype)).run_with(x, w.parts, bias)


# Numbers and scales equal those of the reference; products and sums are in float32. For bfloat16 inputs on machines
# with bfloat16 products, the numbers of a table are rounded to bfloat16, as the reference rounds its weights.
register_kernel(
    Kernel("linear", "cpu_float", run, _accepts, ("cpu",), LAYOUT.name, rank=30, bind=bind, row_independent=True)
)
