"""Codes of quantized weights decoded in registers: functions that Triton kernels call. codes.py tells how.

Triton's interpreter, which tests use, stores bfloat16 as integers and computes on them. So each bfloat16 operation is
a helper that widens its operands there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.target_info import is_hip

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def widen(x):
    """bfloat16 or float16 -> float32; the interpreter's own conversion is wrong for subnormal numbers."""
    if INTERPRET:
        if x.dtype == tl.bfloat16:
            return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def narrow(y, T: tl.constexpr):
    """float32 -> T, to nearest even; the interpreter's own conversion to bfloat16 truncates."""
    if INTERPRET:
        if T == tl.bfloat16:
            u = y.to(tl.float32).to(tl.uint32, bitcast=True)
            return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return y.to(T)


@triton.jit
def fma(x, mul: tl.constexpr, add: tl.constexpr):
    """x * mul + add in the dtype of x, rounded once."""
    if INTERPRET:
        return narrow((widen(x) * mul + add).to(tl.float32), x.dtype)
    m = tl.full(x.shape, mul, tl.float32).to(x.dtype)
    a = tl.full(x.shape, add, tl.float32).to(x.dtype)
    return tl.fma(x, m, a)


@triton.jit
def times(x, y):
    """x * y in the dtype of x."""
    if INTERPRET:
        return narrow(widen(x) * widen(y), x.dtype)
    return x * y


@triton.jit
def plus(x, y):
    """x + y in the dtype of x."""
    if INTERPRET:
        return narrow(widen(x) + widen(y), x.dtype)
    return x + y


@triton.jit
def dot(a, b, acc):
    if INTERPRET:
        return tl.dot(widen(a), widen(b), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def halves(v, T: tl.constexpr):
    """int32 [R, W] -> T [R, 2 W]: its 16-bit halves, low half first."""
    low = (v & 0xFFFF).to(tl.uint16).to(T, bitcast=True)
    high = (v.to(tl.uint32, bitcast=True) >> 16).to(tl.uint16).to(T, bitcast=True)
    return tl.reshape(tl.join(low, high), (v.shape[0], 2 * v.shape[1]))


@triton.jit
def shifted(v, n: tl.constexpr):
    """v << n, or v >> -n."""
    if n >= 0:
        return v << n
    else:
        return v >> (-n)


@triton.jit
def permute_bytes(a, b, select):
    """Byte i of the result: byte (nibble i of select & 7) of the eight bytes b:a. uint32."""
    if INTERPRET or is_hip():
        r = a * 0
        for i in tl.static_range(4):
            n = (select >> (4 * i)) & 7
            r = r | (((tl.where(n < 4, a, b) >> (8 * (n & 3))) & 255) << (8 * i))
        return r
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, select], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def look_up(word, J: tl.constexpr, t0, t1, t2, t3):
    """The 4 nibbles of half J of each word -> 4 bytes of the table t0..t3 of 16 bytes."""
    select = word >> (16 * J)
    zero = word * 0
    low = permute_bytes(zero + t0, zero + t1, select & 0x7777)
    high = permute_bytes(zero + t2, zero + t3, select & 0x7777)
    pick = permute_bytes(zero + 0x0000FF00, zero + 0x0000FF00, (select >> 3) & 0x1111)
    return low ^ ((low ^ high) & pick)


