"""The self-test's cases for kernels that quantize inputs: their codes are compared bit for bit with those of a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.formats import E4M3, E5M2, INT8
from ...core.numerics import Parts
from ...core.spec import ActivationSpec, QuantSpec
from ...core.tensor import AffineQuantizedTensor
from ..activation import encode_activation, quantize_activation
from . import quantize, scaled_mm, tiles
from .weight_only import card

# Greatest ||y - exact|| / ||exact|| of products of codes: sums of int8 are exact, and the result is rounded once; sums
# of float8 have 14 bits on sm_90
LIMITS = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-6}
FLOAT8_LIMIT = 6e-3
BF16, HALF, FULL = torch.bfloat16, torch.float16, torch.float32
INT8_TOKEN = ActivationSpec(QuantSpec(INT8, (-1,)), eps=torch.finfo(torch.float32).eps)
ZERO_POINT = ActivationSpec(QuantSpec(INT8, (-1,), zero_point=True), eps=torch.finfo(torch.float32).eps)
E4M3_TOKEN = ActivationSpec(QuantSpec(E4M3, (-1,)))
E4M3_TENSOR = ActivationSpec(QuantSpec(E4M3, None))


TILES = {  # that no small product gets
    "128x256": scaled_mm.Tile(128, 256, 128, 8, 3),
    "128x256 in blocks": scaled_mm.Tile(128, 256, 128, 8, 4, blocks=True),
}


@dataclass(frozen=True)
class Check:
    """One case.

    check     (device) -> None, or what is wrong
    launches  (target) does the launches of the case with tensors without memory, for aot_compile.compiling
    """

    name: str
    family: str
    check: Callable[[torch.device], str | None]
    launches: Callable[[str], object]


Case = tuple[str, Callable[[torch.device], str | None], Callable[[str], object]]  # family, and as in Check


def _static(act: ActivationSpec, dtype: torch.dtype) -> quantize.Static:
    found = quantize.static_of(act, dtype)
    assert isinstance(found, quantize.Static)
    return found


def _nothing(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _quantizes(act: ActivationSpec, dtype: torch.dtype, m: int, k: int, **options: bool) -> Callable[[str], object]:
    def launches(target: str) -> object:
        given = (_nothing(1, 1, dtype=FULL), None) if act.mode == "static" else None
        norm = _nothing(k, dtype=dtype) if options.get("norm") else None
        values = options.get("values", False)
        x = _nothing(m, k, dtype=dtype)
        return quantize.launch(x, _static(act, dtype), given, values=values, norm=norm, eps=1e-6, target=target)

    return launches


def numbers(m: int, k: int, dtype: torch.dtype, *, special: bool = True) -> Tensor:
    """Rows of very different sizes; if there are five or more, one of zeros, one of tiny numbers, and rows with NaN and
    infinity."""
    generator = torch.Generator(device="cpu").manual_seed(m * 7919 + k)
    x = torch.randn(m, k, generator=generator, dtype=torch.float32, device="cpu")
    x = (x * torch.exp2(torch.arange(m, dtype=torch.float32, device="cpu") % 11 - 5)[:, None]).to(dtype)
    if special and m > 4:
        x[0], x[1, k // 2], x[2, 0] = 0, float("nan"), float("inf")
        x[3] = x[3] * torch.finfo(dtype).smallest_normal
    return x


def result(product: Callable[[], Tensor], how: str, device: torch.device) -> Tensor:
    """What product() returns: called "plain", in a second "stream", or from the replay of a captured "graph"."""
    if device.type != "cuda" or how == "plain":
        return product()
    if how == "stream":
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            y = product()
        torch.cuda.current_stream(device).wait_stream(stream)
        stream.synchronize()
        return y
    product()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = product()
    y.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize(device)
    return y.clone()


def chained(product: Callable[[Tensor], Tensor | None], x: Tensor) -> str | None:
    """Products that each read the result of the one before: a kernel that starts ahead must wait for it."""

    def chain(pause: bool) -> Tensor:
        y: Tensor | None = x
        for _ in range(16 if x.device.type == "cuda" else 2):
            assert y is not None
            y = product(y)
            if pause and x.device.type == "cuda":
                torch.cuda.synchronize(x.device)
        assert y is not None
        return y

    one_by_one = chain(True)
    if not bool(one_by_one.isfinite().all()):
        return "left NaN or infinity"
    if not torch.equal(one_by_one, chain(False)):
        return "a product did not wait for the one before it"
    if x.device.type == "cuda" and not torch.equal(one_by_one, result(lambda: chain(False), "graph", x.device)):
        return "a product did not wait for the one before it, in a graph"
    return None


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


def _codes(act: ActivationSpec, dtype: torch.dtype, m: int, k: int) -> Case:
    special = act.spec.block is not None

    def check(device: torch.device) -> str | None:
        x = numbers(m, k, dtype, special=special)
        scale = torch.tensor(0.037, device="cpu") if act.mode == "static" else None
        wanted = encode_activation(x, act, scale, None)
        found = quantize.encode(x.to(device), act, None if scale is None else scale.to(device))
        return _compare(found, wanted)

    return quantize.family(act), check, _quantizes(act, dtype, m, k)


def _compare(found: Parts, wanted: Parts) -> str | None:
    named = ((found.codes, wanted.codes, "codes"), (found.scale, wanted.scale, "scale"))
    zero = (found.zero_point, wanted.zero_point, "zero_point")
    return next((why for three in (*named, zero) if (why := difference(*three)) is not None), None)


def _values(act: ActivationSpec, dtype: torch.dtype, m: int, k: int) -> Case:
    def check(device: torch.device) -> str | None:
        x = numbers(m, k, dtype)
        return difference(quantize.fake_quantized(x.to(device), act), quantize_activation(x, act, None, None), "values")

    return quantize.family(act), check, _quantizes(act, dtype, m, k, values=True)


def _norm(act: ActivationSpec, dtype: torch.dtype, m: int, k: int) -> Case:
    def check(device: torch.device) -> str | None:
        x = numbers(m, k, dtype, special=False)
        weight = numbers(1, k, dtype)[0]
        wanted = encode_activation(F.rms_norm(x.float(), (k,), weight.float(), 1e-6).to(dtype), act, None, None)
        found = quantize.launch(x.to(device), _static(act, dtype), norm=weight.to(device), eps=1e-6)
        a, b = (p.codes.cpu().double() * p.scale.cpu().double() for p in (found, wanted))
        error = float((a - b).norm() / b.norm())  # the last place of a normalized number may move it to the next code
        return None if error < 4e-3 else f"relative error {error:.1e}"

    return quantize.family(act), check, _quantizes(act, dtype, m, k, norm=True)


def _product(
    dtype: torch.dtype, m: int, n: int, k: int, *, act: ActivationSpec = INT8_TOKEN,
    block: tuple[int, ...] | None = (-1,), bias: bool = False, how: str = "plain", tile: scaled_mm.Tile | None = None,
) -> Case:  # fmt: skip
    """A product of int8 or float8 codes, compared with exact sums. how: "plain", "graph" or "stream", or "chain": each
    product reads the result of the one before, and must wait for it."""
    f = act.spec.format
    limit = LIMITS[dtype] if f is INT8 else FLOAT8_LIMIT

    def check(device: torch.device) -> str | None:
        x = numbers(m, k, dtype, special=False)
        if m > 4 and how != "chain":
            x[0], x[1, 0] = 0, float("nan")
        w = AffineQuantizedTensor.from_float(numbers(n, k, FULL, special=False) * 0.05, QuantSpec(f, block))
        added = numbers(1, n, dtype, special=False)[0] if bias else None
        q = encode_activation(x, act, None, None)
        sums = q.codes.double() @ w.codes.double().t()
        assert isinstance(w.scale, Tensor)
        exact = sums * q.scale.double() * w.scale.double().reshape(-1) + (0 if added is None else added.double())
        bound = scaled_mm.bind_static(w.spec, act, (n, k), dtype)
        held = bound.operand(w.parts.map(lambda t: t.to(device)))
        there, b = x.to(device), None if added is None else added.to(device)

        if how == "chain":
            return chained(lambda y: bound.run(y, held, b), there)

        def product() -> Tensor:
            # the allocator hands this memory out again: what the kernel does not write is NaN
            torch.full((m, n), float("nan"), dtype=dtype, device=device)
            if tile is not None:
                codes = quantize.encode(there, act)
                processors = card(device)[2]
                return scaled_mm.launch(codes.codes, codes.scale, held, b, dtype, tile, processors)
            y = bound.run(there, held, b)
            assert y is not None
            return y

        y = result(product, how, device).cpu()
        if bool((y.isnan() != exact.isnan()).any()):
            return "NaN of an input is not where it should be"
        good = ~exact.isnan()
        error = float((y[good].double() - exact[good]).norm() / exact[good].norm())
        if not error <= limit:
            return f"relative error {error:.1e}, at most {limit:.0e} is expected"
        return difference(product(), y, "a second run")

    def launches(target: str) -> None:
        quantize.launch(_nothing(m, k, dtype=dtype), _static(act, dtype), target=target)
        codes, meta = _nothing(n, k, dtype=f.code_dtype), torch.device("meta")
        w = scaled_mm.Operand(codes, _nothing(1 if block is None else n, dtype=FULL), None, meta, None, None)
        processors = tiles.processors(target)
        chosen = tile or scaled_mm.choose(f, target, tiles.bucket(m), n, dtype, processors)
        if chosen is None:
            return
        x, scale = _nothing(m, k, dtype=f.code_dtype), _nothing(m, 1, dtype=FULL)
        scaled_mm.launch(x, scale, w, _nothing(n, dtype=dtype) if bias else None, dtype, chosen, processors)

    return scaled_mm.ROWS[f][1], check, launches


def cases(full: bool = False) -> Iterator[Check]:
    """The cases of the first use, or all."""
    yield from _quantizing(full)
    yield from _products(full)


def _products(full: bool) -> Iterator[Check]:
    def case(name: str, found: Case) -> Check:
        return Check(f"int8 inputs, {name}", *found)

    def float8(name: str, m: int, n: int, k: int, **options: Any) -> Check:
        return Check(f"float8 inputs, {name}", *_product(BF16, m, n, k, act=E4M3_TOKEN, **options))

    yield case("1 row", _product(BF16, 1, 192, 1024, bias=True))
    yield case("5 rows, odd sizes", _product(BF16, 5, 101, 1104))
    yield case("33 rows", _product(BF16, 33, 130, 608, bias=True))
    yield case("65 rows, one scale for the weight", _product(BF16, 65, 200, 528, block=None))
    yield case("150 rows", _product(BF16, 150, 264, 528, bias=True))
    yield case("520 rows", _product(BF16, 520, 264, 272, bias=True))
    yield case("16 rows, graph", _product(BF16, 16, 128, 2048, how="graph"))
    yield case("16 rows, second stream", _product(BF16, 16, 128, 2048, how="stream"))
    yield case("1 row, chain", _product(BF16, 1, 512, 512, how="chain"))
    yield float8("16 rows, chain", 16, 512, 512, how="chain")
    yield float8("1 row", 1, 192, 1024, bias=True)
    yield float8("5 rows, odd sizes", 5, 112, 1104)
    yield float8("33 rows, one scale for the weight", 33, 144, 608, block=None)
    yield float8("65 rows", 65, 208, 528, bias=True)
    yield float8("16 rows, graph", 16, 128, 2048, how="graph")
    yield float8("16 rows, second stream", 16, 128, 2048, how="stream")
    if not full:
        return
    for m in (1, 8, 16, 17, 64, 128):
        yield float8(f"{m} rows", m, 336, 1040 if m % 2 else 4096, bias=m % 2 == 0)
    yield case("no bias, no rows beyond", _product(HALF, 128, 256, 256))
    for dtype in (BF16, HALF, FULL):
        for m in (1, 16, 17, 64, 128, 129, 500, 1030):
            name = f"{str(dtype).removeprefix('torch.')}, {m} rows"
            yield case(name, _product(dtype, m, 328, 1040 if m % 2 else 1024, bias=m % 2 == 0))
    for name, tile in TILES.items():
        yield case(f"tiles {name}", _product(BF16, 300, 528, 400, bias=True, tile=tile))


def _quantizing(full: bool) -> Iterator[Check]:

    def case(name: str, found: Case) -> Check:
        return Check(f"quantize, {name}", *found)

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
            for dtype in (BF16, HALF, FULL) if f is not E5M2 else (BF16,):
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
