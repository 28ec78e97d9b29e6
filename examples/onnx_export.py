"""Export a quantized model to ONNX and run it in onnxruntime: the stored codes, the same numbers.

For transformers text models, `pennyweight export-onnx MODEL_DIR model.onnx` is enough.

    pip install ".[onnx]"
    python examples/onnx_export.py model.onnx
"""

import sys
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn

import pennyweight as pw
from pennyweight.export.onnx import export_onnx


def main(path: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512)).eval()
    float_bytes = sum(p.nbytes for p in model.parameters())
    pw.quantize_(model, pw.Int4WeightOnlyConfig(group_size=128))

    report = export_onnx(model, (torch.randn(2, 512),), path, input_names=["x"], output_names=["y"])
    print(report)  # the ONNX form of each weight; axis 0 of the input is dynamic
    print(f"{float_bytes / 1e6:.2f} MB in float32 -> {Path(path).stat().st_size / 1e6:.2f} MB in {path}")

    x = torch.randn(5, 512)
    (theirs,) = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(["y"], {"x": x.numpy()})
    with torch.no_grad():
        ours = model(x).numpy()
        pw.dequantize_(model)
        exact = model(x).numpy()
    print(f"onnxruntime to Pennyweight: largest difference {np.abs(theirs - ours).max():.1e}")
    print(f"onnxruntime to the dequantized weights in float32: {np.abs(theirs - exact).max():.1e}")


if __name__ == "__main__":
    main(sys.argv[1])
