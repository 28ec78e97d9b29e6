"""Native calls of attention and rotary embeddings, with arguments that were checked.

As arguments.py says, each function checks its tensors against the extents that src/attention.h and src/rotary.h use.
The reference of both is in kernels/block.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...core.blocks import counts, resolve
from ...core.layouts import portable_layout
from ...core.packing import stream_shape
from ...core.tensor import AffineQuantizedTensor
from ...core.tracing import in_memory
from ...support.errors import ArgumentError
from ..block import Norm, Past
from ..cpu.abi import MOST_CHANNELS, NONE, U8, AttentionArgs, CacheCodes, RotaryArgs
from ..cpu.block import NORMS, ROTATIONS
from ..cpu.library import KINDS
from .arguments import FLOAT_KINDS, address, check_status, native_function

_FLOATS = tuple(FLOAT_KINDS)
_PAST = ("past keys", "past values")
_READ = "codes of a cache"  # key of a structure among what a tensor keeps


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, causal: bool = False, window: int = 0,
    scale: float | None = None, softcap: float = 0.0, past: Past | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(cap(q @ k.T * scale) + mask) @ v for each head; a row without an allowed key is 0.

    q        [B, H, S, D], float32, bfloat16 or float16, any strides with contiguous channels
    k, v     [B, shared, L, D] of one such dtype; shared divides H
    mask     bool (True: allowed) or float (added), [B or 1, H or 1, S or 1, L] or with fewer dimensions
    causal   query token s sees key j if j <= L - S + s
    window   if positive, and if j > L - S + s - window
    scale    default: 1 / sqrt(D)
    softcap  if positive: cap(x) = softcap * tanh(x / softcap)
    past     quantized keys and values [B, shared, P, D] before k and v; L is then P and the tokens of k together. See
             :func:`past_reason`
    out      the result, by default a new tensor in the memory order [B, S, H, D]

    Returns [B, H, S, D] in q's dtype. Arithmetic is in float32; up to 4 tokens are multiplied with codes of 8 and 4
    bits in 16 bits, see src/attention_quantized.h. Raises ArgumentError for tensors that do not go together or that are
    not plain CPU memory, and MemoryError.
    """
    fits = reason(q, k, v, mask, past)
    if fits is not True:
        raise ArgumentError(f"attention: {fits}")
    (b, h, s, d), (_, shared, newest, _) = q.shape, k.shape
    if window < 0 or softcap < 0:
        raise ArgumentError(f"attention: window and softcap must not be negative, got {window} and {softcap}")
    if out is None:
        out = torch.empty((b, s, h, d), dtype=q.dtype, device=q.device).transpose(1, 2)
    elif out.shape != q.shape:
        raise ArgumentError(f"attention: the result has the shape of q {list(q.shape)}, got {list(out.shape)}")
    codes = () if past is None else cache_codes(past)
    length = newest if past is None else newest + past.keys.shape[2]
    marks, mask_kind = None, NONE
    mask_strides: tuple[int, ...] = (0, 0, 0, 0)
    if mask is not None:
        mask = mask.expand(b, h, s, length)
        marks, mask_strides = mask.data_ptr(), mask.stride()
        mask_kind = U8 if mask.dtype is torch.bool else FLOAT_KINDS[mask.dtype]
    q0, q1, q2, _ = q.stride()
    at, out_strides = _strided(out, "attention: result", _FLOATS, (0, 2, 1))
    a = AttentionArgs(
        q.data_ptr(), at, k.data_ptr(), v.data_ptr(), marks, (q0, q2, q1), out_strides, k.stride()[:3], v.stride()[:3],
        mask_strides, b, s, length, window, h, shared, d, FLOAT_KINDS[q.dtype], FLOAT_KINDS[out.dtype],
        FLOAT_KINDS[k.dtype], mask_kind, causal, d**-0.5 if scale is None else scale, softcap, length - newest,
        *map(ctypes.addressof, codes),
    )  # fmt: skip
    status = native_function("pw_attention")(ctypes.addressof(a), torch.get_num_threads())
    if status:
        check_status(status, f"attention: {_shapes(q, k, v)}")
    del codes  # the structures of the past live until here
    return out


