"""ggml's block types: [B, bytes of a block] to plain parts [B, k], and back.

Sources: ggml-common.h and the dequantizers of the ``gguf`` package, which the tests compare with. The codebooks of the
I-quants come from that package. ``codes`` of a function: their bit stream, where native code has read it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from ...core.formats import IQ2, IQ3_S, IQ3_XXS, Format
from ...core.numerics import Parts
from ...support.extras import install

_NIBBLES = (0, 4)
_EIGHT = tuple(range(8))
_PAIRS = (0, 2, 4, 6)


def fields(raw: Tensor, run: int, shifts: Sequence[int], bits: int) -> Tensor:
    """[B, g * run] bytes as [B, g * len(shifts) * run] fields: for each run of bytes, first all fields at the first
    shift, then all at the next. Returns uint8."""
    below = torch.tensor(shifts, dtype=torch.uint8, device="cpu")[:, None]
    out = (raw.unflatten(1, (raw.shape[1] // run, 1, run)) >> below) & ((1 << bits) - 1)
    return out.flatten(1)


def join(values: Tensor, run: int, shifts: Sequence[int]) -> Tensor:
    """Inverse of :func:`fields`: [B, g * len(shifts) * run] fields as [B, g * run] bytes."""
    n = len(shifts)
    view = values.unflatten(1, (values.shape[1] // (n * run), n, run))
    out = view[:, :, 0] << shifts[0]
    for i in range(1, n):
        out = out | (view[:, :, i] << shifts[i])
    return out.flatten(1)


def numbers(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of each row as numbers of a wider dtype; copied, as bytes where a row begins at an odd one."""
    size = dtype.itemsize
    if raw.stride(0) % size or raw.storage_offset() % size:
        return raw.clone(memory_format=torch.contiguous_format).view(dtype)
    return raw.view(dtype).clone(memory_format=torch.contiguous_format)


def half(raw: Tensor) -> Tensor:
    """[B, 2 * k] bytes as [B, k] float16."""
    return numbers(raw, torch.float16)


def raw_bytes(x: Tensor) -> Tensor:
    """The bytes of each row of x. Returns uint8."""
    return x.contiguous().view(torch.uint8)


def minus(x: Tensor) -> Tensor:
    """-x of float16 by its sign bit, so that every bit pattern is recovered."""
    return (x.contiguous().view(torch.int16) ^ -0x8000).view(torch.float16)


def cut(raw: Tensor, *sizes: int) -> list[Tensor]:
    """Split a block into the columns of its fields."""
    return list(raw.split(sizes, 1))


# -- one scale per block -----------------------------------------------------------------------------------------------


def q4_0(raw: Tensor, codes: Tensor | None = None) -> Parts:
    d, qs = cut(raw, 2, 16)
    return Parts(fields(qs, 16, _NIBBLES, 4) if codes is None else codes, half(d))


def pack_q4_0(p: Parts) -> Tensor:
    return torch.cat([raw_bytes(p.scale), join(p.codes, 16, _NIBBLES)], 1)


def q4_1(raw: Tensor, codes: Tensor | None = None) -> Parts:
    d, m, qs = cut(raw, 2, 2, 16)
    return Parts(fields(qs, 16, _NIBBLES, 4) if codes is None else codes, half(d), offset=half(m))


def pack_q4_1(p: Parts) -> Tensor:
    return torch.cat([raw_bytes(p.scale), raw_bytes(p.offset), join(p.codes, 16, _NIBBLES)], 1)


def _five_bits(qh: Tensor, qs: Tensor) -> Tensor:
    return fields(qs, 16, _NIBBLES, 4) | (fields(qh, 1, _EIGHT, 1) << 4)


def _pack_five_bits(codes: Tensor) -> Tensor:
    return torch.cat([join(codes >> 4, 1, _EIGHT), join(codes & 15, 16, _NIBBLES)], 1)


def q5_0(raw: Tensor, codes: Tensor | None = None) -> Parts:
    d, qh, qs = cut(raw, 2, 4, 16)
    return Parts(_five_bits(qh, qs) if codes is None else codes, half(d))


