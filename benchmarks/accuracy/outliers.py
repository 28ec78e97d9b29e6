"""Channels with outliers, put into a Llama without changing what it computes.

What follows a diagonal matrix is divided by what the diagonal is multiplied with: a norm's weights and the columns of
the linears that read it; up_proj's rows and down_proj's columns; v_proj's rows and o_proj's columns. Smoothing undoes
it exactly, so a method loses here what it does not recover.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

SPREAD = 0.3  # of the logarithms
SHARE = 0.015  # of channels that are outliers
NORM, UP, VALUE = 40.0, 40.0, 10.0  # times, at the outliers


def add_(model: Any, seed: int = 0) -> None:
    """In place, on a LlamaForCausalLM in float32."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            _norm(layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj), generator)
            _norm(layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj), generator)
            s = _factors(mlp.up_proj.out_features, UP, generator)
            mlp.up_proj.weight *= s[:, None]
            mlp.down_proj.weight /= s
            s = _factors(attention.v_proj.out_features, VALUE, generator)
            attention.v_proj.weight *= s[:, None]
            # each key-value head is read by several query heads, one after the other
            heads = s.view(model.config.num_key_value_heads, -1)
            repeats = attention.o_proj.in_features // s.numel()
            attention.o_proj.weight /= heads.repeat_interleave(repeats, 0).flatten()
        _norm(model.model.norm, (model.lm_head,), generator)


def _norm(norm: nn.Module, readers: tuple[nn.Linear, ...], generator: torch.Generator) -> None:
    s = _factors(norm.weight.numel(), NORM, generator)
    norm.weight *= s
    for linear in readers:
        linear.weight /= s


def _factors(n: int, times: float, generator: torch.Generator) -> Tensor:
    s = torch.exp(SPREAD * torch.randn(n, generator=generator))
    s[torch.randperm(n, generator=generator)[: max(1, round(SHARE * n))]] *= times
    return s
