"""HQQ: half-quadratic search of a real zero a group; no data."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.accuracy.accounting import Bits
from benchmarks.accuracy.rivals.base import ALL, SMOLLM2, Row, each_weight


def _through(bits: int, group: int) -> Any:
    def run(w: Tensor) -> Tensor:
        import torch
        from hqq.core.quantize import BaseQuantizeConfig, Quantizer

        options = BaseQuantizeConfig(nbits=bits, group_size=group)["weight_quant_params"]
        codes, meta = Quantizer.quantize(w, device="cpu", **options)
        for part in ("scale", "zero"):  # its linear layer keeps them in the dtype of the products
            meta[part] = meta[part].half().float()
        meta["compute_dtype"] = torch.float32
        return Quantizer.dequantize(codes, meta)

    return each_weight(run)


ROWS = tuple(
    Row(f"int{bits} g{group}", _through(bits, group),
        Bits(bits if bits != 3 else 3.2, group, 32, why="float16 scale and zero per group"
             + ("; ten codes of 3 bits in 32" if bits == 3 else "")),
        subjects=ALL + SMOLLM2 if group == 64 else ALL)
    for bits, group in ((8, 64), (4, 64), (4, 128), (3, 64), (2, 64))
)  # fmt: skip