def pack_q5_0(p: Parts) -> Tensor:
    return torch.cat([raw_bytes(p.scale), _pack_five_bits(p.codes)], 1)


def q5_1(raw: Tensor, codes: Tensor | None = None) -> Parts:
    d, m, qh, qs = cut(raw, 2, 2, 4, 16)
    return Parts(_five_bits(qh, qs) if codes is None else codes, half(d), offset=half(m))


def pack_q5_1(p: Parts) -> Tensor:
    return torch.cat([raw_bytes(p.scale), raw_bytes(p.offset), _pack_five_bits(p.codes)], 1)


def q8_0(raw: Tensor, codes: Tensor | None = None) -> Parts:
    d, qs = cut(raw, 2, 32)
    return Parts((qs.contiguous() if codes is None else codes).view(torch.int8), half(d))


def pack_q8_0(p: Parts) -> Tensor:
    return torch.cat([raw_bytes(p.scale), raw_bytes(p.codes)], 1)


def q1_0(raw: Tensor) -> Parts:
    """+d if the bit is set, else -d: code * 2d - d. Read-only: 2d may not be representable in float16."""
    d, qs = cut(raw, 2, 16)
    d = half(d).float()
    return Parts(fields(qs, 1, _EIGHT, 1), 2 * d, offset=-d)


# -- ternary -----------------------------------------------------------------------------------------------------------

# TQ1_0: five digits of base 3 in a byte, as a fraction of 256; of 32 bytes, of 16, and four digits of 4 bytes
_TQ1 = ((0, 32, 5), (32, 48, 5), (48, 52, 4))


def tq1_0(raw: Tensor) -> Parts:
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device="cpu")[:, None]
    runs = [raw[:, None, a:b] * powers[:digits] for a, b, digits in _TQ1]  # modulo 256: this keeps the fraction
    digits = torch.cat([run.flatten(1) for run in runs], 1).to(torch.int16) * 3 >> 8
    return Parts((digits - 1).to(torch.int8), half(raw[:, 52:]))


