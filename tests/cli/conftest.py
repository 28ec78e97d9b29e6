"""Small checkpoints, as users have them, and a way to run commands."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from typer.testing import CliRunner

from pennyweight.cli.app import app

HIDDEN = 64
Run = Callable[..., Any]


@pytest.fixture
def run() -> Run:
    """run(*arguments) -> result with .exit_code, .stdout, .stderr. A defect passes through, it is no exit code."""

    def call(*arguments: Any) -> Any:
        return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)

    return call


def names_only_tensors() -> dict[str, Tensor]:
    """Two layers of a model that no library knows."""
    tensors = {"embed.weight": torch.randn(96, HIDDEN), "head.weight": torch.randn(96, HIDDEN)}
    tensors["norm.weight"] = torch.ones(HIDDEN)
    for i in range(2):
        tensors[f"blocks.{i}.q.weight"] = torch.randn(HIDDEN, HIDDEN)
        tensors[f"blocks.{i}.up.weight"] = torch.randn(3 * HIDDEN, HIDDEN)
        tensors[f"blocks.{i}.up.bias"] = torch.randn(3 * HIDDEN)
    return {name: t.to(torch.bfloat16) for name, t in tensors.items()}


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """A folder with one safetensors file and nothing that names an architecture."""
    folder = tmp_path / "plain"
    folder.mkdir()
    save_file(names_only_tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A two-layer llama as transformers writes it, with a tokenizer file beside it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path / "llama"
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0"}))
    return folder


WORDS = [
    "the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog", "run", "far", "from", "home", "while", "rain",
    "fell", "over", "old", "green", "hills",
]  # fmt: skip


def write_text(path: Path, lines: int = 24) -> Path:
    """Lines of six to eleven words, always the same."""
    path.write_text(
        "\n".join(" ".join(WORDS[(7 * i + 3 * j) % len(WORDS)] for j in range(6 + i % 6)) for i in range(lines))
    )
    return path


def add_tokenizer(folder: Path) -> None:
    """A tokenizer of a word a token, as transformers saves it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<unk>", "<pad>", *dict.fromkeys(WORDS)])}
    tokenizer = Tokenizer(models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>").save_pretrained(folder)


@pytest.fixture
def writer(tmp_path: Path) -> Path:
    """A small llama with weights that count, and a tokenizer."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, initializer_range=0.1, tie_word_embeddings=False,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "writer")
    add_tokenizer(tmp_path / "writer")
    return tmp_path / "writer"


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    """A small BERT without a head, and a tokenizer."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
        initializer_range=0.1, max_position_embeddings=32,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path / "encoder")
    add_tokenizer(tmp_path / "encoder")
    return tmp_path / "encoder"


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_text(tmp_path / "text.txt")


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file under a folder and its bytes; {} where there is no folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
