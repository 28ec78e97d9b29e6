"""Embeddings: the rows asked for, bit for bit, for every way that codes lie in bytes."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core import formats, spec
from pennyweight.export.onnx import export_onnx

ROWS, WIDTH = 23, 38  # neither fills blocks nor bytes
S = pw.QuantSpec
SPECS = {
    "int8": S(formats.INT8, (-1,)),
    "int8_tensor": S(formats.INT8, None),
    "uint8_zero": S(formats.UINT8, (16,), zero_point=True),
    "uint4_zero": S(formats.UINT4, (-1,), zero_point=True),
    "int4_blocks": S(formats.INT4, (16,)),
    "int4_rows_too": S(formats.INT4, (5, 16)),
    "int4_odd": S(formats.INT4, (7,)),
    "tinygemm": S(formats.UINT4, (32,), torch.bfloat16, offset=torch.bfloat16, mid=8),
    "int2": S(formats.INT2, (32,)),
    "uint1": S(formats.UINT1, (16,), zero_point=True),
    "int3": S(formats.INT3, (16,)),
    "int6": S(formats.INT6, (16,)),
    "e4m3": S(formats.E4M3, (-1,)),
    "e5m2": S(formats.E5M2, (8, 16)),
    "e3m2": S(formats.E3M2, (-1,)),
    "nf4": spec.NF4_DOUBLE,
    "nvfp4": spec.NVFP4,
    "mxfp8": spec.MXFP8,
}


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict({name: nn.Embedding(ROWS, WIDTH) for name in SPECS})

    def forward(self, index: Tensor) -> tuple[Tensor, ...]:
        return tuple(table(index) for table in self.tables.values())


@pytest.mark.parametrize("style", ["auto", "matmulnbits", "qdq"])
def test_rows_are_exact(style: str, tmp_path: Path) -> None:
    model, path = Tables().eval(), tmp_path / "tables.onnx"
    for name, s in SPECS.items():
        pw.quantize_(model.tables[name], pw.SpecConfig(s), filter_fn=lambda m, n: True)
    report = export_onnx(model, (torch.zeros(2, 3, dtype=torch.long),), path, style=style)
    assert {r.kernel for r in report.quantized} == {"Gather + decode"}
    index = torch.randint(0, ROWS, (5, 3))
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options: Any = onnxruntime.SessionOptions()
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        for name, got in zip(SPECS, session.run(None, {report.inputs[0]: index.numpy()}), strict=True):
            y = model.tables[name].weight.dequantize().detach()[index]
            assert np.array_equal(got, y.numpy()), name
