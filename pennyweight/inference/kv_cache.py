"""A quantized KV cache, for ``model.generate(past_key_values=QuantizedCache(model.config))``.

Keys share a scale and an offset along tokens, per channel, since a few key channels are large at every token; values
along channels, per token (KIVI, Liu et al. 2024). Tokens are quantized once, in groups counted from the first token,
when they are old enough, and never again: adding tokens appends codes. The newest tokens stay float.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ..core.formats import get_format
from ..core.layouts import portable_layout
from ..core.spec import DTYPES, QuantSpec
from ..core.tensor import AffineQuantizedTensor
from . import block_cache

BITS = (2, 3, 4, 5, 6, 7, 8)
_TOKENS = -2  # the axis of tokens in [batch, heads, tokens, channels]


class QuantizedCache(Cache):
    """Keys and values of a decoder, quantized to ``bits`` bits except the newest tokens.

    config    model config, which shows the layers with full attention. Those with a sliding window, or without
              attention, are as in transformers' DynamicCache. Without it: all layers
    bits      2 to 8
    group     numbers that share a scale and an offset: tokens for keys, channels for values (all, if there are fewer)
    residual  at least this many of the newest tokens stay float; up to ``group`` - 1 more until a group is full

    A call computes with the quantized past and its own float tokens. Beam search, ``crop`` and the selection of
    sequences operate on the codes; a crop into the past dequantizes the rest of the last group.
    """

    def __init__(self, config: Any = None, *, bits: int = 8, group: int = 32, residual: int = 128) -> None:
        if bits not in BITS:
            raise ValueError(f"bits must be one of {BITS}, got {bits!r}")
        if type(group) is not int or group < 1 or type(residual) is not int or residual < 0:
            raise ValueError(f"group must be positive and residual non-negative, got {group!r} and {residual!r}")
        make = partial(QuantizedLayer, bits=bits, group=group, residual=residual)
        if config is None:
            super().__init__(layer_class_to_replicate=make)  # type: ignore[arg-type]
        else:
            layers = DynamicCache(config=config).layers
            super().__init__(layers=[make() if type(layer) is DynamicLayer else layer for layer in layers])
        self.bits, self.group, self.residual = bits, group, residual

    @property
    def nbytes(self) -> int:
        """Total bytes stored in all layers."""
        total = 0
        for layer in self.layers:
            names = ("past_keys", "past_values", "keys", "values")
            parts = [getattr(layer, name, None) for name in names]
            total += sum(t.nbytes for t in parts if t is not None)
        return total


class QuantizedLayer(DynamicLayer):
    """One layer's cache: ``past_keys`` and ``past_values`` quantized, or None; ``keys`` and ``values`` the newest
    tokens."""

    keys: Any
    values: Any

    def __init__(self, bits: int = 8, group: int = 32, residual: int = 128) -> None:
        super().__init__()
        self.bits, self.group, self.residual = bits, group, residual
        self.past_keys: AffineQuantizedTensor | None = None
        self.past_values: AffineQuantizedTensor | None = None

    @property
    def stored(self) -> tuple[Any, ...]:
        return self.past_keys, self.past_values, self.keys, self.values

    def spec(self, keys: bool) -> QuantSpec:
        """The spec of keys or values."""
        block = (self.group, 1) if keys else (self.group,)
        dtype = self.dtype if self.dtype in DTYPES.values() else torch.float32
        spec = QuantSpec(get_format(f"uint{self.bits}"), block, dtype, offset=dtype)
        return spec.with_(layout=portable_layout(spec))

    # -- adding tokens -----------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add tokens [batch, heads, tokens, channels]; return all keys and values as float."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = torch.cat([self.keys, key_states], _TOKENS)
        self.values = torch.cat([self.values, value_states], _TOKENS)
        out = _all(self.past_keys, self.keys), _all(self.past_values, self.values)
        self.quantize_old()
        return out

    def quantize_old(self) -> None:
        """Quantize the whole groups of tokens that are older than the newest ``residual``."""
        full = max(0, self.keys.shape[_TOKENS] - self.residual) // self.group * self.group
        if full:
            self.past_keys = self._append(self.past_keys, self.keys[..., :full, :], keys=True)
            self.past_values = self._append(self.past_values, self.values[..., :full, :], keys=False)
            # copies, so that the float memory of quantized tokens is freed
            self.keys, self.values = self.keys[..., full:, :].clone(), self.values[..., full:, :].clone()

    def _append(self, past: AffineQuantizedTensor | None, x: Tensor, *, keys: bool) -> AffineQuantizedTensor:
        name = "keys of a cache" if keys else "values of a cache"
        new = AffineQuantizedTensor.from_float(x, self.spec(keys), "minmax", name=name)
        return new if past is None else torch.cat([past, new], _TOKENS)  # type: ignore[return-value]

    def get_seq_length(self) -> int:
        if not self.is_initialized:
            return 0
        past = 0 if self.past_keys is None else self.past_keys.shape[_TOKENS]
        return past + self.keys.shape[_TOKENS]

    # -- removing tokens and sequences ------------------------------------------------------------------------------

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens; ``tokens_to_remove`` is their number, negative, as in transformers."""
        length, newest = self.get_seq_length(), 0 if self.keys is None else self.keys.shape[_TOKENS]
        if tokens_to_remove > 0 or (self.is_initialized and -tokens_to_remove > length):
            raise ValueError(f"crop needs a number from -{length} (all tokens) to 0, got {tokens_to_remove}")
        if tokens_to_remove == 0 or not self.is_initialized:
            return
        kept = length + tokens_to_remove
        if -tokens_to_remove <= newest or self.past_keys is None:
            self.keys, self.values = (
                self.keys[..., : newest + tokens_to_remove, :],
                self.values[..., : newest + tokens_to_remove, :],
            )
            return
        whole = kept // self.group * self.group
        self.past_keys, self.keys = _cut(self.past_keys, whole, kept)
        self.past_values, self.values = _cut(self.past_values, whole, kept)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self.batch_select_indices(
                torch.arange(self.keys.shape[0], dtype=torch.int64, device="cpu").repeat_interleave(repeats)
            )

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, in this order; also accepts a mask."""
        if not self.is_initialized:
            return
        indices = indices.nonzero().flatten() if indices.dtype == torch.bool else indices
        self._each(lambda t: t.index_select(0, indices.to(t.device)))

    def reset(self) -> None:
        self.past_keys = self.past_values = None
        super().reset()

    def offload(self) -> None:
        self._each(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._each(lambda t: t.to(self.device, non_blocking=True))

    def _each(self, change: Any) -> None:
        new = (None if t is None else change(t) for t in self.stored)
        self.past_keys, self.past_values, self.keys, self.values = new


def _all(past: AffineQuantizedTensor | None, newest: Tensor) -> Tensor:
    return newest if past is None else torch.cat([past.dequantize(), newest], _TOKENS)


def _cut(past: Any, whole: int, kept: int) -> tuple[AffineQuantizedTensor | None, Tensor]:
    """(the first ``whole`` tokens, the tokens from there to ``kept`` as float)."""
    rest = past.dequantize()[..., whole:kept, :].clone()
    return (past[..., :whole, :].clone() if whole else None), rest


block_cache.QUANTIZED.add(QuantizedLayer)  # fused blocks write it and read its codes
