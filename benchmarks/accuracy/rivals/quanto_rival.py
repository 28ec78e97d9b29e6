"""optimum-quanto: weights in groups of 128 with a scale and a shift in the model's dtype, here bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.accuracy.accounting import Bits, BitsByColumns
from benchmarks.accuracy.rivals.base import ALL, CONVOLUTIONS, SMOLLM2, Row, layers
from benchmarks.accuracy.subjects import Subject


def _run(name: str, dtype: torch.dtype) -> Any:
    def run(subject: Subject, model: nn.Module) -> nn.Module:
        from optimum import quanto

        model = model.to(dtype)
        quanto.quantize(model, weights=getattr(quanto, name), include=list(subject.layers))
        quanto.freeze(model)
        weights = {n: layer.weight for n, layer in layers(subject, model).items()}
        plain = subject.model()
        for n, layer in layers(subject, plain).items():
            value = weights[n].dequantize().float()
            layer.weight.data = value.reshape(layer.weight.shape)
        return plain

    return run


_GROUPED = "bfloat16 scale and shift per group of 128, or of 96, 64 or 32 where that divides the columns first"


def _grouped(bits: int) -> BitsByColumns:
    def of_columns(columns: int) -> Bits:
        group = next((g for g in (128, 96, 64, 32) if columns % g == 0), None)
        return Bits(bits, group, 32)

    return BitsByColumns(of_columns, _GROUPED)


ROWS = (
    Row("qint8", _run("qint8", torch.float32), Bits(8, per_row=32, why="float32 scale per row"),
        subjects=ALL + CONVOLUTIONS + SMOLLM2),
    Row("qint4", _run("qint4", torch.bfloat16), _grouped(4), subjects=ALL + SMOLLM2),
    Row("qint2", _run("qint2", torch.bfloat16), _grouped(2), subjects=ALL + SMOLLM2),
)  # fmt: skip
