"""Write tests/golden/native/v4: a file of format version 4 that every later version must read.

    PYTHONPATH=. python tests/golden/native/make_v4.py

As for make_v1.py: written once. It holds what earlier versions cannot say: guards, and codes that are packed over all
axes but the first.
"""

from pathlib import Path

import torch

from pennyweight.core.formats import INT3, INT4, TERNARY, UINT3, UINT4, learned
from pennyweight.core.spec import NVFP4, QuantSpec
from tests.golden.native.make_v1 import quantized, weight
from tests.golden.native.make_v2 import write


def cases() -> dict[str, torch.Tensor]:
    conv = quantized(QuantSpec(INT4, (-1, -1, -1)), 6, 8, 1, 1)
    return {
        "plain": weight(3, 2),
        "linear": quantized(QuantSpec(INT4, (8,)), 4, 21),
        "experts": quantized(QuantSpec(INT4, (8,)), 2, 4, 16),
        "conv1x1": conv,
        "tied": conv,
        "conv3x3": quantized(QuantSpec(INT3, (4, -1, -1), torch.float16), 5, 8, 3, 3),
        "conv1d": quantized(QuantSpec(UINT4, (2, -1), torch.bfloat16, offset=torch.bfloat16, mid=8), 3, 5, 7),
        "conv.zeros": quantized(QuantSpec(UINT3, (2, -1, -1), zero_point=UINT3), 4, 6, 1, 1),
        "conv.nested": quantized(NVFP4.with_(block=(16, 1, 1)), 4, 32, 1, 1),
        "conv.learned": quantized(QuantSpec(learned(2), (-1, -1, -1)), 4, 4, 3, 3),
        "conv.ternary": quantized(QuantSpec(TERNARY, None), 4, 4, 3, 3),
        "conv.int8": quantized(QuantSpec(INT4, (-1, -1, -1)), 4, 4, 2, 2),
    }


if __name__ == "__main__":
    write(Path(__file__).parent / "v4", cases())
