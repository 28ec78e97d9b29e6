"""The gate to native code: checks of addresses, and the products. Other native calls are in gate_convert.py,
gate_block.py and gate_conv.py.

Only these modules call the native library (enforced by a test). They check all arguments.

C++ receives addresses and sizes and trusts them. So each function here takes tensors, checks the device, dtype, element
count, contiguity and combination that the native code expects, and raises
:class:`~pennyweight.support.errors.ArgumentError` otherwise, before it takes an address. The extents are those that
src/*.h read and write; a debug build of the library asserts them again (src/check.h).

``linear`` is called millions of times, so its checks are split. The weight is checked once, when its :class:`Operand`
is created, and its byte counts again at each call. The input, the bias and active modes or tracers are checked at each
call, by attributes only. An input that is not plain CPU memory is not an error: ``run`` returns None, and the caller
goes through torch's dispatcher, where modes, tracers and transforms see the call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..core.tracing import in_memory, is_observed
from ..support.errors import ArgumentError
from .cpu import library
from .cpu.library import BF16, E4M3, E8M0, F16, F32, I8, NONE, U8, FloatLinear, IntLinear, LinearArgs

PLAIN = (Tensor, torch.nn.Parameter)
FLOAT_KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
_CPU = torch.device("cpu")
# Dtypes that can store each number kind.
DTYPES = {
    F32: (torch.float32,), BF16: (torch.bfloat16,), F16: (torch.float16,), I8: (torch.int8,), U8: (torch.uint8,),
    E8M0: (torch.uint8, torch.float8_e8m0fnu), E4M3: (torch.float8_e4m3fn, torch.uint8),
}  # fmt: skip
TILE = 16  # rows of a tile; see src/pack.h


def native_function(name: str) -> Callable[..., Any]:
    """A function of the native library; only for the gate."""
    return getattr(library.native(), name)


def address(
    t: Tensor, what: str, dtypes: Sequence[torch.dtype], least: int, *, contiguous: bool = True, exact: bool = False
) -> int:
    """Address of a tensor in plain CPU memory, of one of ``dtypes``, with at least (or exactly) ``least`` elements.

    Otherwise raises ArgumentError with ``what``, the expected and the actual properties.
    """
    if not in_memory(t) or not t.is_cpu:
        raise ArgumentError(
            f"{what}: native code needs plain CPU memory, got {type(t).__name__} {list(t.shape)} {t.dtype} on "
            f"{t.device}; call .cpu() first, outside of tracing"
        )
    count = t.numel()
    if t.dtype not in dtypes or count < least or (exact and count != least) or (contiguous and not t.is_contiguous()):
        more = "" if exact else " or more"
        piece = "" if t.is_contiguous() or not contiguous else f", strides {list(t.stride())}"
        raise ArgumentError(
            f"{what}: expected {least}{more} contiguous elements of {' or '.join(map(str, dtypes))}, "
            f"got {list(t.shape)} {t.dtype}{piece}"
        )
    return t.data_ptr()


def _fits(t: Tensor, dtypes: Sequence[torch.dtype], least: int) -> bool:
    """Whether t is plain, contiguous CPU memory with enough elements."""
    return (
        type(t) in PLAIN and t.is_cpu and t.layout is torch.strided and t.dtype in dtypes and t.numel() >= least
        and t.is_contiguous() and not t.is_neg()
    )  # fmt: skip


def optional_address(t: Tensor | None, what: str, kind: int, least: int) -> int | None:
    """Address of a part, or None if its kind is NONE. Raises ArgumentError if a required part is missing."""
    if kind == NONE:
        return None
    if t is None:
        raise ArgumentError(f"{what}: missing, expected {least} elements")
    return address(t, what, DTYPES[kind], least)


def check_status(status: int, what: str) -> None:
    """Raise the error for a status of the native library; 0 is success."""
    if status == library.INVALID:
        raise ArgumentError(
            f"{what}: the native library rejected inconsistent arguments; was a part of a quantized tensor resized, or "
            "its memory freed?"
        )
    if status:
        raise MemoryError(f"{what}: out of memory")


# -- products ----------------------------------------------------------------------------------------------------------


class Operand(NamedTuple):
    """The checked parts of one weight, as native ``linear`` reads them; it keeps references to them.

    more: (part or None, bytes) in the order of the native arguments after the scale; None: only codes and scale
    """

    codes: Tensor
    codes_bytes: int
    scale: Tensor | None
    scale_bytes: int
    more: tuple[tuple[Tensor | None, int], ...] | None
    perm: Tensor | None  # order of the input's channels [K]
    static: tuple[Tensor, torch.dtype, Tensor | None, int] | None  # scale, its dtype, zero point, its shift


class Part(NamedTuple):
    """Requirements of native code for one part: Kind, and minimum number of elements."""

    name: str
    kind: int
    least: int


def count_tiles(n: int) -> int:
    """Tiles of n rows."""
    return -(-n // TILE)


def _codes(n: int, kp: int, bits: int) -> Part:
    return Part("codes", U8, count_tiles(n) * (kp // 32) * 64 * bits)


def int_parts(w: IntLinear) -> tuple[Part, ...]:
    """Codes, scale, zero point, offset, outer scale, outer offset of a weight; see tile_at in src/int_matmul.h."""
    tiles, groups = count_tiles(w.n), w.kp // w.group if w.group > 0 else 1
    outers = -(-groups // w.outer) if w.outer else 0
    count = 1 if w.group < 0 else tiles * TILE * (outers * w.outer if w.outer else groups)
    outer, above = (w.outer_kind, tiles * outers * TILE) if w.outer else (NONE, 0)
    return (
        _codes(w.n, w.kp, w.bits), Part("scale", w.scale, count), Part("zero_point", w.zero_point, count),
        Part("offset", w.offset, count), Part("scale of the scale", outer, above),
        Part("scale of the offset", outer if w.offset else NONE, above),
    )  # fmt: skip


def float_parts(w: FloatLinear, outer_offset: bool) -> tuple[Part, ...]:
    """Codes, scale, outer scale, outer offset, offset, its outer scale; see Scales in src/float_codes.h."""
    tiles = count_tiles(w.n)
    if w.group < 0:
        count = 1
    elif w.row_block:
        count = ((tiles - 1) * TILE // w.row_block + 1) * w.scale_groups
    else:
        count = tiles * w.scale_groups * TILE
    above = 1 if w.outer < 0 else tiles * w.outer_groups * TILE
    coded = w.offset if w.offset in (I8, U8) else NONE
    return (
        _codes(w.n, w.kp, w.bits), Part("scale", w.scale, count),
        Part("scale of the scale", w.outer_kind if w.outer else NONE, above),
        Part("offset of the scale", F32 if outer_offset else NONE, above), Part("offset", w.offset, count),
        Part("scale of the offset", w.outer_kind if coded else NONE, above),
    )  # fmt: skip


def operands(what: str, expected: Sequence[Part], k: int) -> Callable[..., Operand]:
    """(parts, perm, static=None) -> Operand: the parts of one weight, checked against what its native product expects.

    In compiled graphs this runs at each call, so all that does not depend on the parts is computed here. The result
    raises ArgumentError that names the part.
    """
    required = [(i, DTYPES[need.kind], need) for i, need in enumerate(expected) if need.kind != NONE]
    scaled, only_scaled = expected[1].kind != NONE, [i for i, _, _ in required] == [0, 1]

    def check(
        parts: Sequence[Any], perm: Tensor | None,
        static: tuple[Tensor, torch.dtype, Tensor | None, int] | None = None,
    ) -> Operand:  # fmt: skip
        for i, dtypes, need in required:
            part = parts[i]
            if part is None or not _fits(part, dtypes, need.least):
                optional_address(part, f"{what}: {need.name}", need.kind, need.least)  # raises with the details
                raise AssertionError(need.name)
        if perm is not None:
            address(perm, f"{what}: perm", (torch.int32, torch.int64), k, exact=True)
        codes, scale = parts[0], parts[1] if scaled else None
        more = None
        if static is not None or not only_scaled:
            held: list[tuple[Tensor | None, int]] = [(None, 0)] * len(expected)
            for i, _, _ in required:
                held[i] = parts[i], parts[i].nbytes
            more = tuple(held[2:])
        return Operand(codes, codes.nbytes, scale, 0 if scale is None else scale.nbytes, more, perm, static)

    return check


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
    empties, strided, cpu, plain, kinds, dual = torch.empty, torch.strided, _CPU, PLAIN, FLOAT_KINDS, forward_ad

    def run(x: Tensor, w: Operand, bias: Tensor | None, held: Any = (struct, keep)) -> Tensor | None:
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
            raise _changed()
        if more is None:
            args = (None, None, None, None, None, 0) if integer else (None, None, None, None)
        else:
            above: list[Any] = []
            for part, size in more:
                if part is not None and part.nbytes != size:
                    raise _changed()
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
        x: Tensor, operands: Sequence[Operand], biases: Sequence[Tensor | None], held: Any = weights
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
            y = torch.empty((*x.shape[:-1], sizes[i]), dtype=dtype, device=_CPU)
            if bias is not None:
                if bias.dtype not in FLOAT_KINDS or not bias.is_contiguous():
                    bias = bias.float().contiguous()
                    kept.append(bias)
                b, kind = bias.data_ptr(), FLOAT_KINDS[bias.dtype]
            above = [None] * 4 if w.more is None else [None if p is None else p.data_ptr() for p, _ in w.more]
            parts = ((w.codes, w.codes_bytes), (w.scale, w.scale_bytes), *(w.more or ()))
            if w.static is not None or w.scale is None or any(p is not None and p.nbytes != b for p, b in parts):
                raise _changed()
            rows[i] = LinearArgs(
                at, m, step, y.data_ptr(), b, w.codes.data_ptr(), w.scale.data_ptr(), *above, None, 0, kind, n_threads
            )
            ys.append(y)
        check_status(call(where, ctypes.addressof(rows), count), f"linear: {m} rows of {k} columns")
        return ys

    return run


def _readable(x: Tensor, dtype: torch.dtype) -> bool:
    return in_memory(x) and x.is_cpu and x.dtype is dtype


def _changed(op: str = "linear") -> ArgumentError:
    return ArgumentError(
        f"{op}: a stored part of the quantized weight was resized or replaced after the weight was packed; assign a "
        "new weight instead (module.weight = ..., or weight.data = another quantized tensor)"
    )
