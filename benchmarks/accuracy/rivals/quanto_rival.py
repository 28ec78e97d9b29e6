"""optimum-quanto: weights in groups of 128 with a scale and a shift in the model's dtype, here bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.accuracy.accounting import Bits
from benchmarks.accuracy.rivals.base import ALL, CONVOLUTIONS, Row, layers
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


_GROUPED = "bfloat16 scale and shift per group of 128"
ROWS = (
    Row("qint8", _run("qint8", torch.float32), Bits(8, per_row=32, why="float32 scale per row"),
        subjects=ALL + CONVOLUTIONS),
    Row("qint4", _run("qint4", torch.bfloat16), Bits(4, 128, 32, why=_GROUPED)),
    Row("qint2", _run("qint2", torch.bfloat16), Bits(2, 128, 32, why=_GROUPED)),
)  # fmt: skip
