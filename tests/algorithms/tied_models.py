"""Small language models whose embedding table is also the matrix of the output layer, and text with structure."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

VOCABULARY, WIDTH = 256, 64


@cache
def transitions() -> Tensor:
    """Probabilities of the next token [V, V]: common and rare tokens, and pairs that belong together."""
    g = torch.Generator().manual_seed(0)
    frequency = 1 / torch.arange(1, VOCABULARY + 1)
    return (1.5 * torch.randn(VOCABULARY, VOCABULARY, generator=g) + frequency.log()).softmax(-1)


def text(batches: int, size: int = 4, length: int = 16, seed: int = 1) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(VOCABULARY, (batches * size, 1), generator=g)
    for _ in range(length - 1):
        x = torch.cat([x, torch.multinomial(transitions()[x[:, -1]], 1, generator=g)], 1)
    return list(x.chunk(batches))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(F.pad(x[:, :-1], (0, 0, 1, 0))))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TiedLM(nn.Module):
    """Logits are products of the sum of the residual stream, in which the looked-up row is large, with the table."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class HeadlessLM(TiedLM):
    """The same with the product in the model's own forward, so that the table has one place in the model."""

    def __init__(self) -> None:
        super().__init__()
        del self.head

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.linear(x, self.embed.weight)


def trained(model: Any, steps: int = 8) -> Any:
    """The model after some steps on :func:`text`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for ids in text(steps, 16, 32, seed=100):
        logits = logits_of(model(ids))
        F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


def tied_lm(kind: type[TiedLM] = TiedLM) -> TiedLM:
    torch.manual_seed(0)
    return trained(kind())


def tied_llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return trained(transformers.LlamaForCausalLM(config))


def logits_of(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


@torch.no_grad()
def error(model: nn.Module, reference: nn.Module, batches: list[Tensor]) -> float:
    """|logits - logits of the reference| / |logits of the reference|."""
    a, b = (torch.cat([logits_of(m(x)) for x in batches]) for m in (reference, model))
    return float((a - b).norm() / a.norm())


def both(module: nn.Module, name: str) -> bool:
    """The filter of linear layers and embeddings."""
    return isinstance(module, (nn.Linear, nn.Embedding))
