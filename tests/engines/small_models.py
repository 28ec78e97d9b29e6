"""Small random models on disk, for inference engines to load."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 512
_COMMON: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 512, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip


def save_llama(folder: Path, tied: bool = False) -> Path:
    """A Llama with two layers in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return _save(LlamaForCausalLM(LlamaConfig(**_COMMON, tie_word_embeddings=tied)), folder)


def save_moe(folder: Path) -> Path:
    """A Qwen3-MoE with two layers of eight experts in bfloat16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    more = {"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64}
    return _save(Qwen3MoeForCausalLM(Qwen3MoeConfig(**_COMMON, **more)), folder)


def _save(model: Any, folder: Path) -> Path:
    for p in model.parameters():
        if p.ndim > 1:
            p.data.mul_(3)  # so that tokens differ, and best and second best logits as well
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder
