"""The weight-only product as a Triton kernel, for all formats of codes.py and both compute dtypes.

The weight is operand A: y.T = W @ x.T. Rows of W fill the 64 rows of the matrix unit, so the rows of x may be as few
as 16 (or one), and decoded weights stay in registers. See layout.py for the order of codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_kernel import INTERPRET, column, dot, fetch, group_numbers, narrow, numbers, plus, spread, times, widen


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
