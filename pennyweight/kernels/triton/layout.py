"""Layout "gpu": codes in tiles that the weight-only kernel turns into operands of the matrix unit without a shuffle.

A tile has 64 rows. A piece of b bits (codes.PIECES) is a field of 64 rows x 32 words of 32 bits: 16 / b planes of 64
columns. Word i of a row holds columns 2i (low half) and 2i + 1 (high half) of each plane, plane j at bit j * b of the
half. So ``(word >> s) & mask`` is two neighbouring columns of one plane, in the order of the matrix unit's registers.
A tile has the columns of its narrowest piece, 1024 / b; wider pieces have several fields.

codes       int32 [row tiles, column tiles, fields, 64, 32]
scale etc.  one per row: [N]; one per group: [row tiles, column tiles, 64, groups per tile], see :class:`Groups`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core import blocks
from ...core.formats import (
    E2M1,
    E2M3,
    E3M1,
    E4M3,
    E8M0,
    INT2,
    INT4,
    INT5,
    INT6,
    INT7,
    INT8,
    UINT1,
    UINT3,
    UINT4,
)
from ...core.layouts import Layout, register_layout, require_fit
from ...core.numerics import Parts
from ...core.spec import SPECS, TENSOR, QuantSpec
from ...core.tensor import AffineQuantizedTensor
from .codes import Decoding, decoding

ROWS = 64
PLANE = 64
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Groups:
    """How the numbers per group (scale, zero point, offset) of a weight are stored.

    kind    "none", "tensor" (one number), "row" ([N]) or "group"
    size    columns that share a number, for kind "group"
    rows    rows that share a number. They are repeated for each row
    width   numbers per row and tile, for kind "group"
    tiles   tiles that share one column of numbers; 1 if width > 1
    small   whether a plane has several groups (of 16 or 32 columns)
    repeated  whether numbers are stored for each plane, because groups do not divide tiles
    """

    kind: str
    size: int = 0
    rows: int = 1
    width: int = 1
    tiles: int = 1
    small: bool = False
    repeated: bool = False


def columns(d: Decoding) -> int:
    """Columns of a tile."""
    return 1024 // min(d.pieces)


def groups(spec: QuantSpec, shape: Sequence[int], cols: int) -> Groups | str:
    """How numbers per group are stored, or the reason why the layout cannot."""
    if spec.scale is None:
        return Groups("none")
    if spec.block is None:
        return Groups("tensor")
    rows, size = blocks.resolve(spec.block, shape)
    if size >= shape[1]:
        return Groups("row", rows=rows)
    if size in (16, 32):
        return Groups("group", size, rows, cols // size, small=True)
    if size % PLANE:
        return f"needs groups of 16, 32 or a multiple of {PLANE} columns, the weight has {size}"
    if size % cols == 0:
        return Groups("group", size, rows, 1, size // cols)
    if cols % size == 0:
        return Groups("group", size, rows, cols // size)
    return Groups("group", size, rows, cols // PLANE, repeated=True)


def _scale(kind: Any) -> bool | str:
    """Whether the layout stores such scales."""
    if kind is None or kind in _FLOATS:
        return True
    if isinstance(kind, QuantSpec) and kind.format is E8M0 and kind.scale is None:
        return True
    fits = isinstance(kind, QuantSpec) and kind.format is E4M3 and kind.offset is None and kind.layout == "plain"
    if fits and (kind.scale is None or (kind.scale is torch.float32 and kind.block is None)):
        return True
    return "needs plain scales, or scales in e8m0, or in e4m3 with at most one outer scale"


def fits(spec: QuantSpec, shape: Sequence[int]) -> bool | str:
    """True, or the reason why the layout does not support this."""
    if len(shape) != 2 or 0 in shape:
        return "needs a non-empty 2-d weight"
    found = decoding(spec.format, spec.mid)
    if isinstance(found, str):
        return found
    if (verdict := _scale(spec.scale)) is not True:
        return verdict
    if spec.offset is not None and spec.offset not in _FLOATS:
        return "needs plain offsets"
    g = groups(spec, shape, columns(found))
    if isinstance(g, str):
        return g
    if isinstance(spec.scale, QuantSpec) and g.kind != "group":
        return "needs plain scales if they are per row or per tensor"
    if g.kind == "tensor" and (spec.zero_point or spec.offset is not None):
        return "needs zero points and offsets per row or per group"
    return True


def _check(spec: QuantSpec, shape: Sequence[int]) -> tuple[Decoding, Groups]:
    require_fit("gpu", fits(spec, shape), spec, shape)
    d = decoding(spec.format, spec.mid)
    assert isinstance(d, Decoding)
    g = groups(spec, shape, columns(d))
    assert isinstance(g, Groups)
    return d, g


def _tiles(shape: Sequence[int], cols: int) -> tuple[int, int]:
    return -(-shape[0] // ROWS), -(-shape[1] // cols)


def _shifts(bits: int, device: torch.device) -> Tensor:
    """Bit of each plane and half in a word: int32 [planes, 1, 2]."""
    plane = torch.arange(16 // bits, dtype=torch.int32, device=device)[:, None, None] * bits
    return plane + torch.tensor([0, 16], dtype=torch.int32, device=device)


def pack_codes(codes: Tensor, d: Decoding) -> Tensor:
    """uint8 [N, K] below 2**bits -> int32 [row tiles, column tiles, fields, 64, 32]; padding has the code zero."""
    cols = columns(d)
    rt, ct = _tiles(codes.shape, cols)
    full = torch.zeros((rt * ROWS, ct * cols), dtype=torch.uint8, device=codes.device)
    full[: codes.shape[0], : codes.shape[1]] = codes
    out, low = [], 0
    for bits in d.pieces:
        planes = 16 // bits
        piece = (full >> low) & ((1 << bits) - 1)
        low += bits
        # [rt, 64, ct, fields, planes, 32, 2] -> [rt, ct, fields, 64, planes, 32, 2]
        piece = piece.view(rt, ROWS, ct, cols // (planes * PLANE), planes, 32, 2).permute(0, 2, 3, 1, 4, 5, 6)
        words = torch.zeros(piece.shape[:4] + (32,), dtype=torch.int32, device=codes.device)
        for j in range(planes):  # one plane at a time: int32 copies of all codes would take 4 bytes each
            for half in range(2):
                words |= piece[:, :, :, :, j, :, half].to(torch.int32) << (j * bits + 16 * half)
        out.append(words)
    return (out[0] if len(out) == 1 else torch.cat(out, 2)).contiguous()


def unpack_codes(words: Tensor, shape: Sequence[int], d: Decoding) -> Tensor:
    """Inverse of :func:`pack_codes`: uint8 [N, K]."""
    cols = columns(d)
    rt, ct = _tiles(shape, cols)
    codes = torch.zeros((rt * ROWS, ct * cols), dtype=torch.uint8, device=words.device)
    low = first = 0
    for bits in d.pieces:
        planes = 16 // bits
        count = cols // (planes * PLANE)
        field = words[:, :, first : first + count]
        first += count
        piece = torch.empty((rt, ct, count, ROWS, planes, 32, 2), dtype=torch.uint8, device=words.device)
        for j in range(planes):
            for half in range(2):
                piece[:, :, :, :, j, :, half] = ((field >> (j * bits + 16 * half)) & ((1 << bits) - 1)).to(torch.uint8)
        codes |= piece.permute(0, 3, 1, 2, 4, 5, 6).reshape(rt * ROWS, ct * cols) << low
        low += bits
    return codes[: shape[0], : shape[1]].contiguous()


def pack_numbers(part: Tensor, g: Groups, shape: Sequence[int], cols: int, zero: float = 0.0) -> Tensor:
    """Numbers per block [N / rows, groups] as the kernel reads them; padding is ``zero``."""
    if g.kind in ("none", "tensor"):
        return part.contiguous()
    n = shape[0]
    part = part.repeat_interleave(g.rows, 0)[:n] if g.rows > 1 else part
    if g.kind == "row":
        return part.reshape(n).contiguous()
    if g.repeated:
        part = part.repeat_interleave(g.size // PLANE, 1)
    rt, ct = _tiles(shape, cols)
    wide = -(-ct // g.tiles)
    full = torch.full((rt * ROWS, wide * g.width), zero, dtype=part.dtype, device=part.device)
    full[:n, : min(part.shape[1], full.shape[1])] = part[:, : full.shape[1]]
    tiled = full.view(rt, ROWS, wide, g.width).transpose(1, 2)
    if g.small:  # the plane is the fastest axis, so that the kernel can split planes off
        planes = cols // PLANE
        tiled = tiled.reshape(rt, wide, ROWS, planes, g.width // planes).transpose(3, 4)
    return tiled.reshape(rt, wide, ROWS, g.width).contiguous()


def unpack_numbers(tiled: Tensor, g: Groups, shape: Sequence[int], cols: int, count: tuple[int, int]) -> Tensor:
    """Inverse of :func:`pack_numbers`: [N / rows, groups] = count."""
    if g.kind in ("none", "tensor"):
        return tiled
    if g.kind == "row":
        return tiled[:: g.rows].reshape(count).contiguous()
    if g.small:
        planes = cols // PLANE
        tiled = tiled.view(*tiled.shape[:3], g.width // planes, planes).transpose(3, 4).reshape(tiled.shape)
    flat = tiled.transpose(1, 2).reshape(tiled.shape[0] * ROWS, -1)[: shape[0] : g.rows]
    if g.repeated:
        flat = flat[:, :: g.size // PLANE]
    return flat[:, : count[1]].contiguous()


def _each(parts: Parts, spec: QuantSpec, fn: Callable[[Tensor, str], Tensor]) -> Parts:
    """fn(numbers, slot) on scales, or on the codes of quantized scales, and on zero points and offsets."""
    scale = parts.scale
    if isinstance(scale, AffineQuantizedTensor):
        scale = scale.parts
    if isinstance(scale, Parts):
        scale = scale._replace(codes=fn(scale.codes, "scale"))
    elif scale is not None:
        scale = fn(scale, "scale")
    return parts._replace(
        scale=scale,
        zero_point=None if parts.zero_point is None else fn(parts.zero_point, "zero_point"),
        offset=None if parts.offset is None else fn(parts.offset, "offset"),
    )


def pack(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """codes: int32 tiles; numbers per group in tiles. Zero points keep their bytes, e8m0 and e4m3 scales too."""
    d, g = _check(spec, shape)
    cols = columns(d)
    whole = blocks.padded(spec.block, shape)
    codes = pack_codes(spec.format.to_unsigned(parts.codes.contiguous()), d)

    def numbers(part: Tensor, slot: str) -> Tensor:
        if part.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
            return pack_numbers(part.view(torch.uint8), g, whole, cols).view(part.dtype)
        return pack_numbers(part, g, whole, cols)

    return _each(parts._replace(codes=codes), spec, numbers)


def unpack(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """Inverse of :func:`pack`, bit for bit."""
    d, g = _check(spec, shape)
    cols = columns(d)
    whole = blocks.padded(spec.block, shape)
    count = blocks.counts(spec.block, shape)
    codes = spec.format.from_unsigned(unpack_codes(parts.codes, whole, d))

    def numbers(part: Tensor, slot: str) -> Tensor:
        if part.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
            return unpack_numbers(part.view(torch.uint8), g, whole, cols, (count[0], count[1])).view(part.dtype)
        return unpack_numbers(part, g, whole, cols, (count[0], count[1]))

    return _each(parts._replace(codes=codes), spec, numbers)


def _padding(spec: QuantSpec, shape: Sequence[int]) -> int:
    """Bytes in addition to ``spec.nbytes``: padding to whole tiles, and repeated numbers."""
    d, g = _check(spec, shape)
    whole = blocks.padded(spec.block, shape)
    rt, ct = _tiles(whole, columns(d))
    extra = rt * ROWS * ct * columns(d) * d.bits // 8 - math.prod(spec.stream_shape(whole, d.bits))
    if g.kind in ("none", "tensor"):
        return extra
    stored = whole[0] if g.kind == "row" else rt * -(-ct // g.tiles) * ROWS * g.width
    more = stored - math.prod(blocks.counts(spec.block, shape))
    for kind in spec.part_specs().values():
        extra += more * (kind.itemsize if isinstance(kind, torch.dtype) else 1)
    return extra


# Cases that SPECS does not cover: groups of several tiles, that straddle tiles, of several rows; bytes as scales.
_MORE = (
    QuantSpec(INT4, (1024,), scale=torch.bfloat16), QuantSpec(UINT4, (192,), mid=8, scale=torch.float16),
    QuantSpec(INT8, (16, 64)), QuantSpec(UINT3, (64,), zero_point=True, scale=torch.bfloat16), QuantSpec(INT5, (-1,)),
    QuantSpec(UINT4, (32,), scale=torch.bfloat16, offset=torch.bfloat16), QuantSpec(E2M3, None),
    QuantSpec(UINT4, (64,), mid=8, offset=torch.float32), QuantSpec(INT7, (128,)), QuantSpec(INT2, (128,)),
    QuantSpec(E3M1, (64,), scale=QuantSpec(E8M0, (1,), scale=None)), QuantSpec(INT6, (64,), scale=torch.float16),
    QuantSpec(E2M1, (16,), scale=QuantSpec(E4M3, TENSOR)), QuantSpec(UINT1, (64,), mid=1, scale=torch.bfloat16),
)  # fmt: skip
_EXAMPLES = tuple(
    (spec, shape)
    for spec in (*SPECS.values(), *_MORE)
    for shape in ((64, 256), (70, 2100))
    if fits(spec, shape) is True
)
LAYOUT = register_layout(Layout("gpu", pack, unpack, ("cuda", "hip"), _EXAMPLES, _padding))
