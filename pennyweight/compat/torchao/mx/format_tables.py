"""torchao's helpers that take small floats apart: sign, exponent and mantissa of a number, as bits and as values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ....core.formats import E2M1, E2M3, E3M2, Format
from .constants import DTYPE_FP6_E2M3, DTYPE_FP6_E3M2
from .element_codes import get_bits

__all__ = [
    "assert_same", "dtype_to_bitwidth", "dtype_to_exp_bias", "dtype_to_int_dtype", "dtype_to_interesting_values",
    "dtype_to_sem_len", "exp_encoding_to_exp", "float4_e2m1_interesting_values", "float6_e2m3_interesting_values",
    "float6_e3m2_interesting_values", "get_sem_bits", "run", "sem_bits_to_sem_vals", "sem_vals_to_f32",
    "sem_vals_to_formula",
]  # fmt: skip

# dtype -> exponent and mantissa bits; whether the greatest exponent means infinities and NaN
_FIELDS: dict[Any, tuple[int, int, bool]] = {
    torch.float32: (8, 23, True), torch.bfloat16: (8, 7, True), torch.float16: (5, 10, True),
    torch.float8_e4m3fn: (4, 3, False), torch.float8_e5m2: (5, 2, True),
    DTYPE_FP6_E3M2: (3, 2, False), DTYPE_FP6_E2M3: (2, 3, False),
}  # fmt: skip

dtype_to_bitwidth = {dtype: 1 + e + m for dtype, (e, m, _) in _FIELDS.items()}
# torch.uint8 stands for fp4, in the low four bits of a byte
dtype_to_sem_len = {d: (1, e, m) for d, (e, m, _) in _FIELDS.items() if isinstance(d, torch.dtype)} | {
    torch.uint8: (1, 2, 1)
}
dtype_to_exp_bias = {dtype: (1 << (e - 1)) - 1 for dtype, (e, _, _) in _FIELDS.items()}
dtype_to_int_dtype = {
    torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.int8, torch.float8_e5m2: torch.int8, torch.uint8: torch.uint8,
}  # fmt: skip


def get_sem_bits(x: Tensor, bitwidth: int) -> tuple[str, str, str]:
    """(sign, exponent, mantissa) bits of a tensor with one element. uint8 with ``bitwidth`` 4 is an fp4 code."""
    if x.numel() != 1:
        raise AssertionError(f"get_sem_bits takes one number, got {list(x.shape)}")
    _, exponent, _ = dtype_to_sem_len[x.dtype]
    bits = get_bits(x.reshape(()).view(dtype_to_int_dtype[x.dtype]))
    bits = bits[4:] if bitwidth == 4 else bits
    return bits[0], bits[1 : 1 + exponent], bits[1 + exponent :]


def exp_encoding_to_exp(exp_bit_str: str, dtype: Any) -> int:
    """The exponent of its bits; of subnormal numbers that of the least normal one."""
    return max(int(exp_bit_str, 2), 1) - dtype_to_exp_bias[dtype]


def sem_bits_to_sem_vals(s_enc: str, e_enc: str, m_enc: str, dtype: Any) -> tuple[Any, Any, Any, float | None]:
    """(sign, exponent, mantissa, None) of bits: the number is sign * 2**exponent * mantissa. Of an infinity or NaN:
    (None, None, None, that). Not for fp4."""
    sign = 1 if s_enc == "0" else -1
    special = _FIELDS[dtype][2]
    if "0" not in e_enc and special:
        return None, None, None, math.nan if "1" in m_enc else sign * math.inf
    if dtype is torch.float8_e4m3fn and "0" not in e_enc + m_enc:
        return None, None, None, math.nan
    fraction = int(m_enc, 2) / (1 << len(m_enc))
    return sign, exp_encoding_to_exp(e_enc, dtype), fraction + ("1" in e_enc), None


def sem_vals_to_f32(s_i: Any, e_i: Any, m_f: Any, special_value: float | None) -> float:
    """The number of :func:`sem_bits_to_sem_vals`."""
    return special_value if special_value is not None else s_i * 2.0**e_i * m_f


def sem_vals_to_formula(s_i: Any, e_i: Any, m_f: Any, special_value: float | None) -> Any:
    """The number as a formula, "1 * 2^4 * 1.875"; an infinity or NaN itself."""
    return special_value if special_value is not None else f"{s_i} * 2^{e_i} * {m_f}"


def assert_same(fp1: float, fp2: float) -> None:
    """Raise AssertionError unless the numbers are equal up to 1e-5 of their size; NaN equals NaN."""
    if not (math.isnan(fp1) and math.isnan(fp2)) and not math.isclose(fp1, fp2, rel_tol=1e-5):
        raise AssertionError(f"{fp2} != {fp1}")


def _assert_equals(fp_ref: float, s_enc_ref: str, e_enc_ref: str, m_enc_ref: str, dtype: torch.dtype) -> None:
    """Raise AssertionError unless the number has these bits in that dtype, and they give the number."""
    bits = get_sem_bits(torch.tensor(fp_ref, dtype=dtype), dtype_to_bitwidth[dtype])
    if bits != (s_enc_ref, e_enc_ref, m_enc_ref):
        raise AssertionError(f"{fp_ref} in {dtype} has the bits {bits}, not {(s_enc_ref, e_enc_ref, m_enc_ref)}")
    assert_same(fp_ref, sem_vals_to_f32(*sem_bits_to_sem_vals(*bits, dtype)))


# -- tables ------------------------------------------------------------------------------------------------------------

_PATTERNS = (
    ("zero", lambda e, m: ("0" * e, "0" * m)),
    ("smallest_denormal", lambda e, m: ("0" * e, "0" * (m - 1) + "1")),
    ("largest_denormal", lambda e, m: ("0" * e, "1" * m)),
    ("smallest_normal", lambda e, m: ("0" * (e - 1) + "1", "0" * m)),
)


def _row(dtype: Any, sign: str, exponent: str, mantissa: str, note: str) -> tuple[float, str, str, str, str]:
    value = sem_vals_to_f32(*sem_bits_to_sem_vals(sign, exponent, mantissa, dtype))
    return value, sign, exponent, mantissa, note + ("_neg" if sign == "1" and not math.isnan(value) else "")


def _interesting(dtype: Any) -> list[tuple[float, str, str, str, str]]:
    """(value, sign, exponent, mantissa, note) of the extreme numbers of a dtype."""
    e, m, special = _FIELDS[dtype]
    top = "1" * (e - 1) + "0" if special else "1" * e
    last = "1" * (m - 1) + "0" if dtype is torch.float8_e4m3fn else "1" * m
    patterns = [(note, *bits(e, m)) for note, bits in _PATTERNS] + [("largest_normal", top, last)]
    patterns += [("inf", "1" * e, "0" * m)] if special else []
    rows = [_row(dtype, sign, ex, ma, note) for note, ex, ma in patterns for sign in "01"]
    if special or dtype is torch.float8_e4m3fn:
        quiet = "1" * m if e + m == 7 else "1" + "0" * (m - 1)  # torch's NaN
        rows.append(_row(dtype, "0", "1" * e, quiet, "nan"))
    return rows


dtype_to_interesting_values = {d: _interesting(d) for d in _FIELDS if isinstance(d, torch.dtype)}


def _small_table(fmt: Format, exponent_bits: int) -> list[tuple[float, str, str, str, str, str]]:
    """(value, formula, sign, exponent, mantissa, note) of every number of a small float."""
    rows, bias = [], (1 << (exponent_bits - 1)) - 1
    for code, value in enumerate(fmt.values):
        bits = f"{code:0{fmt.bits}b}"
        exponent, mantissa = bits[1 : 1 + exponent_bits], bits[1 + exponent_bits :]
        power = max(int(exponent, 2), 1) - bias
        fraction = int(mantissa, 2) / (1 << len(mantissa)) + ("1" in exponent)
        formula = f"{'-' if bits[0] == '1' else ''}1.0 * 2^{power} * {fraction}"
        note = "zero" if fraction == 0 else "normal" if "1" in exponent else "denormal"
        rows.append((value, formula, bits[0], exponent, mantissa, note))
    return rows


float4_e2m1_interesting_values = _small_table(E2M1, 2)
float6_e3m2_interesting_values = _small_table(E3M2, 3)
float6_e2m3_interesting_values = _small_table(E2M3, 2)
_TABLES = {
    torch.float4_e2m1fn_x2: float4_e2m1_interesting_values, DTYPE_FP6_E3M2: float6_e3m2_interesting_values,
    DTYPE_FP6_E2M3: float6_e2m3_interesting_values,
}  # fmt: skip


def run(dtype: Any) -> None:
    """Print the extreme numbers of a dtype, or all numbers of fp4 and fp6, with formula and bits."""
    if dtype in _TABLES:
        rows: list[tuple[Any, ...]] = list(_TABLES[dtype])
    else:
        rows = [
            (value, sem_vals_to_formula(*sem_bits_to_sem_vals(s, e, m, dtype)), s, e, m, note)
            for value, s, e, m, note in dtype_to_interesting_values[dtype]
        ]
    table = [("orig_val", "formula", "s_enc", "e_enc", "m_enc", "note"), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(6)]
    print("dtype", dtype)
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()
