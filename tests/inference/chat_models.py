"""Small causal models with random weights, and a tokenizer with a chat template."""

from typing import Any

import torch
import transformers as T
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.io.gguf.models import SIZES

TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"
REFUSES_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE


def tokenizer(template: str | None = TEMPLATE) -> Any:
    """A byte a token, and the marks of the template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>", "<|user|>", "<|assistant|>", "<|system|>"])
    return T.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", chat_template=template)


def llama(**other: Any) -> Any:
    return _random(
        T.LlamaForCausalLM(T.LlamaConfig(**{**SIZES, "vocab_size": 260, "max_position_embeddings": 512, **other}))
    )


def _random(model: Any) -> Any:
    """Weights large enough that answers depend on the whole conversation."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.3)
    model.generation_config.eos_token_id = 256
    return model.eval()


def mistral() -> Any:
    sizes = {**SIZES, "vocab_size": 260, "max_position_embeddings": 512, "num_key_value_heads": 2}
    return _random(T.MistralForCausalLM(T.MistralConfig(**sizes, sliding_window=24)))


def mamba() -> Any:
    return _random(T.MambaForCausalLM(T.MambaConfig(vocab_size=260, hidden_size=32, num_hidden_layers=2, state_size=4)))
