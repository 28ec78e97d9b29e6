"""The weight-only product as a Triton kernel, for all formats of codes.py and both compute dtypes.

The weight is operand A: y.T = W @ x.T. Rows of W fill the 64 rows of the matrix unit, so the rows of x may be as few
as 16 (or one), and decoded weights stay in registers. See layout.py for the order of codes, and codes.py for decoding.

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
def scaled(w, s):
    """w * s, rounded once to the dtype of w."""
    if s.dtype == w.dtype:
        return times(w, s)
    else:
        return narrow(widen(w) * widen(s), w.dtype)


@triton.jit
def scaled_plus(w, s, o, UNIT: tl.constexpr):
    """w * s + o UNIT, rounded once to the dtype of w."""
    if INTERPRET:
        return narrow(widen(w) * widen(s) + widen(o) * UNIT, w.dtype)
    elif s.dtype == w.dtype and o.dtype == w.dtype:
        w, s = tl.broadcast(w, s)
        w, o = tl.broadcast(w, o * tl.full((1, 1), UNIT, tl.float32).to(w.dtype))
        return tl.fma(w, s, o)
    else:
        return narrow(widen(w) * widen(s) + widen(o) * UNIT, w.dtype)


@triton.jit
def fetch(p):
    """Read the lines of memory at pointers p into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["M"])