@triton.jit
def table_plane(word, P: tl.constexpr, t_ptr, T: tl.constexpr, ASM: tl.constexpr):
    """Numbers of plane P of words of 4-bit codes. t: int32 [8], the low bytes of 16 numbers, then their high bytes.

    ASM: PTX of each plane with the table in it. Triton moves the change of layout from a tensor in memory to an operand
    in front of code with one operand; otherwise words pass through shared memory once more.
    """
    if not (INTERPRET or is_hip()):
        if len(ASM[P]) > 0:
            return halves(tl.inline_asm_elementwise(ASM[P], "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1), T)
    u = word.to(tl.uint32, bitcast=True)
    l0 = tl.load(t_ptr).to(tl.uint32, bitcast=True)
    l1 = tl.load(t_ptr + 1).to(tl.uint32, bitcast=True)
    l2 = tl.load(t_ptr + 2).to(tl.uint32, bitcast=True)
    l3 = tl.load(t_ptr + 3).to(tl.uint32, bitcast=True)
    h0 = tl.load(t_ptr + 4).to(tl.uint32, bitcast=True)
    h1 = tl.load(t_ptr + 5).to(tl.uint32, bitcast=True)
    h2 = tl.load(t_ptr + 6).to(tl.uint32, bitcast=True)
    h3 = tl.load(t_ptr + 7).to(tl.uint32, bitcast=True)
    SELECT: tl.constexpr = 0x5140 if P < 2 else 0x7362
    LAST: tl.constexpr = 0x5410 if P % 2 == 0 else 0x7632
    select = tl.full(u.shape, SELECT, tl.uint32)
    even = permute_bytes(look_up(u, 0, l0, l1, l2, l3), look_up(u, 0, h0, h1, h2, h3), select)
    odd = permute_bytes(look_up(u, 1, l0, l1, l2, l3), look_up(u, 1, h0, h1, h2, h3), select)
    return halves(permute_bytes(even, odd, tl.full(u.shape, LAST, tl.uint32)).to(tl.int32, bitcast=True), T)


@triton.jit
def piece(words, FIRST: tl.constexpr, P: tl.constexpr, B: tl.constexpr, AT: tl.constexpr):
    """The B bits of each code of plane P, moved to bit AT of each half. FIRST: the piece's first field."""
    PER: tl.constexpr = 16 // B
    J: tl.constexpr = (P % PER) * B
    MASK: tl.constexpr = ((1 << B) - 1) * 0x00010001
    word = tl.load(words + (FIRST + P // PER) * 2048)
    if J > AT:
        return (word >> (J - AT)) & (MASK << AT)
    elif J < AT:
        return (word & (MASK << J)) << (AT - J)
    else:
        return word & (MASK << J)


@triton.jit
def numbers(
    words, t_ptr, P: tl.constexpr, KIND: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr,
    COLS: tl.constexpr, ZERO: tl.constexpr, MANTISSA: tl.constexpr, UP: tl.constexpr, T: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """The numbers of plane P of a tile, [R, 2 W]; kind "int" in bfloat16 times 2**-6."""
    if KIND == "table":
        return table_plane(tl.load(words), P, t_ptr, T, ASM)
    BITS: tl.constexpr = B0 + B1 + B2
    AT: tl.constexpr = (P * B0) % 8 if B1 == 0 else 0  # in the low byte of each half: there bits are linear, codes.py
    v = piece(words, 0, P, B0, AT)
    if B1 > 0:
        v = v | piece(words, COLS * B0 // 1024, P, B1, AT + B0)
    if B2 > 0:
        v = v | piece(words, COLS * (B0 + B1) // 1024, P, B2, AT + B0 + B1)
    if KIND == "int":
        if T == tl.bfloat16:
            return fma(halves(v, T), 2.0 ** (127 - AT), -ZERO * 0.015625)
        else:
            return fma(halves(v | 0x64006400, T), 2.0 ** (-AT), -(1024.0 * 2.0 ** (-AT) + ZERO))
    else:
        SIGN: tl.constexpr = (1 << (AT + BITS - 1)) * 0x00010001
        REST: tl.constexpr = (((1 << (BITS - 1)) - 1) << AT) * 0x00010001
        LEFT: tl.constexpr = (7 if T == tl.bfloat16 else 10) - MANTISSA - AT
        return fma(halves(((v & SIGN) << (16 - AT - BITS)) | shifted(v & REST, LEFT), T), UP, 0.0)


@triton.jit
def group_numbers(p, KIND: tl.constexpr, T: tl.constexpr):
    """Scales as stored: floats unchanged, bytes decoded, into T if that is exact. KIND: "float", "e8m0", "e4m3"."""
    if KIND == "e8m0":
        u = p.to(tl.uint32)
        y = tl.where(u == 0, 0x00400000, u << 23).to(tl.float32, bitcast=True)
        if T == tl.bfloat16:
            return narrow(y, T)
        else:
            return y
    elif KIND == "e4m3":
        u = p.to(tl.uint32)
        y = (((u & 0x80) << 24) | ((u & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120
        return narrow(y, T)
    else:
        return p


@triton.jit
def column(s, g: tl.constexpr, WIDTH: tl.constexpr, LOG: tl.constexpr):
    """Columns of s [R, WIDTH] whose index ends with the LOG bits of g: [R, WIDTH >> LOG]."""
    for i in tl.static_range(LOG):
        a, b = tl.split(tl.reshape(s, (s.shape[0], WIDTH >> (i + 1), 2)))
        if (g >> i) % 2 == 0:
            s = a
        else:
            s = b
    return tl.reshape(s, (s.shape[0], WIDTH >> LOG))


@triton.jit
def spread(s, SMALL: tl.constexpr, KEEP: tl.constexpr, G: tl.constexpr):
    """Numbers of the groups of a plane [R, KEEP] -> one per column [R, KEEP * G]; one group: [R, 1]."""
    if SMALL:
        return tl.reshape(tl.broadcast_to(s[:, :, None], (s.shape[0], KEEP, G)), (s.shape[0], KEEP * G))
    else:
        return s


@triton.jit
def fetch(p):
    """Read the lines of memory at pointers p into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
