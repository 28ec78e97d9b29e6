"""Small mixtures of experts of transformers, with random weights."""

from typing import Any

import torch
import transformers

_EVERY = {
    "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
_MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_key_value_heads": 2, "intermediate_size": 48, "num_local_experts": 4},
    "Qwen3Moe": {
        "num_key_value_heads": 2, "intermediate_size": 48, "moe_intermediate_size": 32, "num_experts": 4,
        "num_experts_per_tok": 2, "head_dim": 16,
    },
    "DeepseekV3": {
        "num_key_value_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 32, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **_MLA,
    },
    "GptOss": {
        "num_key_value_heads": 2, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}  # fmt: skip


def mixture(name: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**_EVERY, **MIXTURES[name])
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()
