"""Native calls other than products: packing of codes, quantization, dequantization, optimizer steps.

As arguments.py says, each function checks its arguments against the extents that src/*.h read and write.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...core.call_site import in_layer
from ...core.numerics import LookupTable
from ...support.errors import ArgumentError
from ..cpu.abi import (
    GGUF_BLOCKS,
    GGUF_PIECE,
    GIVEN,
    GPTQ_COLUMNS,
    MATRIX,
    MATRIX_BY_ROW,
    TABLE_LEVELS,
    Affine,
    BlockErrors,
    GptqBlock,
    NumberTable,
)
from ..cpu.library import KINDS
from .arguments import (
    DTYPES,
    FLOAT_KINDS,
    Part,
    address,
    check_status,
    count_tiles,
    extents,
    native_function,
    optional_address,
)

_BYTES = (torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)


def pack_codes(codes: Tensor, columns: int, bits: int, flip: int, out: Tensor) -> None:
    """codes: uint8 [n, k] -> out: uint8 [tiles of n, columns / 32 * 64 * bits]; see src/pack.h."""
    n, k = _sizes(codes, "pack: codes")
    size = _tile_bytes("pack", n, k, columns, bits)
    source = address(codes, "pack: codes", _BYTES, n * k)
    target = address(out, "pack: packed codes", (torch.uint8,), size, exact=True)
    if n and columns:
        check_status(
            native_function("pw_pack_codes")(source, n, k, columns, bits, flip & 255, target, torch.get_num_threads()),
            "pack",
        )


def pack_stream(stream: Tensor, k: int, columns: int, bits: int, pad: int, out: Tensor) -> None:
    """As :func:`pack_codes`, from bit streams. stream: uint8 [n, ceil(k * bits / 8)]; pad: the code of padding."""
    n, width = _sizes(stream, "pack: bit stream")
    size = _tile_bytes("pack", n, k, columns, bits)
    if k < 0 or width != -(-k * bits // 8) or not 0 <= pad < 1 << bits:
        raise ArgumentError(
            f"pack: got a bit stream {list(stream.shape)} and padding {pad} for {k} columns of {bits} bits; expected "
            f"{-(-k * bits // 8)} bytes in a row, and padding from 0 to {(1 << bits) - 1}"
        )
    source = address(stream, "pack: bit stream", (torch.uint8,), n * width)
    target = address(out, "pack: packed codes", (torch.uint8,), size, exact=True)
    if n and columns:
        status = native_function("pw_pack_stream")(source, n, k, columns, bits, pad, target, torch.get_num_threads())
        check_status(status, "pack")


def unpack_codes(packed: Tensor, columns: int, bits: int, flip: int, out: Tensor) -> None:
    """Inverse of :func:`pack_codes`. out: uint8 [n, k] with k <= columns."""
    n, k = _sizes(out, "unpack: codes")
    source = address(packed, "unpack: packed codes", (torch.uint8,), _tile_bytes("unpack", n, k, columns, bits))
    target = address(out, "unpack: codes", (torch.uint8,), n * k, exact=True)
    if n and k:
        status = native_function("pw_unpack_codes")(
            source, n, k, columns, bits, flip & 255, target, torch.get_num_threads()
        )
        check_status(status, "unpack")


def _sizes(t: Tensor, what: str) -> tuple[int, int]:
    if t.ndim != 2:
        raise ArgumentError(f"{what}: expected a matrix, got {list(t.shape)}")
    return t.shape[0], t.shape[1]


def _tile_bytes(what: str, n: int, k: int, columns: int, bits: int) -> int:
    """Bytes of n rows of codes in tiles."""
    if not 1 <= bits <= 8 or columns < k or columns % 32:
        raise ArgumentError(
            f"{what}: got {bits} bits and {columns} columns for {k} columns of codes; expected 1 to 8 bits, and a "
            f"multiple of 32 that is at least {k}"
        )
    return count_tiles(n) * columns * 2 * bits


# -- conversions -------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _parts(matrix: bytes, described: int) -> tuple[Part, ...]:
    return extents(described, Affine.from_buffer_copy(matrix))


def _addresses(what: str, a: Any, parts: Sequence[Tensor | None], *, by_row: bool = False) -> list[int | None]:
    """Addresses of codes, scale, zero point and offset. by_row: the others are not in tiles even if codes are."""
    codes, *others = parts
    if codes is None or a.n < 1 or a.k < 1 or a.group < 1 or a.groups * a.group < a.k or a.row_block < 1:
        raise ArgumentError(f"{what}: needs codes and a non-empty matrix")
    expected = _parts(bytes(a), MATRIX_BY_ROW if by_row else MATRIX)
    found: list[int | None] = [address(codes, f"{what}: codes", _BYTES, expected[0].least)]
    for part, need in zip(others, expected[1:], strict=True):
        found.append(optional_address(part, f"{what}: {need.name}", need.kind, need.least))
    return found


def dequantize(a: Any, parts: Sequence[Tensor | None], index: Tensor | None, out: Tensor, threads: int) -> None:
    """Dequantize rows ``index`` (None: all) of a quantized matrix into ``out``.

    parts: codes, scale, zero point, offset. index: int64. Raises IndexError if out of range, and ArgumentError.
    """
    rows = a.n if index is None else index.numel()
    found = _addresses("dequantize", a, parts)
    where = None if index is None else address(index, "embedding: index", (torch.int64,), rows)
    target = address(out, "dequantize: result", DTYPES[a.x], rows * a.k, exact=True)
    if not rows:
        return
    status = native_function("pw_dequantize")(ctypes.addressof(a), *found, where, rows, target, threads)
    if status == 1:
        assert index is not None
        raise IndexError(
            f"index out of range{in_layer()}: a quantized table has rows 0 to {a.n - 1}, got indices "
            f"{int(index.min())} to {int(index.max())}"
        )
    check_status(status, "dequantize")


def quantize(q: Any, x: Tensor, parts: Sequence[Tensor | None], sums: Tensor, threads: int) -> None:
    """Quantize a float matrix [n, k] with any row stride; ``q.rule`` decides whether ``parts`` are read or written.

    sums: float64 [2 + 2 n]. Raises MemoryError, ArgumentError.
    """
    a = q.to
    source, step = _rows("quantize", a, x)
    found = _addresses("quantize", a, parts, by_row=q.rule == GIVEN)
    room = address(sums, "quantize: sums", (torch.float64,), 2 + 2 * a.n)
    status = native_function("pw_quantize")(ctypes.addressof(q), source, step, *found, room, threads)
    check_status(status, f"quantize: a tensor of {list(x.shape)}")


def ranges(a: Any, x: Tensor, ends: Tensor, threads: int) -> None:
    """Minimum and maximum of each group of each row of x [n, k], written to ends [n, groups, 2] of x's dtype."""
    source, step = _rows("ranges", a, x)
    target = address(ends, "ranges: result", DTYPES[a.x], a.n * a.groups * 2, exact=True)
    check_status(native_function("pw_ranges")(ctypes.addressof(a), source, step, target, threads), "ranges")


