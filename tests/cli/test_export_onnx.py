"""export-onnx: a checkpoint in, a file that onnxruntime runs with the model's own results out."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import pennyweight as pw
from pennyweight.io.meta_model import fresh_model


def logits(path: Path, inputs: dict[str, torch.Tensor]) -> np.ndarray:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return session.run(["logits"], {k: v.numpy() for k, v in inputs.items()})[0]


def text() -> dict[str, torch.Tensor]:
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[2, 5:] = 0
    return {"input_ids": torch.randint(0, 128, (3, 9)), "attention_mask": mask}


@torch.no_grad()
def assert_like(path: Path, model: nn.Module) -> None:
    inputs = text()
    y = model.eval()(**inputs, use_cache=False).logits.numpy()
    assert np.abs(logits(path, inputs) - y).max() <= 5e-6 * np.abs(y).max()


# tests/export has each style
@pytest.mark.parametrize("style", ["auto", pytest.param("matmulnbits", marks=pytest.mark.exhaustive)])
def test_a_quantized_checkpoint(run: Any, llama: Path, tmp_path: Path, style: str) -> None:
    small, out, report_file = tmp_path / "small", tmp_path / "model.onnx", tmp_path / "report.json"
    assert run("quantize", llama, small, "--config", "int4", "--group-size", "32").exit_code == 0
    result = run("export-onnx", small, out, "--style", style, "--json", report_file)
    assert result.exit_code == 0
    assert result.stderr.startswith("note: bfloat16 is written as float32")
    assert f"{out}: {out.stat().st_size:,} bytes" in result.stdout
    report = json.loads(report_file.read_text())
    assert report["file_bytes"] == {str(out): out.stat().st_size}
    assert (report["inputs"], report["outputs"]) == (["input_ids", "attention_mask"], ["logits"])
    model = pw.load(small, fresh_model(str(small))).float()
    quantized = {n for n, p in model.named_parameters() if isinstance(p, pw.AffineQuantizedTensor)}
    assert {r["name"].removeprefix("model.") for r in report["rows"] if r["scheme"]} == quantized
    assert {r["kernel"] for r in report["rows"] if r["scheme"]} == {"MatMulNBits"}
    assert_like(out, model)


def test_a_float_checkpoint_and_a_config(run: Any, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "model.onnx"
    result = run("export-onnx", llama, out, "--config", "uint4", "--group-size", "32", "--json", "-")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["files"] == [str(out)]
    model = pw.load(llama, fresh_model(str(llama)))
    pw.quantize_(model, pw.UIntXWeightOnlyConfig(dtype="uint4", group_size=32))
    assert_like(out, model.float())


def refused(run: Any, *arguments: Any) -> str:
    result = run("export-onnx", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    return line.removeprefix("pennyweight: ")


def test_refusals(run: Any, plain: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "model.onnx"
    assert "there is no config.json; the layers of the model cannot be determined" in refused(run, plain, out)
    assert "contains float weights; pass --config to quantize them, one of int8" in refused(run, llama, out)
    assert "--group-size needs --config" in refused(run, llama, out, "--group-size", "32")
    assert "unknown config 'int9'" in refused(run, llama, out, "--config", "int9")
    assert f"{llama} is a folder; pass the name of a file" in refused(run, llama, llama, "--config", "int8")
    assert "does not exist" in refused(run, llama, tmp_path / "no" / "m.onnx", "--config", "int8")
    assert "style must be one of auto" in refused(run, llama, out, "--config", "int8", "--style", "fast")
    small = tmp_path / "small"
    run("quantize", llama, small, "--config", "int8")
    assert "is already quantized (model.layers.0" in refused(run, small, out, "--config", "int8")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnx_ir" else object())
    assert refused(run, small, out) == "export to ONNX needs onnx_ir: pip install onnx onnxscript onnxruntime"
    assert not os.path.exists(out)


def test_a_strange_config(run: Any, llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "hidden_act": "no such thing"}))
    assert "transformers cannot build it: KeyError" in refused(run, llama, tmp_path / "m.onnx", "--config", "int8")


def test_a_model_that_is_not_of_text(run: Any, tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=16
    )
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    line = refused(run, tmp_path / "vit", tmp_path / "m.onnx", "--config", "int8")
    assert line.startswith("ViTModel: only models with input_ids")


def test_a_buffer_that_older_releases_stored(run: Any, tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=16,
    )  # fmt: skip
    folder = tmp_path / "bert"
    transformers.BertModel(config).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    state["embeddings.position_ids"] = torch.arange(16)[None]
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    result = run("export-onnx", folder, tmp_path / "m.onnx", "--config", "int8", "--json", "-")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["outputs"] == ["last_hidden_state"]
