"""sentence-transformers: a small random encoder, quantized, saved and loaded."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

import pennyweight as pw
from pennyweight.integrations.transformers import attach_quantizer
from tests import forked
from tests.integrations import writers
from tests.integrations.writers import Writer

TEXTS = ["small weights", "large models", "weights for small models and large ones"]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def encoder_folder(folder: Path) -> Path:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words += ["small", "large", "weights", "models", "for", "and", "ones"]
    (folder / "encoder").mkdir(parents=True)
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "encoder")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=32,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder / "encoder")
    return folder / "encoder"


def sentences(folder: Path, **model_args: Any) -> SentenceTransformer:
    word = Transformer(str(folder), model_kwargs=model_args)
    return SentenceTransformer(modules=[word, Pooling(64, "mean")], device="cpu")


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.dequantize() for n, p in model.named_parameters() if isinstance(p, pw.AffineQuantizedTensor)}


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a, b).min())


@pytest.mark.parametrize("name", ["int8", "int8-dynamic", "int4", "nf4"])
def test_quantized_saved_and_loaded(name: str, tmp_path: Path) -> None:
    folder = encoder_folder(tmp_path)
    model = sentences(folder)
    exact = model.encode(TEXTS, convert_to_tensor=True)
    config = pw.PennyweightConfig(name).config
    pw.quantize_(model, config)
    attach_quantizer(model[0].model, config)
    said = model.encode(TEXTS, convert_to_tensor=True)
    assert cosine(said, exact) > (0.999 if "int8" in name else 0.97)
    model.save(str(tmp_path / "saved"), create_model_card=False)
    again = SentenceTransformer(str(tmp_path / "saved"), device="cpu")
    assert torch.equal(again.encode(TEXTS, convert_to_tensor=True), said)
    mine, theirs = weights(model), weights(again)
    assert len(mine) == 13
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(w, theirs[n]) for n, w in mine.items())


@pytest.mark.parametrize("fused", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["quantized", "fused"])
def test_pool_of_processes(fused: bool, tmp_path: Path) -> None:
    """Its processes are started by "spawn", and get the model as an argument."""
    model = sentences(encoder_folder(tmp_path))
    pw.quantize_(model, "int8")
    if fused:
        pw.fuse_(model)
    expected = model.encode(TEXTS, batch_size=1)
    pool = model.start_multi_process_pool(["cpu"])
    try:
        got = model.encode(TEXTS, pool=pool, batch_size=1, chunk_size=1)
    finally:
        model.stop_multi_process_pool(pool)
    np.testing.assert_array_equal(got, expected)


def test_quantized_while_loading(tmp_path: Path) -> None:
    folder = encoder_folder(tmp_path)
    exact = sentences(folder).encode(TEXTS, convert_to_tensor=True)
    model = sentences(folder, quantization_config=pw.PennyweightConfig("int8", []))
    assert len(weights(model)) == 13
    assert cosine(model.encode(TEXTS, convert_to_tensor=True), exact) > 0.999


def said(model: Any) -> torch.Tensor:
    return model.encode(TEXTS, convert_to_tensor=True)


def read(folder: Path, other: Any) -> Any:
    return SentenceTransformer(str(folder), device="cpu")


def dense(folder: Path) -> SentenceTransformer:
    """A linear layer of sentence-transformers' own after the encoder: it is saved by safetensors alone."""
    torch.manual_seed(0)
    modules = [Transformer(str(folder)), Pooling(64, "mean"), Dense(64, 32)]
    return SentenceTransformer(modules=modules, device="cpu")


WRITERS = {
    "save": Writer(lambda m, d: m.save(str(d), create_model_card=False), read),
    "save_pretrained": Writer(lambda m, d: m.save_pretrained(str(d), create_model_card=False), read),
    "save, the encoder by pw.load": Writer(
        lambda m, d: m.save(str(d), create_model_card=False), lambda d, m: (pw.load(d, m[0].model), m)[1]
    ),
}


@pytest.mark.parametrize("config", ["int8-dynamic", "int4", "nf4"])
@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_writers(writer: Writer, config: str, tmp_path: Path) -> None:
    folder = encoder_folder(tmp_path)
    model = sentences(folder)
    pw.quantize_(model, writers.CONFIGS[config])
    writers.check(writer, model, sentences(folder), tmp_path / "saved", said)


def test_a_quantized_module_of_sentence_transformers_itself_is_refused(tmp_path: Path) -> None:
    model = dense(encoder_folder(tmp_path))
    pw.quantize_(model, pw.Int8WeightOnlyConfig())
    refusing = Writer(WRITERS["save"].write)
    writers.check(refusing, model, model, tmp_path / "saved", said)
    pw.dequantize_(model)
    pw.quantize_(model, pw.Int8WeightOnlyConfig(), lambda m, name: name.startswith("0.") and type(m) is torch.nn.Linear)
    writers.check(WRITERS["save"], model, model, tmp_path / "again", said)


PROBE = """
import sys, torch
from sentence_transformers import SentenceTransformer
ours, compressed, texts = sys.argv[1], sys.argv[2], sys.argv[3:]
assert "pennyweight" not in sys.modules
try:
    SentenceTransformer(ours, device="cpu")
    sys.exit("made up weights")
except Exception as e:
    assert "import pennyweight" in str(e), repr(e)
from transformers import CompressedTensorsConfig
dense = {"quantization_config": CompressedTensorsConfig(run_compressed=False)}
print(SentenceTransformer(compressed, device="cpu", model_kwargs=dense).encode(texts).tolist())
import pennyweight
print(SentenceTransformer(ours, device="cpu").encode(texts).tolist())
"""


def test_a_process_that_does_not_know_us(tmp_path: Path) -> None:
    model = sentences(encoder_folder(tmp_path))
    pw.quantize_(model, pw.Int8WeightOnlyConfig())
    for name, format in (("ours", "pennyweight"), ("compressed", "compressed-tensors")):
        attach_quantizer(model[0].model, save_as=format)
        model.save(str(tmp_path / name), create_model_card=False)
    command = ["-c", PROBE, str(tmp_path / "ours"), str(tmp_path / "compressed"), *TEXTS]
    run = forked.run(command)
    assert run.returncode == 0, run.stderr[-2000:]
    compressed, ours = (torch.tensor(json.loads(line)) for line in run.stdout.splitlines() if line.startswith("[["))
    expected = model.encode(TEXTS, convert_to_tensor=True).cpu()
    assert torch.equal(ours, expected)
    assert torch.allclose(compressed, expected, atol=1e-5)
