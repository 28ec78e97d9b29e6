"""Block types that the gguf package encodes itself, by round to nearest."""

from __future__ import annotations

from torch import Tensor

from benchmarks.accuracy.accounting import Bits
from benchmarks.accuracy.rivals.base import ALL, SMOLLM2, Row, each_weight


def _through(name: str):
    def run(w: Tensor) -> Tensor:
        import torch
        from gguf import GGMLQuantizationType, quants

        kind = GGMLQuantizationType[name]
        return torch.from_numpy(quants.dequantize(quants.quantize(w.numpy(), kind), kind).copy())

    return each_weight(run)


_SCALE, _BOTH = "float16 scale per block of 32", "float16 scale and minimum per block of 32"
_EXACT = "Q4_1"  # the type of the file that is the float model there
ROWS = tuple(
    Row(name, _through(name), Bits(bits, why=why), subjects=ALL if name == _EXACT else ALL + SMOLLM2)
    for name, bits, why in (
        ("Q4_0", 4.5, _SCALE),
        ("Q4_1", 5.0, _BOTH),
        ("Q5_0", 5.5, _SCALE),
        ("Q5_1", 6.0, _BOTH),
        ("Q8_0", 8.5, _SCALE),
        ("MXFP4", 4.25, "e8m0 scale per block of 32"),
    )
)
