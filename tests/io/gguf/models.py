"""Tiny random models of every architecture, as the tests of names and configs need them."""

from typing import Any

import torch
import transformers as T
from torch import Tensor, nn

from pennyweight.io.gguf.names import Mapped, to_gguf

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
YARN_MORE = YARN | {"attention_factor": 1.5, "beta_fast": 16.0, "beta_slow": 2.0}
LONG = {"rope_type": "longrope", "long_factor": [4.0, 5.0, 6.0, 7.5], "short_factor": [1.0, 1.1, 1.2, 1.3]}
# name -> (class of the model, config)
MODELS: dict[str, tuple[type[nn.Module], Any]] = {
    "llama": (T.LlamaForCausalLM, T.LlamaConfig(**GROUPED)),
    "llama_biased": (T.LlamaForCausalLM, T.LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True)),
    "llama_tied_wide": (T.LlamaForCausalLM, T.LlamaConfig(**GROUPED, tie_word_embeddings=True, head_dim=16)),
    "llama3": (T.LlamaForCausalLM, T.LlamaConfig(**GROUPED, rope_parameters=LLAMA3)),
    "mistral": (T.MistralForCausalLM, T.MistralConfig(**GROUPED, sliding_window=16)),
    "qwen2": (T.Qwen2ForCausalLM, T.Qwen2Config(**GROUPED)),
    "qwen2_yarn": (T.Qwen2ForCausalLM, T.Qwen2Config(**GROUPED, rope_parameters=YARN)),
    "qwen2_yarn_more": (T.Qwen2ForCausalLM, T.Qwen2Config(**GROUPED, rope_parameters=YARN_MORE)),
    "qwen3": (T.Qwen3ForCausalLM, T.Qwen3Config(**GROUPED, head_dim=128)),
    "gemma": (T.GemmaForCausalLM, T.GemmaConfig(**GROUPED, head_dim=16)),
    "gemma2": (T.Gemma2ForCausalLM, T.Gemma2Config(**GROUPED, head_dim=256)),
    "gemma3": (
        T.Gemma3ForCausalLM,
        T.Gemma3TextConfig(**{**GROUPED, "num_hidden_layers": 7}, head_dim=256, sliding_window=16),
    ),
    "phi2": (T.PhiForCausalLM, T.PhiConfig(**SIZES)),
    "phi3": (T.Phi3ForCausalLM, T.Phi3Config(**GROUPED, sliding_window=32)),
    "phi3_long": (
        T.Phi3ForCausalLM,
        T.Phi3Config(**GROUPED, original_max_position_embeddings=32, rope_parameters=LONG),
    ),
    "bert": (T.BertModel, T.BertConfig(**SIZES)),
}


def random(name: str, seed: int = 0) -> nn.Module:
    """The model of that name, every parameter random, norms and biases too."""
    kind, config = MODELS[name]
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape) * 0.3)
    return model


def gguf_tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Mapped]]:
    """A model's tensors as GGUF has them, and what became of each."""
    state = model.state_dict()
    mapped = to_gguf(state, model.config.to_dict())
    return {m.name: m.transform.to_gguf(state[n], n) for n, m in mapped.items() if m.name is not None}, mapped
