"""Write tests/golden/native/v3: a file of format version 3 that every later version must read.

    PYTHONPATH=. python tests/golden/native/make_v3.py

As for make_v1.py: written once. It holds what versions 1 and 2 cannot say: zero points that take the bits of a format
of their own, and tables of numbers that tensors bring themselves.
"""

from pathlib import Path

import torch

from pennyweight.core.formats import INT4, INT8, TERNARY, UINT3, UINT4, UINT5, learned
from pennyweight.core.spec import QuantSpec
from tests.golden.native.make_v1 import quantized, weight
from tests.golden.native.make_v2 import reordered, write


def cases() -> dict[str, torch.Tensor]:
    return {
        "plain": weight(3, 2),
        "bytes": quantized(QuantSpec(UINT4, (8,), zero_point=True), 4, 24),
        "uint4": quantized(QuantSpec(UINT4, (8,), torch.float16, zero_point=UINT4), 4, 40),
        "int4": quantized(QuantSpec(INT4, (8,), torch.bfloat16, zero_point=INT4), 3, 21, dtype=torch.bfloat16),
        "uint3": reordered(quantized(QuantSpec(UINT3, (2, 8), zero_point=UINT3), 5, 33)),
        "wide": quantized(QuantSpec(UINT4, (4,), zero_point=UINT5), 3, 32),
        "ternary": quantized(QuantSpec(TERNARY, (8,), zero_point=TERNARY), 2, 24),
        "tensor": quantized(QuantSpec(UINT4, None, zero_point=UINT4), 2, 3, 5),
        "learned.ones": quantized(QuantSpec(learned(3), (8,), torch.float16), 4, 21),
        "learned.pairs": reordered(quantized(QuantSpec(learned(4, 2), (2, 8)), 5, 33)),
        "learned.fours": quantized(QuantSpec(learned(8, 4), (-1,), torch.bfloat16), 6, 30, dtype=torch.bfloat16),
        "learned.eights": quantized(QuantSpec(learned(5, 8), None, scale=None), 6, 30).t(),
        "scales": quantized(QuantSpec(INT8, (8,), scale=QuantSpec(UINT4, (4,), zero_point=UINT4)), 4, 40),
    }


if __name__ == "__main__":
    write(Path(__file__).parent / "v3", cases())
