"""The kernels behind the hardware questions. Imported on a device only."""

import triton
import triton.language as tl


@triton.jit
def scaled_bits(bits_ptr, y_ptr, SIZE: tl.constexpr, MUL: tl.constexpr, ADD: tl.constexpr):
    """y = fma(x, MUL, ADD) in bfloat16, where x has the bits 0, 1, 2, ... : what the weight-only kernels rest on."""
    i = tl.arange(0, SIZE)
    x = tl.load(bits_ptr + i).to(tl.bfloat16, bitcast=True)
    mul = tl.full(x.shape, MUL, tl.float32).to(tl.bfloat16)
    add = tl.full(x.shape, ADD, tl.float32).to(tl.bfloat16)
    tl.store(y_ptr + i, tl.fma(x, mul, add))


@triton.jit
def float8_dot(a_ptr, b_ptr, y_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """y [M, N] = a [M, K] b [N, K].T; a, b: bytes read as e4m3."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :]).to(tl.float8e4nv, bitcast=True)
    b = tl.load(b_ptr + n[None, :] * K + k[:, None]).to(tl.float8e4nv, bitcast=True)
    tl.store(y_ptr + m[:, None] * N + n[None, :], tl.dot(a, b))
