"""Native ``linear`` for integer codes of 1 to 8 bits on a CPU, and the layout "cpu" that it reads.

One kernel serves weight-only and int8 inputs: a float input is split into two or three int8 limbs with a power-of-two
scale per block of columns, so every product is an exact integer product. See src/int_linear.cpp for the arithmetic and
src/pack.h for the packing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from ...core import blocks
from ...core.formats import E8M0, INT7, INT8, UINT7, UINT8
from ...core.layouts import Layout, register_layout, require_fit, unpack_zero_point
from ...core.numerics import Parts
from ...core.spec import SPECS, ActivationSpec, QuantSpec
from ...core.tensor import AffineQuantizedTensor as QT
from ..native import arguments
from ..native import linear as native_linear
from ..table import Bound, Case, Kernel, Together, case_of, register_kernel
from .abi import ASYMMETRIC, FLOAT, INT_WEIGHT, NONE, STATIC, SYMMETRIC, IntLinear
from .abi import E8M0 as E8M0_KIND
from .library import KINDS, usable
from .pack_ops import STEP, TILE, pack_codes, pack_stream, unpack_codes

INPUT_BLOCK = 128  # maximum columns of a float input that share a power of two
SUM_BLOCK = 2048  # maximum columns of one integer sum; far below the 65793 that fit int32
ZERO_POINT_BLOCK = 512  # the same for inputs with a zero point, exact in float32: 512 * 255 * 128 < 2**24
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _scale_dtype(kind: Any) -> bool:
    return kind in _FLOATS or (isinstance(kind, QuantSpec) and kind.format is E8M0 and kind.scale is None)


def is_coded_scale(kind: Any) -> bool:
    """Whether a scale or offset is an integer code times a plain outer scale, as in ggml's K-quants."""
    return (
        isinstance(kind, QuantSpec) and kind.format.kind == "int" and kind.scale in _FLOATS and kind.layout == "plain"
        and not (kind.zero_point or kind.mid) and kind.offset is None and kind.block is not None
    )  # fmt: skip


def outer(spec: QuantSpec, shape: Sequence[int]) -> int:
    """Scales per outer scale in a row; 0 if scales are not coded."""
    kind = spec.scale
    return blocks.resolve(kind.block, blocks.counts(spec.block, shape))[-1] if is_coded_scale(kind) else 0  # type: ignore[union-attr]


def coded_fits(spec: QuantSpec, shape: Sequence[int]) -> bool | str:
    """True, or the reason why a coded scale or offset is not supported."""
    kinds = [k for k in (spec.scale, spec.offset) if isinstance(k, QuantSpec) and is_coded_scale(k)]
    if not kinds:
        return True
    if spec.zero_point or len(kinds) != len(spec.part_specs()) or len({(k.block, k.scale) for k in kinds}) > 1:
        return "needs offsets quantized in the same blocks as the scales, and no zero points"
    counts = () if spec.block is None else blocks.counts(spec.block, shape)
    one_row = len(counts) == 2 and blocks.resolve(kinds[0].block, counts)[0] == 1
    return one_row or "needs quantized scales with blocks within one row"


def fits(spec: QuantSpec, shape: Sequence[int]) -> bool | str:
    """True, or the reason why the layout does not support this."""
    if len(shape) != 2:
        return "needs a 2-d weight"
    if spec.format.kind != "int":
        return "needs integer codes"
    if not (_scale_dtype(spec.scale) or is_coded_scale(spec.scale)) or not (
        spec.offset in (None, *_FLOATS) or is_coded_scale(spec.offset)
    ):
        return "needs plain scales and offsets, integers with plain outer scales, or e8m0 scales"
    if spec.zero_point and spec.zero_point_format.bits > spec.format.bits:
        return "needs zero points with no more bits than the codes"
    if coded_fits(spec, shape) is not True:
        return coded_fits(spec, shape)
    if spec.block is None:
        return (spec.offset is None and not spec.zero_point) or "needs zero points and offsets per row or group"
    rows, group = blocks.resolve(spec.block, shape)
    if rows != 1:
        return f"needs rows that do not share scales, the weight has blocks of {[rows, group]}"
    return (
        group >= shape[1] or group % STEP == 0 or f"needs groups that are multiples of {STEP}, the weight has {group}"
    )


