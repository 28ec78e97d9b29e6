"""eval: its figures are pw.compare's on the same text, and what it refuses it refuses in one line."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import pennyweight as pw
from pennyweight.report.evaluation_inputs import pooling_of, text_batches
from tests.cli.conftest import add_tokenizer, write_text


@pytest.fixture
def small(run: Any, writer: Path, tmp_path: Path) -> Path:
    assert run("quantize", writer, tmp_path / "small", "--config", "int4", "--group-size", "32").exit_code == 0
    return tmp_path / "small"


def test_the_figures_are_those_of_compare(run: Any, writer: Path, small: Path, text: Path, tmp_path: Path) -> None:
    result = run("eval", writer, small, "--text", text, "--length", 16, "--batch", 3, "--json", tmp_path / "e.json")
    assert (result.exit_code, result.stderr) == (0, "")
    data = json.loads((tmp_path / "e.json").read_text())
    exact = AutoModelForCausalLM.from_pretrained(writer)
    found = pw.load(small, AutoModelForCausalLM.from_config(exact.config))
    ids = AutoTokenizer.from_pretrained(writer)(text.read_text())["input_ids"]
    windows = [torch.tensor([ids[i : i + 16]]) for i in range(0, len(ids), 16) if len(ids) - i > 1]
    expected = pw.compare(exact, found, [{"input_ids": w} for w in windows])
    assert data["sequences"] == len(windows)
    assert data["kl"]["mean"] == pytest.approx(expected.kl.mean, rel=1e-4)
    assert data["perplexity"]["ratio"] == pytest.approx(expected.perplexity.ratio, rel=1e-5)
    assert data["perplexity"]["tokens"] == sum(w.numel() - 1 for w in windows)
    assert f"mean {data['kl']['mean']:.3g} nats" in result.stdout
    assert all(layer["name"] in result.stdout for layer in data["layers"])
    as_json = run("eval", writer, small, "--text", text, "--length", 16, "--batch", 3, "--json", "-")
    assert json.loads(as_json.stdout) == data


def test_an_encoder_is_compared_by_its_embeddings(run: Any, encoder: Path, text: Path, tmp_path: Path) -> None:
    run("quantize", encoder, tmp_path / "small", "--config", "int8")
    result = run("eval", encoder, tmp_path / "small", "--text", text, "--json", "-", "--limit", 10)
    data = json.loads(result.stdout)
    assert (data["kind"], data["sequences"], data["perplexity"]) == ("embeddings", 10, None)
    exact = AutoModel.from_pretrained(encoder)
    found = pw.load(tmp_path / "small", AutoModel.from_config(exact.config))
    lines = text.read_text().splitlines()
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    batches = [dict(tokenizer([lines[i * 24 // 10]], return_tensors="pt")) for i in range(10)]
    expected = pw.compare(exact, found, batches, kind="embeddings")
    assert data["kl"]["mean"] == pytest.approx(expected.kl.mean, rel=1e-2)  # batches are padded there
    assert 0 < data["kl"]["mean"] < 0.01


def test_a_file_of_another_format(run: Any, writer: Path, text: Path, tmp_path: Path) -> None:
    shutil.copytree(writer, tmp_path / "bare")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).unlink()
    made = run("convert", tmp_path / "bare", tmp_path / "small.gguf", "--to", "gguf", "--type", "q8_0")
    assert made.exit_code == 0, made.stderr
    result = run("eval", writer, tmp_path / "small.gguf", "--text", text, "--json", "-")
    data = json.loads(result.stdout)
    assert data["unmatched"] == []
    assert data["bits_per_weight"] == 8.5
    assert 0 < data["kl"]["mean"] < 0.01


def test_two_texts_in_one_model_are_refused(run: Any, text: Path, tmp_path: Path) -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
    T5ForConditionalGeneration(T5Config(**sizes)).save_pretrained(tmp_path / "t5")
    add_tokenizer(tmp_path / "t5")
    result = run("eval", tmp_path / "t5", tmp_path / "t5", "--text", text)
    assert "T5ForConditionalGeneration is an encoder-decoder model" in result.stderr


def test_the_bound(run: Any, writer: Path, small: Path, text: Path) -> None:
    assert run("eval", writer, small, "--text", text, "--max-kl", 100).exit_code == 0
    result = run("eval", writer, small, "--text", text, "--max-kl", 1e-9)
    assert result.exit_code == 2
    assert "KL(float || quantized):" in result.stdout  # the figures are shown all the same
    assert result.stderr.count("\n") == 1
    assert "the limit is 1e-09; worst layers: model.layers." in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--text is required"),
        (["--text", "/nowhere/x.txt"], "/nowhere/x.txt: No such file or directory"),
        (["--text", "EMPTY"], "contains no text"),
        (["--text", "LATIN"], "is not UTF-8 text (byte 0)"),
        (["--text", "TEXT", "--max-kl", "0"], "--max-kl must be positive, got 0.0"),
        (["--text", "TEXT", "--length", "1"], "length must be at least 2, got 1"),
        (["--text", "TEXT", "--json", "/nowhere/r.json"], "folder /nowhere does not exist"),
    ],
)
def test_errors(run: Any, writer: Path, text: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "latin").write_bytes(b"\xe9t\xe9")
    names = {"EMPTY": tmp_path / "empty", "LATIN": tmp_path / "latin", "TEXT": text}
    result = run("eval", writer, writer, *(names.get(a, a) for a in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_folders_without_what_is_needed(run: Any, plain: Path, writer: Path, text: Path) -> None:
    assert "there is no config.json" in run("eval", plain, plain, "--text", text).stderr
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (writer / name).unlink()
    assert "has no tokenizer" in run("eval", writer, writer, "--text", text).stderr


def test_windows_and_lines(writer: Path, encoder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(writer)
    model = AutoModelForCausalLM.from_pretrained(writer)
    texts = ["the cat sat on a mat", "one dog"]
    batches = text_batches(model, tokenizer, texts, batch=2, length=5, limit=None)
    assert [b["attention_mask"].sum(1).tolist() for b in batches] == [[5, 2]]  # a window of one token tells nothing
    lines = write_text(tmp_path / "t").read_text()
    batches = text_batches(AutoModel.from_pretrained(encoder), tokenizer, [lines], batch=8, length=7, limit=20)
    assert [len(b["input_ids"]) for b in batches] == [8, 8, 4]
    assert all(b["input_ids"].shape[1] <= 7 for b in batches)
    with pytest.raises(ValueError, match="no sequence of at least two tokens"):
        text_batches(model, tokenizer, ["cat"])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, "mean"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"),
        ({"pooling_mode_lasttoken": True}, "last"),
    ],
)
def test_pooling_as_sentence_transformers_says(tmp_path: Path, config: Any, expected: str) -> None:
    if config is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert pooling_of(str(tmp_path)) == expected


def test_exchanged_folders_and_other_models_are_refused(run: Any, writer: Path, small: Path, text: Path) -> None:
    for command in (["eval", small, writer], ["report", writer, "--float", small, "-o", writer.parent / "r.html"]):
        result = run(*command, "--text", text)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{small} (float) and {writer}: " in result.stderr
        assert "and none of the other model; exchange them" in result.stderr
    other = writer.parent / "other"
    config = AutoModelForCausalLM.from_pretrained(writer).config
    config.intermediate_size, config.num_hidden_layers = 48, 4
    AutoModelForCausalLM.from_config(config).save_pretrained(other)
    result = run("eval", writer, other, "--text", text)
    assert result.exit_code == 2
    assert "weights have the same name and shape in the float model: these are different models" in result.stderr
