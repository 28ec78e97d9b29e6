"""The self-test's cases for kernels that quantize inputs: their codes are compared bit for bit with those of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.formats import E4M3, E5M2, INT8
from ...core.numerics import Parts
from ...core.spec import ActivationSpec, QuantSpec
from ..activation import encode_activation, quantize_activation
from . import quantize

BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
INT8_TOKEN = ActivationSpec(QuantSpec(INT8, (-1,)), eps=torch.finfo(torch.float32).eps)
ZERO_POINT = ActivationSpec(QuantSpec(INT8, (-1,), zero_point=True), eps=torch.finfo(torch.float32).eps)
E4M3_TOKEN = ActivationSpec(QuantSpec(E4M3, (-1,)))
E4M3_TENSOR = ActivationSpec(QuantSpec(E4M3, None))


@dataclass(frozen=True)
class Check:
    """One case: check(device) is None, or what is wrong."""

    name: str
    family: str
    check: Callable[[torch.device], str | None]


def numbers(m: int, k: int, dtype: torch.dtype, *, special: bool = True) -> Tensor:
    """Rows of very different sizes; if there are five or more, one of zeros, one of tiny numbers, and rows with NaN and
    infinity."""
    generator = torch.Generator(device="cpu").manual_seed(m * 7919 + k)
    x = torch.randn(m, k, generator=generator, dtype=torch.float32, device="cpu")
    x = (x * torch.exp2(torch.arange(m, device="cpu").float() % 11 - 5)[:, None]).to(dtype)
    if special and m > 4:
        x[0], x[1, k // 2], x[2, 0] = 0, float("nan"), float("inf")
        x[3] = x[3] * torch.finfo(dtype).smallest_normal
    return x


def difference(found: Tensor | None, wanted: Tensor | None, name: str) -> str | None:
    """None if two tensors have the same bits, or are NaN at the same places."""
    if found is None or wanted is None:
        return None if found is wanted else f"{name} is {'missing' if found is None else 'not expected'}"
    if found.dtype is not wanted.dtype or found.shape != wanted.shape:
        return f"{name} is {tuple(found.shape)} {found.dtype}, expected {tuple(wanted.shape)} {wanted.dtype}"
    a, b = found.cpu(), wanted
    if a.dtype.is_floating_point:
        a, b = a.float(), b.float()
        wrong = (a != b) & ~(a.isnan() & b.isnan()) | (~a.isnan() & (a.signbit() != b.signbit()))
    else:
        wrong = a != b
    count = int(wrong.sum())
    return f"{count} of {a.numel()} numbers of {name} differ from those of the CPU" if count else None


def _codes(act: ActivationSpec, dtype: torch.dtype, m: int, k: int) -> Callable[[torch.device], str | None]:
    special = act.spec.block is not None

    def check(device: torch.device) -> str | None:
        x = numbers(m, k, dtype, special=special)
        scale = torch.tensor(0.037, device="cpu") if act.mode == "static" else None
        wanted = encode_activation(x, act, scale, None)
        found = quantize.encode(x.to(device), act, None if scale is None else scale.to(device))
        return _compare(found, wanted)

    return check


def _compare(found: Parts, wanted: Parts) -> str | None:
    named = ((found.codes, wanted.codes, "codes"), (found.scale, wanted.scale, "scale"))
    zero = (found.zero_point, wanted.zero_point, "zero_point")
    return next((why for three in (*named, zero) if (why := difference(*three)) is not None), None)


def _values(act: ActivationSpec, dtype: torch.dtype, m: int, k: int) -> Callable[[torch.device], str | None]:
    def check(device: torch.device) -> str | None:
        x = numbers(m, k, dtype)
        return difference(quantize.fake_quantized(x.to(device), act), quantize_activation(x, act, None, None), "values")

    return check


def _norm(act: ActivationSpec, dtype: torch.dtype, m: int, k: int) -> Callable[[torch.device], str | None]:
    def check(device: torch.device) -> str | None:
        x = numbers(m, k, dtype, special=False)
        weight = numbers(1, k, dtype)[0]
        wanted = encode_activation(F.rms_norm(x.float(), (k,), weight.float(), 1e-6).to(dtype), act, None, None)
        static = quantize.static_of(act, dtype)
        assert isinstance(static, quantize.Static)
        found = quantize._launch(x.to(device), static, None, values=False, norm=weight.to(device), eps=1e-6)
        a, b = (p.codes.cpu().double() * p.scale.cpu().double() for p in (found, wanted))
        error = float((a - b).norm() / b.norm())  # the last place of a normalized number may move it to the next code
        return None if error < 4e-3 else f"relative error {error:.1e}"

    return check


def cases(full: bool = False) -> Iterator[Check]:
    """The cases of the first use, or all."""

    def case(name: str, check: Callable[[torch.device], str | None]) -> Check:
        return Check(f"quantize, {name}", quantize.FAMILY, check)

    yield case("int8 per token", _codes(INT8_TOKEN, BF16, 5, 1000))
    yield case("int8 per token, 4096 columns", _codes(INT8_TOKEN, BF16, 33, 4096))
    yield case("e4m3 per token", _codes(E4M3_TOKEN, BF16, 65, 4096))
    yield case("e4m3 per token, float16", _codes(E4M3_TOKEN, HALF, 16, 777))
    yield case("e4m3 per tensor", _codes(E4M3_TENSOR, BF16, 16, 512))
    yield case("int8 with zero points", _codes(ZERO_POINT, BF16, 9, 256))
    yield case("int8 with zero points, dequantized", _values(ZERO_POINT, BF16, 9, 256))
    yield case("e4m3, dequantized", _values(E4M3_TOKEN, BF16, 9, 256))
    yield case("int8, static", _codes(ActivationSpec(QuantSpec(INT8, None), "static"), BF16, 3, 100))
    yield case("e4m3, long rows", _codes(E4M3_TOKEN, BF16, 5, 20001))
    yield case("RMSNorm, int8", _norm(INT8_TOKEN, BF16, 5, 1000))
    if not full:
        return
    for f in (INT8, E4M3, E5M2):
        for block in ((-1,), None):
            for dtype in (BF16, HALF, FULL):
                act = ActivationSpec(QuantSpec(f, block))
                name = f"{act.spec}, {str(dtype).removeprefix('torch.')}"
                yield case(name, _codes(act, dtype, 7, 515))
                yield case(f"{name}, static", _codes(ActivationSpec(act.spec, "static"), dtype, 7, 515))
                if block is not None:
                    yield case(f"{name}, dequantized", _values(act, dtype, 7, 515))
                    yield case(f"{name}, long rows", _codes(act, dtype, 7, 16400))
    for dtype in (HALF, FULL):
        yield case(f"zero points, {dtype}", _codes(ZERO_POINT, dtype, 9, 256))
        yield case(f"RMSNorm, e4m3, {dtype}", _norm(E4M3_TOKEN, dtype, 5, 4096))
