"""Steps of a transformer block for inference, on numbered buffers of rows, and their plain reference.

The native executor (native/block.py, cpu/src/block.h) runs the steps of a block in one call with one parallel region.
The reference here is the definition of every step; the native result agrees with it within float32 rounding.

Buffers are matrices [rows, width], rows = batch * tokens. Buffer 0 is the block's input and buffer 1 its output, both
in the dtype of the model; the others are scratch in float32. All arithmetic between products is in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.hadamard import rotate_blocks
from ..support.errors import ArgumentError

Activation = Literal["relu", "gelu", "gelu_tanh", "quick_gelu", "silu"]
# In the order of Function in cpu/src/abi.h, after IDENTITY.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,  # x / 2 * (1 + erf(x / sqrt(2)))
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
}


@dataclass(frozen=True, eq=False)
class Norm:
    """Normalization of rows: of a buffer, or of each head.

    "layer"  (x - mean(x)) / sqrt(var(x) + eps) * (weight + offset) + bias
    "rms"    x / sqrt(mean(x**2) + eps) * (weight + offset) + bias

    weight, bias: [width], or None for 1 and 0. offset: added to the weight (1 in Gemma).
    """

    kind: Literal["layer", "rms"]
    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None
    offset: float = 0.0


@dataclass(frozen=True, eq=False)
class Layer:
    """A linear layer: weight [N, K], quantized; bias [N] or None."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True)
class Columns:
    """Columns of a buffer, from ``start`` on."""

    buffer: int
    start: int = 0


@dataclass(frozen=True, eq=False)
class LinearStep:
    """out[i] = act(h @ layers[i].weight.T + layers[i].bias) + residual, with h = norm(x), or x without a norm.

    x         buffer of the input, width K
    layers    one or more layers with the same K; the input is normalized and quantized once for all of them
    out       one buffer for each layer
    norm      applied to the rows of x
    normed    buffer that keeps h, if a later step reads it
    gated     out[0] = act(h @ gate.T + b) * (h @ up.T + b) + residual. gate and up are two layers of the same size, or
              the first and the second half of the rows of one layer
    residual  buffer that is added; may be the same as out[0]
    """

    x: int
    layers: tuple[Layer, ...]
    out: tuple[int, ...]
    norm: Norm | None = None
    normed: int | None = None
    act: Activation | None = None
    gated: bool = False
    residual: int | None = None


@dataclass(frozen=True, eq=False)
class NormStep:
    """out = norm(x) + residual. residual: a buffer, or None."""

    x: int
    out: int
    norm: Norm
    residual: int | None = None


@dataclass(frozen=True, eq=False)
class Heads:
    """Sizes of attention: query heads, heads of keys and values (a divisor of them), and channels of a head."""

    query: int
    shared: int
    size: int


@dataclass(frozen=True, eq=False)
class RotaryStep:
    """Normalizes and rotates the heads of q and k, and writes k and v to the call's keys and values.

    q is changed in place in its buffer. Row (b, s) of k and v goes to ``keys[b, head, past + s]`` and
    ``values[b, head, past + s]`` of the :class:`Call`.

    rotary   None: not rotated. With cos, sin of the call, on the first ``rotated`` channels x of each head:
             "half"          x * cos + cat(-x2, x1) * sin, (x1, x2) the two halves of x
             "interleaved"   the same with x1 the even and x2 the odd channels, in their places
    q_norm, k_norm   per head, before the rotation
    """

    q: Columns
    k: Columns
    v: Columns
    heads: Heads
    rotary: Literal["half", "interleaved"] | None = None
    rotated: int = 0
    q_norm: Norm | None = None
    k_norm: Norm | None = None


@dataclass(frozen=True, eq=False)
class AttentionStep:
    """out = softmax(cap(q @ k.T * scale) + mask) @ v for each head; a row without an allowed key is 0.

    k, v   columns of buffers: keys are the call's own tokens. None: the call's ``keys`` and ``values``
    cap    softcap > 0: softcap * tanh(x / softcap)

    Query token s of S sees key j of L if j <= L - S + s (``causal`` of the call), if j > L - S + s - window (``window``
    of the call, 0: none), and if the mask allows it.
    """

    q: Columns
    out: int
    heads: Heads
    scale: float
    k: Columns | None = None
    v: Columns | None = None
    softcap: float = 0.0