def _rows(what: str, a: Any, x: Tensor) -> tuple[int, int]:
    """Address and row stride (in elements) of x: [n, k] with contiguous rows, or contiguous with n * k elements."""
    if x.ndim == 2 and tuple(x.shape) == (a.n, a.k) and (x.stride(1) == 1 or a.k == 1) and x.stride(0) >= a.k:
        return address(x, f"{what}: input", DTYPES[a.x], a.n * a.k, contiguous=False, exact=True), x.stride(0)
    return address(x, f"{what}: input", DTYPES[a.x], a.n * a.k, exact=True), a.k


def finite(x: Tensor, threads: int) -> bool:
    """Whether x is free of NaN and inf. x: dense memory without gaps, contiguous or transposed."""
    dense = x.is_contiguous() or (x.ndim >= 2 and x.mT.is_contiguous())
    if not dense:
        raise ArgumentError(
            f"finite: expected memory without gaps, got {list(x.shape)} with strides {list(x.stride())}"
        )
    at = address(x, "finite: input", tuple(FLOAT_KINDS), 0, contiguous=False)
    return bool(native_function("pw_finite")(at, KINDS[x.dtype], x.numel(), threads))


# -- blocks of GGUF files ----------------------------------------------------------------------------------------------


GGUF_MADE = tuple(type_ for type_, (*_, made) in GGUF_BLOCKS.items() if made)  # types of gguf_quantize


