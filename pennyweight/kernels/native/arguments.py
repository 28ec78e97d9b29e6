"""Checks of what native code is given: addresses of tensors, and the parts of a weight.

C++ receives addresses and sizes and trusts them. So each function of this folder takes tensors, checks the device,
dtype, element count, contiguity and combination that the native code expects, and raises
:class:`~pennyweight.support.errors.ArgumentError` otherwise, before it takes an address. The extents of parts are
asked of the library, which checks them again at each call and asserts them in a debug build (cpu/src/check.h). A test
holds that no other file calls the native library.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.tracing import in_memory
from ...support.errors import ArgumentError
from ..cpu import library
from ..cpu.abi import BF16, E4M3, E8M0, F16, F32, I8, INVALID, NONE, U8, Extent

PLAIN = (Tensor, torch.nn.Parameter)
FLOAT_KINDS = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16}
CPU = torch.device("cpu")
# Dtypes that can store each number kind.
DTYPES = {
    F32: (torch.float32,), BF16: (torch.bfloat16,), F16: (torch.float16,), I8: (torch.int8,), U8: (torch.uint8,),
    E8M0: (torch.uint8, torch.float8_e8m0fnu), E4M3: (torch.float8_e4m3fn, torch.uint8),
}  # fmt: skip
TILE = 16  # rows of a tile; see src/pack.h


def native_function(name: str) -> Callable[..., Any]:
    """A function of the native library; only for files of this folder."""
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
    if status == INVALID:
        raise ArgumentError(
            f"{what}: the native library rejected inconsistent arguments; was a part of a quantized tensor resized, or "
            "its memory freed?"
        )
    if status:
        raise MemoryError(f"{what}: out of memory")


# -- the parts of a weight ---------------------------------------------------------------------------------------------


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


def extents(described: int, structure: ctypes.Structure) -> tuple[Part, ...]:
    """The parts that native code reads of what a structure describes, as src/check.h checks them at each call.

    described: a value of Described in src/abi.h. Raises ArgumentError if the structure is inconsistent.
    """
    rows = (Extent * 8)()
    count = native_function("pw_extents")(described, ctypes.addressof(structure), ctypes.addressof(rows), len(rows))
    if count < 0:
        check_status(INVALID, type(structure).__name__)
    return tuple(Part(row.name.decode(), row.kind, row.count) for row in rows[:count])


def count_tiles(n: int) -> int:
    """Tiles of n rows."""
    return -(-n // TILE)


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
            rows: list[tuple[Tensor | None, int]] = [(None, 0)] * len(expected)
            for i, _, _ in required:
                rows[i] = parts[i], parts[i].nbytes
            more = tuple(rows[2:])
        return Operand(codes, codes.nbytes, scale, 0 if scale is None else scale.nbytes, more, perm, static)

    return check


def changed_part(op: str = "linear") -> ArgumentError:
    return ArgumentError(
        f"{op}: a stored part of the quantized weight was resized or replaced after the weight was packed; assign a "
        "new weight instead (module.weight = ..., or weight.data = another quantized tensor)"
    )
