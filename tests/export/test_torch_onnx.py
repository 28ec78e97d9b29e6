"""torch.onnx.export of a quantized model: its error names the exporter that works; other models are torch's matter."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw

MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(64, 32)), torch.ones(2, 64)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3)), torch.ones(2, 3, 8, 8)),
    "recurrent": (lambda: nn.LSTM(64, 32), torch.ones(5, 2, 64)),
}


@pytest.mark.filterwarnings("ignore")  # torch's, of both exporters
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_error_names_our_exporter(name: str, dynamo: bool, tmp_path: Path) -> None:
    make, x = MODELS[name]
    model = make().eval()
    pw.quantize_(model, "int8", lambda module, fqn: True)
    said = r"weight\w* is quantized, which torch.onnx.export cannot write.*pennyweight\.export\.onnx\.export_onnx"
    for frozen in (False, True):
        if frozen:
            pw.inference.freeze_(model)
        with pytest.raises(torch.onnx.OnnxExporterError, match=said), torch.no_grad():
            torch.onnx.export(model, (x,), str(tmp_path / "m.onnx"), dynamo=dynamo, verbose=False)


@pytest.mark.filterwarnings("ignore")
def test_an_exported_program_and_float_models(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(64, 32)).eval(), torch.ones(2, 64)
    torch.onnx.export(model, (x,), str(tmp_path / "float.onnx"), dynamo=True, verbose=False)
    assert (tmp_path / "float.onnx").exists()
    with pytest.raises(Exception, match="step 1/3") as caught:  # an error of torch's stays as it is
        torch.onnx.export(model, (x, x), str(tmp_path / "m.onnx"), dynamo=True, verbose=False)
    assert "quantized" not in str(caught.value)
    pw.quantize_(model, "int8")
    program = torch.export.export(model, (x,))
    with pytest.raises(torch.onnx.OnnxExporterError, match=r"node linear is quantized.*export_onnx"):
        torch.onnx.export(program, (), str(tmp_path / "m.onnx"), dynamo=True, verbose=False)
