"""Small models of several families, with random weights, and what they are run on."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0,
}  # fmt: skip


# -- one on whose correlated inputs rounding with data differs from rounding without ---------------------------------


def llama(layers: int = 2, hidden: int = 64) -> Any:
    """A Llama of two layers with grouped heads and random weights, float32."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
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


# -- of several makes ------------------------------------------------------------------------------------------------


def small_llama(layers: int = 2, **options: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=40, max_position_embeddings=64, **options,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=32, d_ff=64, d_kv=16, num_layers=2, num_decoder_layers=2, num_heads=2, vocab_size=40,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).eval()


def deep_mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 8)).eval()


def padded_tokens(batches: int = 3, mask: bool = True) -> list[dict[str, Tensor]]:
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


# -- with gains, shifts and biases that are not what they start as ----------------------------------------------------


def decoder(family: str, **more: Any) -> nn.Module:
    """Llama, Qwen2, Mistral, ... with two key-value heads for four query heads."""
    config = getattr(transformers, f"{family}Config")(**SIZES, num_key_value_heads=2, **more)
    return shaken(getattr(transformers, f"{family}ForCausalLM")(config))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0
    )
    return shaken(transformers.GPT2LMHeadModel(config))


def bert() -> nn.Module:
    return shaken(transformers.BertModel(transformers.BertConfig(**SIZES)))


def vit() -> nn.Module:
    sizes = {k: v for k, v in SIZES.items() if k not in ("vocab_size", "pad_token_id")}
    return shaken(transformers.ViTForImageClassification(transformers.ViTConfig(**sizes, image_size=16, patch_size=8)))


def shaken_mlp(activation: nn.Module) -> nn.Module:
    return shaken(nn.Sequential(nn.Linear(16, 32), activation, nn.Linear(32, 8)))


def shaken(model: nn.Module) -> nn.Module:
    """Vectors (gains, shifts, biases) moved at random, so that a rewrite that forgets one is seen."""
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.ndim == 1:
            p.data += 0.3 * torch.randn(p.shape, generator=generator)
    return model.eval()


def ids(batches: int = 3, length: int = 9) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(VOCABULARY, (2, length), generator=generator) for _ in range(batches)]


def images() -> list[Tensor]:
    return [torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))]


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def same_state(model: nn.Module, before: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return list(now) == list(before) and all(torch.equal(now[name], t) for name, t in before.items())


def planted(model: nn.Module, every: int = 16, size: float = 40.0) -> nn.Module:
    """A Llama that computes the same with outlier channels: gains, up and v multiplied, what reads them divided."""
    for layer in model.model.layers:  # type: ignore[union-attr]
        attention, ffn = layer.self_attn, layer.mlp
        _plant(layer.input_layernorm.weight, [attention.q_proj, attention.k_proj, attention.v_proj], every, size)
        _plant(layer.post_attention_layernorm.weight, [ffn.gate_proj, ffn.up_proj], every, size)
        _plant(ffn.up_proj.weight, [ffn.down_proj], every, size)
    return model


def _plant(writer: Tensor, readers: list[nn.Module], every: int, size: float) -> None:
    s = torch.ones(writer.shape[0])
    s[::every] = size
    writer.data.mul_(s if writer.ndim == 1 else s.unsqueeze(1))
    for r in readers:
        r.weight.data.div_(s)
