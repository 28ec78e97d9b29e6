"""bitsandbytes' 4-bit tables, which run on a CPU."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.accuracy.accounting import Bits
from benchmarks.accuracy.rivals.base import ALL, SMOLLM2, Row, each_weight


def _through(table: str, nested: bool) -> Any:
    def run(w: Tensor) -> Tensor:
        from bitsandbytes import functional as F

        codes, state = F.quantize_4bit(w, blocksize=64, quant_type=table, compress_statistics=nested)
        return F.dequantize_4bit(codes, state)

    return each_weight(run)


_PLAIN = Bits(4, 64, 32, why="float32 absmax per block of 64")
_NESTED = Bits(4 + 8 / 64 + 32 / (64 * 256), per_layer=32 + 32 * 256,
               why="8-bit absmax per block of 64, float32 scale of 256 of them, mean and table per layer")  # fmt: skip
ROWS = (
    Row("NF4", _through("nf4", False), _PLAIN, subjects=ALL + SMOLLM2),
    Row("NF4 nested", _through("nf4", True), _NESTED, subjects=ALL + SMOLLM2, note="compress_statistics=True"),
    Row("FP4", _through("fp4", False), _PLAIN, subjects=ALL + SMOLLM2),
)
