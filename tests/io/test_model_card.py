"""The model card: its front matter is what the Hub reads, its numbers are those of the files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

import pennyweight as pw
from pennyweight.io.model_card import MARK, REPOSITORY, engines, is_generated, model_card, write_card
from pennyweight.planning.quantize_report import size
from tests.integrations.small import llama

BASE_CARD = """---
# a comment
license: other
license_name: some-license
license_link: https://example.com/license
language:
- en
- "no"
tags:
- chat
datasets: [x]
pipeline_tag: text-generation
---
# Base
"""


def folder_of(path: Path, config: Any = "int4", **how: Any) -> tuple[Path, pw.Report]:
    model = llama()
    report = pw.quantize_(model, config, **how)
    model.save_pretrained(path)
    return path, report


def front_matter(text: str) -> dict[str, Any]:
    """As the Hub's library parses it; it raises for invalid metadata."""
    return ModelCard(text, ignore_metadata_errors=False).data.to_dict()


def test_front_matter(tmp_path: Path) -> None:
    folder, report = folder_of(tmp_path / "small")
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text(BASE_CARD)
    data = front_matter(model_card(str(folder), source=str(base), base="org/base-1.5", report=report))
    assert data == {
        "library_name": "transformers", "base_model": "org/base-1.5", "base_model_relation": "quantized",
        "quantized_by": "pennyweight", "license": "other", "license_name": "some-license",
        "license_link": "https://example.com/license", "language": ["en", "no"], "pipeline_tag": "text-generation",
        "tags": ["pennyweight", "quantized", "int4"],
    }  # fmt: skip


@pytest.mark.parametrize("base_card", ["", "no front matter", "---\nlicense: mit\n", "---\n---\n", "\udcff---\n"])
def test_front_matter_without_one_of_the_base(tmp_path: Path, base_card: str) -> None:
    folder, _ = folder_of(tmp_path / "small")
    (tmp_path / "README.md").write_bytes(base_card.encode(errors="surrogateescape"))
    data = front_matter(model_card(str(folder), source=str(tmp_path)))
    assert data.keys() == {"library_name", "quantized_by", "pipeline_tag", "tags"}


def test_strange_names_stay_strings(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path / "small")
    assert front_matter(model_card(str(folder), base="no/1.5"))["base_model"] == "no/1.5"
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["x\n```\nLlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    assert "AutoModel.from_pretrained" in model_card(str(folder))


def test_the_numbers(tmp_path: Path) -> None:
    folder, report = folder_of(tmp_path / "small", skip=["*.v_proj"])
    text = model_card(str(folder), report=report, bytes_before=10**6, measured=[("top-1 agreement", "99%")])
    known = [row.sqnr for row in report.quantized if row.sqnr is not None]
    least = min(report.quantized, key=lambda row: row.sqnr or 0)
    assert f"mean {sum(known) / len(known):.1f} dB, least {least.sqnr:.1f} dB ({least.name})" in text
    after = (folder / "model.safetensors").stat().st_size
    assert f"| size | 1 MB → {size(after)}, {10**6 / after:.2f}x smaller |" in text
    assert "| top-1 agreement | 99% |" in text
    assert "| `model.layers.*.self_attn.v_proj.weight` | 2 | skipped by '*.v_proj' |" in text
    assert "`Int4WeightOnlyConfig()`" in text
    assert json.loads(text.split("```json\n")[1].split("```")[0])["config"] == {"type": "Int4WeightOnlyConfig"}
    assert model_card(str(folder), report=report) == model_card(str(folder), report=report)
    without = model_card(str(folder))
    assert "SQNR" not in without
    floats = sum(t.numel() * t.element_size() for t in llama().state_dict().values())
    assert f"| size | {size(floats)} → " in without


def test_golden_outputs_are_named(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path / "small")
    model = llama()
    found = pw.report.golden(model, [{"input_ids": torch.arange(12)[None]}])
    found.save(folder)
    assert f"mean KL at most {found.bound:.3g}" in model_card(str(folder))
    (folder / "golden.safetensors").write_bytes(b"x" * 20)
    assert "verify" not in model_card(str(folder))


@pytest.mark.parametrize("to", ["compressed-tensors", "gptq", "awq", "fp8", "float", "gguf", "bitsandbytes"])
def test_every_format_has_a_card(tmp_path: Path, to: str) -> None:
    configs = {"fp8": pw.Float8WeightOnlyConfig(), "bitsandbytes": "nf4"}
    config = configs.get(to, pw.IntxWeightOnlyConfig(torch.int4, pw.PerGroup(32)))
    folder, _ = folder_of(tmp_path / "small", config)
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    pw.convert(folder, out, to=to)
    text = model_card(str(out))
    front_matter(text)
    assert "pw.load(" in text
    with pw.open(out) as checkpoint:
        for engine, _ in engines(checkpoint):
            assert f"| {engine} |" in text


def test_the_engine_table(tmp_path: Path) -> None:
    folder, _ = folder_of(tmp_path / "small", pw.IntxWeightOnlyConfig(torch.int4, pw.PerGroup(32)))
    pw.convert(folder, tmp_path / "ct", to="compressed-tensors")
    with pw.open(folder) as ours, pw.open(tmp_path / "ct") as theirs:
        here, there = dict(engines(ours)), dict(engines(theirs))
        assert ("transformers", "converted by `pennyweight convert --for transformers`") in engines(ours)
    assert here["vLLM on a CPU"] == "converted by `pennyweight convert --for vllm`"
    assert here["onnxruntime"] == "converted by `pennyweight export-onnx`"
    assert there["transformers"] == there["vLLM on a CPU"] == "reads it"
    other, _ = folder_of(tmp_path / "offsets", "int4")
    with pw.open(other) as offsets:
        assert "vLLM on a GPU" not in dict(engines(offsets))


def test_cards_of_people_are_never_replaced(tmp_path: Path) -> None:
    folder, report = folder_of(tmp_path / "small")
    path = folder / "README.md"
    assert write_card(str(folder), report=report)
    assert is_generated(path.read_bytes())
    assert write_card(str(folder))  # a generated one
    assert "SQNR" not in path.read_text()
    path.write_text(path.read_text().replace(MARK, "") + "By hand")
    assert not write_card(str(folder))
    assert path.read_text().endswith("By hand")
    base = tmp_path / "base"
    base.mkdir()
    (base / "README.md").write_text(BASE_CARD)
    path.write_text(BASE_CARD)  # a copy of the base model's card
    assert write_card(str(folder), source=str(base))
    assert REPOSITORY in path.read_text()
    (folder / "config.json").unlink()
    assert not write_card(str(folder))  # not a folder of transformers
