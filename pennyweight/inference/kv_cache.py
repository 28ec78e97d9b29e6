"""A quantized KV cache, for ``model.generate(past_key_values=QuantizedCache(model.config))``.

Keys share a scale and an offset along tokens, per channel, since a few key channels are large at every token; values
along channels, per token (KIVI, Liu et al. 2024). Tokens are quantized once, in groups counted from the first token
that is quantized, when they are old enough, and never again: adding tokens appends codes. The newest tokens stay float.

Two more measures reduce the error of less than 8 bits. The channels of a head are rotated by a Hadamard matrix before
rounding (QuaRot, Ashkboos et al. 2024), which spreads large channels: k H is stored for keys, and scores are those of
rotated queries, (q H)(k H)^T = q k^T; v H for values, and outputs are rotated back, (w v H) H = w v. And the first
tokens stay float: they get much of the attention of all later ones, whatever their content (attention sinks, Xiao et
al. 2024), so that errors of their keys change every result.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ..core.formats import get_format
from ..core.hadamard import rotate_blocks
from ..core.layouts import portable_layout
from ..core.spec import DTYPES, QuantSpec
from ..core.tensor import AffineQuantizedTensor
from ..kernels.block import Past
from . import block_cache

BITS = (2, 3, 4, 5, 6, 7, 8)
SINKS = 4  # float tokens at the start, by default below 8 bits
_TOKENS = -2  # the axis of tokens in [batch, heads, tokens, channels]


class QuantizedCache(Cache):
    """Keys and values of a decoder, quantized to ``bits`` bits except the first and the newest tokens.

    config      model config, which shows the layers with full attention. Those with a sliding window, or without
                attention, are as in transformers' DynamicCache. Without it: all layers
    bits        2 to 8
    key_bits    of keys, if other than ``bits``; errors of keys cost more than those of values
    value_bits  of values, if other than ``bits``
    rotate      rotate the channels of each head by a Hadamard matrix before rounding, in blocks of the largest power of
                two that divides their number. Default: keys and values of fewer than 8 bits, but for heads with an odd
                number of channels, which cannot be rotated
    sinks       this many of the first tokens stay float. Default: 4, but 0 if keys and values have 8 bits
    group       numbers that share a scale and an offset: tokens for keys, channels for values (all, if there are fewer)
    residual    at least this many of the newest tokens stay float; up to ``group`` - 1 more until a group is full

    A call computes with the quantized past and its own float tokens. Beam search, ``crop`` and the selection of
    sequences operate on the codes; a crop into the past dequantizes the rest of the last group. Raises ValueError for
    other numbers; ``update`` raises it if ``rotate`` is True and a head has an odd number of channels.
    """

    def __init__(
        self, config: Any = None, *, bits: int = 8, key_bits: int | None = None, value_bits: int | None = None,
        rotate: bool | None = None, sinks: int | None = None, group: int = 32, residual: int = 128,
    ) -> None:  # fmt: skip
        self.key_bits, self.value_bits = (bits if n is None else n for n in (key_bits, value_bits))
        for name, n in (("bits", bits), ("key_bits", self.key_bits), ("value_bits", self.value_bits)):
            if type(n) is not int or n not in BITS:
                raise ValueError(f"{name} must be one of {BITS}, got {n!r}")
        if rotate is not None and type(rotate) is not bool:
            raise ValueError(f"rotate must be True, False or None, got {rotate!r}")
        if sinks is None:
            sinks = SINKS if min(self.key_bits, self.value_bits) < 8 else 0
        if type(group) is not int or group < 1 or type(residual) is not int or residual < 0:
            raise ValueError(f"group must be positive and residual non-negative, got {group!r} and {residual!r}")
        if type(sinks) is not int or sinks < 0:
            raise ValueError(f"sinks must be a non-negative number of tokens, got {sinks!r}")
        make = partial(
            QuantizedLayer, self.key_bits, group, residual, value_bits=self.value_bits, rotate=rotate, sinks=sinks
        )
        if config is None:
            super().__init__(layer_class_to_replicate=make)  # type: ignore[arg-type]
        else:
            layers = DynamicCache(config=config).layers
            super().__init__(layers=[make() if type(layer) is DynamicLayer else layer for layer in layers])
        self.bits, self.rotate, self.sinks, self.group, self.residual = bits, rotate, sinks, group, residual

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
    """One layer's cache: ``past_keys`` and ``past_values`` quantized, or None; ``keys`` and ``values`` the float
    tokens, the first ``sinks`` tokens and then the newest.

    bits is that of keys, and of values without ``value_bits``; the others are as in :class:`QuantizedCache`. hadamard:
    size of the blocks of channels that are rotated, of keys and of values; 0: not rotated.
    """

    keys: Any
    values: Any

    def __init__(
        self, bits: int = 8, group: int = 32, residual: int = 128, *, value_bits: int | None = None,
        rotate: bool | None = False, sinks: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.key_bits, self.value_bits = bits, bits if value_bits is None else value_bits
        self.rotate, self.sinks, self.group, self.residual = rotate, sinks, group, residual
        self.hadamard = 0, 0
        self.past_keys: AffineQuantizedTensor | None = None
        self.past_values: AffineQuantizedTensor | None = None

    @property
    def stored(self) -> tuple[Any, ...]:
        return self.past_keys, self.past_values, self.keys, self.values

    @property
    def past(self) -> Past | None:
        """The quantized tokens."""
        return None if self.past_keys is None else Past(self.past_keys, self.past_values, self.hadamard)

    def spec(self, keys: bool) -> QuantSpec:
        """The spec of keys or values."""
        block, bits = ((self.group, 1), self.key_bits) if keys else ((self.group,), self.value_bits)
        dtype = self.dtype if self.dtype in DTYPES.values() else torch.float32
        spec = QuantSpec(get_format(f"uint{bits}"), block, dtype, offset=dtype)
        return spec.with_(layout=portable_layout(spec))

    # -- adding tokens -----------------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self.hadamard = self._block(key_states, self.key_bits), self._block(value_states, self.value_bits)
        self.is_initialized = True

    def _block(self, x: Tensor, bits: int) -> int:
        """The channels of a block that is rotated, 0 if none is: the largest power of two that divides them all."""
        channels = x.shape[-1]
        block = channels & -channels
        if self.rotate and block < 2:
            raise ValueError(
                f"rotate=True needs heads with an even number of channels, got {channels}; pass rotate=False"
            )
        wanted = bits < 8 if self.rotate is None else self.rotate
        return block if wanted and block > 1 else 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add tokens [batch, heads, tokens, channels]; return all keys and values as float."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = torch.cat([self.keys, key_states], _TOKENS)
        self.values = torch.cat([self.values, value_states], _TOKENS)
        out = self.floats()
        self.quantize_old()
        return out

    def floats(self) -> tuple[Tensor, Tensor]:
        """All keys and values as float."""
        past, first = self.past, self.sinks
        if past is None:
            return self.keys, self.values
        keys, values = past.floats(self.dtype)
        return (
            torch.cat([self.keys[..., :first, :], keys, self.keys[..., first:, :]], _TOKENS),
            torch.cat([self.values[..., :first, :], values, self.values[..., first:, :]], _TOKENS),
        )

    def quantize_old(self) -> None:
        """Quantize the whole groups of tokens that are older than the newest ``residual``, but not the first ones."""
        first = self.sinks
        end = first + max(0, self.keys.shape[_TOKENS] - first - self.residual) // self.group * self.group
        if end > first:
            self.past_keys = self._append(self.past_keys, self.keys[..., first:end, :], keys=True)
            self.past_values = self._append(self.past_values, self.values[..., first:end, :], keys=False)
            # copies, so that the float memory of quantized tokens is freed
            self.keys, self.values = (
                torch.cat([t[..., :first, :], t[..., end:, :]], _TOKENS) for t in (self.keys, self.values)
            )

    def _append(self, past: AffineQuantizedTensor | None, x: Tensor, *, keys: bool) -> AffineQuantizedTensor:
        name, block = ("keys of a cache", self.hadamard[0]) if keys else ("values of a cache", self.hadamard[1])
        x = rotate_blocks(x, block) if block else x
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
        kept, past, first = length + tokens_to_remove, self.past, self.sinks
        if past is None or -tokens_to_remove <= newest - first:
            self.keys, self.values = (t[..., : newest + tokens_to_remove, :] for t in (self.keys, self.values))
            return
        whole = max(0, kept - first) // self.group * self.group
        self.keys, self.values = (
            torch.cat([t[..., : min(first, kept), :], old[..., whole : max(0, kept - first), :]], _TOKENS)
            for t, old in zip((self.keys, self.values), past.floats(self.dtype), strict=True)
        )
        self.past_keys, self.past_values = (t[..., :whole, :].clone() if whole else None for t in past[:2])

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


block_cache.QUANTIZED.add(QuantizedLayer)  # fused blocks write it and read its codes
