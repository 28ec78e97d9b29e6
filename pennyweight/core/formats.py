"""Number formats: finite sets of numbers with their codes, each defined in one line.

A code is the stored value; ``decode`` returns the number of a code, ``encode`` the code of the nearest number.
Sources: OCP OFP8 (2023) for e4m3/e5m2; OCP MX v1.0 for e3m2, e2m3, e2m1, e8m0; QLoRA (Dettmers et al. 2023,
appendix E) for nf4; Dettmers et al. 2022 (8-bit optimizers) for the dynamic maps; ggml's block types for iq1 to iq4;
Pennyweight's own: the unsigned floats without zero, for second moments (docs/optimizers.md).
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..support.arguments import did_you_mean, hint, show
from ..support.errors import ArgumentTypeError

_BY_NAME: dict[str, Format] = {}


@dataclass(frozen=True, eq=False)
class Format:
    """A finite set of numbers and their codes. Interned by name: identity is equality.

    kind "int":   the code is the number, an integer in [lo, hi].
    kind "float": small IEEE-like floats; 8-bit ones use torch's dtype, the others are stored sign-magnitude in a byte.
    kind "table": the code is an index into ``values`` (ascending).
    kind "learned": the code is an index into the tensor's own table, with ``dim`` numbers per row.
    rounding: the dtype in which quantized scales are computed, rounded after each operation, as in the library that
    defines the format; None: in float32, rounded once.
    """

    name: str
    bits: int
    kind: str
    code_dtype: torch.dtype
    lo: float
    hi: float
    values: tuple[float, ...] = field(default=(), repr=False)
    dim: int = 1
    rounding: torch.dtype | None = field(default=None, repr=False)

    def __new__(
        cls, name: str, bits: int, kind: str, code_dtype: torch.dtype, lo: float, hi: float,
        values: tuple[float, ...] = (), dim: int = 1, rounding: torch.dtype | None = None,
    ) -> Format:  # fmt: skip
        """Returns the interned format if equal: torch.compile recreates frozen dataclasses from their fields."""
        known = _BY_NAME.get(name)
        if known is None:
            return super().__new__(cls)
        if (known.bits, known.kind, known.code_dtype, known.lo, known.hi, known.values, known.dim, known.rounding) != (
            bits, kind, code_dtype, lo, hi, values, dim, rounding,
        ):  # fmt: skip
            raise ValueError(f"number format {name!r} exists already; choose another name")
        return known

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ValueError(f"number format {self.name!r}: bits must be in 1..8, got {self.bits}")
        _BY_NAME[self.name] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return get_format, (self.name,)

    def __str__(self) -> str:
        return self.name

    @property
    def signed(self) -> bool:
        return self.lo < 0

    @property
    def native_float(self) -> bool:
        """Whether torch has a dtype for this format."""
        return self.code_dtype.is_floating_point

    def encode(self, x: Tensor) -> Tensor:
        """Codes of the nearest numbers, ties to even, saturating. x: any shape, float; NaN is not representable."""
        if self.kind == "int":
            return x.round().clamp(self.lo, self.hi).to(self.code_dtype)
        if self.native_float:
            return x.clamp(self.lo, self.hi).to(self.code_dtype)
        if self is E8M0:
            return _encode_e8m0(x)
        if self.kind == "learned":
            raise ValueError(f"{self} is a learned format: its numbers are in each tensor's own table")
        if self.kind == "float":  # sign-magnitude: the positive half of the table is ascending in its code
            half = 1 << (self.bits - 1)
            x = x.float().contiguous()  # bucketize copies, and warns, otherwise
            magnitude = torch.bucketize(
                x.abs(), decision_levels(self.values[:half], x.device, even=True), out_int32=True
            )
            return (magnitude | (x.signbit().to(magnitude.dtype) << (self.bits - 1))).to(torch.uint8)
        levels = decision_levels(self.values, x.device, even=False)
        return torch.bucketize(x.float().contiguous(), levels, out_int32=True).to(torch.uint8)

    def decode(self, codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Numbers of the codes, as ``dtype``."""
        if self.kind == "int" or self.native_float:
            return codes.to(dtype)
        if self is E8M0:
            power = torch.ldexp(torch.ones_like(codes, dtype=torch.float64), codes.to(torch.int32) - 127)
            return torch.where(codes == 255, torch.nan, power).to(dtype)
        if self.kind == "learned":
            raise ValueError(f"{self} is a learned format: its numbers are in each tensor's own table")
        return torch.tensor(self.values, dtype=dtype, device=codes.device)[codes.to(torch.int32)]

    def numbers(self, device: torch.device | str = "cpu") -> Tensor:
        """All finite numbers, ascending, float32. Raises ValueError for learned formats."""
        if self.kind == "int":
            return torch.arange(int(self.lo), int(self.hi) + 1, dtype=torch.float32, device=device)
        codes = torch.arange(len(self.values) or 256, dtype=torch.int64, device=device).to(torch.uint8)
        found = self.decode(codes.view(self.code_dtype), torch.float32)
        return torch.unique(found[found.isfinite()])

    def to_unsigned(self, codes: Tensor) -> Tensor:
        """Codes as unsigned integers of ``bits`` bits, for bit streams and files. Returns uint8."""
        if self.native_float:
            return codes.view(torch.uint8)
        if self.code_dtype is torch.int8:
            return (codes - int(self.lo)).to(torch.uint8) if self.bits < 8 else codes.view(torch.uint8) ^ 128
        return codes

    def from_unsigned(self, codes: Tensor) -> Tensor:
        """Inverse of :meth:`to_unsigned`. codes: uint8."""
        if self.native_float:
            return codes.view(self.code_dtype)
        if self.code_dtype is torch.int8:
            return codes.to(torch.int8) + int(self.lo) if self.bits < 8 else (codes ^ 128).view(torch.int8)
        return codes