def _group(spec: QuantSpec, shape: Sequence[int]) -> int:
    """Columns per scale; 0: one per row; -1: one per tensor. A row with an offset or a coded scale is one group."""
    if spec.block is None:
        return -1
    group = blocks.resolve(spec.block, shape)[-1]
    if group < shape[1]:
        return group
    return padded_columns(shape[1], STEP) if spec.offset is not None or is_coded_scale(spec.scale) else 0


def padded_columns(n: int, step: int) -> int:
    return -(-n // step) * step


def packed_columns(spec: QuantSpec, shape: Sequence[int]) -> int:
    """Columns of packed codes: in whole steps."""
    return max(STEP, padded_columns(blocks.padded(spec.block, shape)[-1], STEP))


def tile_rows(p: Tensor) -> Tensor:
    """[n, groups] -> [ceil(n / 16), groups, 16], zero beyond n."""
    n, groups = p.shape
    if n % TILE == 0:
        return p.reshape(-1, TILE, groups).mT.clone(memory_format=torch.contiguous_format)
    out = p.new_zeros((padded_columns(n, TILE), groups))
    out[:n] = p
    return out.view(-1, TILE, groups).transpose(1, 2).contiguous()


def untile_rows(p: Tensor, n: int) -> Tensor:
    """Inverse of :func:`tile_rows`."""
    rows = p.transpose(1, 2).reshape(-1, p.shape[1])[:n]
    return rows.clone(memory_format=torch.contiguous_format)  # contiguous() keeps odd strides of an axis of size 1


def map_groups(parts: Parts, spec: QuantSpec, fn: Callable[[Tensor], Tensor]) -> Parts:
    """Apply fn to the parts with one number per group; per-tensor numbers are unchanged."""
    if spec.block is None:
        return parts
    changed: dict[str, Any] = {
        name: (p.parts if isinstance(p, QT) else p).map(fn) if isinstance(p, (Parts, QT)) else fn(p)
        for name in ("scale", "zero_point", "offset")
        if (p := getattr(parts, name)) is not None
    }
    return parts._replace(**changed)


def pack(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """codes: uint8 [ceil(N/16), K/32 * 64 * bits]; scale, zero_point, offset: [ceil(N/16), groups, 16]."""
    require_fit("cpu", fits(spec, shape), spec, shape)
    packed = pack_codes(parts.codes.view(torch.uint8), packed_columns(spec, shape), spec.format.bits, _flip(spec))
    return map_groups(parts, spec, tile_rows)._replace(codes=packed)


def from_bits(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """As :func:`pack`, from parts in layout "bits"."""
    require_fit("cpu", fits(spec, shape), spec, shape)
    width = spec.codes_shape(shape)[-1]
    packed = pack_stream(parts.codes, width, packed_columns(spec, shape), spec.format.bits, _flip(spec))
    parts = parts._replace(zero_point=unpack_zero_point(parts.zero_point, spec, shape))
    return map_groups(parts, spec, tile_rows)._replace(codes=packed)


def unpack(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """Inverse of :func:`pack`, bit for bit."""
    n, k = blocks.padded(spec.block, shape)
    codes = unpack_codes(parts.codes, n, k, packed_columns(spec, shape), spec.format.bits, _flip(spec))
    codes = codes.view(spec.format.code_dtype)
    return map_groups(parts, spec, lambda p: untile_rows(p, n))._replace(codes=codes)


def _flip(spec: QuantSpec) -> int:
    """The number added to a code, modulo 256, to make it unsigned."""
    return -int(spec.format.lo) & 255


def _padding(spec: QuantSpec, shape: Sequence[int]) -> int:
    """Bytes of padding rows and columns in tiles."""
    n, (rows, columns) = shape[0], (padded_columns(shape[0], TILE), packed_columns(spec, shape))
    width = blocks.padded(spec.block, shape)[-1]
    extra = rows * columns * spec.format.bits // 8 - n * -(-width * spec.format.bits // 8)
    if spec.block is not None:
        groups = blocks.counts(spec.block, shape)[-1]
        for kind in spec.part_specs().values():
            extra += (rows - n) * (kind.nbytes((1, groups)) if isinstance(kind, QuantSpec) else groups * kind.itemsize)
    return extra


_EXAMPLES = tuple(
    (spec, shape) for spec in SPECS.values() for shape in ((16, 256), (33, 100)) if fits(spec, shape) is True
)
LAYOUT = register_layout(Layout("cpu", pack, unpack, ("cpu",), _EXAMPLES, _padding, from_bits))


# -- the kernel ------------------------------------------------------------------------------------------------------


def fits_input(act: ActivationSpec) -> bool | str:
    """True, or the reason why native code does not support these codes of an input; blocks of dynamic ones apart."""
    spec = act.spec
    if spec.format not in (INT7, INT8, UINT7, UINT8) or spec.mid or spec.offset is not None:
        return "needs 7- or 8-bit integer activations without an offset"
    if spec.format.lo == 0 and not spec.zero_point:
        return "needs signed activations, or unsigned ones with a zero point"
    if spec.scale not in _FLOATS:
        return "needs activations with a plain scale"
    if act.mode == "static":
        return spec.block is None or "needs one static activation scale"
    if act.rule not in ((None, "asymmetric") if spec.zero_point else (None, "symmetric", "absmax")):
        return f"does not support activations with the rule {act.rule!r}"
    return True


def static_input(w: Any, act: ActivationSpec | None) -> tuple[Tensor, Any, Tensor | None, int] | None:
    """The static activation of a weight as an Operand has it: scale, its dtype, zero point, its shift."""
    if act is None or act.mode != "static":
        return None
    if w.act_scale is None:
        raise RuntimeError("a static activation needs act_scale on the weight; calibrate, or pass it in the config")
    return w.act_scale, act.spec.scale, w.act_zero_point, 128 if act.spec.format is UINT8 else 0


def _activation(act: ActivationSpec | None, columns: int) -> bool | str:
    verdict = act is None or fits_input(act)
    if act is None or verdict is not True or act.mode == "static":
        return verdict
    if act.spec.block is None or len(act.spec.block) > 1:
        return "needs one activation scale per token, or per group of columns of a token"
    group = _act_group(act, columns)
    return group % STEP == 0 or f"needs groups of input columns that are multiples of {STEP}, not {group}"


def _act_group(act: ActivationSpec | None, columns: int) -> int:
    """Columns of a token that share a scale of a dynamic activation; 0: all."""
    if act is None or act.mode == "static" or act.spec.block is None:
        return 0
    group = act.spec.block[-1]
    return group if 0 < group < columns else 0


def _accepts(case: Case) -> bool | str:
    verdict = usable()
    return supports(case) if verdict is True else verdict


@lru_cache(maxsize=4096)
def supports(case: Case) -> bool | str:
    """True, or the reason why the kernel does not support the case, on any machine."""
    for verdict in (fits(case.spec, case.shape), _activation(case.act, case.shape[-1])):
        if verdict is not True:
            return verdict
    return case.dtype in _FLOATS or f"for float32, bfloat16 and float16 inputs, not {case.dtype}"


def _block(group: int, act_group: int, act: ActivationSpec | None) -> int:
    """Columns of one integer sum: a divisor of the groups; a float input has one power of two per sum."""
    most = INPUT_BLOCK if act is None else ZERO_POINT_BLOCK if act.spec.zero_point else SUM_BLOCK
    both = math.gcd(max(group, 0), act_group)
    if both == 0:
        return most
    return next(b for b in range(min(most, both) // STEP * STEP, 0, -STEP) if both % b == 0)


def describe(case: Case) -> IntLinear:
    """The case as the struct of src/abi.h."""
    spec, act, (n, k), kinds = case.spec, case.act, case.shape, cast("dict[Any, int]", KINDS)
    group, act_group, columns = _group(spec, case.shape), _act_group(act, k), packed_columns(spec, case.shape)

    def number_kind(kind: Any) -> int:
        if not isinstance(kind, QuantSpec):
            return kinds[kind]
        return E8M0_KIND if kind.format is E8M0 else kinds[kind.format.code_dtype]

    w = IntLinear(
        n=n, k=k, kp=columns, act_group=act_group, bits=spec.format.bits, center=spec.mid - int(spec.format.lo),
        group=group, block=_block(group, act_group, act), scale=number_kind(spec.scale),
        zero_point=KINDS[spec.zero_point_dtype] if spec.zero_point else NONE,
        offset=number_kind(spec.offset), outer=outer(spec, case.shape),
        outer_kind=kinds[spec.scale.scale] if isinstance(spec.scale, QuantSpec) else NONE,
        x=KINDS[case.dtype], act=FLOAT, act_scale=KINDS[torch.float32],
    )  # fmt: skip
    if act is not None:
        f = act.spec.format
        shift = 128 if f.lo == 0 and f.hi > 127 else 0  # limbs are signed
        w.act_lo, w.act_hi, w.act_scale = int(f.lo) - shift, int(f.hi) - shift, kinds[act.spec.scale]
        w.act = STATIC if act.mode == "static" else ASYMMETRIC if act.spec.zero_point else SYMMETRIC
        w.act_steps = f.hi if act.rule == "absmax" else (f.hi - f.lo) / (1 if act.spec.zero_point else 2)
        info = torch.finfo(case.dtype)
        least = info.smallest_normal * info.eps
        w.act_floor = info.smallest_normal if act.eps is None else max(act.eps, least)
        if act.eps is not None:
            w.act_floor = float(torch.tensor(w.act_floor, dtype=case.dtype, device="cpu"))
    return w


@lru_cache(maxsize=4096)
def bind(case: Case) -> Bound:
    """The kernel specialized for one case; see :class:`pennyweight.kernels.table.Bound`."""
    struct, operands = described(replace(case, spec=case.spec.with_(layout="plain")))
    return Bound(native_linear.product(struct, case.dtype), operands)


@lru_cache(maxsize=4096)
def described(case: Case) -> tuple[IntLinear, Callable[[Any], arguments.Operand]]:
    """The structure of a case in layout "plain", which nobody writes to, and a function from the parts of a weight to
    the checked operand of the native product."""
    struct = describe(case)
    return struct, _operands(case, struct)


def _operands(case: Case, struct: IntLinear) -> Callable[[Any], arguments.Operand]:
    """Parts of a weight of this case -> operand of the native product."""
    act, expected = case.act, arguments.extents(INT_WEIGHT, struct)
    nested, under = isinstance(case.spec.scale, QuantSpec), struct.outer > 0
    inner = under and case.spec.offset is not None
    check = arguments.operands(f"linear {list(case.shape)} {case.spec}", expected, struct.k)

    def operand(w: Any) -> arguments.Operand:
        scale, offset = w.scale, w.offset
        parts = (
            w.codes, scale.codes if nested else scale, w.zero_point, offset.codes if inner else offset,
            scale.scale if under else None, offset.scale if inner else None,
        )  # fmt: skip
        return check(parts, w.perm, static_input(w, act))

    return operand


def run(x: Tensor, w: Any, bias: Tensor | None) -> Tensor:
    """y = x @ w.T + bias. x: [.., K]; w: in layout "cpu"."""
    return bind(case_of(w, x.dtype)).run_with(x, w.parts, bias)


def together(cases: tuple[Case, ...]) -> Together | None:
    """Run weights that differ only in their number of rows with the same input [.., K], in one call."""
    first = cases[0]
    alike = all(replace(case, shape=(first.shape[0], case.shape[1])) == first for case in cases)
    if not alike or (first.act is not None and first.act.mode == "static"):
        return None
    weights = (IntLinear * len(cases))(*(describe(replace(c, spec=c.spec.with_(layout="plain"))) for c in cases))
    operands = [_operands(case, struct) for case, struct in zip(cases, weights, strict=True)]
    return Together(native_linear.products(weights, first.dtype), operands)


# The integer sums of products are exact; scales are applied and blocks are added in float32. Float inputs are rounded
# to 2**-15 (two limbs) or 2**-23 (three limbs) of the largest magnitude of their block.
register_kernel(
    Kernel("linear", "cpu_int", run, _accepts, ("cpu",), LAYOUT.name, rank=30, tolerance="fixed22", bind=bind,
           together=together, row_independent=True)
)  # fmt: skip
