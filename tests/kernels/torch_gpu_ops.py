"""References of torch's GPU ops, in float64 on a CPU: what each computes, and what each refuses on a device.

The refusals are those of aten/native/cuda, which torch's fake functions have only in part.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def nibbles(packed: Tensor) -> Tensor:
    """float4_e2m1fn_x2 [rows, K/2] -> float64 [rows, K]; the low bits are the even column."""
    byte = packed.view(torch.uint8).long()
    return E2M1[torch.stack([byte & 15, byte >> 4], -1).flatten(-2)]


def untiled(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Scales [rows, columns] from cuBLAS' order, by the formula of its manual, one by one."""
    values = flat.reshape(-1).view(torch.uint8).tolist()
    assert len(values) == -(-rows // 128) * 128 * (-(-columns // 4) * 4), "wrong number of block scales"
    tiles = -(-columns // 4)

    def at(r: int, c: int) -> int:
        tile = (r // 128) * tiles + c // 4
        return values[tile * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4]

    found = torch.tensor([[at(r, c) for c in range(columns)] for r in range(rows)], dtype=torch.uint8)
    if flat.dtype is torch.float8_e8m0fnu:
        return 2.0 ** (found.double() - 127)
    return found.view(torch.float8_e4m3fn).double()


def check_operands(a: Tensor, b: Tensor) -> None:
    assert a.ndim == b.ndim == 2
    assert a.shape[1] == b.shape[0]
    assert a.stride(0) > a.stride(1) == 1, "a must be row-major"
    assert b.stride(1) > b.stride(0) == 1, "b must be column-major"
    assert a.shape[1] % 16 == 0
    assert b.shape[0] % 16 == 0
    assert b.shape[1] % 16 == 0
    assert a.data_ptr() % 16 == 0
    assert b.data_ptr() % 16 == 0


def scaled_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None, scale_result: Any = None,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    check_operands(a, b)
    assert scale_result is None
    m, n = a.shape[0], b.shape[1]
    if a.dtype is torch.float4_e2m1fn_x2 or scale_a.dtype is not torch.float32:
        assert out_dtype is torch.bfloat16
        assert bias is None
        assert not use_fast_accum
        fp4 = a.dtype is torch.float4_e2m1fn_x2
        assert a.dtype == b.dtype
        assert fp4 or a.dtype is torch.float8_e4m3fn
        assert scale_a.dtype is scale_b.dtype is (torch.float8_e4m3fn if fp4 else torch.float8_e8m0fnu)
        size = 16 if fp4 else 32
        x, w = (nibbles(a), nibbles(b.t())) if fp4 else (a.double(), b.t().double())
        assert x.shape[1] % 32 == 0
        x = x * untiled(scale_a, m, x.shape[1] // size).repeat_interleave(size, 1)
        w = w * untiled(scale_b, n, w.shape[1] // size).repeat_interleave(size, 1)
        return (x @ w.t()).to(out_dtype)
    assert a.dtype in FLOAT8
    assert b.dtype in FLOAT8
    assert not a.dtype is b.dtype is torch.float8_e5m2
    assert scale_a.dtype is scale_b.dtype is torch.float32
    if scale_a.numel() == scale_b.numel() == 1:
        assert out_dtype in (torch.float32, torch.bfloat16, torch.float16)
        scale_a, scale_b = scale_a.reshape(1, 1), scale_b.reshape(1, 1)
    else:
        assert (scale_a.shape, scale_b.shape) == ((m, 1), (1, n))
        assert scale_a.is_contiguous()
        assert scale_b.is_contiguous()
        assert out_dtype is torch.bfloat16
    y = a.double() @ b.double() * scale_a.double() * scale_b.double()
    if bias is not None:
        assert bias.dtype is out_dtype is not torch.float32
        assert bias.shape == (n,)
        assert bias.is_contiguous()
        y = y + bias.double()
    return y.to(out_dtype)


def int_mm(a: Tensor, b: Tensor) -> Tensor:
    assert a.ndim == b.ndim == 2
    assert a.dtype is b.dtype is torch.int8
    assert a.shape[0] > 16, "self.size(0) needs to be greater than 16"
    assert a.shape[1] == b.shape[0]
    assert a.shape[1] > 0
    assert a.shape[1] % 8 == 0
    assert b.shape[1] % 8 == 0
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    return (a.double() @ b.double()).to(torch.int32)


def int4_words(codes: Tensor, inner: int) -> Tensor:
    """``_convert_weight_to_int4pack`` of codes 0..15 [N, K], lane by lane."""
    n, k = codes.shape
    out = torch.zeros(n // 8, k // (16 * inner), 32, inner // 2, dtype=torch.int64)
    for tile, step, lane, word in torch.cartesian_prod(*(torch.arange(s) for s in out.shape)).tolist():
        row, column = tile * 8 + lane // 4, (step * inner + word * 2) * 16 + lane % 4 * 2
        starts = [column, column + 8, column + 16, column + 24]
        even, odd = ([int(codes[row, c + i]) for c in starts] for i in (0, 1))
        out[tile, step, lane, word] = sum(v << 4 * i for i, v in enumerate([*even, *odd]))
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


def weight_int4pack_mm(a: Tensor, words: Tensor, group: int, scales: Tensor) -> Tensor:
    assert a.dtype is scales.dtype is torch.bfloat16
    assert words.dtype is torch.int32
    assert a.is_contiguous()
    assert words.is_contiguous()
    assert scales.is_contiguous()
    inner, k, n = words.shape[3] * 2, a.shape[1], words.shape[0] * 8
    assert inner in (2, 4, 8)
    assert words.shape[1:3] == (k // (inner * 16), 32)
    assert group in (32, 64, 128, 256)
    assert k % group == 0
    assert scales.shape == (k // group, n, 2)
    codes = torch.zeros(n, k, dtype=torch.float64)
    for tile, step, lane, word in torch.cartesian_prod(*(torch.arange(s) for s in words.shape)).tolist():
        row, column, value = (
            tile * 8 + lane // 4,
            (step * inner + word * 2) * 16 + lane % 4 * 2,
            words[tile, step, lane, word],
        )
        for i in range(4):
            codes[row, column + 8 * i] = (int(value) >> 4 * i) & 15
            codes[row, column + 8 * i + 1] = (int(value) >> 16 + 4 * i) & 15
    scale, offset = (scales[..., i].t().double().repeat_interleave(group, 1) for i in (0, 1))
    return (a.double() @ ((codes - 8) * scale + offset).t()).to(torch.bfloat16)


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, offs: Tensor | None = None, bias: Any = None,
    scale_result: Any = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> Tensor:  # fmt: skip
    """Rows after the last end are not written: NaN here."""
    assert a.dtype is b.dtype is torch.float8_e4m3fn
    assert out_dtype is torch.bfloat16
    assert bias is scale_result is None
    assert a.stride(-1) == 1
    assert b.stride(-2) == 1
    assert a.shape[-1] % 16 == 0
    assert b.shape[-1] % 16 == 0
    assert scale_a.dtype is scale_b.dtype is torch.float32
    assert scale_b.shape == (b.shape[0], b.shape[2])
    assert scale_a.shape == a.shape[:-1]
    assert scale_a.is_contiguous()
    assert scale_b.is_contiguous()
    x, w = a.double() * scale_a.double()[..., None], b.double() * scale_b.double()[:, None]
    if a.ndim == 3:
        assert offs is None
        return (x @ w).to(out_dtype)
    assert offs is not None
    assert offs.dtype is torch.int32
    assert offs.shape == b.shape[:1]
    y, start = torch.full((a.shape[0], b.shape[2]), torch.nan, dtype=torch.float64), 0
    for e, end in enumerate(offs.tolist()):
        y[start:end], start = x[start:end] @ w[e], end
    return y.to(out_dtype)


# (object, name, reference)
OPS: tuple[tuple[Any, str, Any], ...] = (
    (torch, "_scaled_mm", scaled_mm),
    (torch, "_int_mm", int_mm),
    (torch, "_scaled_grouped_mm", scaled_grouped_mm),
)
