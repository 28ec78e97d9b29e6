"""sentence-transformers: a small random encoder, quantized, saved and loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizerFast

import pennyweight as pw
from pennyweight.integrations.transformers import attach_quantizer

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


def test_quantized_while_loading(tmp_path: Path) -> None:
    folder = encoder_folder(tmp_path)
    exact = sentences(folder).encode(TEXTS, convert_to_tensor=True)
    model = sentences(folder, quantization_config=pw.PennyweightConfig("int8", []))
    assert len(weights(model)) == 13
    assert cosine(model.encode(TEXTS, convert_to_tensor=True), exact) > 0.999
