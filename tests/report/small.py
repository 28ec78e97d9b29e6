"""Small models with large enough weights for quantization to show."""

import copy
from typing import Any

import torch
from torch import nn
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import pennyweight as pw

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
    "initializer_range": 0.08, "max_position_embeddings": 64,
}  # fmt: skip


def llama(tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=tied)).eval()


def bert() -> BertModel:
    torch.manual_seed(0)
    return BertModel(BertConfig(**SIZES)).eval()


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 10))


def quantized(model: nn.Module, config: Any = None, *how: Any) -> nn.Module:
    out = copy.deepcopy(model)
    pw.quantize_(out, config or pw.Int4WeightOnlyConfig(32), *how)
    return out


def prompts(batches: int = 2) -> list[dict[str, torch.Tensor]]:
    """Of which some is padding."""
    random = torch.Generator().manual_seed(1)
    out = []
    for _ in range(batches):
        mask = torch.ones(3, 12, dtype=torch.long)
        mask[0, 7:] = 0
        out.append({"input_ids": torch.randint(0, 128, (3, 12), generator=random), "attention_mask": mask})
    return out
