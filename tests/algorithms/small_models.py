"""Small models of several makes, with random weights."""

from typing import Any

import torch
from torch import Tensor, nn


def llama(layers: int = 2, **options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=40, max_position_embeddings=64, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=40,
        max_position_embeddings=64,
    )  # fmt: skip
    return BertModel(config).eval()


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=32, d_ff=64, d_kv=16, num_layers=2, num_decoder_layers=2, num_heads=2, vocab_size=40,
        decoder_start_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config).eval()


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 8)).eval()


def tokens(batches: int = 3, mask: bool = True) -> list[dict[str, Tensor]]:
    out = []
    for _ in range(batches):
        batch = {"input_ids": torch.randint(0, 40, (2, 12))}
        if mask:
            batch["attention_mask"] = torch.ones(2, 12, dtype=torch.long)
            batch["attention_mask"][1, 8:] = 0
        out.append(batch)
    return out


def linear_weights(model: nn.Module) -> dict[int, str]:
    return {id(m.weight): f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)}
