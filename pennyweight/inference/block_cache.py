"""Keys and values of fused blocks: transformers' caches, updated as their own code does.

Any cache works: its ``update`` runs between the two parts of a block. For three kinds of layers the block itself writes
the keys and values, in one call: DynamicLayer, whose tensors become views of a buffer with spare capacity, so that a
token does not copy the past; StaticLayer; and QuantizedLayer, whose newest tokens are as in a DynamicLayer, and whose
codes attention reads as they are. Its first tokens may be float, too: attention reads the codes before them, since the
order of keys changes no result.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ..kernels.block import Past
from ..kernels.native.attention import past_reason

SPARE = 64  # tokens added to a buffer at least, when it grows
# Classes of layers with past, past_keys, sinks and quantize_old(); inference/kv_cache.py adds its own
QUANTIZED: set[type] = set()


class Room(NamedTuple):
    """Where new keys and values [batch, heads, tokens, channels] of ``dtype`` go in a layer: after the first ``past``
    tokens. Attention then reads ``length`` tokens, and before them ``coded``, quantized keys and values, of
    ``codes`` tokens. The first ``sinks`` of the ``length`` tokens were before the ``codes`` in the text."""

    past: int
    length: int
    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    coded: Past | None = None
    codes: int = 0
    sinks: int = 0

    def reordered(self, mask: Tensor) -> Tensor:
        """A mask [.., keys] whose columns are in the order of the text, in the order of attention."""
        if not self.sinks:
            return mask
        first, codes, rest = mask.split([self.sinks, self.codes, mask.shape[-1] - self.sinks - self.codes], -1)
        return torch.cat((codes, first, rest), -1)


class _Grown:
    """Buffers of a DynamicLayer with spare capacity, the views of them that the layer holds."""

    __slots__ = ("buffers", "capacity", "views")

    def __init__(self, buffers: tuple[Tensor, Tensor], capacity: int) -> None:
        self.buffers, self.capacity = buffers, capacity
        self.views: tuple[Tensor, Tensor] = buffers

    def holds(self, layer: Any) -> bool:
        """Whether the layer has the newest views. A copy or a crop of it may not write after them."""
        return layer.keys is self.views[0] and layer.values is self.views[1]


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


def room(layer: Any, shape: tuple[int, int, int, int], dtype: torch.dtype) -> Room | None:
    """Room for keys and values of this shape [batch, heads, tokens, channels]; changes nothing. None: the layer's own
    ``update`` must be called."""
    library = sys.modules["transformers.cache_utils"]
    batch, heads, tokens, channels = shape
    keys, values = layer.keys, layer.values
    grown = _GROWN.get(layer)
    if grown is not None and grown.holds(layer) and type(layer) is library.DynamicLayer:  # its buffers are ours
        past = keys.shape[2]
        if (batch, heads, past, channels) == keys.shape and keys.dtype is dtype and not _needs_gradient(keys, values):
            return Room(past, past + tokens, shape, dtype)
    coded, sinks = None, 0
    if type(layer) is library.DynamicLayer or quantizes(layer):
        filled = past = 0 if not layer.is_initialized or keys.numel() == 0 else keys.shape[-2]
        length = past + tokens
        if quantizes(layer) and layer.is_initialized:
            if layer.dtype is not dtype or layer.device.type != "cpu":
                return None
            if layer.past_keys is not None:
                coded, sinks = layer.past, layer.sinks
                if past_reason(coded, torch.empty((batch, heads, 0, channels), dtype=dtype, device="cpu")) is not True:
                    return None
    elif type(layer) is library.StaticLayer:
        length = layer.max_cache_len
        past = int(layer.cumulative_length) if layer.is_initialized else 0
        filled = length if layer.is_initialized else 0
        if past + tokens > length:
            return None  # update raises
    else:
        return None
    if filled:  # else update initializes the layer
        expected = (batch, heads, filled, channels)
        if keys.shape != expected or values.shape != expected or keys.dtype is not dtype or values.dtype is not dtype:
            return None  # update raises, or promotes
        if not (keys.is_cpu and values.is_cpu and keys.layout is values.layout is torch.strided):
            return None
        if keys.is_neg() or values.is_neg():
            return None
        if _needs_gradient(keys, values):
            return None  # a trained prefix
    return Room(past, length, shape, dtype, coded, 0 if coded is None else coded.keys.shape[2], sinks)


def _needs_gradient(keys: Tensor, values: Tensor) -> bool:
    return torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad)


def quantizes(layer: Any) -> bool:
    """Whether this is a layer of a QuantizedCache."""
    return type(layer) in QUANTIZED


def take(layer: Any, found: Room) -> tuple[Tensor, Tensor]:
    """Make the room part of the layer, as its ``update`` does. Returns the tensors [batch, heads, capacity, channels]
    to which keys and values are to be written."""
    past, length, shape, dtype = found[:4]
    if not layer.is_initialized:
        empty = torch.empty((*shape[:2], 0, shape[3]), dtype=dtype, device="cpu")
        layer.lazy_initialization(empty, empty)
    if type(layer) is sys.modules["transformers.cache_utils"].StaticLayer:
        layer.cumulative_length.add_(shape[2])
        return layer.keys, layer.values
    grown = _GROWN.get(layer)
    if grown is None or not grown.holds(layer) or grown.capacity < length:
        grown = _GROWN[layer] = _grow(layer, past, length, shape, dtype)
    keys, values = grown.buffers
    layer.keys, layer.values = grown.views = keys.narrow(2, 0, length), values.narrow(2, 0, length)
    return grown.buffers


def _grow(layer: Any, past: int, length: int, shape: tuple[int, int, int, int], dtype: torch.dtype) -> _Grown:
    capacity = length + SPARE + length // 4
    batch, heads, _, channels = shape
    with torch.inference_mode(False), torch.no_grad():
        made = [torch.empty((batch, heads, capacity, channels), dtype=dtype, device="cpu") for _ in range(2)]
        for new, old in zip(made, (layer.keys, layer.values) if past else (), strict=False):
            new[:, :, :past].copy_(old)
    return _Grown((made[0], made[1]), capacity)
