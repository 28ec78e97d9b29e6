"""Describes quantized tensors for the native conversions: a matrix of codes with parts per row and group."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core import blocks
from ...core.formats import E2M3, E3M2, E4M3, E5M2, E8M0, Format
from ...core.spec import QuantSpec
from ...core.tracing import plain_tensors
from ..native import arguments
from . import abi
from .abi import BITS, LOOKUP, MINIFLOAT, NONE, PLAIN, SIGNED, TILES, UNSIGNED
from .abi import E8M0 as E8M0_KIND
from .library import KINDS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
STORES = {"plain": PLAIN, "bits": BITS, "cpu": TILES, "cpu_float": TILES}
# Mantissa bits, exponent bias, smallest code magnitude that is inf or NaN. Other floats use tables.
_MINIFLOATS = {E4M3: (3, 7, 0x7F), E5M2: (2, 15, 0x7C), E3M2: (2, 3, 1 << 8), E2M3: (3, 1, 1 << 8)}


class Affine(abi.Affine):
    """A quantized matrix; see src/abi.h."""

    kept: Tensor | None = None  # owner of the memory of ``table``

    def copy(self) -> Affine:
        new = Affine.from_buffer_copy(self)
        new.kept = self.kept
        return new


class Matrix(NamedTuple):
    """Rows, columns, padded columns, columns per block, rows per block, blocks per row."""

    n: int
    k: int
    width: int
    group: int
    row_block: int
    groups: int


def matrix(spec: QuantSpec, shape: tuple[int, ...], *, by_row: bool = False) -> Matrix | None:
    """View of a tensor of any rank as a matrix with the same memory and blocks; None if there is none.

    by_row: the rows of the matrix must be the rows of the tensor.
    """
    if not shape or 0 in shape or (spec.block is not None and len(spec.block) > len(shape)):
        return None
    sizes, whole = blocks.resolve(spec.block, shape), blocks.padded(spec.block, shape)
    counts = blocks.counts(spec.block, shape)
    if len(shape) > 2 and whole[:-1] != shape[:-1]:
        return None
    groups, rows = 1, 1  # of the leading axes: blocks, and rows of a block
    for count, size in zip(counts[:-1], sizes[:-1], strict=True):
        if rows == 1:
            groups, rows = groups * count, size
        elif count == 1:
            rows *= size
        else:
            return None
    n, k = math.prod(shape[:-1]), shape[-1]
    contiguous = spec.layout == "plain" or (spec.layout == "bits" and k * spec.format.bits % 8 == 0)
    if not by_row and rows > 1 and counts[-1] == 1 and whole == shape and contiguous:  # a block is one long row
        return Matrix(groups, rows * k, rows * k, rows * k, 1, 1)
    return Matrix(n, k, whole[-1], sizes[-1], rows, counts[-1])


@lru_cache(maxsize=64)
def _table(f: Format) -> tuple[Tensor, int]:
    """float32 [256] with the number of each code, NaN for invalid codes; and its address."""
    with plain_tensors():
        numbers = torch.full((256,), math.nan, dtype=torch.float32, device="cpu")
        count = len(f.values) or 1 << f.bits
        numbers[:count] = f.decode(torch.arange(count, dtype=torch.int64, device="cpu").to(torch.uint8), torch.float32)
        return numbers, arguments.address(numbers, "table of numbers", (torch.float32,), 256)


def part_kind(kind: Any) -> int:
    """Number kind in which native code gets a scale or offset; float32 for unsupported kinds."""
    if isinstance(kind, QuantSpec):
        return E8M0_KIND if kind.format is E8M0 and kind.scale is None else KINDS[torch.float32]
    return KINDS.get(kind, KINDS[torch.float32])


@lru_cache(maxsize=4096)
def affine(spec: QuantSpec, shape: tuple[int, ...], dtype: torch.dtype, *, by_row: bool = False) -> Affine | None:
    """Descriptor of a tensor under a spec, converted from or to floats of ``dtype``; None if native code does not
    support it.

    The result is cached: copy it before changing it.
    """
    store = STORES.get(spec.layout)
    whole = matrix(spec, shape, by_row=by_row)
    nested = any(isinstance(k, QuantSpec) and part_kind(k) != E8M0_KIND for k in (spec.scale, spec.offset))
    if (
        whole is None
        or store is None
        or spec.format.kind == "learned"
        or dtype not in FLOATS
        or (store == TILES and nested)
    ):
        return None
    if spec.scale is torch.float64:  # the reference then computes in float64
        return None
    f, center = spec.format, spec.mid
    a = Affine(
        n=whole.n, k=whole.k, width=whole.width, stride=whole.width, group=whole.group, groups=whole.groups,
        row_block=whole.row_block, store=store, bits=f.bits, scale=part_kind(spec.scale),
        zero_point=KINDS[spec.zero_point_dtype] if spec.zero_point else NONE, offset=part_kind(spec.offset),
        x=KINDS[dtype],
    )  # fmt: skip
    if store == BITS and spec.zero_point_bits < 8:
        a.zero_bits, a.zero_lo = spec.zero_point_bits, int(spec.zero_point_format.lo)
    if store == BITS:
        a.stride = -(-whole.width * f.bits // 8)
    elif store == TILES:
        a.stride = max(1, -(-whole.width // 32)) * 64 * f.bits
    if f.kind == "int":
        a.numbers = SIGNED if store == PLAIN and f.code_dtype is torch.int8 else UNSIGNED
        a.center = center if store == PLAIN else center - int(f.lo)
    elif f in _MINIFLOATS:
        a.numbers = MINIFLOAT
        a.mantissa, a.bias, a.special = _MINIFLOATS[f]
    else:
        a.numbers, (a.kept, a.table) = LOOKUP, _table(f)
    return a


def threads_for(elements: int) -> int:
    """Number of threads for that much work."""
    return max(1, min(torch.get_num_threads(), elements >> 15))