def pack_tq1_0(p: Parts) -> Tensor:
    digits = (p.codes + 1).to(torch.int32)
    out, at = [], 0
    for a, b, count in _TQ1:
        run = digits[:, at : at + count * (b - a)].unflatten(1, (count, b - a))
        at += count * (b - a)
        value = sum(run[:, i] * 3 ** (4 - i) for i in range(count))
        out.append(((value * 256 + 242) // 243).to(torch.uint8))
    return torch.cat([*out, raw_bytes(p.scale)], 1)


def tq2_0(raw: Tensor) -> Parts:
    qs, d = cut(raw, 64, 2)
    codes = fields(qs, 32, _PAIRS, 2)
    if codes.numel() and int(codes.max()) > 2:
        raise ValueError(f"TQ2_0: {int((codes > 2).sum())} codes are 3, which is not a ternary value")
    return Parts(codes.view(torch.int8) - 1, half(d))


def pack_tq2_0(p: Parts) -> Tensor:
    return torch.cat([join((p.codes + 1).view(torch.uint8), 32, _PAIRS), raw_bytes(p.scale)], 1)


# -- tables and microscaling -------------------------------------------------------------------------------------------


def mxfp4(raw: Tensor, codes: Tensor | None = None) -> Parts:
    """ggml stores twice the e2m1 values and half the power of two; the resulting values are those of OCP MX."""
    e, qs = cut(raw, 1, 16)
    if e.numel() and int(e.max()) == 255:
        raise ValueError(f"MXFP4: {int((e == 255).sum())} scales are 255, which is NaN")
    return Parts(fields(qs, 16, _NIBBLES, 4) if codes is None else codes, Parts(e.contiguous()))


def pack_mxfp4(p: Parts) -> Tensor:
    return torch.cat([p.scale.codes, join(p.codes, 16, _NIBBLES)], 1)


def nvfp4(raw: Tensor) -> Parts:
    """Four unsigned e4m3 scales, then four blocks of 16. ggml reads 127 as zero and ignores the sign bit; no writer
    produces either, and both are rejected."""
    d, qs = cut(raw, 4, 32)
    if d.numel() and int(d.max()) > 126:
        raise ValueError(f"NVFP4: {int((d > 126).sum())} scales are not positive e4m3 numbers")
    return Parts(fields(qs, 8, _NIBBLES, 4), Parts(d.contiguous().view(torch.float8_e4m3fn)))


def pack_nvfp4(p: Parts) -> Tensor:
    return torch.cat([raw_bytes(p.scale.codes), join(p.codes, 8, _NIBBLES)], 1)


# -- K-quants: super-blocks of 256 elements with quantized scales ------------------------------------------------------

# A K-quant subtracts dmin * m while a spec adds an offset, so the scale of the offset is -dmin (its sign bit flipped).


def q2_k(raw: Tensor, codes: Tensor | None = None) -> Parts:
    scales, qs, d, dmin = cut(raw, 16, 64, 2, 2)
    offset = Parts(scales >> 4, minus(half(dmin)))
    codes = fields(qs, 32, _PAIRS, 2) if codes is None else codes
    return Parts(codes, Parts(scales & 15, half(d)), offset=offset)


def pack_q2_k(p: Parts) -> Tensor:
    scales = p.scale.codes | (p.offset.codes << 4)
    d, dmin = raw_bytes(p.scale.scale), raw_bytes(minus(p.offset.scale))
    return torch.cat([scales, join(p.codes, 32, _PAIRS), d, dmin], 1)


def q3_k(raw: Tensor, codes: Tensor | None = None) -> Parts:
    hmask, qs, low, high, d = cut(raw, 32, 64, 8, 4, 2)
    if codes is None:
        codes = (fields(qs, 32, _PAIRS, 2) | (fields(hmask, 32, _EIGHT, 1) << 2)).view(torch.int8) - 4
    scales = fields(low, 8, _NIBBLES, 4) | (fields(high, 4, _PAIRS, 2) << 4)
    return Parts(codes, Parts(scales.view(torch.int8) - 32, half(d)))


def pack_q3_k(p: Parts) -> Tensor:
    codes, scales = (p.codes + 4).view(torch.uint8), (p.scale.codes + 32).view(torch.uint8)
    low, high = join(scales & 15, 8, _NIBBLES), join(scales >> 4, 4, _PAIRS)
    return torch.cat(
        [join(codes >> 2, 32, _EIGHT), join(codes & 3, 32, _PAIRS), low, high, raw_bytes(p.scale.scale)], 1
    )


def _with_mins(codes: Tensor, d: Tensor, dmin: Tensor, packed: Tensor) -> Parts:
    """packed: eight 6-bit scales and eight 6-bit mins in 12 bytes: first the first four of each, with the upper two
    bits of the last four above them; then the lower four bits of the last four, scales below mins."""
    low, high, last = packed[:, :8] & 63, (packed[:, :8] >> 6) << 4, packed[:, 8:]
    scales = torch.cat([low[:, :4], (last & 15) | high[:, :4]], 1)
    mins = torch.cat([low[:, 4:], (last >> 4) | high[:, 4:]], 1)
    return Parts(codes, Parts(scales, half(d)), offset=Parts(mins, minus(half(dmin))))


def _head(p: Parts) -> list[Tensor]:
    """d, dmin, and the 6-bit scales and mins of Q4_K and Q5_K."""
    scales, mins = p.scale.codes, p.offset.codes
    first = [x[:, :4] | ((x[:, 4:] >> 4) << 6) for x in (scales, mins)]
    last = (scales[:, 4:] & 15) | ((mins[:, 4:] & 15) << 4)
    return [raw_bytes(p.scale.scale), raw_bytes(minus(p.offset.scale)), *first, last]


def q4_k(raw: Tensor, codes: Tensor | None = None) -> Parts:
    d, dmin, scales, qs = cut(raw, 2, 2, 12, 128)
    return _with_mins(fields(qs, 32, _NIBBLES, 4) if codes is None else codes, d, dmin, scales)


def pack_q4_k(p: Parts) -> Tensor:
    return torch.cat([*_head(p), join(p.codes, 32, _NIBBLES)], 1)


def q5_k(raw: Tensor, codes: Tensor | None = None) -> Parts:
    d, dmin, scales, qh, qs = cut(raw, 2, 2, 12, 32, 128)
    if codes is None:
        codes = fields(qs, 32, _NIBBLES, 4) | (fields(qh, 32, _EIGHT, 1) << 4)
    return _with_mins(codes, d, dmin, scales)


def pack_q5_k(p: Parts) -> Tensor:
    return torch.cat([*_head(p), join(p.codes >> 4, 32, _EIGHT), join(p.codes & 15, 32, _NIBBLES)], 1)


def q6_k(raw: Tensor, codes: Tensor | None = None) -> Parts:
    ql, qh, scales, d = cut(raw, 128, 64, 16, 2)
    if codes is None:
        codes = (fields(ql, 64, _NIBBLES, 4) | (fields(qh, 32, _PAIRS, 2) << 4)).view(torch.int8) - 32
    return Parts(codes, Parts(scales.contiguous().view(torch.int8), half(d)))


def pack_q6_k(p: Parts) -> Tensor:
    codes = (p.codes + 32).view(torch.uint8)
    scales = [raw_bytes(p.scale.codes), raw_bytes(p.scale.scale)]
    return torch.cat([join(codes & 15, 64, _NIBBLES), join(codes >> 4, 32, _PAIRS), *scales], 1)


def iq4_xs(raw: Tensor, codes: Tensor | None = None) -> Parts:
    d, high, low, qs = cut(raw, 2, 2, 4, 128)
    scales = fields(low, 1, _NIBBLES, 4) | (fields(high, 1, _PAIRS, 2) << 4)
    codes = fields(qs, 16, _NIBBLES, 4) if codes is None else codes
    return Parts(codes, Parts(scales.view(torch.int8) - 32, half(d)))


def pack_iq4_xs(p: Parts) -> Tensor:
    scales = (p.scale.codes + 32).view(torch.uint8)
    high, low = join(scales >> 4, 1, _PAIRS), join(scales & 15, 1, _NIBBLES)
    return torch.cat([raw_bytes(p.scale.scale), high, low, join(p.codes, 16, _NIBBLES)], 1)


# -- I-quants: an index selects 4 or 8 values at once from a codebook --------------------------------------------------

# For every codebook, each element is one of a few values (6 or 16) times a scale that is exact in float32, so the parts
# are those of a table format with float32 scales: the same values, in 3 or 4 bits per element. Read-only.


@cache
def codebook(name: str) -> Tensor:
    """[entries, 4 or 8] values of a type's codebook. float32. Raises ImportError if gguf is not installed."""
    try:
        from gguf import quants
    except ImportError as e:
        raise ImportError(f"{name} needs the codebooks of the gguf package: {install('gguf')}") from e
    kind = getattr(quants, name)  # a name from the table in blocks.py, never from a file
    kind.init_grid()
    return torch.from_numpy(kind.grid[0, 0].copy())


@cache
def _positions(name: str, f: Format) -> Tensor:
    """The codebook as indices into the magnitudes of a format that has each value and its negative."""
    half_of = torch.tensor(f.values[len(f.values) // 2 :], dtype=torch.float32, device="cpu")
    return torch.searchsorted(half_of, codebook(name)).to(torch.uint8)


def _signed(name: str, f: Format, index: Tensor, negative: Tensor) -> Tensor:
    """Codes [B, k * width] of codebook entries [B, k] with a sign per element, 1 if negative."""
    n = len(f.values) // 2
    place = _positions(name, f)[index.long()].flatten(1)
    return torch.where(negative == 1, n - 1 - place, n + place)


def _words(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Little-endian unsigned integers of 2 or 4 bytes, as int64."""
    signed = numbers(raw, dtype).long()
    return signed & ((1 << 8 * dtype.itemsize) - 1)


def _even_signs(seven: Tensor) -> Tensor:
    """Eight signs from seven bits: the last makes the number of set bits even. [B, k] to [B, 8 * k]."""
    parity = seven
    for shift in (4, 2, 1):
        parity = parity ^ (parity >> shift)
    return fields((seven | ((parity & 1) << 7)).to(torch.uint8), 1, _EIGHT, 1)


def _bit_fields(words: Tensor, shifts: tuple[int, ...], bits: int) -> Tensor:
    """[B, k] words as [B, k * len(shifts)] fields."""
    return ((words[:, :, None] >> torch.tensor(shifts, device="cpu")) & ((1 << bits) - 1)).flatten(1)


def _scale(d: Tensor, steps: Tensor, factor: float) -> Tensor:
    """d * (steps + 1/2) * factor: exact, since d has 11 bits and steps at most 4."""
    return half(d).float() * (steps + 0.5) * factor


def iq2_xxs(raw: Tensor) -> Parts:
    d, qs = cut(raw, 2, 64)
    index = qs.unflatten(1, (8, 8))[:, :, :4].flatten(1)
    word = _words(qs, torch.int32)[:, 1::2]
    codes = _signed("IQ2_XXS", IQ2, index, _even_signs(_bit_fields(word, (0, 7, 14, 21), 7)))
    return Parts(codes, _scale(d, word >> 28, 0.25))


def iq2_xs(raw: Tensor) -> Parts:
    d, qs, scales = cut(raw, 2, 64, 8)
    word = _words(qs, torch.int16)
    codes = _signed("IQ2_XS", IQ2, word & 511, _even_signs(word >> 9))
    return Parts(codes, _scale(d, fields(scales, 1, _NIBBLES, 4), 0.25))


def iq2_s(raw: Tensor) -> Parts:
    d, qs, signs, qh, scales = cut(raw, 2, 32, 32, 8, 8)
    index = qs.long() | (fields(qh, 1, (0, 2, 4, 6), 2).long() << 8)
    codes = _signed("IQ2_S", IQ2, index, fields(signs, 1, _EIGHT, 1))
    return Parts(codes, _scale(d, fields(scales, 1, _NIBBLES, 4), 0.25))


def iq3_xxs(raw: Tensor) -> Parts:
    d, qs, scales = cut(raw, 2, 64, 32)
    word = _words(scales, torch.int32)
    codes = _signed("IQ3_XXS", IQ3_XXS, qs, _even_signs(_bit_fields(word, (0, 7, 14, 21), 7)))
    return Parts(codes, _scale(d, word >> 28, 0.5))


def iq3_s(raw: Tensor) -> Parts:
    d, qs, qh, signs, scales = cut(raw, 2, 64, 8, 32, 4)
    index = qs.long() | (fields(qh, 1, _EIGHT, 1).long() << 8)
    codes = _signed("IQ3_S", IQ3_S, index, fields(signs, 1, _EIGHT, 1))
    return Parts(codes, _scale(d, fields(scales, 1, _NIBBLES, 4), 2.0))


def _shifted(index: Tensor, up: Tensor) -> Tensor:
    """Codes of -1, 0, 1 plus 1/8 if ``up`` is 1, else minus 1/8; ``up`` is per entry."""
    digits = codebook("IQ1_S").to(torch.int8)[index]
    return (2 * (digits + 1) + up[:, :, None]).to(torch.uint8).flatten(1)


def iq1_s(raw: Tensor) -> Parts:
    d, qs, qh = cut(raw, 2, 32, 16)
    word = _words(qh, torch.int16)
    index = qs.long() | (_bit_fields(word, (0, 3, 6, 9), 3) << 8)
    up = 1 - (word >> 15)
    return Parts(_shifted(index, up.repeat_interleave(4, 1)), _scale(d, (word >> 12) & 7, 2.0))


def iq1_m(raw: Tensor) -> Parts:
    """The float16 is in the upper four bits of four words, the first word lowest."""
    qs, qh, scales = cut(raw, 32, 16, 8)
    word = _words(scales, torch.int16)
    bits = ((word >> 12) << torch.tensor([0, 4, 8, 12], device="cpu")).sum(1, keepdim=True)
    d = bits.to(torch.int16).view(torch.uint8)
    index = qs.long() | (fields(qh, 1, _NIBBLES, 3).long() << 8)
    up = 1 - (fields(qh, 1, _NIBBLES, 4) >> 3).to(torch.int64)
    return Parts(_shifted(index, up), _scale(d, _bit_fields(word, (0, 3, 6, 9), 3), 2.0))
