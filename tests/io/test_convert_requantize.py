"""convert tells what it rounds again, asks before it loses an algorithm's work, and writes what an engine reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import pennyweight as pw
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io import CheckpointError
from pennyweight.io.codecs.gptq import GPTQ
from pennyweight.io.manifest import Meta
from pennyweight.planning.configs.by_name import by_name
from pennyweight.planning.parameters import Site
from tests.cli.conftest import run
from tests.io.gguf.test_export import llama, saved

__all__ = ["run"]

SITE = Site("u", "u", "weight", "linear", (64, 128), torch.float16, "cpu", "Linear")
INT4 = pw.Int4WeightOnlyConfig(32)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(64, 128)
        self.q_proj, self.k_proj = nn.Linear(128, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.q_proj(x).sum() + self.k_proj(x).sum()


def own(folder: Path, config: Any, **how: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = Net().half()
    pw.quantize_(model, config, **how)
    pw.save(model, folder)
    (folder / "config.json").write_text(json.dumps({"model_type": "x"}))
    return pw.load(folder)


def metadata(folder: Path) -> dict[str, str]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return dict(file.metadata())


def test_rounding_again_is_told_with_the_numbers(tmp_path: Path) -> None:
    before = own(tmp_path / "own", INT4)
    report = pw.convert(tmp_path / "own", tmp_path / "there", to="gptq")
    after = pw.load(tmp_path / "there")
    moved = total = 0
    for row in report.quantized:
        was, now = before[row.name].dequantize(torch.float32), after[row.name].dequantize(torch.float32)
        moved += int(((now - was).abs() > was.abs() / 256).sum())
        total += was.numel()
        assert row.note.startswith("requantized from uint4[32]")
    worst = min(report.quantized, key=lambda row: row.sqnr or 0)
    assert report.notes == [
        f"warning: 2 weights were rounded again, {moved:,} of {total:,} numbers changed; SQNR against the source "
        f"{worst.sqnr:.1f} dB in the worst, {worst.name}"
    ]
    assert 0 < moved < total
    assert metadata(tmp_path / "there") == {"format": "pt", "pennyweight_algorithm": "nearest"}


def test_exact_and_rounded_scales_are_no_warning(tmp_path: Path) -> None:
    own(tmp_path / "own", by_name("w4a16", 32), algorithm="hqq")
    assert pw.convert(tmp_path / "own", tmp_path / "a", to="compressed-tensors").notes == []
    own(tmp_path / "wide", pw.IntxWeightOnlyConfig("int4", pw.PerGroup(32), scale_dtype=torch.float32), algorithm="hqq")
    report = pw.convert(tmp_path / "wide", tmp_path / "b", to="gptq")
    assert {row.note.partition(":")[0] for row in report.quantized} == {
        "the codes of int4[32] scale=f32, scales rounded"
    }
    assert report.notes == []


def test_codes_that_an_algorithm_chose_are_kept_unless_told(tmp_path: Path) -> None:
    to = "gptq"
    own(tmp_path / "own", INT4, algorithm="hqq")
    assert metadata(tmp_path / "own")["pennyweight_algorithm"] == "hqq"
    for options in ({}, {"dry_run": True}):
        with pytest.raises(CheckpointError, match=r"k_proj.weight: hqq chose its codes.*1 more.*requantize=True"):
            pw.convert(tmp_path / "own", tmp_path / "there", to=to, **options)
        assert not (tmp_path / "there").exists()
    report = pw.convert(tmp_path / "own", tmp_path / "there", to=to, requantize=True)
    assert report.notes[0].startswith("warning: 2 weights were rounded again")
    # what was written still names the algorithm, and goes on to be kept
    assert metadata(tmp_path / "there")["pennyweight_algorithm"] == "hqq"
    pw.convert(tmp_path / "own", tmp_path / "native")
    assert metadata(tmp_path / "native")["pennyweight_algorithm"] == "hqq"


def test_gguf_files_too(tmp_path: Path) -> None:
    saved(llama(), tmp_path / "small", tokenizer=True)
    model = llama()
    pw.quantize_(model, "w4a16", skip=["lm_head"], algorithm="hqq")
    model.save_pretrained(tmp_path / "small")  # transformers' own writer records it too
    assert metadata(tmp_path / "small")["pennyweight_algorithm"] == "hqq"
    assert pw.convert(tmp_path / "small", tmp_path / "a.gguf", for_="llama.cpp").notes == []  # the codes as Q4_0
    with pytest.raises(CheckpointError, match=r"hqq chose its codes, and GGUF cannot store them.*requantize=True"):
        pw.convert(tmp_path / "small", tmp_path / "b.gguf", to="gguf", gguf_type="q8_0")
    assert not (tmp_path / "b.gguf").exists()
    report = pw.convert(tmp_path / "small", tmp_path / "b.gguf", to="gguf", gguf_type="q8_0", requantize=True)
    assert report.notes[-1].startswith("warning: 14 weights were rounded again; SQNR against the source")


def test_a_loaded_model_remembers(tmp_path: Path) -> None:
    own(tmp_path / "own", INT4, algorithm="hqq")
    pw.save(pw.load(tmp_path / "own", Net().half()), tmp_path / "again")
    assert metadata(tmp_path / "again")["pennyweight_algorithm"] == "hqq"
    pw.convert(tmp_path / "own", tmp_path / "gptq", to="gptq", requantize=True)
    with pw.open(tmp_path / "gptq") as checkpoint:
        assert checkpoint.algorithm == "hqq"


def test_a_dequantized_model_has_no_algorithm(tmp_path: Path) -> None:
    model = Net().half()
    pw.quantize_(model, INT4, algorithm="hqq")
    pw.dequantize_(model)
    pw.quantize_(model, INT4)
    pw.save(model, tmp_path / "m")
    assert "pennyweight_algorithm" not in metadata(tmp_path / "m")


def test_act_order_is_lost_only_when_told(tmp_path: Path) -> None:
    w = QT.from_float(torch.randn(64, 128, dtype=torch.float16), by_name("w4a16", 32).scheme(SITE).weight)
    pw.save({"up.weight": w.with_(perm=torch.randperm(128))}, tmp_path / "own")
    pw.convert(tmp_path / "own", tmp_path / "gptq", to="gptq")
    theirs = json.loads((tmp_path / "gptq" / "config.json").read_text())
    assert theirs["quantization_config"]["desc_act"] is True
    pw.convert(tmp_path / "gptq", tmp_path / "ct", to="compressed-tensors")  # says that it was rounded to nearest
    save_file(load_file(tmp_path / "gptq" / "model.safetensors"), tmp_path / "gptq" / "model.safetensors")
    with pytest.raises(CheckpointError, match="GPTQ chose its codes, and compressed-tensors cannot store them"):
        pw.convert(tmp_path / "gptq", tmp_path / "ct2", to="compressed-tensors")
    pw.convert(tmp_path / "gptq", tmp_path / "ct2", to="compressed-tensors", requantize=True)


def test_for_an_engine(tmp_path: Path) -> None:
    rules = pw.FqnToConfig({"_embeddings": "int8", "_default": by_name("w4a16", 32)})
    own(tmp_path / "own", rules)
    report = pw.convert(tmp_path / "own", tmp_path / "v", for_="vllm")
    assert {row.name: row.note for row in report.rows} == {
        "embed_tokens.weight": "vLLM on a CPU reads embeddings only as floats",
        "k_proj.weight": "exact",
        "q_proj.weight": "exact",
    }
    assert json.loads((tmp_path / "v" / "config.json").read_text())["quantization_config"]["format"] == "pack-quantized"
    assert not isinstance(pw.load(tmp_path / "v")["embed_tokens.weight"], QT)
    assert pw.convert(tmp_path / "own", tmp_path / "g", to="gptq", for_="vllm").config.endswith("to gptq")
    with pytest.raises(
        ValueError, match="vLLM on a CPU does not read to='fp8'; it reads compressed-tensors, gptq, awq"
    ):
        pw.convert(tmp_path / "own", tmp_path / "x", to="fp8", for_="vllm")
    with pytest.raises(ValueError, match="onnxruntime reads ONNX files: pennyweight export-onnx"):
        pw.convert(tmp_path / "own", tmp_path / "x", for_="onnxruntime")
    own(tmp_path / "int8", "int8")
    with pytest.raises(CheckpointError, match=r"k_proj.weight: vLLM on a CPU does not read int8.*use 'w8a8'"):
        pw.convert(tmp_path / "int8", tmp_path / "x", for_="vllm")
    own(tmp_path / "parts", pw.FqnToConfig({"q_proj": by_name("w4a16", 32), "k_proj": "w8a8"}))
    with pytest.raises(CheckpointError, match="computes both as one layer, qkv_proj"):
        pw.convert(tmp_path / "parts", tmp_path / "x", for_="vllm")
    pw.convert(tmp_path / "parts", tmp_path / "y", for_="transformers")


def test_rules_of_gptq_cover_fused_layers(tmp_path: Path) -> None:
    def meta(bits: int) -> Meta:
        return Meta(by_name(f"int{bits}", 32).scheme(SITE).weight if bits != 4 else small, (64, 64), torch.float16)

    small = by_name("w4a16", 32).scheme(SITE).weight
    kinds = {"a.q_proj": 8, "a.k_proj": 8, "b.q_proj": 8, "b.k_proj": 4, "c.up_proj": 4, "d": 4, "e": 4}
    assert GPTQ.writing is not None
    plain = ("f.q_proj.weight", "f.v_proj.weight", "lm_head.weight")
    method = GPTQ.writing.method({f"{name}.weight": meta(bits) for name, bits in kinds.items()}, plain)
    assert method["bits"] == 4
    assert set(method["dynamic"]) == {
        *(rf"-:^f\.{name}$" for name in ("q_proj", "v_proj", "qkv_proj")),
        *(rf"+:^a\.{name}$" for name in ("q_proj", "k_proj", "qkv_proj")),
        r"+:^b\.q_proj$",
    }


def test_the_command(run: Any, tmp_path: Path) -> None:
    own(tmp_path / "own", INT4, algorithm="hqq")
    refused = run("convert", tmp_path / "own", tmp_path / "out", "--for", "vllm")
    assert refused.exit_code == 2
    assert "hqq chose its codes" in refused.stderr
    assert "pass --requantize if that is wanted" in refused.stderr
    told = run("convert", tmp_path / "own", tmp_path / "out", "--for", "vllm", "--requantize")
    assert told.exit_code == 0, told.stderr
    assert "pennyweight: warning: 2 weights were rounded again" in told.stderr
    assert (
        "unknown engine 'vlm' (did you mean 'vllm'?)"
        in run("convert", tmp_path / "own", tmp_path / "o", "--for", "vlm").stderr
    )
