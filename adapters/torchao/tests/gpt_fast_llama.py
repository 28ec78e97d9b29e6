"""A small Llama in gpt-fast's form, which torchao's SpinQuant expects."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self, config: SimpleNamespace, split: bool, bias: bool) -> None:
        super().__init__()
        self.heads, self.local, self.width = config.n_head, config.n_local_heads, config.head_dim
        sizes = (self.heads * self.width, self.local * self.width, self.local * self.width)
        self.sizes = sizes
        if split:
            self.wq, self.wk, self.wv = (nn.Linear(config.dim, n, bias=bias) for n in sizes)
        else:
            self.wqkv = nn.Linear(config.dim, sum(sizes), bias=bias)
        self.wo = nn.Linear(config.dim, config.dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.wq(x), self.wk(x), self.wv(x)) if hasattr(self, "wq") else self.wqkv(x).split(self.sizes, -1)
        q, k, v = (p.unflatten(-1, (-1, self.width)).transpose(1, 2) for p in parts)
        k, v = (t.repeat_interleave(self.heads // self.local, 1) for t in (k, v))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: SimpleNamespace, bias: bool) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(config.dim, config.intermediate_size, bias=bias) for _ in range(2))
        self.w2 = nn.Linear(config.intermediate_size, config.dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, config: SimpleNamespace, split: bool, bias: bool) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(config, split, bias), FeedForward(config, bias)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(config.dim), nn.RMSNorm(config.dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, dim: int = 32, inner: int = 96, split: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.config = SimpleNamespace(dim=dim, n_head=4, n_local_heads=2, head_dim=dim // 4, intermediate_size=inner)
        self.tok_embeddings = nn.Embedding(50, dim)
        self.layers = nn.ModuleList(Block(self.config, split, bias) for _ in range(2))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, 50, bias=False)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(torch.rand(p.shape, generator=generator) + 0.5 if "norm" in name else p)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))
