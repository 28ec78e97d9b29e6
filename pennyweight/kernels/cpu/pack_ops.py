"""Pack and unpack codes, as ops that a traced graph can contain: the native library only gets real memory."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import gate_convert

TILE, STEP = 16, 32  # rows and columns of a tile; see src/pack.h

LIBRARY = torch.library.Library("pennyweight", "FRAGMENT")
LIBRARY.define("cpu_pack(Tensor codes, int columns, int bits, int flip) -> Tensor")
LIBRARY.define("cpu_unpack(Tensor packed, int rows, int width, int columns, int bits, int flip) -> Tensor")


def pack_codes(codes: Tensor, columns: int, bits: int, flip: int) -> Tensor:
    """uint8 [n, k] -> uint8 [ceil(n / 16), columns / 32 * 64 * bits]. flip: added to each code before packing."""
    return torch.ops.pennyweight.cpu_pack.default(codes, columns, bits, flip)


def unpack_codes(packed: Tensor, rows: int, width: int, columns: int, bits: int, flip: int) -> Tensor:
    """Inverse of :func:`pack_codes`. Returns uint8 [rows, width]."""
    return torch.ops.pennyweight.cpu_unpack.default(packed, rows, width, columns, bits, flip)


def _pack_fake(codes: Tensor, columns: int, bits: int, flip: int) -> Tensor:
    return codes.new_empty((-(-codes.shape[0] // TILE), columns // STEP * 64 * bits), dtype=torch.uint8)


def _pack(codes: Tensor, columns: int, bits: int, flip: int) -> Tensor:
    codes, out = codes.contiguous(), _pack_fake(codes, columns, bits, flip)
    gate_convert.pack_codes(codes, columns, bits, flip, out)
    return out


def _unpack_fake(packed: Tensor, rows: int, width: int, columns: int, bits: int, flip: int) -> Tensor:
    return packed.new_empty((rows, width))


def _unpack(packed: Tensor, rows: int, width: int, columns: int, bits: int, flip: int) -> Tensor:
    packed, out = packed.contiguous(), packed.new_empty((rows, width))
    gate_convert.unpack_codes(packed, columns, bits, flip, out)
    return out


LIBRARY.impl("cpu_pack", _pack, "CPU")
LIBRARY.impl("cpu_unpack", _unpack, "CPU")
torch.library.register_fake("pennyweight::cpu_pack", _pack_fake, lib=LIBRARY)
torch.library.register_fake("pennyweight::cpu_unpack", _unpack_fake, lib=LIBRARY)