def gguf_codes(type_: int, blocks: Tensor, out: Tensor, threads: int) -> None:
    """The codes of blocks of a GGUF type as a bit stream, see core/packing.py.

    blocks: uint8, whole blocks. out: uint8 with the bytes of the stream. A code counts from 0.
    """
    if type_ not in GGUF_BLOCKS:
        raise ArgumentError(f"gguf: got type {type_}; known types: {[*GGUF_BLOCKS]}")
    elements, size, bits, _ = GGUF_BLOCKS[type_]
    count = blocks.numel() // size
    source = address(blocks, "gguf: blocks", (torch.uint8,), count * size, exact=True)
    target = address(out, "gguf: codes", (torch.uint8,), count * elements // 8 * bits, exact=True)
    if count:
        check_status(native_function("pw_gguf_codes")(type_, source, count, target, threads), "gguf")


def gguf_quantize(type_: int, x: Tensor, importance: Tensor | None, out: Tensor, sums: Tensor, threads: int) -> bool:
    """Quantize the rows of x [.., k] to blocks of a GGUF type. False if a scale is beyond float16: ``out`` is then not
    valid.

    importance: float32 [k]. out: uint8 with the bytes of the blocks. sums: float64 [pieces, 2], sums of x**2 and
    (value - x)**2 of each GGUF_PIECE elements.
    """
    if type_ not in GGUF_MADE or x.ndim < 1 or x.dtype not in FLOAT_KINDS:
        raise ArgumentError(f"gguf: got type {type_} for {list(x.shape)} {x.dtype}; known types: {[*GGUF_MADE]}")
    (elements, size, _, _), n, k = GGUF_BLOCKS[type_], x.numel(), x.shape[-1]
    if not k or k % elements:
        raise ArgumentError(f"gguf: rows of {k} elements are not whole blocks of {elements}")
    source = address(x, "gguf: input", tuple(FLOAT_KINDS), n, exact=True)
    weights = None if importance is None else address(importance, "gguf: importance", (torch.float32,), k, exact=True)
    target = address(out, "gguf: result", (torch.uint8,), n // elements * size, exact=True)
    room = address(sums, "gguf: sums", (torch.float64,), 2 * -(-n // GGUF_PIECE), exact=True)
    if not n:
        return True
    status = native_function("pw_gguf_quantize")(type_, source, KINDS[x.dtype], n, k, weights, target, room, threads)
    if status == 1:
        return False
    check_status(status, "gguf")
    return True


# -- rounding in solvers -----------------------------------------------------------------------------------------------


def _number_table(table: LookupTable | None) -> NumberTable:
    """Raises ArgumentError unless the numbers are those of all codes."""
    if table is None:
        return NumberTable()
    count, sign, floats = len(table.levels), table.sign, (torch.float32,)
    if not (1 <= count <= TABLE_LEVELS and 0 <= sign <= 5 and (not sign or count + 1 == 1 << sign)):
        raise ArgumentError(
            f"table: got {count} levels with sign bit {sign}; expected 1 to {TABLE_LEVELS}, with a sign bit 2**sign - 1"
        )
    levels = address(table.levels, "table: levels", floats, count, exact=True)
    numbers = address(table.numbers, "table: numbers", floats, (count + 1) << (sign > 0), exact=True)
    return NumberTable(levels, numbers, count, sign)


def _are_terms(zero_point: Tensor | None, offsets: Sequence[Tensor | None], table: LookupTable | None) -> bool:
    """Whether there are all terms of offsets (least, divisor, offset) or none; with a table nothing but the last."""
    if len(offsets) != 3:
        return False
    given = [p is not None for p in offsets]
    return zero_point is None and not any(given[:2]) if table is not None else len(set(given)) == 1


def gptq_block(
    w: Tensor, lower: Tensor, terms: Sequence[Tensor | None], limits: Sequence[float], codes: Tensor, values: Tensor,
    errors: Tensor, threads: int, descent: bool = False, table: LookupTable | None = None,
) -> None:  # fmt: skip
    """The loop over a block of columns, see src/gptq.h. Writes codes (bytes), values and errors, [columns, n] as w.

    lower: [columns, columns], the block of the factor, transposed. terms: keep, factor, scale, zero point, least,
    divisor, offset, float32 [columns, n] or None. limits: shift, lo, hi, mid. descent: coordinate descent from the
    codes and values that are given; w is the pull on them, lower the block of the Hessian, and errors become the
    changes of the values. table: of a format of few numbers; factor is the divisor then, and of the limits nothing is
    used.
    """
    columns, n = _sizes(w, "gptq: block")
    keep, factor, scale, zero_point, *offsets = terms
    shift, lo, hi, mid = limits
    if (
        not 1 <= columns <= GPTQ_COLUMNS or not _are_terms(zero_point, offsets, table)
        or not (-128 <= lo < hi <= 255 and hi - lo < 256)
    ):  # fmt: skip
        raise ArgumentError(
            f"gptq: got a block of {columns} columns with codes from {lo} to {hi}; expected 1 to {GPTQ_COLUMNS}, codes "
            "of 8 bits, and all terms of offsets or none; with a table nothing but offsets"
        )
    count, floats = n * columns, (torch.float32,)

    def at(t: Tensor | None, what: str) -> int:
        if t is None:
            raise ArgumentError(f"gptq: {what}: missing, expected {count} elements")
        return address(t, f"gptq: {what}", floats, count, exact=True)

    def optional(t: Tensor | None, what: str) -> int | None:
        return None if t is None else at(t, what)

    block = GptqBlock(
        n, columns, at(w, "block"), address(lower, "gptq: factor", floats, columns * columns, exact=True),
        optional(keep, "keep"), at(factor, "reciprocals"), at(scale, "scale"), optional(zero_point, "zero point"),
        *map(optional, offsets, ("least", "divisor", "offset")),
        address(codes, "gptq: codes", (torch.uint8, torch.int8), count, exact=True),
        at(values, "values"), at(errors, "errors"), shift, lo, hi, mid, _number_table(table), threads, descent,
    )  # fmt: skip
    if n:
        check_status(native_function("pw_gptq_block")(ctypes.addressof(block)), "gptq")


def squared_errors(
    x: Tensor, weight: Tensor | None, terms: Sequence[Tensor | None], limits: Sequence[float], errors: Tensor,
    threads: int, table: LookupTable | None = None,
) -> None:  # fmt: skip
    """The weighted squared error of each block under its parameters, see src/squared_errors.h.

    x: float32 [blocks, size]. weight: float32 [rows, size] or None; block i has row i % rows. terms: factor, scale,
    zero point, least, divisor, offset, float32 [blocks] or None. limits: shift, lo, hi, mid. errors: float32 [blocks].
    table: as in :func:`gptq_block`.
    """
    count, size = _sizes(x, "errors: blocks")
    scaling, zero_point, offsets = terms[:2], terms[2], terms[3:]
    if not _are_terms(zero_point, offsets, table) or not limits[1] < limits[2] or not size:
        raise ArgumentError(
            f"errors: got blocks of {size} elements with codes from {limits[1]} to {limits[2]}; expected elements, a "
            "range of codes, and all terms of offsets or none; with a table nothing but offsets"
        )
    floats, rows = (torch.float32,), 0 if weight is None else weight.shape[0]
    if weight is not None and (weight.ndim != 2 or weight.shape[1] != size or not rows):
        raise ArgumentError(f"errors: got weights {list(weight.shape)} for blocks of {size} elements")

    def of_blocks(t: Tensor | None, what: str) -> int:
        if t is None:
            raise ArgumentError(f"errors: {what}: missing, expected {count} elements")
        return address(t, f"errors: {what}", floats, count, exact=True)

    def optional(t: Tensor | None, what: str) -> int | None:
        return None if t is None else of_blocks(t, what)

    job = BlockErrors(
        count, size, address(x, "errors: blocks", floats, count * size, exact=True),
        None if weight is None else address(weight, "errors: weights", floats, rows * size, exact=True), rows,
        *map(of_blocks, scaling, ("reciprocals", "scale")),
        optional(zero_point, "zero point"), *map(optional, offsets, ("least", "divisor", "offset")),
        of_blocks(errors, "result"), *limits, _number_table(table), threads,
    )  # fmt: skip
    if count:
        check_status(native_function("pw_squared_errors")(ctypes.addressof(job)), "errors")


# -- optimizers --------------------------------------------------------------------------------------------------------


def optimizer_steps(jobs: Any, count: int, threads: int) -> None:
    """Run ``count`` steps (an array of Job, whose addresses came from :func:`address`). Raises MemoryError."""
    status = native_function("pw_optim_steps")(ctypes.addressof(jobs), count, threads)
    check_status(status, f"optimizer step of {count} parameters")


def probe(what: int, buffer: Tensor | None, count: int, threads: int) -> int:
    """Bytes or operations of a benchmark loop in src/bandwidth_probe.h. count: bytes of ``buffer``, or rounds."""
    at = 0 if buffer is None else address(buffer, "probe: buffer", (torch.float32,), -(-count // 4))
    return int(native_function("pw_probe")(what, at, count, threads))