def decision_levels(values: tuple[float, ...], device: torch.device, *, even: bool) -> Tensor:
    """Decision levels between neighbours for ``torch.bucketize(x, levels)``, which rounds x == level down.

    With ``even`` a tie above an odd code must round up, so its level is just below the midpoint.
    """
    mids = [(a + b) / 2 for a, b in pairwise(values)]
    levels = torch.tensor(mids, dtype=torch.float32, device=device)
    if even:
        below = torch.nextafter(levels, torch.zeros_like(levels))
        levels = torch.where(torch.arange(len(mids), dtype=torch.int64, device=device) % 2 == 1, below, levels)
    return levels


def _encode_e8m0(x: Tensor) -> Tensor:
    """Nearest power of two in value: 2**(e+1) from 1.5 * 2**e on (ties to the even code)."""
    mantissa, exponent = torch.frexp(x.float().clamp(max=E8M0.hi))  # x = mantissa * 2**exponent, mantissa in [0.5, 1)
    code = exponent + 126
    up = (mantissa > 0.75) | ((mantissa == 0.75) & (code % 2 == 1))
    return torch.where(x > 0, code + up, 0).clamp(0, 254).to(torch.uint8)


_COMMON = re.compile(r"u?int\d|e\dm\d|nf4|ternary")  # suggested for a wrong name


def get_format(name: str) -> Format:
    """The format with that name. Raises ValueError with similar names, ArgumentTypeError for something else."""
    try:
        return _BY_NAME[name]
    except (KeyError, TypeError):
        families = "known are int1 to int8, uint1 to uint8, e4m3, e5m2, e3m2, e2m3, e2m1, nf4, ternary and others"
        if isinstance(name, str):
            guess = did_you_mean(name, filter(_COMMON.fullmatch, _BY_NAME))
            raise ValueError(f"unknown number format {name!r}{guess}; {families}") from None
        bits = isinstance(name, int) and not isinstance(name, bool) and f"int{name}" in _BY_NAME
        guess = hint([f"int{name}", f"uint{name}"]) if bits else ""
        raise ArgumentTypeError(f"a number format is given by its name, got {show(name)}{guess}; {families}") from None


def all_formats() -> list[Format]:
    """Every registered format except learned ones, in order of registration."""
    return [f for f in _BY_NAME.values() if f.kind != "learned"]


