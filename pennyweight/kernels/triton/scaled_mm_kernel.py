"""The product of int8 or float8 inputs with weights of the same format as Triton kernels, with scales and bias applied
to the sums.

Both operands are read in rows of K codes, as the matrix unit wants 8-bit operands. For few rows of the input the weight
is its first operand, which has at least 64 rows. Sums in int32 are exact in any order, and the numbers of a row depend
on that row alone; sums of float8 products have float32's exponent and fewer bits on sm_90.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_kernel import INTERPRET, fetch, narrow, widen


@triton.jit
def tile_of(i, M, N, BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr):
    """Tile i in an order in which neighbours share rows and columns: GROUP tiles down, then one to the right."""
    down = tl.cdiv(M, BM)
    band = GROUP * tl.cdiv(N, BN)
    first = i // band * GROUP
    size = tl.minimum(down - first, GROUP)
    return first + i % band % size, i % band // size


@triton.jit
def e4m3_numbers(c):
    """e4m3 -> float32; the interpreter's own conversion is wrong for subnormal numbers."""
    u = c.to(tl.uint8, bitcast=True).to(tl.uint32)
    return (((u & 0x80) << 24) | ((u & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@triton.jit
def add_product(a, b, acc, ACC: tl.constexpr):
    """acc + a @ b."""
    if INTERPRET and ACC == tl.float32:
        return tl.dot(e4m3_numbers(a), e4m3_numbers(b), acc, input_precision="ieee")
    return tl.dot(a, b, acc, out_dtype=ACC)


@triton.jit
def placed(v, FIRST: tl.constexpr):
    """A vector along the first or the second axis of a tile."""
    if FIRST:
        return v[:, None]
    else:
        return v[None, :]


@triton.jit
def scaled(
    acc, m, n, sx_ptr, sw_ptr, b_ptr, M, N, SX: tl.constexpr, SW: tl.constexpr, HAS_B: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    """float32(acc) sx[m] sw[n] + b[n]. SX, SW: 1, or 0 where one number is for all. acc: [m, n], with SWAP [n, m]."""
    y = acc.to(tl.float32) * placed(tl.load(sx_ptr + m * SX, mask=m < M, other=0.0), not SWAP)
    sw = placed(widen(tl.load(sw_ptr + n * SW, mask=n < N, other=0.0)), SWAP)
    if HAS_B:  # fused here, so that no compiler decides it differently for another tile
        y, sw = tl.broadcast(y, sw)
        y, b = tl.broadcast(y, placed(widen(tl.load(b_ptr + n, mask=n < N, other=0.0)), SWAP))
        return tl.fma(y, sw, b)
    return y * sw


@triton.jit(do_not_specialize=["M"])
def product(
    x_ptr, w_ptr, sx_ptr, sw_ptr, b_ptr, y_ptr, part_ptr, lock_ptr, M, N, K,
    SX: tl.constexpr, SW: tl.constexpr, HAS_B: tl.constexpr, SWAP: tl.constexpr, EVEN: tl.constexpr, T: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr, ACC: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """y[m, n] = sum_k x[m, k] w[n, k] sx[m] sw[n] + b[n] for a tile of BM x BN numbers. x: [M, K], w: [N, K].

    ACC    int32 for int8 operands, float32 for float8
    SWAP   whether the weight is the first operand of the matrix unit
    EVEN   whether K is a multiple of BK
    SPLIT  programs that share a tile; the last one to finish adds their sums in a fixed order. Each lock is zero before
           and after
    AHEAD  the kernel starts before the one in front of it has ended, fetches weights, and waits for it (compute
           capability 9.0; launch_pdl)
    """
    pm, pn = tile_of(tl.program_id(0), M, N, BM, BN, GROUP)
    pk = tl.program_id(1)
    m = pm * BM + tl.arange(0, BM)
    n = pn * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    xrow = x_ptr + tl.minimum(m, M - 1).to(tl.int64) * K  # rows beyond the last are not written
    wrow = w_ptr + tl.minimum(n, N - 1).to(tl.int64) * K
    if SWAP:
        acc = tl.zeros((BN, BM), ACC)
    else:
        acc = tl.zeros((BM, BN), ACC)
    steps = tl.cdiv(K, BK)
    per = tl.cdiv(steps, SPLIT)
    if AHEAD and not INTERPRET:  # the weight does not depend on the kernel in front of this one
        for line in tl.static_range((STAGES - 1) * BK // 128):
            fetch(wrow + tl.minimum(pk * per * BK + line * 128, K - 1))
        tl.extra.cuda.gdc_wait()
    for t in tl.range(pk * per, tl.minimum(steps, pk * per + per), num_stages=STAGES):
        at = t * BK + k
        if SWAP:
            xs = xrow[None, :] + at[:, None]
            ws = wrow[:, None] + at[None, :]
            if EVEN:
                acc = add_product(tl.load(ws), tl.load(xs), acc, ACC)
            else:
                w = tl.load(ws, mask=(at < K)[None, :], other=0.0)
                acc = add_product(w, tl.load(xs, mask=(at < K)[:, None], other=0.0), acc, ACC)
        else:
            xs = xrow[:, None] + at[None, :]
            ws = wrow[None, :] + at[:, None]
            if EVEN:
                acc = add_product(tl.load(xs), tl.load(ws), acc, ACC)
            else:
                x = tl.load(xs, mask=(at < K)[None, :], other=0.0)
                acc = add_product(x, tl.load(ws, mask=(at < K)[:, None], other=0.0), acc, ACC)
    if AHEAD and not INTERPRET:
        tl.extra.cuda.gdc_launch_dependents()
    m2 = placed(m, not SWAP)
    n2 = placed(n, SWAP)
    live = (m2 < M) & (n2 < N)
    last = True
    if SPLIT > 1:
        tiles = tl.num_programs(0)
        mine = tl.program_id(0)
        cell = (m2 - pm * BM) * BN + (n2 - pn * BN)
        tl.store(part_ptr + (pk * tiles + mine).to(tl.int64) * (BM * BN) + cell, acc, mask=live)
        tl.debug_barrier()
        last = tl.atomic_add(lock_ptr + mine, 1, sem="acq_rel") == SPLIT - 1
    if last:
        if SPLIT > 1:
            acc = tl.zeros(acc.shape, ACC)
            for i in range(SPLIT):
                parts = part_ptr + (i * tiles + mine).to(tl.int64) * (BM * BN) + cell
                acc += tl.load(parts, cache_modifier=".cg", mask=live, other=0)
            tl.store(lock_ptr + mine, 0)
        y = scaled(acc, m, n, sx_ptr, sw_ptr, b_ptr, M, N, SX, SW, HAS_B, SWAP)
        first = y_ptr + (pm * BM).to(tl.int64) * N  # offsets within a tile need 32 bits, and half the registers
        tl.store(first + ((m2 - pm * BM) * N + n2), narrow(y, T), mask=live)


@triton.jit(do_not_specialize=["M"])
def product_blocks(
    x_blocks, w_blocks, sx_ptr, sw_ptr, b_ptr, y_blocks, M, N, K,
    SX: tl.constexpr, SW: tl.constexpr, HAS_B: tl.constexpr, T: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """As product for many rows of int8, on devices that copy blocks of memory themselves (compute capability 9.0).

    x_blocks, w_blocks, y_blocks: tensor descriptors of x in blocks [BM, BK], w [BN, BK], y [BM, BN / 2]. Each of
    PROGRAMS programs computes every PROGRAMS-th tile, and loads the first blocks of the next one while it writes a
    result.
    """
    tiles = tl.cdiv(M, BM) * tl.cdiv(N, BN)
    for i in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=True):
        pm, pn = tile_of(i, M, N, BM, BN, GROUP)
        acc = tl.zeros((BM, BN), tl.int32)
        for t in range(tl.cdiv(K, BK)):
            x = x_blocks.load([pm * BM, t * BK])
            w = w_blocks.load([pn * BN, t * BK])
            acc = tl.dot(x, w.T, acc, out_dtype=tl.int32)
        m = pm * BM + tl.arange(0, BM)
        n = pn * BN + tl.arange(0, BN // 2)
        halves = tl.split(tl.permute(tl.reshape(acc, (BM, 2, BN // 2)), (0, 2, 1)))
        for half in tl.static_range(2):  # half the shared memory for results is one more stage for operands
            y = scaled(halves[half], m, n + half * (BN // 2), sx_ptr, sw_ptr, b_ptr, M, N, SX, SW, HAS_B, False)
            y_blocks.store([pm * BM, pn * BN + half * (BN // 2)], narrow(y, T))
