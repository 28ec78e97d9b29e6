"""ggml's block types with one scale per block: [B, bytes of a block] to plain parts [B, k] and back.

Sources: ggml-common.h and the dequantizers of the ``gguf`` package, which the tests compare with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.numerics import Parts
from .unpack import cut, fields, half, join, raw_bytes

_NIBBLES = (0, 4)
_EIGHT = tuple(range(8))
_PAIRS = (0, 2, 4, 6)


def q4_0(raw: Tensor) -> Parts:
    d, qs = cut(raw, 2, 16)
    return Parts(fields(qs, 16, _NIBBLES, 4), half(d))


def pack_q4_0(p: Parts) -> Tensor:
    return torch.cat([raw_bytes(p.scale), join(p.codes, 16, _NIBBLES)], 1)


def q4_1(raw: Tensor) -> Parts:
    d, m, qs = cut(raw, 2, 2, 16)
    return Parts(fields(qs, 16, _NIBBLES, 4), half(d), offset=half(m))


def pack_q4_1(p: Parts) -> Tensor:
    return torch.cat([raw_bytes(p.scale), raw_bytes(p.offset), join(p.codes, 16, _NIBBLES)], 1)


def _five_bits(qh: Tensor, qs: Tensor) -> Tensor:
    return fields(qs, 16, _NIBBLES, 4) | (fields(qh, 1, _EIGHT, 1) << 4)


def _pack_five_bits(codes: Tensor) -> Tensor:
    return torch.cat([join(codes >> 4, 1, _EIGHT), join(codes & 15, 16, _NIBBLES)], 1)


def q5_0(raw: Tensor) -> Parts:
    d, qh, qs = cut(raw, 2, 4, 16)
    return Parts(_five_bits(qh, qs), half(d))


def pack_q5_0(p: Parts) -> Tensor:
    return torch.cat([raw_bytes(p.scale), _pack_five_bits(p.codes)], 1)


def q5_1(raw: Tensor) -> Parts:
    d, m, qh, qs = cut(raw, 2, 2, 4, 16)
    return Parts(_five_bits(qh, qs), half(d), offset=half(m))


def pack_q5_1(p: Parts) -> Tensor:
    return torch.cat([raw_bytes(p.scale), raw_bytes(p.offset), _pack_five_bits(p.codes)], 1)


def q8_0(raw: Tensor) -> Parts:
    d, qs = cut(raw, 2, 32)
    return Parts(qs.contiguous().view(torch.int8), half(d))


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


def mxfp4(raw: Tensor) -> Parts:
    """ggml stores twice the e2m1 values and half the power of two; the resulting values are those of OCP MX."""
    e, qs = cut(raw, 1, 16)
    if e.numel() and int(e.max()) == 255:
        raise ValueError(f"MXFP4: {int((e == 255).sum())} scales are 255, which is NaN")
    return Parts(fields(qs, 16, _NIBBLES, 4), Parts(e.contiguous()))


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
