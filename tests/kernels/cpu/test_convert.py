"""Native conversions between floats and codes against core/numerics.py, bit for bit."""

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pennyweight as pw
from pennyweight.algorithms.solvers.rtn import quantize_weight
from pennyweight.core import quantize_backends
from pennyweight.core.formats import E8M0, Format, all_formats
from pennyweight.core.layouts import get_layout
from pennyweight.core.numerics import Parts, dequantize, quantize, sqnr
from pennyweight.core.qparams import RULES
from pennyweight.core.spec import INT4_GROUP, INT8_ROW, SPECS, TINYGEMM, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.core.tensor import check_finite
from pennyweight.kernels.cpu import convert, float_linear, int_linear, library
from pennyweight.planning.scheme import Scheme

pytestmark = pytest.mark.skipif(library.available() is not True, reason=f"native library: {library.available()}")

PACKINGS: dict[str, Any] = {"cpu": int_linear, "cpu_float": float_linear}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((17, 96), (3, 130), (33, 1), (1, 70), (16, 64), (40, 33))
MANY = r"layer\.weight: 1 of 1632 values are NaN or inf"
SIZES = ("normal", "huge", "tiny")


@pytest.fixture(params=[(isa, threads) for isa in library.isas() for threads in (1, 2)], ids=str)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Every instruction set that is here, by one thread and by two, which small tensors would not get."""
    isa, threads = request.param
    monkeypatch.setattr(convert, "threads_for", lambda elements: threads)
    library.use_isa(isa)
    yield library.isas().index(isa) * 2 + threads
    library.use_isa("")


def int_specs() -> list[QuantSpec]:
    specs = []
    for f in (f for f in all_formats() if f.kind == "int"):
        for block in ((-1,), None, (32,), (5,)):
            for scale in FLOATS:
                parts: list[dict[str, Any]] = [{}, {"zero_point": True}, {"offset": scale}, {"mid": int(f.hi)}]
                parts += [{"offset": torch.bfloat16, "mid": int(f.hi + 1) // 2 if f.lo == 0 and f.hi > 1 else 0}]
                specs += [QuantSpec(f, block, scale, **extra) for extra in parts]
    return specs


def other_specs() -> list[QuantSpec]:
    formats = [f for f in all_formats() if f.kind != "int" and f is not E8M0]
    plain = [QuantSpec(f, block, scale) for f in formats for block in ((-1,), None, (32,), (7,)) for scale in FLOATS]
    int4, int8 = (QuantSpec(SPECS[name].format) for name in ("int4_group", "int8_row"))
    e8m0 = QuantSpec(E8M0, (1,), scale=None)
    nested = [int8.with_(block=(32,), scale=e8m0), int4.with_(block=(32,), scale=SPECS["fp8_tensor"], zero_point=True)]
    return [*plain, *SPECS.values(), *nested, int8.with_(block=(17, 32)), int8.with_(block=(8, 16))]


def data(shape: tuple[int, ...], dtype: torch.dtype, size: str) -> torch.Tensor:
    """Normal numbers; some at the end of the dtype's range; subnormal ones. A row of zeros, and one of one number."""
    info = torch.finfo(dtype)
    x = torch.randn(shape, dtype=torch.float64)
    x *= {"normal": 1.0, "huge": info.max / 2, "tiny": info.smallest_normal / 8}[size]
    x = x.clamp(-info.max, info.max).to(dtype)
    if shape[0] > 2:
        x[0], x[1] = 0, x[1, 0]
    return x


def leaves(parts: Parts) -> list[torch.Tensor]:
    found = []
    for part in parts:
        if part is not None:
            found += leaves(part) if isinstance(part, Parts) else [part]
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bits, NaN aside, of which there are many."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.contiguous(), b.contiguous()
    if a.dtype in FLOATS:
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        a, b = a.nan_to_num(7.0), b.nan_to_num(7.0)
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def layouts(spec: QuantSpec, shape: tuple[int, ...]) -> list[str]:
    return ["plain", "bits", *(name for name, of in PACKINGS.items() if of.fits(spec, shape) is True)]