def reason(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, past: Past | None = None) -> bool | str:
    """True if :func:`attention` takes these tensors, or why not."""
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or k.dtype != v.dtype:
        return f"expected q [B, H, S, D] and k, v [B, shared, L, D], got {_shapes(q, k, v)}"
    (b, h, s, d), (kb, shared, length, kd) = q.shape, k.shape
    if kb != b or kd != d or not shared or h % shared or not 1 <= d <= MOST_CHANNELS:
        return (
            f"q has batch {b}, {h} heads of {d} channels, keys have batch {kb}, {shared} heads of {kd}; "
            f"expected the same batch and channels, 1 to {MOST_CHANNELS}, and a divisor of the heads"
        )
    for t in (q, k, v):
        if t.dtype not in FLOAT_KINDS or not in_memory(t) or not t.is_cpu or (d > 1 and t.stride(3) != 1):
            return f"expected float tensors in plain CPU memory with contiguous channels, got {_shapes(q, k, v)}"
    if past is not None:
        fits = past_reason(past, k)
        if fits is not True:
            return fits
        length += past.keys.shape[2]
    if mask is not None:
        sizes = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        if mask.ndim > 4 or any(n not in (1, full) for n, full in zip(sizes, (b, h, s, length), strict=True)):
            return f"the mask {list(mask.shape)} does not expand to [{b}, {h}, {s}, {length}]"
        if mask.dtype not in (torch.bool, *_FLOATS) or not in_memory(mask) or not mask.is_cpu:
            return f"expected a bool or float mask in plain CPU memory, got {_shapes(mask)}"
    return True


def past_reason(past: Past, newest: Tensor) -> bool | str:
    """True if :func:`attention` reads this quantized past before keys ``newest`` [B, shared, N, D], or why not.

    Codes are unsigned integers of 1 to 8 bits, with a scale and an offset for a group of tokens or of channels.
    """
    for t, block in zip(past[:2], past.hadamard, strict=True):
        if type(t) is not AffineQuantizedTensor or t.ndim != 4 or newest.ndim != 4:
            return f"a quantized past is a tensor [B, shared, P, D], got {type(t).__name__}"
        shape = t.shape
        if shape[:2] != newest.shape[:2] or shape[3] != newest.shape[3] or shape != past.keys.shape:
            return f"a past {list(shape)} does not go before keys {list(newest.shape)}"
        if block and (block < 0 or block & (block - 1) or shape[3] % block):
            return f"blocks of {block} rotated channels: expected a power of two that divides {shape[3]}"
        if _READ in t._bound:  # what follows does not change
            continue
        spec = t.spec
        if spec.format.name != f"uint{spec.format.bits}" or spec.layout != portable_layout(spec):
            return f"codes of {spec.format.name} in layout {spec.layout} are not read"
        if resolve(spec.block, t.shape)[:2] != (1, 1):
            return f"each head has scales of its own, got block {spec.block}"
        if spec.zero_point or spec.scale not in _FLOATS or spec.scale != spec.offset:
            return f"a past has scales and offsets of one float dtype, got {spec.scale} and {spec.offset}"
    return True


def cache_codes(past: Past) -> tuple[CacheCodes, ...]:
    """The structures of quantized keys and values that :func:`past_reason` accepted. Each tensor keeps its own, which
    holds while its parts are the same memory. Raises ArgumentError for parts that do not go together."""
    found = []
    for t, block, what in zip(past[:2], past.hadamard, _PAST, strict=True):
        parts = t._codes, t._scale, t._offset
        memory = [block, *((p.data_ptr(), p.shape, p.stride()) for p in parts)]
        cached = t._bound.get(_READ)
        if cached is None or cached[0] != memory:
            cached = t._bound[_READ] = (memory, _codes(t, block, what))
        found.append(cached[1])
    return tuple(found)


def _codes(t: Any, block: int, what: str) -> CacheCodes:
    """The structure of keys or values that :func:`past_reason` accepted. block: of channels that were rotated."""
    shape, bits = t.shape, t.spec.format.bits
    parts = (
        ("codes", t._codes, (torch.uint8,), stream_shape(t.spec.codes_shape(shape), bits)),
        ("scale", t._scale, (t.spec.scale,), counts(t.spec.block, shape)),
        ("offset", t._offset, (t.spec.scale,), counts(t.spec.block, shape)),
    )
    c = CacheCodes()
    for name, part, dtypes, expected in parts:
        if tuple(part.shape) != tuple(expected):
            raise ArgumentError(f"attention: {name} of {what}: expected {list(expected)}, got {list(part.shape)}")
        at, strides = _strided(part, f"attention: {name} of {what}", dtypes, (0, 1, 2))
        setattr(c, name, at)
        setattr(c, f"{'code' if name == 'codes' else name}_strides", strides)
    _, _, c.tokens, c.channels = resolve(t.spec.block, shape)
    c.row, c.bits, c.kind, c.hadamard = t._codes.shape[-1], bits, KINDS[t.spec.scale], block
    return c