def weight_only(
    x_ptr, w_ptr, s_ptr, z_ptr, o_ptr, t_ptr, r_ptr, b_ptr, y_ptr, part_ptr, lock_ptr, M, N, K, NT,
    KIND: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, COLS: tl.constexpr, ZERO: tl.constexpr,
    MANTISSA: tl.constexpr, UP: tl.constexpr, SCALE: tl.constexpr, SKIND: tl.constexpr, G: tl.constexpr,
    WIDTH: tl.constexpr, LOG: tl.constexpr, TILES: tl.constexpr, HAS_Z: tl.constexpr, HAS_O: tl.constexpr,
    HAS_R: tl.constexpr, HAS_B: tl.constexpr, EVEN: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    W: tl.constexpr, SPLIT: tl.constexpr, BEFORE: tl.constexpr, ASM: tl.constexpr, AHEAD: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """y[m, n] = sum_k x[m, k] ((u[n, k] - zero - z) s + o) r + b[n], for a tile of BM x BN numbers.

    SCALE    "none", "row" (s, z, o: [N]) or "group": see layout.py for their order
    G        columns of a group; those of less than 64 need BEFORE and W = 32
    LOG      log2 of the parts that a tile's numbers are split into: of its groups, or of its planes if G < 64
    r        one number for all. HAS_Z, HAS_O, HAS_R, HAS_B: whether z, o, r, b are given
    BEFORE   scales are applied to the weights, before the product (always with offsets per row), else to the
             sums of each group or row
    W        words of each row and field that a step reads: 2 W columns of each plane
    NT       tiles of a row of tiles, of COLS columns each
    EVEN     whether K is NT * COLS
    AHEAD    the kernel starts before the one in front of it has ended, fetches weights, and waits for it (compute
             capability 9.0; launch_pdl)
    SPLIT    programs that share a tile. The last one to finish adds their sums in a fixed order, so results do not
             depend on timing. Each lock is zero before and after
    """
    pn = tl.program_id(0)
    pk = tl.program_id(1)
    pm = tl.program_id(2)
    PLANES: tl.constexpr = COLS // 64
    SUB: tl.constexpr = 32 // W
    WORDS: tl.constexpr = COLS * (B0 + B1 + B2) * 2  # of a tile
    GROUPED: tl.constexpr = SCALE == "group"
    SMALL: tl.constexpr = GROUPED and G < 64
    SHARE: tl.constexpr = PLANES >> LOG  # planes that share a scale
    UNIT: tl.constexpr = 0.015625 if KIND == "int" and T == tl.bfloat16 else 1.0
    r = tl.arange(0, BN)
    n = pn * BN + r
    m = pm * BM + tl.arange(0, BM)
    p = tl.arange(0, 2 * W)
    block = tl.minimum(n // 64, tl.cdiv(N, 64) - 1).to(tl.int64)  # the last BN rows may end beyond the last row tile
    per = tl.cdiv(NT * SUB, SPLIT)
    rows = w_ptr + (block * NT * WORDS + (n % 64) * 32)[:, None] + tl.arange(0, W)[None, :]
    xrow = x_ptr + m.to(tl.int64)[None, :] * K
    at = (block * tl.cdiv(NT, TILES) * (64 * WIDTH) + (n % 64) * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    if AHEAD:  # the weight does not depend on the kernel in front of this one
        if not INTERPRET:
            start = pk * per // SUB
            for step in tl.static_range(STAGES - 1):
                for field in tl.static_range(WORDS // 2048):
                    tile_at = (block * NT + tl.minimum(start + step, NT - 1)) * WORDS + field * 2048
                    fetch(w_ptr + tile_at + (n % 64) * 32)
            tl.extra.cuda.gdc_wait()
    if SCALE == "row":
        row_s = tl.load(s_ptr + n, mask=n < N, other=0.0)[:, None]
        if HAS_Z:
            row_z = tl.load(z_ptr + n, mask=n < N, other=0)[:, None]
        if HAS_O:
            row_o = tl.load(o_ptr + n, mask=n < N, other=0.0)[:, None]
    acc = tl.zeros((BN, BM), tl.float32)
    for t in tl.range(pk * per, tl.minimum(NT * SUB, pk * per + per), num_stages=STAGES):
        kt = t // SUB
        sub = t % SUB
        words = rows + kt * WORDS + sub * W
        k0 = kt * COLS + sub * (2 * W)
        tile = at + (kt // TILES) * (64 * WIDTH)
        for g in tl.static_range(PLANES // SHARE):
            if GROUPED:
                s = group_numbers(
                    spread(column(tl.load(s_ptr + tile), g, WIDTH, LOG), SMALL, WIDTH >> LOG, G), SKIND, T
                )
                if HAS_Z:
                    z = spread(column(tl.load(z_ptr + tile), g, WIDTH, LOG), SMALL, WIDTH >> LOG, G)
                if HAS_O:
                    o = spread(column(tl.load(o_ptr + tile), g, WIDTH, LOG), SMALL, WIDTH >> LOG, G)
            elif SCALE == "row":
                s = row_s
                if HAS_Z:
                    z = row_z
                if HAS_O:
                    o = row_o
            part = tl.zeros((BN, BM), tl.float32) if GROUPED and not BEFORE else acc
            for q in tl.static_range(SHARE):
                k = k0 + (g * SHARE + q) * 64 + p
                if EVEN:
                    x = tl.load(xrow + k[:, None], mask=(m < M)[None, :], other=0.0)
                else:
                    x = tl.load(xrow + k[:, None], mask=(m < M)[None, :] & (k < K)[:, None], other=0.0)
                w = numbers(words, t_ptr, g * SHARE + q, KIND, B0, B1, B2, COLS, ZERO, MANTISSA, UP, T, ASM)
                if HAS_Z:
                    w = plus(w, narrow(z.to(tl.float32) * -UNIT, T))
                if BEFORE:
                    if HAS_O:
                        w = scaled_plus(w, s, o, UNIT)
                    else:
                        w = scaled(w, s)
                part = dot(w, x, part)
                if HAS_O and not BEFORE:  # a product of its own, of few registers and instructions
                    if o.dtype == T:
                        same = tl.broadcast_to(times(o, narrow(tl.full((1, 1), UNIT, tl.float32), T)), (BN, 2 * W))
                        if (
                            BM < 16
                        ):  # the two products want different layouts of x: one load for both would not be pipelined
                            if EVEN:
                                x = tl.load(xrow + k[:, None], mask=(m < M)[None, :], other=0.0, cache_modifier=".ca")
                            else:
                                x = tl.load(
                                    xrow + k[:, None], mask=(m < M)[None, :] & (k < K)[:, None], other=0.0,
                                    cache_modifier=".ca",
                                )  # fmt: skip
                        acc = dot(same, x, acc)
                    else:
                        ones = narrow(tl.full((BN, 2 * W), 1.0, tl.float32), T)
                        acc += dot(ones, x, tl.zeros((BN, BM), tl.float32)) * (widen(o) * UNIT)
            if GROUPED and not BEFORE:
                acc += part * widen(s)
            else:
                acc = part
    if AHEAD:  # not earlier: kernels further behind would fetch, too, and take the bandwidth
        if not INTERPRET:
            tl.extra.cuda.gdc_launch_dependents()
    tiles = tl.num_programs(0) * tl.num_programs(2)
    mine = pn * tl.num_programs(2) + pm
    cell = r[:, None] + BN * tl.arange(0, BM)[None, :]
    live = (m < M)[None, :] & (n < N)[:, None]
    last = True
    if SPLIT > 1:
        tl.store(part_ptr + (pk * tiles + mine).to(tl.int64) * (BN * BM) + cell, acc, mask=live)
        tl.debug_barrier()
        last = tl.atomic_add(lock_ptr + mine, 1, sem="acq_rel") == SPLIT - 1
    if last:
        if SPLIT > 1:
            acc = tl.zeros((BN, BM), tl.float32)
            for i in range(SPLIT):
                parts = part_ptr + (i * tiles + mine).to(tl.int64) * (BN * BM) + cell
                acc += tl.load(parts, cache_modifier=".cg", mask=live, other=0.0)
            tl.store(lock_ptr + mine, 0)
        acc = acc * (1.0 / UNIT)
        if SCALE == "row" and not BEFORE:
            acc = acc * widen(row_s)
        if HAS_R:
            acc = acc * tl.load(r_ptr).to(tl.float32)
        if HAS_B:
            acc = acc + widen(tl.load(b_ptr + n, mask=n < N, other=0.0))[:, None]
        tl.store(y_ptr + m.to(tl.int64)[None, :] * N + n[:, None], narrow(acc, T), mask=live)


@triton.jit
def dequantize(
    w_ptr, s_ptr, z_ptr, o_ptr, t_ptr, r_ptr, y_ptr, N, K,
    KIND: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr, B2: tl.constexpr, COLS: tl.constexpr, ZERO: tl.constexpr,
    MANTISSA: tl.constexpr, UP: tl.constexpr, SCALE: tl.constexpr, SKIND: tl.constexpr, G: tl.constexpr,
    WIDTH: tl.constexpr, LOG: tl.constexpr, TILES: tl.constexpr, HAS_Z: tl.constexpr, HAS_O: tl.constexpr,
    HAS_R: tl.constexpr, EVEN: tl.constexpr, T: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """y[n, k] = ((u[n, k] - zero - z) s + o) r for one tile, computed in float32 and rounded once. As weight_only."""
    rt = tl.program_id(0).to(tl.int64)
    kt = tl.program_id(1)
    nt = tl.num_programs(1)
    PLANES: tl.constexpr = COLS // 64
    WORDS: tl.constexpr = COLS * (B0 + B1 + B2) * 2
    GROUPED: tl.constexpr = SCALE == "group"
    SMALL: tl.constexpr = GROUPED and G < 64
    SHARE: tl.constexpr = PLANES >> LOG
    UNIT: tl.constexpr = 0.015625 if KIND == "int" and T == tl.bfloat16 else 1.0
    r = tl.arange(0, 64)
    n = rt * 64 + r
    words = w_ptr + ((rt * nt + kt) * WORDS + r * 32)[:, None] + tl.arange(0, 32)[None, :]
    tile = ((rt * tl.cdiv(nt, TILES) + kt // TILES) * (64 * WIDTH) + r * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    for q in tl.static_range(PLANES):
        w = widen(numbers(words, t_ptr, q, KIND, B0, B1, B2, COLS, ZERO, MANTISSA, UP, T, ASM)) * (1.0 / UNIT)
        if SCALE == "row":
            if HAS_Z:
                w = w - tl.load(z_ptr + n, mask=n < N, other=0).to(tl.float32)[:, None]
            w = w * widen(tl.load(s_ptr + n, mask=n < N, other=0.0))[:, None]
            if HAS_O:
                w = w + widen(tl.load(o_ptr + n, mask=n < N, other=0.0))[:, None]
        if GROUPED:
            if HAS_Z:
                z = spread(column(tl.load(z_ptr + tile), q // SHARE, WIDTH, LOG), SMALL, WIDTH >> LOG, G)
                w = w - z.to(tl.float32)
            s = group_numbers(
                spread(column(tl.load(s_ptr + tile), q // SHARE, WIDTH, LOG), SMALL, WIDTH >> LOG, G), SKIND, T
            )
            w = w * widen(s)
            if HAS_O:
                w = w + widen(spread(column(tl.load(o_ptr + tile), q // SHARE, WIDTH, LOG), SMALL, WIDTH >> LOG, G))
        if HAS_R:
            w = w * tl.load(r_ptr).to(tl.float32)
        k = kt * COLS + q * 64 + tl.arange(0, 64)
        tl.store(y_ptr + n[:, None] * K + k[None, :], narrow(w, T), mask=(n < N)[:, None] & (k < K)[None, :])