def learned_formats() -> list[Format]:
    """Every learned format."""
    return [f for f in _BY_NAME.values() if f.kind == "learned"]


def learned(bits: int, dim: int = 1) -> Format:
    """Learned format: ``bits``-bit indices into a table with rows of ``dim`` numbers, bits / dim bits per weight.

    Raises ValueError unless bits is 1 to 8 and dim is 1, 2, 4 or 8. The scale is the largest magnitude of a block, so
    the numbers are in -1 to 1.
    """
    if dim not in (1, 2, 4, 8):
        raise ValueError(f"a code represents 1, 2, 4 or 8 numbers, got {dim}")
    name = f"learned{bits}" + (f"x{dim}" if dim > 1 else "")
    return Format(name, bits, "learned", torch.uint8, -1.0, 1.0, (), dim)


def _int(bits: int) -> Format:
    return Format(f"int{bits}", bits, "int", torch.int8, -(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def _uint(bits: int) -> Format:
    return Format(f"uint{bits}", bits, "int", torch.uint8, 0, (1 << bits) - 1)


def small_float(name: str, exponent_bits: int, mantissa_bits: int) -> Format:
    """A sign-magnitude float without infinities or NaN (OCP MX: e3m2, e2m3, e2m1), stored in a byte."""
    bias = (1 << (exponent_bits - 1)) - 1
    positive = []
    for code in range(1 << (exponent_bits + mantissa_bits)):
        exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        positive.append((1 + fraction) * 2.0 ** (exponent - bias) if exponent else fraction * 2.0 ** (1 - bias))
    values = (*positive, *(-v for v in positive))
    return Format(name, 1 + exponent_bits + mantissa_bits, "float", torch.uint8, -positive[-1], positive[-1], values)


def table(name: str, values: tuple[float, ...], rounding: torch.dtype | None = None) -> Format:
    """A format from ascending numbers; the code is the index. rounding: see :class:`Format`."""
    if list(values) != sorted(values):
        raise ValueError(f"number format {name!r}: values must be in ascending order")
    bits = max(1, (len(values) - 1).bit_length())
    return Format(name, bits, "table", torch.uint8, values[0], values[-1], values, 1, rounding)


def _dynamic_map(bits: int, signed: bool) -> tuple[float, ...]:
    """2**bits numbers, dense near zero: bits - 1 decades, each with twice the numbers of the one below, plus 0 and 1.

    The numbers of a decade are the midpoints of equal steps over [0.1, 1], times the decade's power of ten. Computed
    with Python floats, because the last bits of ``torch.linspace`` differ between CPUs.
    """
    decades = bits - 1
    positive: list[float] = []
    for i in range(decades):
        n = 1 << (i if signed else i + 1)
        positive += [(0.1 + 0.9 * (k + 0.5) / n) * 10.0 ** (i - decades + 1) for k in range(n)]
    return tuple(sorted([0.0, 1.0, *positive, *([-v for v in positive] if signed else [])]))


def _dynamic8_float32() -> tuple[float, ...]:
    """The numbers of ``_dynamic_map(8, signed=True)`` as bitsandbytes computes them: some differ in the last place.

    bitsandbytes takes the step edges from ``torch.linspace`` in float32. This reproduces CPUs with fused multiply-add:
    counting up from the start in the lower half, down from 1 in the upper half.
    """
    low = _float32(0.1)
    positive: list[float] = []
    for i in range(7):
        n = 1 << i
        step = _float32(1.0 - low) / n
        edges = [_float32(low + step * k if k < (n + 1) // 2 else 1.0 - step * (n - k)) for k in range(n + 1)]
        positive += [_float32(_float32(a + b) / 2 * _float32(10.0 ** (i - 6))) for a, b in pairwise(edges)]
    return tuple(sorted([0.0, 1.0, *positive, *(-v for v in positive)]))


def _float32(x: float) -> float:
    """x rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", x))[0])


INT1, INT2, INT3, INT4, INT5, INT6, INT7, INT8 = (_int(b) for b in range(1, 9))
UINT1, UINT2, UINT3, UINT4, UINT5, UINT6, UINT7, UINT8 = (_uint(b) for b in range(1, 9))
for _dim in (1, 2, 4, 8):
    for _bits in range(1, 9):
        learned(_bits, _dim)
TERNARY = Format("ternary", 2, "int", torch.int8, -1, 1)
# Multiples of 1/2 that are not integers, as many above zero as below: the grid of stretched elastic quantization
# (ParetoQ, Liu et al. 2025). The number of code c is c + 1/2 - 2**(bits - 1).
HALF_INTS = tuple(
    table(f"half_int{b}", tuple(k + 0.5 for k in range(-(1 << (b - 1)), 1 << (b - 1)))) for b in range(1, 9)
)
E4M3 = Format("e4m3", 8, "float", torch.float8_e4m3fn, -448.0, 448.0)
E5M2 = Format("e5m2", 8, "float", torch.float8_e5m2, -57344.0, 57344.0)
E3M2 = small_float("e3m2", 3, 2)
E2M3 = small_float("e2m3", 2, 3)
E3M1 = small_float("e3m1", 3, 1)
E2M2 = small_float("e2m2", 2, 2)
E2M1 = small_float("e2m1", 2, 1)
E8M0 = Format("e8m0", 8, "float", torch.uint8, 2.0**-127, 2.0**127)  # a scale: 2**(code - 127); code 255 is NaN
NF4 = table(
    "nf4",
    (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
)  # fmt: skip
# torchao's normal floats: four decimal digits, rounded to the dtype of the quantized tensor, as are its scales.
_NF4_DIGITS = (
    -1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0,
    0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.7230, 1.0,
)  # fmt: skip
for _dtype in (torch.float32, torch.bfloat16, torch.float16):
    table(
        f"nf4_digits_{str(_dtype).removeprefix('torch.')}",
        tuple(torch.tensor(_NF4_DIGITS, dtype=_dtype, device="cpu").tolist()),
        rounding=_dtype,
    )
DYNAMIC8 = table("dynamic8", _dynamic_map(8, signed=True))
UDYNAMIC8 = table("udynamic8", _dynamic_map(8, signed=False))
DYNAMIC4 = table("dynamic4", _dynamic_map(4, signed=True))
UDYNAMIC4 = table("udynamic4", _dynamic_map(4, signed=False))
# (1 + k / 2**m) * 2**j, with m = 1; with m = 4 for the upper eight octaves and 3 for sixteen below. A code is the upper
# bits of a float32, less a constant.
UFLOAT8 = table(
    "ufloat8", tuple((1 + k / n) * 2.0**j for j in range(-20, 4) for n in (8 if j < -4 else 16,) for k in range(n))
)
UFLOAT4 = table("ufloat4", tuple((1 + k / 2) * 2.0**j for j in range(-4, 4) for k in range(2)))
LINEAR4 = table("linear4", tuple(k / 16 for k in range(1, 17)))  # 4-bit second moments of Li, Chen and Zhu 2023
DYNAMIC8_FLOAT32 = table("dynamic8_float32", _dynamic8_float32())
# bitsandbytes' fp4: sixteen quotients by 12, rounded to float32. It has two codes for zero, and so has the table.
_FP4_TWELFTHS = (-12, -8, -6, -4, -3, -2, -0.0625, 0, 0, 0.0625, 2, 3, 4, 6, 8, 12)
FP4_TWELFTHS = table("fp4_twelfths", tuple(_float32(v / 12) for v in _FP4_TWELFTHS))


def _both_signs(*magnitudes: float) -> tuple[float, ...]:
    return (*(-m for m in reversed(magnitudes)), *magnitudes)


# Possible element values of ggml's I-quants, over all codebooks (ggml-common.h). None contains zero.
IQ4_NL = table("iq4_nl", (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113))
IQ1 = table("iq1", _both_signs(0.125, 0.875, 1.125))
IQ2 = table("iq2", _both_signs(8, 25, 43))
IQ3_XXS = table("iq3_xxs", _both_signs(4, 12, 20, 28, 36, 44, 52, 62))
IQ3_S = table("iq3_s", _both_signs(1, 3, 5, 7, 9, 11, 13, 15))
