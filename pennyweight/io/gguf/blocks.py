"""Table of all tensor types in GGUF files; each type decodes to plain parts and encodes them.

A row of a tensor is a whole number of blocks. Decoding gives the parts of a spec, so that
``core.numerics.dequantize(parts, spec, shape)`` equals ggml's result, bit for bit in float32 (except the sign of zero
in MXFP4 and NVFP4, and values that overflow float32, which saturate); encoding gives the bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core import spec as specs
from ...core.formats import E2M1, E4M3, IQ1, IQ2, IQ3_S, IQ3_XXS, UINT1
from ...core.numerics import Parts
from ...core.spec import QuantSpec
from ...kernels.cpu.abi import GGUF_BLOCKS
from ...kernels.cpu.library import usable
from ...kernels.cpu.matrix_view import threads_for
from ...kernels.native.convert import gguf_codes
from . import quants as q

NVFP4 = QuantSpec(E2M1, (16,), scale=QuantSpec(E4M3, (1,), scale=None))  # without a per-tensor scale


@dataclass(frozen=True)
class BlockType:
    """A type of ggml.

    name, id   as in ggml.h (GGML_TYPE_...)
    elements   elements per block, stored in ``nbytes`` bytes
    spec       spec of the parts; a dtype for plain types
    unpack     parts [blocks, k] of raw blocks [blocks, nbytes]; with ``codes``, these. Raises ValueError for invalid
               bytes.
    pack       its inverse; None if the type is read-only
    """

    name: str
    id: int
    elements: int
    nbytes: int
    spec: QuantSpec | torch.dtype
    unpack: Callable[..., Parts] | None = None
    pack: Callable[[Parts], Tensor] | None = None

    @property
    def plain(self) -> bool:
        return isinstance(self.spec, torch.dtype)

    @property
    def writable(self) -> bool:
        return self.plain or self.pack is not None

    def row_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a row. Raises ValueError if it is not a whole number of blocks."""
        n = shape[-1] if shape else 1
        if n % self.elements:
            raise ValueError(f"{self.name}: rows of {n} elements; must be a multiple of the block size {self.elements}")
        return n // self.elements * self.nbytes

    def decode(self, raw: Tensor, shape: Sequence[int]) -> Parts:
        """Plain parts of the rows of a tensor of that shape; for a plain type ``codes`` is the tensor.

        raw: uint8 [rows, row bytes]. Raises ValueError for invalid bytes, and ImportError for types that need the
        codebooks of the gguf package.
        """
        rows = math.prod(shape[:-1])
        if raw.dtype is not torch.uint8 or tuple(raw.shape) != (rows, self.row_bytes(shape)):
            raise ValueError(
                f"{self.name} of shape {[*shape]} needs uint8 [{rows}, {self.row_bytes(shape)}],"
                f" got {raw.dtype} {[*raw.shape]}"
            )
        if isinstance(self.spec, torch.dtype):
            return Parts(_aligned(raw, self.spec).reshape(tuple(shape)))
        return self._in_rows(raw, shape, None)

    def decode_stream(self, raw: Tensor, shape: Sequence[int]) -> Parts | None:
        """As :meth:`decode`, with the codes as the bit stream that files have; None without native code for the type.

        It reads the codes in one pass over memory; the torch code of 4 bits takes a dozen.
        """
        if self.id not in GGUF_BLOCKS or usable() is not True or not raw.is_contiguous():
            return None
        blocks, bits = raw.numel() // self.nbytes, GGUF_BLOCKS[self.id][2]
        codes = torch.empty((blocks, self.elements * bits // 8), dtype=torch.uint8, device="cpu")
        gguf_codes(self.id, raw, codes, threads_for(blocks * self.elements))
        return self._in_rows(raw, shape, codes)

    def _in_rows(self, raw: Tensor, shape: Sequence[int], codes: Tensor | None) -> Parts:
        blocks, raw = shape[-1] // self.elements, raw.reshape(-1, self.nbytes)
        raw = raw.clone() if raw.data_ptr() % 4 else raw  # numbers in a file that aligns tensors to less
        assert self.unpack is not None
        parts = self.unpack(raw) if codes is None else self.unpack(raw, codes)
        return parts.map(lambda t: t.reshape(*shape[:-1], blocks * t.shape[1]).contiguous())

    def encode(self, parts: Parts, shape: Sequence[int]) -> Tensor:
        """uint8 [rows, row bytes] from plain parts. Raises ValueError if the type is read-only."""
        rows, row_bytes = math.prod(shape[:-1]), self.row_bytes(shape)
        if isinstance(self.spec, torch.dtype):
            if parts.codes.dtype is not self.spec or tuple(parts.codes.shape) != tuple(shape):
                raise ValueError(
                    f"{self.name} of shape {[*shape]} needs {self.spec}, got {parts.codes.dtype} {[*parts.codes.shape]}"
                )
            return parts.codes.contiguous().reshape(-1).view(torch.uint8).reshape(rows, row_bytes)
        if self.pack is None:
            raise ValueError(f"{self.name} is read-only: encoding with its codebook is not supported")
        blocks = rows * (shape[-1] // self.elements)
        if not blocks:
            return torch.zeros((rows, row_bytes), dtype=torch.uint8, device="cpu")
        return self.pack(parts.map(lambda t: t.reshape(blocks, t.numel() // blocks))).reshape(rows, row_bytes)


def _aligned(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes viewed as a dtype; copied if they are not aligned."""
    flat = raw.reshape(-1)
    return (flat.clone() if flat.data_ptr() % dtype.itemsize else flat).view(dtype)


_TYPES = [
    BlockType("F32", 0, 1, 4, torch.float32),
    BlockType("F16", 1, 1, 2, torch.float16),
    BlockType("Q4_0", 2, 32, 18, specs.Q4_0, q.q4_0, q.pack_q4_0),
    BlockType("Q4_1", 3, 32, 20, specs.Q4_1, q.q4_1, q.pack_q4_1),
    BlockType("Q5_0", 6, 32, 22, specs.Q5_0, q.q5_0, q.pack_q5_0),
    BlockType("Q5_1", 7, 32, 24, specs.Q5_1, q.q5_1, q.pack_q5_1),
    BlockType("Q8_0", 8, 32, 34, specs.Q8_0, q.q8_0, q.pack_q8_0),
    BlockType("Q2_K", 10, 256, 84, specs.Q2_K, q.q2_k, q.pack_q2_k),
    BlockType("Q3_K", 11, 256, 110, specs.Q3_K, q.q3_k, q.pack_q3_k),
    BlockType("Q4_K", 12, 256, 144, specs.Q4_K, q.q4_k, q.pack_q4_k),
    BlockType("Q5_K", 13, 256, 176, specs.Q5_K, q.q5_k, q.pack_q5_k),
    BlockType("Q6_K", 14, 256, 210, specs.Q6_K, q.q6_k, q.pack_q6_k),
    BlockType("IQ2_XXS", 16, 256, 66, QuantSpec(IQ2, (32,)), q.iq2_xxs),
    BlockType("IQ2_XS", 17, 256, 74, QuantSpec(IQ2, (16,)), q.iq2_xs),
    BlockType("IQ3_XXS", 18, 256, 98, QuantSpec(IQ3_XXS, (32,)), q.iq3_xxs),
    BlockType("IQ1_S", 19, 256, 50, QuantSpec(IQ1, (32,)), q.iq1_s),
    BlockType("IQ4_NL", 20, 32, 18, specs.IQ4_NL, q.q4_0, q.pack_q4_0),
    BlockType("IQ3_S", 21, 256, 110, QuantSpec(IQ3_S, (32,)), q.iq3_s),
    BlockType("IQ2_S", 22, 256, 82, QuantSpec(IQ2, (16,)), q.iq2_s),
    BlockType("IQ4_XS", 23, 256, 136, specs.IQ4_XS, q.iq4_xs, q.pack_iq4_xs),
    BlockType("I8", 24, 1, 1, torch.int8),
    BlockType("I16", 25, 1, 2, torch.int16),
    BlockType("I32", 26, 1, 4, torch.int32),
    BlockType("I64", 27, 1, 8, torch.int64),
    BlockType("F64", 28, 1, 8, torch.float64),
    BlockType("IQ1_M", 29, 256, 56, QuantSpec(IQ1, (16,)), q.iq1_m),
    BlockType("BF16", 30, 1, 2, torch.bfloat16),
    BlockType("TQ1_0", 34, 256, 54, specs.TERNARY_256, q.tq1_0, q.pack_tq1_0),
    BlockType("TQ2_0", 35, 256, 66, specs.TERNARY_256, q.tq2_0, q.pack_tq2_0),
    BlockType("MXFP4", 39, 32, 17, specs.MXFP4, q.mxfp4, q.pack_mxfp4),
    BlockType("NVFP4", 40, 64, 36, NVFP4, q.nvfp4, q.pack_nvfp4),
    BlockType("Q1_0", 41, 128, 18, QuantSpec(UINT1, (128,), offset=torch.float32), q.q1_0),
]
TYPES = {t.name: t for t in _TYPES}
BY_ID = {t.id: t for t in _TYPES}
# ggml type numbers that are not valid in files: removed, or used only during computation.
REMOVED = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip
