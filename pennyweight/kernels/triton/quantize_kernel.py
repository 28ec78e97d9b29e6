"""Quantizing rows of an input as a Triton kernel: one pass that reads the row, chooses its scale and writes its codes.

Bit for bit what core.numerics.quantize gives on a CPU: the scale is computed in the input's dtype with the same
roundings, codes are rounded to nearest even. Divisions are exact where the reference divides, and no product is fused
with a sum that the reference rounds separately.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .decode_kernel import INTERPRET, narrow, widen


@triton.jit
def rounded(y, T: tl.constexpr):
    """A float32 y rounded to T, as float32."""
    return widen(narrow(y, T))


@triton.jit
def nearest(q):
    """The nearest integers of |q| < 2**22, ties to even: 1.5 * 2**23 leaves no bits for fractions."""
    return (q + 12582912.0).to(tl.float32) - 12582912.0


@triton.jit
def held(s, floor, limit):
    """s clamped to [floor, limit]; NaN stays."""
    s = tl.where(s < floor, floor, s)
    return tl.where(s > limit, limit, s)


@triton.jit
def bits(x):
    """The bits of |x|: they order as the numbers do, and NaN is above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def is_nan(x):
    return bits(x) > 0x7F800000


@triton.jit
def span_scale(lo, hi, STEPS: tl.constexpr, T: tl.constexpr):
    """(hi - lo) / STEPS in T; divides first if the difference overflows. core.qparams._span."""
    s = rounded(tl.div_rn(rounded(hi - lo, T), STEPS), T)
    wide = rounded(rounded(tl.div_rn(hi, STEPS), T) - rounded(tl.div_rn(lo, STEPS), T), T)
    return tl.where(bits(s) < 0x7F800000, s, wide)


@triton.jit
def quotient(x, s, r, up):
    """x / s, correctly rounded where the result is in -512 .. 512, else of the same sign and at least 512.

    r = 1 / (s up), correctly rounded; up: a power of two that keeps s up far from the ends of float32. The remainder of
    x r is exact, so one correction rounds correctly (Markstein 1990). A division would take twice as many instructions.
    """
    if INTERPRET:  # it rounds products before it adds
        return x / s
    x = x * up
    q = tl.minimum(tl.maximum(x * r, -512.0), 512.0)
    return tl.where(x == 0, x, tl.fma(tl.fma(-q, s * up, x), r, q))  # the sum of -0 and its remainder is +0


@triton.jit
def float_code(q, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr):
    """int32 codes of the nearest 8-bit floats, ties to even, saturating at code LAST; NaN gives 0x7F."""
    KEEP: tl.constexpr = 23 - MANTISSA
    FIRST: tl.constexpr = (128 - BIAS) << 23  # bits of the smallest normal number
    MAGIC: tl.constexpr = 2.0 ** (24 - BIAS - MANTISSA)  # its last bit is the unit of subnormal numbers
    MAGIC_BITS: tl.constexpr = (151 - BIAS - MANTISSA) << 23
    u = q.to(tl.int32, bitcast=True)
    a = u & 0x7FFFFFFF
    normal = ((a + ((1 << (KEEP - 1)) - 1) + ((a >> KEEP) & 1)) >> KEEP) - ((127 - BIAS) << MANTISSA)
    small = (tl.minimum(a, FIRST).to(tl.float32, bitcast=True) + MAGIC).to(tl.float32)
    code = tl.where(a < FIRST, small.to(tl.int32, bitcast=True) - MAGIC_BITS, normal)
    code = tl.where(a > 0x7F800000, 0x7F, tl.minimum(code, LAST))
    return code | ((u >> 24) & 0x80)


