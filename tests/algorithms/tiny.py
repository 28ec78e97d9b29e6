"""Small untrained models of several families, with gains, shifts and biases that are not what they start as."""

from typing import Any

import torch
import transformers
from torch import Tensor, nn

VOCABULARY = 64
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "pad_token_id": 0,
}  # fmt: skip


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


def mlp(activation: nn.Module) -> nn.Module:
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
