"""Every row of the engine table that onnxruntime and OpenVINO read: their outputs are those of the decoded weights."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.spec import FP8_BLOCK
from pennyweight.planning.configs.by_name import CONFIGS, named
from pennyweight.planning.engines import ROWS, Reads, SpecRow, row_of
from pennyweight.planning.parameters import Site

pytest.importorskip("onnx_ir")
SITE = Site("0.weight", "0", "weight", "linear", (64, 256), torch.float32, "cpu", "Linear")
OTHERS = {
    "SpecConfig(FP8_BLOCK)": pw.SpecConfig(FP8_BLOCK),
    "Int8StaticActivationInt8WeightConfig": pw.Int8StaticActivationInt8WeightConfig(act_quant_scale=0.03),
    "IntxWeightOnlyConfig": pw.IntxWeightOnlyConfig("int7", pw.PerGroup(64), pw.MappingType.ASYMMETRIC),
}


def config_of(row: SpecRow) -> Any:
    return OTHERS[row.example] if row.example in OTHERS else named(row.example)


def run(engine: str, path: Path, x: Tensor) -> Tensor:
    if engine == "onnxruntime":
        module = pytest.importorskip("onnxruntime")
        session = module.InferenceSession(path, providers=["CPUExecutionProvider"])
        return torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
    openvino = pytest.importorskip("openvino")
    # by default it computes in bfloat16 on processors that can, and rounds inputs of integer weights to 8 bits
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    model = openvino.Core().compile_model(str(path), "CPU", exact)
    return torch.from_numpy(model([x.numpy()])[0].copy())


def test_examples_are_of_their_rows() -> None:
    assert {row.example for row in ROWS} - set(CONFIGS) - {"uint4:128"} == set(OTHERS)
    for row in ROWS:
        assert row_of(config_of(row).scheme(SITE)) is row


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.example)
def test_the_engine_computes_with_the_stored_weights(row: SpecRow, engine: str, tmp_path: Path) -> None:
    from pennyweight.export.onnx import export_onnx

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 64, bias=False)).eval()
    pw.quantize_(model, config_of(row), dry_run=True)
    if not isinstance(row.engines[engine], Reads):
        with pytest.raises(pw.PlanError, match="does not read"):
            pw.quantize_(model, config_of(row), for_=engine)
        pw.quantize_(model, config_of(row))
        with pytest.raises(ValueError, match=r"0\.weight|layer"):
            export_onnx(model, (torch.randn(2, 256),), tmp_path / "m.onnx", input_names=["x"])
        return
    pw.quantize_(model, config_of(row), for_=engine)
    export_onnx(model, (torch.randn(2, 256),), tmp_path / "m.onnx", input_names=["x"])
    x = torch.randn(5, 256)
    y = run(engine, tmp_path / "m.onnx", x)
    weight = model[0].weight
    assert isinstance(weight, pw.AffineQuantizedTensor)
    expected = model(x).detach() if weight.act is not None else x @ weight.dequantize().T
    error = float((y - expected).abs().max() / expected.abs().max())
    noted = row.engines[engine] != Reads("onnx")
    assert error < (1e-5 if weight.act is None else 0.02 if noted else 5e-3), f"{error:.2e}"
    assert math.isfinite(error)
