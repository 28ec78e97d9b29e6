"""Small models with correlated inputs, on which rounding with data differs from rounding without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def llama(layers: int = 2, hidden: int = 64) -> Any:
    """A Llama of two layers with grouped heads and random weights, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():  # logits that differ from token to token
        model.lm_head.weight.mul_(20)
    return model


def tokens(batches: int = 6, size: int = 4, length: int = 24, seed: int = 1) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 61, (size, length), generator=g) for _ in range(batches)]


def blocks_only(module: nn.Module, name: str) -> bool:
    """The filter of all that is quantized in these models: linear layers but the head."""
    return isinstance(module, nn.Linear) and "lm_head" not in name


def mlp(width: int = 32, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width)).eval()


def inputs(width: int = 32, batches: int = 3, rows: int = 64, seed: int = 1) -> list[Tensor]:
    """Correlated: a few directions carry most of the energy."""
    g = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=g) * torch.logspace(0, -2, width)
    return [torch.randn(rows, width, generator=g) @ mixing.T for _ in range(batches)]
