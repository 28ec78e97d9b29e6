"""Pack and unpack codes, as ops that a traced graph can contain: the native library only gets real memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..native import convert as native_convert

TILE, STEP = 16, 32  # rows and columns of a tile; see src/pack.h

LIBRARY = torch.library.Library("pennyweight", "FRAGMENT")
LIBRARY.define("cpu_pack(Tensor codes, int columns, int bits, int flip) -> Tensor")
LIBRARY.define("cpu_pack_stream(Tensor stream, int width, int columns, int bits, int pad) -> Tensor")
LIBRARY.define("cpu_unpack(Tensor packed, int rows, int width, int columns, int bits, int flip) -> Tensor")


def pack_codes(codes: Tensor, columns: int, bits: int, flip: int) -> Tensor:
    """uint8 [n, k] -> uint8 [ceil(n / 16), columns / 32 * 64 * bits]. flip: added to each code before packing."""
    return torch.ops.pennyweight.cpu_pack.default(codes, columns, bits, flip)


def pack_stream(stream: Tensor, width: int, columns: int, bits: int, pad: int) -> Tensor:
    """As :func:`pack_codes`, from the bit stream of each row: uint8 [n, ceil(width * bits / 8)] of ``width`` codes, see
    core/packing.py. pad: the code of padding rows and columns."""
    return torch.ops.pennyweight.cpu_pack_stream.default(stream, width, columns, bits, pad)


def unpack_codes(packed: Tensor, rows: int, width: int, columns: int, bits: int, flip: int) -> Tensor:
    """Inverse of :func:`pack_codes`. Returns uint8 [rows, width]."""
    return torch.ops.pennyweight.cpu_unpack.default(packed, rows, width, columns, bits, flip)


def _pack_fake(codes: Tensor, columns: int, bits: int, flip: int) -> Tensor:
    return codes.new_empty((-(-codes.shape[0] // TILE), columns // STEP * 64 * bits), dtype=torch.uint8)


def _pack(codes: Tensor, columns: int, bits: int, flip: int) -> Tensor:
    codes, out = codes.contiguous(), _pack_fake(codes, columns, bits, flip)
    native_convert.pack_codes(codes, columns, bits, flip, out)
    return out


def _pack_stream_fake(stream: Tensor, width: int, columns: int, bits: int, pad: int) -> Tensor:
    return _pack_fake(stream, columns, bits, pad)


def _pack_stream(stream: Tensor, width: int, columns: int, bits: int, pad: int) -> Tensor:
    stream, out = stream.contiguous(), _pack_fake(stream, columns, bits, pad)
    native_convert.pack_stream(stream, width, columns, bits, pad, out)
    return out


def _unpack_fake(packed: Tensor, rows: int, width: int, columns: int, bits: int, flip: int) -> Tensor:
    return packed.new_empty((rows, width))


def _unpack(packed: Tensor, rows: int, width: int, columns: int, bits: int, flip: int) -> Tensor:
    packed, out = packed.contiguous(), packed.new_empty((rows, width))
    native_convert.unpack_codes(packed, columns, bits, flip, out)
    return out


LIBRARY.impl("cpu_pack", _pack, "CPU")
LIBRARY.impl("cpu_pack_stream", _pack_stream, "CPU")
LIBRARY.impl("cpu_unpack", _unpack, "CPU")
torch.library.register_fake("pennyweight::cpu_pack", _pack_fake, lib=LIBRARY)
torch.library.register_fake("pennyweight::cpu_pack_stream", _pack_stream_fake, lib=LIBRARY)
torch.library.register_fake("pennyweight::cpu_unpack", _unpack_fake, lib=LIBRARY)