def check_quantize(spec: QuantSpec, x: torch.Tensor, rule: str | None, eps: float | None = None) -> int:
    """How many layouts were quantized natively; each was right."""
    try:
        plain = quantize(x, spec, rule, eps)
    except ValueError:
        assert quantize_backends.quantize(x, spec, rule, eps) is NotImplemented
        return 0
    done = 0
    for layout in layouts(spec, tuple(x.shape)):
        named = spec.with_(layout=layout)
        got = quantize_backends.quantize(x, named, rule, eps)
        if got is NotImplemented:
            continue
        done += 1
        want = get_layout(layout).pack(plain, named, x.shape)
        for a, b in zip(leaves(got.parts), leaves(want), strict=True):
            assert same_bits(a, b), (str(named), tuple(x.shape), x.dtype, rule, a, b)
        noise = float((dequantize(plain, spec, x.shape).double() - x.double()).square().sum())
        signal = float(x.double().square().sum())
        assert got.signal == pytest.approx(signal, rel=1e-5, abs=0)
        assert got.noise == pytest.approx(noise, rel=1e-4, abs=1e-14 * signal)
    return done


def check_dequantize(spec: QuantSpec, plain: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    want, done = dequantize(plain, spec, shape, dtype), 0
    for layout in layouts(spec, shape):
        named = spec.with_(layout=layout)
        w = QT(get_layout(layout).pack(plain, named, shape), named, shape, dtype)
        got = quantize_backends.dequantize(w.parts, named, shape, dtype)
        if got is not NotImplemented:
            done += 1
            assert same_bits(got, want), (str(named), shape, dtype)
        assert same_bits(w.dequantize(), want)
    return done


def cases(specs: list[QuantSpec], count: int, seed: int) -> Iterator[tuple[QuantSpec, torch.Tensor]]:
    """So many combinations of all that varies, others for each instruction set."""
    choose = random.Random(seed)
    for _ in range(count):
        spec, shape = choose.choice(specs), choose.choice(SHAPES)
        yield spec, data(shape, choose.choice(FLOATS), choose.choice(SIZES))


def test_quantize_is_the_reference_bit_for_bit(machine: int) -> None:
    done = 0
    for i, (spec, x) in enumerate(cases(int_specs(), 60, machine)):
        for rule in (None, "symmetric", "symmetric_no_clip"):
            done += check_quantize(spec, x, rule, (None, 1e-5, 1e-30)[i % 3])
    assert done > 300


def test_scales_that_are_quantized_or_shared_by_rows(machine: int) -> None:
    done = 0
    for spec in (s for s in other_specs() if s.format.kind == "int"):
        for shape in ((17, 96), (34, 64), (16, 32)):
            for dtype in FLOATS:
                done += check_quantize(spec, data(shape, dtype, "normal"), None)
    assert done > 50


def test_dequantize_is_the_reference_bit_for_bit(machine: int) -> None:
    done = 0
    for i, (spec, x) in enumerate(cases(int_specs() + other_specs(), 60, machine)):
        done += check_dequantize(spec, quantize(x, spec), tuple(x.shape), FLOATS[i % 3])
    assert done > 110


def test_float64_scales_are_those_of_the_reference(machine: int) -> None:
    """It computes in float64 under them: plain ones are left to it, those above quantized scales go through it."""
    nested = SPECS["nvfp4"].with_(scale=QuantSpec(SPECS["fp8_tensor"].format, None, torch.float64))
    done = [
        check_dequantize(spec, quantize(data(shape, dtype, "normal"), spec), shape, dtype)
        for spec in (QuantSpec(SPECS["int8_row"].format, (-1,), torch.float64), nested)
        for shape in SHAPES for dtype in FLOATS
    ]  # fmt: skip
    assert not any(done[: len(done) // 2])
    assert all(done[len(done) // 2 :])


@pytest.mark.parametrize("f", [f for f in all_formats() if f is not E8M0], ids=str)
def test_every_code_of_every_format(f: Format, machine: int) -> None:
    """NaN, infinities, both zeros and subnormals too; and scales that take them out of the range of the dtype."""
    count = len(f.values) or (int(f.hi - f.lo + 1) if f.kind == "int" else 256)
    codes = f.from_unsigned(torch.arange(3 * 64 * 5).remainder(count).to(torch.uint8)).reshape(3, -1)
    for scale in (torch.tensor([[1.0], [3e38], [1e-42]]), torch.tensor([[-0.5], [0.0], [1.1]])):
        for offset in (None, torch.tensor([[-0.0], [1e38], [-3.0]])):
            spec = QuantSpec(f, (-1,), offset=None if offset is None else torch.float32)
            for dtype in FLOATS:
                assert check_dequantize(spec, Parts(codes, scale, None, offset), (3, codes.shape[1]), dtype)


@pytest.mark.parametrize("shape", [(5,), (70,), (2, 3, 40), (4, 6, 3, 3), (3, 1, 7), (2, 2, 2, 2, 33)])
@pytest.mark.parametrize("block", [None, (-1,), (8,), (1, -1), (-1, -1), (-1, -1, -1), (2, 8)])
def test_any_rank(shape: tuple[int, ...], block: tuple[int, ...] | None) -> None:
    if block is not None and len(block) > len(shape):
        return
    x = torch.randn(shape)
    for f in ("int8", "uint4", "int3"):
        spec = QuantSpec(pw.core.formats.get_format(f), block)
        check_quantize(spec, x, "symmetric_no_clip")
        check_dequantize(spec, quantize(x, spec), shape, torch.bfloat16)
    fp8 = SPECS["fp8_row"].with_(block=block)
    check_dequantize(fp8, quantize(x, fp8), shape, torch.float32)


def test_strides_and_views() -> None:
    x = torch.randn(40, 96).to(torch.bfloat16)
    for view in (x[:, :64], x[::2], x.t(), x[3:4], x[:, ::2], x[:, 1:2], x[:1, :1].expand(16, 64)):
        for spec in (INT8_ROW, INT4_GROUP, TINYGEMM, QuantSpec(INT8_ROW.format, None)):
            assert check_quantize(spec, view, None) == len(layouts(spec, tuple(view.shape)))
    w = QT.from_float(x, INT4_GROUP)
    full = w.dequantize()
    assert torch.equal(w[:, 32:64].dequantize(), full[:, 32:64])
    assert torch.equal(w[3:17].dequantize(), full[3:17])
    assert torch.equal(w[::2].dequantize(), full[::2])
    assert torch.equal(w.t().dequantize(), full.t())


def test_nothing_is_converted_of_nothing() -> None:
    for shape in ((0, 32), (3, 0), (0,)):
        x = torch.empty(shape)
        assert quantize_backends.quantize(x, INT8_ROW) is NotImplemented
        w = QT.from_float(x, INT8_ROW)
        assert w.dequantize().shape == shape
    assert QT.from_float(torch.tensor(2.5), QuantSpec(INT8_ROW.format, None)).dequantize().shape == ()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("at", [(0, 0), (7, 95), (16, 33)])
def test_nan_and_inf_are_errors_that_name_the_tensor(
    bad: float, dtype: torch.dtype, at: tuple[int, int], machine: int
) -> None:
    for size in SIZES:
        x = data((17, 96), dtype, size)
        assert quantize_backends.finite(x) is True
        x[at] = bad
        assert quantize_backends.finite(x) is False
        assert not math.isfinite(quantize_backends.quantize(x, INT8_ROW).signal)
        name = "layer.weight"
        with pytest.raises(ValueError, match=MANY):
            check_finite(x, name)
        with pytest.raises(ValueError, match=MANY):
            QT.from_float(x, INT4_GROUP, name=name)
        with pytest.raises(ValueError, match=MANY):
            quantize_weight(x, Scheme(INT4_GROUP), name)


@pytest.mark.parametrize("layout", ["plain", "bits", "cpu"])
def test_a_weight_has_the_sqnr_of_its_values(layout: str) -> None:
    for spec in (INT8_ROW, INT4_GROUP, TINYGEMM, SPECS["mxfp4"]):
        if layout not in layouts(spec, (64, 256)):
            continue
        x = torch.randn(64, 256) * torch.logspace(-12, 3, 64).unsqueeze(1)
        w, found = quantize_weight(x, Scheme(spec), layout=layout)
        assert w.spec.layout == layout
        assert found == pytest.approx(sqnr(x, w.dequantize()), abs=1e-4)
        assert torch.equal(w.dequantize(), QT.from_float(x, spec).dequantize())


def test_sums_do_not_depend_on_threads_or_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(50, 3000).to(torch.bfloat16)
    seen = set()
    for isa in library.isas():
        library.use_isa(isa)
        for threads in (1, 2):
            monkeypatch.setattr(convert, "threads_for", lambda elements, threads=threads: threads)
            seen.add(quantize_backends.quantize(x, TINYGEMM)[1:])
    library.use_isa("")
    assert len(seen) == 1


def test_a_rule_that_looks_at_more_than_ranges_is_left_to_the_reference() -> None:
    x = torch.randn(16, 64)
    by_range = {name for name in RULES if quantize_backends.quantize(x, INT8_ROW, name) is not NotImplemented}
    assert by_range >= {"symmetric", "symmetric_no_clip", "mx_floor"}
    for name in by_range:  # the same numbers from the ends of each block as from the blocks
        assert check_quantize(INT8_ROW, x, name)
        assert check_quantize(QuantSpec(INT8_ROW.format, None), x, name)
    assert "mse" not in by_range


def test_what_is_traced_or_batched_takes_the_reference() -> None:
    w = QT.from_float(torch.randn(32, 64), INT4_GROUP)
    with torch._subclasses.FakeTensorMode() as mode:
        fake = w.parts.map(mode.from_tensor)
        assert quantize_backends.dequantize(fake, w.spec, (32, 64), torch.float32) is NotImplemented
    meta = w.parts.map(lambda p: p.to("meta"))
    assert quantize_backends.dequantize(meta, w.spec, (32, 64), torch.float32) is NotImplemented
    seen = []
    torch.vmap(
        lambda c: seen.append(quantize_backends.dequantize(Parts(c, w.scale), w.spec, (32, 64), torch.float32)) or c
    )(w.codes[None])
    assert seen == [NotImplemented]


@pytest.mark.parametrize("layout", ["plain", "bits", "cpu"])
@pytest.mark.parametrize("name", ["int8_row", "int4_group", "uint4_group"])
def test_it_compiles(name: str, layout: str) -> None:
    torch._dynamo.reset()
    w = QT.from_float(torch.randn(33, 64), SPECS[name].with_(layout=layout))
    double = torch.compile(lambda w: w.dequantize() * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(double(w), w.dequantize() * 2)


def test_without_the_library_everything_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(16, 64)
    want = QT.from_float(x, INT4_GROUP)
    monkeypatch.setattr(convert, "usable", lambda: "not built")
    assert quantize_backends.quantize(x, INT4_GROUP) is NotImplemented
    assert quantize_backends.finite(x) is NotImplemented
    w, found = quantize_weight(x, Scheme(INT4_GROUP))
    assert torch.equal(w.codes, want.codes)
    assert torch.equal(w.dequantize(), want.dequantize())
    assert found == pytest.approx(sqnr(x, want.dequantize()), abs=1e-4)