def rotary(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, past: int, cos: Tensor | None = None,
    sin: Tensor | None = None, kind: str | None = None, q_norm: Norm | None = None, k_norm: Norm | None = None,
) -> None:  # fmt: skip
    """Normalize and rotate the heads of q and k, and write k and v to keys and values from token ``past`` on.

    q             float32 [B, S, H, D], changed in place; heads lie side by side, and B and S form rows
    k, v          float32 [B, S, shared, D], likewise
    keys, values  [B, shared, capacity, D] of one float dtype, any strides with contiguous channels
    cos, sin      [B or 1, S, rotated] of one float dtype; kind: "half", "interleaved" or None, see RotaryStep

    Raises ArgumentError for tensors that do not go together or that are not plain CPU memory.
    """
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or keys.ndim != 4 or values.shape != keys.shape:
        raise ArgumentError(
            "rotary: expected q [B, S, H, D], k and v [B, S, shared, D], keys and values [B, shared, capacity, D], "
            f"got {_shapes(q, k, v, keys, values)}"
        )
    (b, s, h, d), shared = q.shape, k.shape[2]
    if (k.shape[0], k.shape[1], k.shape[3]) != (b, s, d) or not shared or h % shared or not 1 <= d <= MOST_CHANNELS:
        raise ArgumentError(f"rotary: q and k do not go together: {_shapes(q, k)}")
    if keys.shape[:2] != (b, shared) or keys.shape[3] != d or past < 0 or past + s > keys.shape[2]:
        raise ArgumentError(f"rotary: {s} tokens from {past} on do not fit into keys {list(keys.shape)}")
    if keys.dtype != values.dtype or kind not in ROTATIONS:
        raise ArgumentError(f"rotary: keys {keys.dtype}, values {values.dtype}, kind {kind!r}")
    a = RotaryArgs()
    a.q, a.q_stride = _rows(q, "rotary: q")
    a.k, a.k_stride = _rows(k, "rotary: k")
    a.v, a.v_stride = _rows(v, "rotary: v")
    a.keys, a.key_strides = _strided(keys, "rotary: keys", _FLOATS, (0, 1, 2))
    a.values, a.value_strides = _strided(values, "rotary: values", _FLOATS, (0, 1, 2))
    if kind is not None:
        rotated = 0 if cos is None else cos.shape[-1]
        if (
            cos is None or sin is None or cos.shape != sin.shape or cos.dtype != sin.dtype or cos.ndim != 3
            or cos.shape[0] not in (1, b) or cos.shape[1] != s or rotated % 2 or not 2 <= rotated <= d
        ):  # fmt: skip
            got = "none" if cos is None or sin is None else _shapes(cos, sin)
            raise ArgumentError(f"rotary: expected cos and sin [{b} or 1, {s}, an even number up to {d}], got {got}")
        cos, sin = cos.expand(b, -1, -1), sin.expand(b, -1, -1)
        a.cos, a.cos_strides = _strided(cos, "rotary: cos", _FLOATS, (0, 1))
        a.sin, a.sin_strides = _strided(sin, "rotary: sin", _FLOATS, (0, 1))
        a.rotation, a.rotated, a.angle_kind = ROTATIONS[kind], rotated, KINDS[cos.dtype]
    for to, norm, what in ((a.q_norm, q_norm, "q"), (a.k_norm, k_norm, "k")):
        if norm is None:
            continue
        to.kind, to.eps, to.offset = NORMS[norm.kind], norm.eps, norm.offset
        for name, p in (("weight", norm.weight), ("bias", norm.bias)):
            if p is not None:
                setattr(to, name, address(p, f"rotary: {name} of {what}'s norm", _FLOATS, d, exact=True))
                setattr(to, f"{name}_kind", FLOAT_KINDS[p.dtype])
    a.batch, a.tokens, a.past = b, s, past
    a.heads, a.shared, a.size, a.cache_kind = h, shared, d, KINDS[keys.dtype]
    status = native_function("pw_rotary")(ctypes.addressof(a), torch.get_num_threads())
    check_status(status, f"rotary: {_shapes(q, k)}")


def _strided(
    t: Tensor, what: str, dtypes: Sequence[torch.dtype], dims: Sequence[int], *, channels: bool = True
) -> tuple[int, tuple[int, ...]]:
    """Address and strides of ``dims`` of a strided tensor; channels: the last dimension must be contiguous."""
    at = address(t, what, dtypes, 0, contiguous=False)
    strides = t.stride()
    if channels and t.shape[-1] > 1 and strides[-1] != 1:
        raise ArgumentError(f"{what}: expected contiguous channels, got {list(t.shape)} with strides {list(strides)}")
    return at, tuple(strides[i] for i in dims)


def _rows(t: Tensor, what: str) -> tuple[int, int]:
    """Address of [B, S, heads, D] float32 as rows of heads side by side, and their stride."""
    b, s, heads, d = t.shape
    at, (batch, token, head) = _strided(t, what, (torch.float32,), (0, 1, 2))
    if (heads > 1 and head != d) or (b > 1 and s > 1 and batch != s * token):
        raise ArgumentError(f"{what}: expected rows of heads, got {list(t.shape)} with strides {list(t.stride())}")
    return at, token if s > 1 else batch


def _shapes(*tensors: Tensor) -> str:
    return ", ".join(f"{list(t.shape)} {t.dtype}" for t in tensors)
