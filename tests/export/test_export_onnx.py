"""export_onnx itself: what it refuses, what it leaves alone, and files."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core import spec
from pennyweight.export import onnx as saving
from pennyweight.export.onnx import export_onnx

MX_BOTH = pw.MXDynamicActivationMXWeightConfig()


def small(config: Any = None) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(64, 48), nn.Dropout(0.5), nn.Linear(48, 16)).eval()
    pw.quantize_(model, config or pw.UIntXWeightOnlyConfig(group_size=32))
    return model


def run(path: Any, x: Tensor) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


@torch.no_grad()
def test_silent_and_the_model_is_as_it_was(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, path = small().train(), tmp_path / "m.onnx"
    before = {n: id(p) for n, p in model.named_parameters()}
    capfd.readouterr()
    report = export_onnx(model, (torch.randn(2, 64),), path)
    assert capfd.readouterr() == ("", "")
    assert {n: id(p) for n, p in model.named_parameters()} == before
    assert all(m.training for m in model.modules())
    x = torch.randn(5, 64)
    assert np.abs(run(path, x) - model.eval()(x).numpy()).max() < 1e-5
    onnx.checker.check_model(onnx.load(str(path)))
    assert report.files == [str(path)]
    assert os.listdir(tmp_path) == ["m.onnx"]


def test_the_report(tmp_path: Path) -> None:
    model, path = small(), tmp_path / "m.onnx"
    names = {"input_names": ["features"], "output_names": ["scores"]}
    report = export_onnx(model, (torch.randn(2, 64),), path, opset=22, **names)
    assert [r.name for r in report.rows] == ["0.weight", "2.weight", "0.bias", "2.bias"]
    assert [(r.type, r.shape, r.kernel) for r in report.quantized] == [
        ("Linear", (48, 64), "MatMulNBits"), ("Linear", (16, 48), "MatMulNBits"),
    ]  # fmt: skip
    assert {r.note for r in report.skipped} == {"float32"}
    data = json.loads(report.to_json())
    assert data["files"] == [str(path)]
    assert (data["opset"], data["inputs"], data["outputs"]) == (22, ["features"], ["scores"])
    loaded = onnx.load(str(path))
    assert {o.domain: o.version for o in loaded.opset_import} == {"": 22, "com.microsoft": 1}
    assert [v.name for v in [*loaded.graph.input, *loaded.graph.output]] == ["features", "scores"]
    assert [d.dim_param for d in loaded.graph.input[0].type.tensor_type.shape.dim] == ["batch", ""]
    assert "0.weight" in str(report)


def test_what_no_output_needs_is_not_in_the_file(tmp_path: Path) -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = nn.Linear(64, 8, bias=False), nn.Linear(64, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.spare(x)
            return self.used(x)

    model = Half().eval()
    pw.quantize_(model, pw.Int8WeightOnlyConfig())
    report = export_onnx(model, (torch.randn(2, 64),), tmp_path / "m.onnx")
    assert [(r.name, r.bytes_after, r.note) for r in report.rows] == [
        ("used.weight", 8 * 64 + 8 * 4, ""),
        ("spare.weight", 0, "not used by any output"),
        ("spare.bias", 0, "not used by any output"),
    ]
    assert not [t for t in onnx.load(str(tmp_path / "m.onnx")).graph.initializer if "spare" in t.name]


def test_free_axes(tmp_path: Path) -> None:
    model, path = small(), tmp_path / "m.onnx"
    export_onnx(model, (torch.randn(1, 64),), path)  # one row says nothing about how many there will be
    assert run(path, torch.randn(7, 64)).shape == (7, 16)
    export_onnx(model, (torch.randn(2, 3, 64),), path, dynamic_shapes=({0: "rows", 1: torch.export.Dim("columns")},))
    assert run(path, torch.randn(5, 4, 64)).shape == (5, 4, 16)
    sizes = onnx.load(str(path)).graph.input[0].type.tensor_type.shape.dim
    assert [d.dim_param for d in sizes] == ["rows", "columns", ""]
    export_onnx(model, (torch.randn(3, 64),), path, dynamic_batch=False)
    assert [d.dim_value for d in onnx.load(str(path)).graph.input[0].type.tensor_type.shape.dim] == [3, 64]


def test_inputs_that_do_not_agree(tmp_path: Path) -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b.sum()

    with pytest.raises(
        ValueError, match=r"tensors with equal sizes of axis 0, got .*'argument 0': 2.*pass dynamic_shapes"
    ):
        export_onnx(Two(), (torch.randn(2, 4), torch.randn(3)), tmp_path / "m.onnx")
    export_onnx(Two(), (torch.randn(2, 4), torch.randn(3)), tmp_path / "m.onnx", dynamic_shapes=({0: "rows"}, None))


@torch.no_grad()
def test_bfloat16_is_refused_with_the_remedy(tmp_path: Path) -> None:
    model, path = nn.Sequential(nn.Linear(64, 48)).to(torch.bfloat16).eval(), tmp_path / "m.onnx"
    pw.quantize_(model, pw.Int4WeightOnlyConfig(group_size=32))
    codes, scale = model[0].weight.codes.clone(), model[0].weight.scale.clone()
    with pytest.raises(ValueError, match=r"0.weight is bfloat16; .*model.float\(\) converts it, and keeps the codes"):
        export_onnx(model, (torch.randn(2, 64),), path)
    model.float()
    assert torch.equal(model[0].weight.codes, codes)
    assert torch.equal(model[0].weight.scale, scale)
    export_onnx(model, (torch.randn(2, 64),), path)
    x = torch.randn(3, 64)
    y = x @ model[0].weight.dequantize().t() + model[0].bias
    assert np.abs(run(path, x) - y.numpy()).max() < 1e-5


def test_what_has_no_form_is_named(tmp_path: Path) -> None:
    model, path = small(MX_BOTH), tmp_path / "m.onnx"
    with pytest.raises(
        ValueError, match=r"0.weight \[48, 64\] \(e4m3.*, input dynamic e4m3.*has no ONNX pattern for lin"
    ) as e:
        export_onnx(model, (torch.randn(2, 64),), path)
    assert "decode + MatMul: its activation scale is" in str(e.value)
    assert "pass allow_float=True" in str(e.value)
    assert os.listdir(tmp_path) == []


@torch.no_grad()
def test_allow_float(tmp_path: Path) -> None:
    model, path = small(MX_BOTH), tmp_path / "m.onnx"
    report = export_onnx(model, (torch.randn(2, 64),), path, allow_float=True)
    assert report.quantized == []
    assert report.rows[0].note.startswith("float32: no pattern for e4m3")
    x = torch.randn(3, 64)
    pw.dequantize_(model)  # inputs are not quantized in the file: it says so
    assert np.abs(run(path, x) - model(x).numpy()).max() < 1e-5


def test_an_input_that_only_an_unknown_op_would_take(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bk,nk->bn", x, self.layer.weight * 2)

    model = Odd().eval()
    pw.quantize_(model, pw.Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(
        ValueError, match=r"layer.weight: aten.mul.* uses this weight, which has activation quantization"
    ):
        export_onnx(model, (torch.randn(2, 16),), tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"style": "fast"}, "style must be one of auto, matmulnbits, qdq, got 'fast'"),
        ({"opset": 20}, "opset must be at least 21, .* got 20"),
        ({"accuracy_level": 5}, "accuracy_level must be 0 to 4"),
    ],
)
def test_wrong_arguments(how: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        export_onnx(small(), (torch.randn(2, 64),), tmp_path / "m.onnx", **how)
    with pytest.raises(ValueError, match=r"m.onnx: there is no folder"):
        export_onnx(small(), (torch.randn(2, 64),), tmp_path / "no" / "m.onnx")


def test_what_is_not_installed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxscript" else object())
    with pytest.raises(ImportError, match=r"needs onnxscript: pip install onnx onnxscript onnxruntime"):
        export_onnx(small(), (torch.randn(2, 64),), tmp_path / "m.onnx")


def test_the_accuracy_level_is_in_the_file(tmp_path: Path) -> None:
    for level in (1, 4):
        export_onnx(small(), (torch.randn(2, 64),), tmp_path / "m.onnx", accuracy_level=level)
        nodes = [n for n in onnx.load(str(tmp_path / "m.onnx")).graph.node if n.op_type == "MatMulNBits"]
        assert [a.i for n in nodes for a in n.attribute if a.name == "accuracy_level"] == [level, level]


@torch.no_grad()
def test_large_weights_go_to_a_second_file(tmp_path: Path) -> None:
    model, path = small(), tmp_path / "m.onnx"
    report = export_onnx(model, (torch.randn(2, 64),), path, max_inline_bytes=1000)
    assert report.files == [str(path), f"{path}.data"]
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "m.onnx.data"]
    assert path.stat().st_size < 6000
    x = torch.randn(3, 64)
    assert np.abs(run(path, x) - model(x).numpy()).max() < 1e-5


def test_a_failure_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")

    def full(*paths: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(saving, "rename_into_place", full)
    with pytest.raises(OSError, match="No space left"):
        export_onnx(small(), (torch.randn(2, 64),), path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["m.onnx"]


def test_nf4_numbers_are_in_the_file_once(tmp_path: Path) -> None:
    export_onnx(small(pw.SpecConfig(spec.NF4_BLOCK)), (torch.randn(2, 64),), tmp_path / "m.onnx")
    tables = [
        t for t in onnx.load(str(tmp_path / "m.onnx")).graph.initializer if list(t.dims) == [16] and "numbers" in t.name
    ]
    assert len(tables) == 1


@pytest.mark.parametrize("style", ["auto", "matmulnbits", "qdq"])
def test_a_file_says_which_engine_it_is_for(style: str, tmp_path: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    pw.quantize_(model, pw.Int4WeightOnlyConfig(group_size=32))
    export_onnx(model, (torch.randn(2, 64),), tmp_path / "m.onnx", style=style)
    told = {p.key: p.value for p in onnx.load(str(tmp_path / "m.onnx")).metadata_props}
    assert told["pennyweight.style"] == style
    assert told["pennyweight.engine"].startswith("any of opset 21" if style == "qdq" else "onnxruntime")


@pytest.mark.parametrize(
    "config", [pw.UIntXWeightOnlyConfig(torch.uint2, group_size=32), pw.NVFP4WeightOnlyConfig()], ids=["uint2", "nvfp4"]
)
def test_packed_codes_are_shifted_in_32_bits(config: Any, tmp_path: Any) -> None:
    """OpenVINO computes the same graph over uint8 wrongly, without an error."""
    model = nn.Sequential(nn.Linear(64, 32)).eval()
    pw.quantize_(model, config)
    export_onnx(model, (torch.randn(2, 64),), tmp_path / "m.onnx")
    graph = onnx.load(str(tmp_path / "m.onnx")).graph
    kinds = {t.name: t.data_type for t in graph.initializer}
    made = {name: node for node in graph.node for name in node.output}
    shifts = [node for node in graph.node if node.op_type == "BitShift"]
    assert shifts
    for node in shifts:
        cast = made[node.input[0]]
        assert cast.op_type == "Cast"
        assert cast.attribute[0].i == onnx.TensorProto.UINT32
        assert kinds[node.input[1]] == onnx.TensorProto.UINT32