Step = LinearStep | NormStep | RotaryStep | AttentionStep


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps of a block. widths: of each buffer. dtype: of the input and the output. partial: other steps follow,
    so that these need not write the output."""

    steps: tuple[Step, ...]
    widths: tuple[int, ...]
    dtype: torch.dtype
    partial: bool = False


class Past(NamedTuple):
    """Quantized keys and values [batch, shared heads, P, size] of P tokens, as inference/kv_cache.py holds them.

    hadamard: size of the blocks of channels that were rotated before they were quantized (core/hadamard.py), of keys
    and of values; 0: not rotated.
    """

    keys: Any
    values: Any
    hadamard: tuple[int, int] = (0, 0)

    def floats(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The keys and values, rotated back."""
        return _floats(self.keys, self.hadamard[0], dtype), _floats(self.values, self.hadamard[1], dtype)


def _floats(t: Any, hadamard: int, dtype: torch.dtype) -> Tensor:
    if not hadamard:
        return t.dequantize(dtype)
    return rotate_blocks(t.dequantize(torch.promote_types(dtype, torch.float32)), hadamard).to(dtype)


@dataclass(eq=False)
class Call:
    """Arguments of one call besides the input [batch, tokens, width].

    cos, sin      [batch or 1, tokens, rotated]
    mask          bool (True: allowed) or float (added), [batch or 1, heads or 1, tokens, length], any strides
    keys, values  [batch, shared heads, capacity, size], any strides with contiguous channels, of float32, bfloat16 or
                  float16. RotaryStep writes at ``past``; AttentionStep reads the first ``length``
    coded         quantized keys and values of the P tokens before those; ``past`` and ``length`` do not count them, the
                  mask does
    kept          buffers whose contents outlive the call: index -> tensor [rows, width] float32 that is used for it.
                  With it a block can be run in two parts
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    mask: Tensor | None = None
    causal: bool = False
    window: int = 0
    keys: Tensor | None = None
    values: Tensor | None = None
    past: int = 0
    length: int = 0
    coded: Past | None = None
    kept: dict[int, Tensor] = field(default_factory=dict)


# -- reference ---------------------------------------------------------------------------------------------------------


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """x [.., width] float32 -> the same."""
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    if norm.weight is not None:
        y = y * (norm.weight.detach().float() + norm.offset)
    return y if norm.bias is None else y + norm.bias.detach().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, rotary: str | None, rotated: int) -> Tensor:
    """x [batch, tokens, heads, size] float32 with cos, sin [batch or 1, tokens, rotated]."""
    if rotary is None:
        return x
    turned, rest = x[..., :rotated], x[..., rotated:]
    cos, sin = cos.float().unsqueeze(2), sin.float().unsqueeze(2)
    if rotary == "half":
        first, second = turned.chunk(2, -1)
        other = torch.cat((-second, first), -1)
    else:
        other = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    return torch.cat((turned * cos + other * sin, rest), -1)


def attend(q: Tensor, k: Tensor, v: Tensor, call: Call, scale: float, softcap: float) -> Tensor:
    """q [B, H, S, D], k and v [B, shared, L, D], float32 -> [B * S, H * D]."""
    (b, h, s, d), length = q.shape, k.shape[2]
    if length == 0:
        return q.new_zeros(b * s, h * d)
    k, v = (t.repeat_interleave(h // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(s, dtype=torch.int64, device=q.device)[:, None] + (length - s)
    key = torch.arange(length, dtype=torch.int64, device=q.device)
    if call.causal:
        scores = scores.masked_fill(key > at, -torch.inf)
    if call.window:
        scores = scores.masked_fill(key <= at - call.window, -torch.inf)
    if call.mask is not None:
        mask = call.mask[..., :length]
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.float()
    top = scores.amax(-1, keepdim=True)
    weights = torch.exp(scores - torch.where(top == -torch.inf, 0.0, top))
    total = weights.sum(-1, keepdim=True)
    y = weights @ v / torch.where(total == 0, 1.0, total)
    return y.transpose(1, 2).reshape(b * s, h * d)


def _act(name: str | None, y: Tensor) -> Tensor:
    return y if name is None else ACTIVATIONS[name](y)


def run_reference(block: Steps, x: Tensor, call: Call) -> Tensor:
    """The output [batch, tokens, width] for an input [batch, tokens, width], with torch ops in float32; x itself if no
    step writes it, as in the first of two parts of a block.

    Products are ``F.linear`` with the layers' quantized weights.
    """
    batch, tokens = x.shape[:2]
    rows = batch * tokens
    buffers: dict[int, Tensor] = {0: x.reshape(rows, -1).float(), **call.kept}

    def put(index: int, value: Tensor) -> None:
        if index in call.kept:
            call.kept[index].copy_(value)
        else:
            buffers[index] = value

    def heads(columns: Columns, count: int, size: int) -> Tensor:  # [batch, tokens, count, size]
        part = buffers[columns.buffer][:, columns.start : columns.start + count * size]
        return part.reshape(batch, tokens, count, size)

    for step in block.steps:
        if isinstance(step, LinearStep):
            h = buffers[step.x] if step.norm is None else normalize(buffers[step.x], step.norm)
            if step.normed is not None:
                put(step.normed, h)
            ys = [F.linear(h, w.weight, None if w.bias is None else w.bias.float()) for w in step.layers]
            if step.gated:
                gate, up = ys if len(ys) == 2 else ys[0].chunk(2, -1)
                ys = [_act(step.act, gate) * up]
            else:
                ys = [_act(step.act, y) for y in ys]
            for index, y in zip(step.out, ys, strict=True):
                put(index, y if step.residual is None else y + buffers[step.residual])
        elif isinstance(step, NormStep):
            y = normalize(buffers[step.x], step.norm)
            put(step.out, y if step.residual is None else y + buffers[step.residual])
        elif isinstance(step, RotaryStep):
            _rotary(step, buffers, heads, call, tokens)
        else:
            held_q = heads(step.q, step.heads.query, step.heads.size).transpose(1, 2)
            if step.k is not None and step.v is not None:
                k, v = (heads(t, step.heads.shared, step.heads.size).transpose(1, 2) for t in (step.k, step.v))
            else:
                if call.keys is None or call.values is None:
                    raise ArgumentError("attention step: the call has no keys and values")
                k, v = (t[:, :, : call.length].float() for t in (call.keys, call.values))
                if call.coded is not None:
                    before = call.coded.floats(torch.float32)
                    k, v = (torch.cat(both, 2) for both in zip(before, (k, v), strict=True))
            put(step.out, attend(held_q, k, v, call, step.scale, step.softcap))
    if 1 not in buffers:
        return x
    return buffers[1].to(block.dtype).view(batch, tokens, -1)


def _rotary(
    step: RotaryStep, buffers: dict[int, Tensor], heads: Callable[..., Tensor], call: Call, tokens: int
) -> None:
    if call.keys is None or call.values is None:
        raise ArgumentError("rotary step: the call has no keys and values to write to")
    q, k = heads(step.q, step.heads.query, step.heads.size), heads(step.k, step.heads.shared, step.heads.size)
    q = q if step.q_norm is None else normalize(q, step.q_norm)
    k = k if step.k_norm is None else normalize(k, step.k_norm)
    if step.rotary is not None:
        if call.cos is None or call.sin is None:
            raise ArgumentError("rotary step: the call has no cos and sin")
        q, k = (rotate(t, call.cos, call.sin, step.rotary, step.rotated) for t in (q, k))
    width = step.heads.query * step.heads.size
    buffers[step.q.buffer][:, step.q.start : step.q.start + width] = q.reshape(-1, width).clone()
    v = heads(step.v, step.heads.shared, step.heads.size)
    for cache, new in ((call.keys, k), (call.values, v)):
        cache[:, :, call.past : call.past + tokens] = new.transpose(1, 2).to(cache.dtype)
