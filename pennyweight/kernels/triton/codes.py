"""How the weight-only kernel decodes the codes of a format: data for decode_kernel.py.

Codes are stored as 16-bit halves of 32-bit words, see layout.py. The kernel masks one code of each half and turns both
halves into two numbers of the compute dtype at once:

int    bfloat16: the bits of an integer u < 256 at bit p of a half are the subnormal number u * 2**(p - 133), exactly.
       float16: OR-ed into 1024.0 they are 1024 + u * 2**p. One fused multiply-add gives (u - zero), exactly; in
       bfloat16 scaled by 2**-6, because 2**127 is the greatest power of two.
float  sign and magnitude are moved to their places in the compute dtype, and the exponent bias is corrected by one
       multiplication with a power of two: exact, including subnormals.
table  a byte permutation reads a table of 16 numbers, which is rounded to the compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.formats import Format

PIECES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
DTYPES = (torch.bfloat16, torch.float16)
_MANTISSA = {"e4m3": 3, "e5m2": 2, "e3m2": 2, "e2m3": 3, "e3m1": 1, "e2m2": 2, "e2m1": 1}


@dataclass(frozen=True)
class Decoding:
    """pieces    widths of the bit fields that a code is split into, lowest bits first
    kind      "int", "float" or "table"
    zero      the code that means zero, for kind "int"; may be fractional (half integers)
    mantissa  mantissa bits, for kind "float"
    """

    pieces: tuple[int, ...]
    kind: str
    zero: float = 0.0
    mantissa: int = 0

    @property
    def bits(self) -> int:
        return sum(self.pieces)

    def up(self, dtype: torch.dtype) -> float:
        """The factor that kind "float" multiplies with: 2**(bias of dtype - bias of the format)."""
        exponent = self.bits - 1 - self.mantissa
        bias = (1 << (exponent - 1)) - 1
        return 2.0 ** ((127 if dtype is torch.bfloat16 else 15) - bias)


def decoding(f: Format, mid: int = 0) -> Decoding | str:
    """How codes of a format are decoded, or the reason why the kernel cannot."""
    pieces = PIECES[f.bits]
    if f.dim != 1:
        return f"needs one number per code, {f} has {f.dim}"
    if f.kind == "int":
        return Decoding(pieces, "int", mid - f.lo)
    if f.name.startswith("half_int"):  # the number of code c is c + 1/2 - 2**(bits - 1)
        return Decoding(pieces, "int", 2.0 ** (f.bits - 1) - 0.5)
    if f.name in _MANTISSA:
        return Decoding(pieces, "float", mantissa=_MANTISSA[f.name])
    if f.bits == 4 and f.kind in ("table", "learned"):
        return Decoding(pieces, "table")
    return f"reads integers, small floats and tables of 16 numbers, not {f}"
