"""Quantizes floats to ggml's block types. Types with one scale per block are bit-identical to the ``gguf`` package;
the others use a search (algorithms/solvers/kquant_search.py). All arithmetic is float32, elementwise or with a fixed
summation order, so the result does not depend on threads or SIMD width. Native code (kernels/cpu/src/gguf_quantize.h)
writes the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...algorithms.solvers import kquant_search
from ...algorithms.solvers.kquant_search import chosen, half, weighted
from ...core.numerics import Parts
from ...kernels.cpu.library import usable
from ...kernels.cpu.matrix_view import threads_for
from ...kernels.native import convert as native_convert
from ...kernels.native.arguments import FLOAT_KINDS
from .blocks import TYPES

_CHUNK = 1 << 17  # elements quantized at once, with some tens of temporary arrays of that size

Rule = Callable[[Tensor, "Tensor | None"], Parts]


def quantize(x: Tensor, name: str, importance: Tensor | None = None) -> Parts:
    """Plain parts of x in a ggml type; for plain types ``codes`` is the tensor itself.

    x: float [.., n], finite. importance: [n], or [e, n] for x [e, .., n], weight of the squared error of each column,
    e.g. the mean square of the input (llama.cpp's imatrix); used by the types in ``WEIGHTED``. Raises ValueError for
    read-only types, rows that are not whole blocks, values that are not finite or exceed the range of float16 scales.
    """
    if name not in FROM_FLOATS:
        raise ValueError(f"{name!r} is not a type that floats can be quantized to; known: {', '.join(FROM_FLOATS)}")
    kind = TYPES[name]
    kind.row_bytes(x.shape)
    fast = quantize_native(x, name, importance)
    if fast is not None:
        return kind.decode(fast.raw, tuple(x.shape))
    if not bool(x.isfinite().all()):
        raise ValueError(f"{name}: {int((~x.isfinite()).sum())} of {x.numel()} values are NaN or infinite")
    if isinstance(kind.spec, torch.dtype):
        codes = x.to(kind.spec).contiguous()
        if not bool(codes.isfinite().all()):
            raise ValueError(f"{name} cannot represent {float(x.abs().max()):.4g}; use BF16 or F32")
        return Parts(codes)
    if importance is not None and importance.ndim == 2 and x.ndim == 3 and len(importance) == len(x) > 0:
        each = [quantize(matrix, name, weights) for matrix, weights in zip(x, importance, strict=True)]
        return _cat([parts.map(lambda t: t[None]) for parts in each])
    if importance is not None and tuple(importance.shape) != (x.shape[-1],):
        raise ValueError(f"importance of shape {[*importance.shape]}; expected one per column, {x.shape[-1]}")
    n = x.shape[-1]
    flat = x.detach().reshape(-1, n) if n else x.detach().new_zeros((0, kind.elements))
    step = max(1, _CHUNK // max(1, n))
    weights = None if importance is None else importance.float().view(-1, kind.elements)
    pieces = []
    for start in range(0, max(1, flat.shape[0]), step):
        blocks = flat[start : start + step].float().reshape(-1, kind.elements)
        spread = None if weights is None else weights.repeat(blocks.shape[0] // len(weights), 1)
        rule = RULES[name] if spread is None else WEIGHTED.get(name, RULES[name])
        pieces.append(rule(blocks, spread))
    per_row = n // kind.elements
    lead = x.shape[:-1]
    return _cat(pieces).map(lambda t: t.reshape(*lead, per_row * t.shape[1]).contiguous())


class Blocks(NamedTuple):
    """Blocks of a tensor as in a file, uint8 [rows, row bytes], and the sums of x**2 and (value - x)**2."""

    raw: Tensor
    signal: float
    noise: float


def quantize_native(
    x: Tensor, name: str, importance: Tensor | None = None, threads: int | None = None
) -> Blocks | None:
    """As :func:`quantize`, to bytes; None where native code has no such type or is missing, and for all that
    :func:`quantize` refuses. threads: default: as many as the size is worth."""
    kind = TYPES[name]
    k = x.shape[-1] if x.ndim else 0
    if (
        kind.id not in native_convert.GGUF_MADE or not x.numel() or k % kind.elements or not x.is_cpu
        or x.dtype not in FLOAT_KINDS or usable() is not True
    ):  # fmt: skip
        return None
    x = x.detach().contiguous()
    weights = None if importance is None else importance.float().contiguous()
    if weights is not None and (weights.ndim == 2 and x.ndim == 3) and len(weights) == len(x):
        each = [quantize_native(matrix, name, row, threads) for matrix, row in zip(x, weights, strict=True)]
        found = [blocks for blocks in each if blocks is not None]
        if len(found) < len(each):
            return None
        return Blocks(
            torch.cat([b.raw for b in found]), math.fsum(b.signal for b in found), math.fsum(b.noise for b in found)
        )
    if weights is not None and tuple(weights.shape) != (k,):
        return None
    raw = torch.empty((x.numel() // k, kind.row_bytes(x.shape)), dtype=torch.uint8, device="cpu")
    sums = torch.empty((-(-x.numel() // native_convert.GGUF_PIECE), 2), dtype=torch.float64, device="cpu")
    count = threads_for(x.numel()) if threads is None else threads
    fits = native_convert.gguf_quantize(kind.id, x, weights, raw, sums, count)
    signal, noise = sums.sum(0).tolist()
    return Blocks(raw, signal, noise) if fits and math.isfinite(signal) else None


def _cat(pieces: list[Parts]) -> Parts:
    out: list[Any] = []
    for parts in zip(*pieces, strict=True):
        first = parts[0]
        joined = _cat(list(parts)) if isinstance(first, Parts) else None if first is None else torch.cat(parts)
        out.append(joined)
    return Parts(*out)


# -- one scale per block: x is [blocks, elements] ----------------------------------------------------------------------


def _reciprocal(d: Tensor) -> Tensor:
    """1 / d, and 0 if that is not finite."""
    return torch.where((1 / d).isfinite(), 1 / d, 0)


def _round_away(x: Tensor) -> Tensor:
    """Round to the nearest integer, halves away from zero, like C's roundf."""
    size = x.abs()
    whole = size.floor()
    return x.sign() * (whole + (2 * (size - whole)).floor())


def _largest(x: Tensor) -> Tensor:
    """The element of largest magnitude of each block, with its sign; the first among equals. [blocks, 1]"""
    return x.gather(1, x.abs().argmax(1, keepdim=True))


def _centred(x: Tensor, mid: int) -> Parts:
    """Codes 0 .. 2 * mid - 1 around mid; the element of largest magnitude gets code 0."""
    d = _largest(x) / -mid
    codes = (x * _reciprocal(d) + (mid + 0.5)).trunc().clamp(0, 2 * mid - 1)
    return Parts(codes.to(torch.uint8), half(d))


def _between(x: Tensor, top: int) -> Parts:
    """Codes 0 .. top from the smallest to the largest element."""
    lo = x.amin(1, keepdim=True) + 0.0  # never -0
    d = (x.amax(1, keepdim=True) - lo) / top + 0.0
    codes = ((x - lo) * _reciprocal(d) + 0.5).trunc().clamp(0, top)
    return Parts(codes.to(torch.uint8), half(d), offset=half(lo))


def _symmetric(x: Tensor, top: int) -> Parts:
    d = x.abs().amax(1, keepdim=True) / top
    return Parts(_round_away(x * _reciprocal(d)).to(torch.int8), half(d))


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _nearest_e2m1(x: Tensor, scale: Tensor) -> Tensor:
    """Codes that minimize |code * scale - x|; ties go to the smaller code, and 0 is positive."""
    best = torch.zeros(x.shape, dtype=torch.uint8, device="cpu")
    least = x.abs()
    for code in (*range(1, 8), *range(9, 16)):
        error = (scale * (_E2M1[code & 7] * (-1 if code > 7 else 1)) - x).abs()
        best = torch.where(error < least, code, best)
        least = torch.minimum(least, error)
    return best.to(torch.uint8)


def _mxfp4(x: Tensor) -> Parts:
    """Exponent of the largest magnitude, minus that of e2m1's maximum: floor(log2 amax) - 2."""
    amax = x.abs().amax(1, keepdim=True)
    power = torch.where(amax > 0, amax.double().log2().float().floor() - 2 + 127, 0).clamp(0, 254).to(torch.uint8)
    scale = torch.ldexp(torch.ones(power.shape, dtype=torch.float32, device="cpu"), power.to(torch.int32) - 127)
    return Parts(_nearest_e2m1(x, scale), Parts(power))


def _nvfp4(x: Tensor) -> Parts:
    """The better of two scales for each 16 elements: the largest magnitude as 6, or as 4."""
    sub = x.view(-1, 16)
    amax = sub.abs().amax(1, keepdim=True)
    found = []
    for reach in (6.0, 4.0):
        scale = (amax / reach).clamp(max=448).to(torch.float8_e4m3fn)
        codes = _nearest_e2m1(sub, scale.float())
        value = (
            torch.tensor((*_E2M1, *(-v for v in _E2M1)), dtype=torch.float32, device="cpu")[codes.long()]
            * scale.float()
        )
        found.append((kquant_search.pairwise_sum((value - sub).square().t()), scale, codes))
    (error6, scale6, codes6), (error4, scale4, codes4) = found
    better = (error4 < error6)[:, None]
    scale = torch.where(better, scale4.view(torch.uint8), scale6.view(torch.uint8)).view(-1, 4)
    return Parts(torch.where(better, codes4, codes6).view(-1, 64), Parts(scale.view(torch.float8_e4m3fn)))


_PLAIN = ("F32", "F16", "F64", "BF16")
RULES: dict[str, Rule] = {
    "Q4_0": lambda x, w: _centred(x, 8),
    "Q4_1": lambda x, w: _between(x, 15),
    "Q5_0": lambda x, w: _centred(x, 16),
    "Q5_1": lambda x, w: _between(x, 31),
    "Q8_0": lambda x, w: _symmetric(x, 127),
    "TQ1_0": lambda x, w: _symmetric(x, 1),
    "TQ2_0": lambda x, w: _symmetric(x, 1),
    "MXFP4": lambda x, w: _mxfp4(x),
    "NVFP4": lambda x, w: _nvfp4(x),
    **chosen(),
}
# Types that use importance, and how
WEIGHTED: dict[str, Rule] = {**chosen(), **weighted()}
# Types that floats can be quantized to; integer types would round them
FROM_FLOATS = tuple(name for name in TYPES if name in _PLAIN or name in RULES)