@triton.jit
def float_value(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The finite number of a code, as float32."""
    UP: tl.constexpr = 2.0 ** (127 - BIAS)
    u = ((code & 0x80) << 24) | ((code & 0x7F) << (23 - MANTISSA))
    return u.to(tl.float32, bitcast=True) * UP


@triton.jit
def write(
    x, out, live, s, r, up, zero, limit, KIND: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr, MANTISSA: tl.constexpr,
    BIAS: tl.constexpr, LAST: tl.constexpr, HAS_Z: tl.constexpr, VALUES: tl.constexpr, NATIVE: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Write the codes of x, or their values."""
    if KIND == "int":
        q = x * r
        c = nearest(tl.minimum(tl.maximum(q, -1024.0), 1024.0))
        if HAS_Z:
            c = c + zero
        c = tl.where(is_nan(q), 0.0, tl.minimum(tl.maximum(c, LO), HI))  # NaN has no code; its scale is NaN
        if VALUES:
            if HAS_Z:
                c = c - zero
        else:
            tl.store(out, c.to(tl.int8), mask=live)
    else:
        q = quotient(x, s, r, up)
        if NATIVE:
            tl.store(out, q.to(tl.float8e4nv).to(tl.uint8, bitcast=True), mask=live)
        else:
            code = float_code(q, MANTISSA, BIAS, LAST)
            if VALUES:
                c = float_value(code, MANTISSA, BIAS)
                c = tl.where(is_nan(q), q, c)
            else:
                tl.store(out, code.to(tl.uint8), mask=live)
    if VALUES:
        tl.store(out, narrow(held(rounded(c * s, T), -limit, limit), T), mask=live)


@triton.jit
def quantize_rows(
    x_ptr, q_ptr, s_ptr, z_ptr, lo_ptr, hi_ptr, g_ptr, K, floor, limit, eps,
    PARAMS: tl.constexpr, KIND: tl.constexpr, DIVISOR: tl.constexpr, LO: tl.constexpr, HI: tl.constexpr,
    MANTISSA: tl.constexpr, BIAS: tl.constexpr, LAST: tl.constexpr, HAS_Z: tl.constexpr, VALUES: tl.constexpr,
    NATIVE: tl.constexpr, NORM: tl.constexpr, PER_ROW: tl.constexpr, LOOP: tl.constexpr, T: tl.constexpr,
    B: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Codes q and scale s (zero point z) of each row of x [M, K]; one program per row.

    PARAMS   "row": chosen from the row. "range": from lo[0] and hi[0], the range of all rows. "given": s[0], z[0], or
             with PER_ROW one per row, are read instead of written
    KIND     "int" with codes LO .. HI, or "float" with MANTISSA bits, an exponent bias BIAS, and greatest code LAST
    DIVISOR  the scale is absmax / DIVISOR; with HAS_Z (max - min) / DIVISOR, where the range includes zero
    floor, limit  least and greatest scale
    VALUES   whether q gets (code - z) s in T instead of codes (int8, or uint8 for floats)
    NATIVE   whether the device converts to e4m3 itself
    NORM     x is divided by sqrt(mean(x**2) + eps), multiplied with g [K] and rounded to T before; without LOOP
    LOOP     whether a row is longer than B columns: then it is read twice, the second time from the L2 cache
    EARLY    whether the kernel behind this one may start at once: it fetches its weights, and waits (launch_pdl)
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = row if PER_ROW else row * 0
    k = tl.arange(0, B)
    xs = x_ptr + row * K
    out = q_ptr + row * K
    if not LOOP:
        x = widen(tl.load(xs + k, mask=k < K, other=0.0))
        if NORM:
            x = x * tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, 0) / K + eps))
            x = rounded(x * widen(tl.load(g_ptr + k, mask=k < K, other=0.0)), T)
    if PARAMS == "given":
        s = tl.load(s_ptr + at)
        zero = 0.0
        if HAS_Z:
            zero = tl.load(z_ptr + at).to(tl.float32)
    else:
        if PARAMS == "range":
            lo = widen(tl.load(lo_ptr))
            hi = widen(tl.load(hi_ptr))
            amax = tl.maximum(bits(lo), bits(hi)).to(tl.float32, bitcast=True)
            lo = tl.minimum(lo, 0.0)
            hi = tl.maximum(hi, 0.0)
        elif LOOP:
            a = tl.zeros((B,), tl.int32)
            low = tl.zeros((B,), tl.float32)
            high = tl.zeros((B,), tl.float32)
            for k0 in range(0, K, B):
                x = widen(tl.load(xs + k0 + k, mask=k0 + k < K, other=0.0))
                a = tl.maximum(a, bits(x))
                if HAS_Z:
                    low = tl.minimum(low, x)
                    high = tl.maximum(high, x)
            amax = tl.max(a, 0).to(tl.float32, bitcast=True)
            lo = tl.min(low, 0)
            hi = tl.max(high, 0)
        else:
            amax = tl.max(bits(x), 0).to(tl.float32, bitcast=True)
            if HAS_Z:
                lo = tl.min(tl.minimum(x, 0.0), 0)
                hi = tl.max(tl.maximum(x, 0.0), 0)
        zero = 0.0
        if HAS_Z:
            s = held(span_scale(lo, hi, DIVISOR, T), floor, limit)
            zero = rounded(LO - nearest(tl.maximum(rounded(tl.div_rn(lo, s), T), -1024.0)), T)
            zero = tl.minimum(tl.maximum(zero, LO), HI)
            s = tl.where(is_nan(amax), amax, s)  # a range leaves NaN out
            zero = tl.where(is_nan(amax), 0.0, zero)
        else:
            s = held(rounded(tl.div_rn(amax, DIVISOR), T), floor, limit)
        if not VALUES and (PARAMS == "row" or row == 0):
            tl.store(s_ptr + at, s)
            if HAS_Z:
                tl.store(z_ptr + at, tl.cast(zero, tl.int8))
    up = 1.0
    if KIND == "int":
        r = tl.div_rn(1.0, s)
        r = tl.where(bits(r) < 0x7F800000, r, 0.0)  # a scale of nearly zero maps every number to zero
    elif INTERPRET:
        r = s
        s = tl.where(s == 0, float("inf"), s)  # maps every number to zero too
    else:
        size = tl.abs(s)
        up = tl.where(size < 8.6e-19, 1.8446744073709552e19, tl.where(size > 1.2e18, 5.421010862427522e-20, 1.0))
        r = tl.where(s == 0, 0.0, tl.div_rn(1.0, s * up))
    if LOOP:
        for k0 in range(0, K, B):
            x = widen(tl.load(xs + k0 + k, mask=k0 + k < K, other=0.0))
            write(
                x, out + k0 + k, k0 + k < K, s, r, up, zero, limit, KIND, LO, HI, MANTISSA, BIAS, LAST, HAS_Z, VALUES,
                NATIVE, T,
            )  # fmt: skip
    else:
        write(x, out + k, k < K, s, r, up, zero, limit, KIND, LO, HI, MANTISSA, BIAS, LAST, HAS_Z, VALUES, NATIVE, T)
