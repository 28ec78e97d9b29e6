"""Keys and values of cross-attention in fused blocks: computed once for each text, and kept in transformers' cache."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from .block_description import CrossPart


class CrossAttention:
    """Computes the keys and values of one block, by its own linear layers."""

    def __init__(self, block: nn.Module, part: CrossPart) -> None:
        self.heads, self.layer = part.heads, part.layer
        self.layers = block.get_submodule(part.keys), block.get_submodule(part.values)

    def held(self, cache: Any, batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor] | str | None:
        """Keys and values [batch, heads, n, channels] in the cache; None if they must be computed; or the reason (str)
        why they cannot be read."""
        if cache is None:
            return None
        library = sys.modules.get("transformers.cache_utils")
        if library is None or type(cache) is not library.EncoderDecoderCache:
            return "the cache is not an EncoderDecoderCache"
        if not cache.is_updated.get(self.layer):
            return None
        layer = cache.cross_attention_cache.layers[self.layer]
        keys, values = layer.keys, layer.values
        for t in (keys, values):
            if type(t) is not Tensor or not t.is_cpu or t.dtype is not dtype or t.ndim != 4 or t.stride(3) != 1:
                return "keys and values of cross-attention are not tensors in memory"
            if (t.shape[0], t.shape[1], t.shape[3]) != (batch, self.heads.shared, self.heads.size):
                return f"keys and values of cross-attention have shape {list(t.shape)}"
            if t.is_neg() or (t.requires_grad and torch.is_grad_enabled()) or t.shape != keys.shape:
                return "keys and values of cross-attention need a gradient or are a view that is not computed"
        return keys, values

    def computed(self, cache: Any, states: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of ``states`` [batch, n, channels]; the cache gets them."""
        batch, length, _ = states.shape
        shape = batch, length, self.heads.shared, self.heads.size
        keys, values = (layer(states).view(shape).transpose(1, 2) for layer in self.layers)
        if cache is None:
            return keys, values
        keys, values = cache.cross_attention_cache.update(keys, values, self.layer)
        cache.is_updated[self.layer] = True
        return keys, values
