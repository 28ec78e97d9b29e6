"""Keys and values of fused blocks: transformers' caches, updated as their own code does.

Any cache works: its ``update`` runs between the two parts of a block. For two kinds of layers the block itself writes
the keys and values, in one call: DynamicLayer, whose tensors become views of a buffer with spare capacity, so that a
token does not copy the past; and StaticLayer.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

SPARE = 64  # tokens added to a buffer at least, when it grows


class Slots(NamedTuple):
    """Tensors [batch, heads, capacity, channels] to which a block writes its keys and values from token ``past`` on,
    and the number of tokens that it then reads."""

    keys: Tensor
    values: Tensor
    past: int
    length: int


class _Grown:
    """Buffers of a DynamicLayer, and the views of them that the layer holds."""

    __slots__ = ("buffers", "views")

    def __init__(self, buffers: tuple[Tensor, Tensor], views: tuple[Tensor, Tensor]) -> None:
        self.buffers, self.views = buffers, views


_GROWN: WeakKeyDictionary[Any, _Grown] = WeakKeyDictionary()


def layer_of(cache: Any, index: int) -> Any:
    """The layer whose ``update`` the cache would call and nothing else; None if the cache does more."""
    library = sys.modules.get("transformers.cache_utils")
    if library is None or type(cache).update is not library.Cache.update or cache.offloading:
        return None
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= index:
            cache.layers.append(cache.layer_class_to_replicate())
    return cache.layers[index] if index < len(cache.layers) else None


def length_after(layer: Any, shape: tuple[int, int, int, int], dtype: torch.dtype) -> int | None:
    """The number of keys that attention reads after keys and values of this shape [batch, heads, tokens, channels] were
    added to a layer. None: :func:`slots` does not support the layer in its state."""
    library = sys.modules["transformers.cache_utils"]
    batch, heads, tokens, channels = shape
    keys, values = layer.keys, layer.values
    if type(layer) is library.DynamicLayer:
        past = 0 if not layer.is_initialized or keys.numel() == 0 else keys.shape[-2]
        length = past + tokens
    elif type(layer) is library.StaticLayer:
        length = layer.max_cache_len
        if layer.is_initialized and int(layer.cumulative_length) + tokens > length:
            return None  # update raises
        past = length if layer.is_initialized else 0
    else:
        return None
    if past:  # else update initializes the layer
        expected = (batch, heads, past, channels)
        for t in (keys, values):
            if t.shape != expected or t.dtype != dtype or t.device.type != "cpu":
                return None  # update raises, or promotes
    return length if tokens <= length else None


def slots(layer: Any, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Slots:
    """Make room for new keys and values in a layer for which :func:`length_after` is known, and count them as its
    own."""
    if not layer.is_initialized:
        empty = torch.empty((*shape[:2], 0, shape[3]), dtype=dtype, device="cpu")
        layer.lazy_initialization(empty, empty)
    if type(layer) is sys.modules["transformers.cache_utils"].StaticLayer:
        past = int(layer.cumulative_length)
        layer.cumulative_length.add_(shape[2])
        return Slots(layer.keys, layer.values, past, layer.max_cache_len)
    return _append(layer, shape, dtype)


def _append(layer: Any, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Slots:
    batch, heads, tokens, channels = shape
    keys, values = layer.keys, layer.values
    past = 0 if keys.numel() == 0 else keys.shape[2]
    length = past + tokens
    grown = _GROWN.get(layer)
    # Other holders of the buffer (a copy of the layer, a cropped layer) may have written after these views
    newest = grown is not None and past > 0 and keys is grown.views[0] and values is grown.views[1]
    if grown is not None and newest and grown.buffers[0].shape[2] >= length:
        buffers = grown.buffers
    else:
        capacity = length + SPARE + length // 4
        with torch.inference_mode(False), torch.no_grad():
            made = [torch.empty((batch, heads, capacity, channels), dtype=dtype, device="cpu") for _ in range(2)]
            for new, old in zip(made, (keys, values) if past else (), strict=False):
                new[:, :, :past].copy_(old)
        buffers = made[0], made[1]
    views = buffers[0].narrow(2, 0, length), buffers[1].narrow(2, 0, length)
    _GROWN[layer] = _Grown(buffers, views)
    layer.keys, layer.values = views
    return Slots(*buffers, past, length)
