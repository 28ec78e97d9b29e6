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


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file under a folder and its bytes; {} where there is no folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
