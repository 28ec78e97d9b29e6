"""Scales and offsets that are integers under plain numbers (ggml's K-quants, IQ4_XS) on the native kernels."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pennyweight as pw
from pennyweight.core import blocks
from pennyweight.core.formats import INT4, INT6, INT8, NF4
from pennyweight.core.numerics import part_value
from pennyweight.core.spec import SPECS, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.inference.freeze import freeze_
from pennyweight.kernels import explain, get_kernel
from pennyweight.kernels.cpu import float_linear, int_linear, library
from pennyweight.kernels.repack import choose_layout, prepare
from pennyweight.kernels.table import case_of, select

pytestmark = pytest.mark.skipif(library.available() is not True, reason="the native library was not built")

KERNELS = {
    "q2_k": "cpu_float", "q3_k": "cpu_float", "q4_k": "cpu_int", "q5_k": "cpu_int", "q6_k": "cpu_float",
    "iq4_xs": "cpu_float",
}  # fmt: skip
SHAPES = [(33, 100), (70, 768), (16, 4608), (5, 40)]  # [N, K]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=library.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    library.use_isa(request.param)
    yield request.param
    library.use_isa("")


def make(name: str, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> QT:
    generator = torch.Generator().manual_seed(sum(shape))
    return prepare(QT.from_float(torch.randn(*shape, generator=generator).to(dtype), SPECS[name]))


def under_float32(w: QT) -> QT:
    """The same codes under float32 scales and offsets."""
    parts, counts = w.plain_parts(), blocks.counts(w.spec.block, w.shape)
    values = {
        name: part_value(getattr(parts, name), kind, counts, torch.float32)
        for name, kind in w.spec.part_specs().items()
    }
    spec = w.spec.with_(layout="plain", **dict.fromkeys(values, torch.float32))
    return QT(parts._replace(**values), spec, w.shape, w.dtype)


@pytest.mark.parametrize("name", KERNELS)
def test_the_bits_of_the_same_codes_under_float32_scales(name: str, isa: str) -> None:
    torch.manual_seed(0)
    for shape in SHAPES:
        for dtype in DTYPES:
            w = make(name, shape, dtype)
            plain = prepare(under_float32(w))
            assert torch.equal(plain.dequantize(torch.float32), w.dequantize(torch.float32))
            assert select("linear", case_of(plain)).name == select("linear", case_of(w)).name == KERNELS[name]
            bias = torch.randn(shape[0]).to(dtype)
            for m in (0, 1, 3, 40):
                x = torch.randn(m, shape[1]).to(dtype)
                assert torch.equal(F.linear(x, w, bias), F.linear(x, plain, bias)), (shape, dtype, m)


@pytest.mark.parametrize("name", KERNELS)
def test_one_hot_inputs_read_the_weight_to_the_bit(name: str, isa: str) -> None:
    for shape in ((33, 100), (16, 352)):
        w = make(name, shape)
        assert torch.equal(F.linear(torch.eye(shape[1]), w), w.dequantize().t())


@pytest.mark.parametrize("name", KERNELS)
def test_a_row_depends_on_nothing_else(name: str, isa: str) -> None:
    for dtype in DTYPES:
        w, x = make(name, (50, 1056), dtype), torch.randn(19, 1056).to(dtype)
        whole = F.linear(x, w)
        for i, n in ((0, 1), (3, 2), (7, 5)):
            assert torch.equal(F.linear(x[i : i + n], w), whole[i : i + n])


@pytest.mark.parametrize("name", KERNELS)
def test_eager_frozen_compiled_and_gradients(name: str) -> None:
    torch._dynamo.reset()
    layer = nn.Linear(320, 33)
    w = make(name, (33, 320))
    layer.weight = nn.Parameter(w, requires_grad=False)
    x = torch.randn(2, 3, 320, requires_grad=True)
    assert f"{KERNELS[name]} " in next(line for line in str(explain(x, w)).splitlines() if "RUNS" in line)
    pw.reset_fallbacks()
    y = layer(x)
    up = torch.randn_like(y)
    y.backward(up)
    torch.testing.assert_close(x.grad, up @ w.dequantize())
    for frozen in (False, True):
        if frozen:
            freeze_(nn.Sequential(layer))
        with torch.no_grad():
            assert torch.equal(layer(x.detach()), y)
            assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x.detach()), y)
    assert pw.fallbacks() == {}


def test_several_weights_with_one_input() -> None:
    ws = [make("q4_k", (n, 288), torch.bfloat16) for n in (16, 33, 7)]
    run = get_kernel("linear", "cpu_int").together
    assert run is not None
    together = run(tuple(case_of(w) for w in ws))
    assert together is not None
    for m in (1, 5):
        x = torch.randn(m, 288).to(torch.bfloat16)
        operands = [operand(w.parts) for operand, w in zip(together.operands, ws, strict=True)]
        for y, w in zip(together.run(x, operands, [None] * 3), ws, strict=True):
            assert torch.equal(y, F.linear(x, w))


def test_bytes_are_those_of_the_file() -> None:
    """Nothing is kept beside the nested parts; integers under a scale take a byte each."""
    for name, bits in (
        ("q2_k", 2 + 2 * 8 / 16 + 2 / 16),
        ("q4_k", 4 + 2 * 8 / 32 + 2 / 16),
        ("q6_k", 6 + 0.5 + 1 / 16),
    ):
        w = make(name, (64, 512))
        assert w.nbytes * 8 == bits * w.numel()
        assert isinstance(w.scale, QT)
        assert w.scale.spec == SPECS[name].scale


@pytest.mark.parametrize("name", KERNELS)
def test_embedding_reads_rows(name: str) -> None:
    for dtype in DTYPES:
        for shape in ((40, 512), (13, 37), (1, 64)):
            w = QT.from_float(torch.randn(shape).to(dtype), SPECS[name])
            for packed in (w, w.to_layout("bits"), prepare(w, dtype=dtype)):
                assert select("embedding", case_of(packed)).rank > 0
                for index in (torch.randint(shape[0], (2, 5)), torch.tensor(0), torch.zeros(0, dtype=torch.int64)):
                    assert torch.equal(F.embedding(index, packed), w.dequantize()[index])
                with pytest.raises(IndexError, match=f"rows 0 to {shape[0] - 1}"):
                    F.embedding(torch.tensor([0, shape[0]]), packed)


@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
def test_a_tied_table_keeps_the_packing_of_linear(name: str) -> None:
    torch._dynamo.reset()
    w = QT.from_float(torch.randn(50, 512), SPECS[name])
    kernel, layout = choose_layout(case_of(w), ("linear", "embedding"))
    assert (kernel.name, layout) == (KERNELS[name], {"cpu_int": "cpu", "cpu_float": "cpu_float"}[KERNELS[name]])
    w, index = w.to_layout(layout), torch.randint(50, (3, 2))
    pw.reset_fallbacks()
    run = torch.compile(lambda index: F.embedding(index, w), fullgraph=True, backend="aot_eager")
    assert torch.equal(run(index), w.dequantize()[index])
    assert pw.fallbacks() == {}


def test_what_is_refused_and_why() -> None:
    k6 = SPECS["q4_k"].scale
    assert isinstance(k6, QuantSpec)
    shape = (64, 256)
    for fits, spec, reason in (
        (int_linear.fits, QuantSpec(INT4, (32,), scale=QuantSpec(INT6, (2, 8))), "within one row"),
        (int_linear.fits, QuantSpec(INT4, (32,), scale=k6, offset=torch.float16), "blocks as the scales"),
        (int_linear.fits, QuantSpec(INT4, (32,), scale=k6, offset=k6.with_(block=(4,))), "blocks as the scales"),
        (int_linear.fits, QuantSpec(INT4, (32,), scale=k6, zero_point=True), "no zero points"),
        (
            int_linear.fits,
            QuantSpec(INT4, (32,), scale=QuantSpec(INT8, (8,), offset=torch.float32)),
            "integers with plain outer",
        ),
        (int_linear.fits, QuantSpec(INT4, (32,), scale=QuantSpec(NF4, (8,))), "integers with plain outer"),
        (float_linear.fits, QuantSpec(NF4, (32,), scale=k6, offset=torch.float16), "blocks as the scales"),
        (float_linear.fits, QuantSpec(NF4, (32,), offset=k6), "blocks as the scales"),
        (float_linear.fits, QuantSpec(NF4, None, offset=torch.float32), "offsets per row or group"),
        (float_linear.fits, QuantSpec(INT4, (16,), zero_point=True), "not multiples of 32"),
    ):
        verdict = fits(spec, shape)
        assert isinstance(verdict, str), spec
        assert reason in verdict, (spec, verdict)


@pytest.mark.parametrize("rows", [2, 4, 24, 48])
def test_rows_share_outer_scales(rows: int, isa: str) -> None:
    """The layout repeats them for each row, and gives them back as they were."""
    spec = QuantSpec(NF4, (32,), scale=QuantSpec(INT8, (rows, 4), offset=torch.float32))
    w = QT.from_float(torch.randn(48, 256, generator=torch.Generator().manual_seed(rows)), spec)
    packed = prepare(w)
    assert packed.spec.layout == "cpu_float"
    assert packed.nbytes > w.to_layout("bits").nbytes
    for ours, told in zip(packed.plain_parts().scale, w.plain_parts().scale, strict=True):
        assert ours is told is None or torch.equal(ours, told)
    x = torch.randn(5, 256)
    assert torch.allclose(F.linear(x, packed), F.linear(x, w.dequantize()), rtol=1e-5, atol=1e-4)


def test_rows_that_outer_scales_do_not_divide() -> None:
    spec = QuantSpec(NF4, (32,), scale=QuantSpec(INT8, (32, 4), offset=torch.float32))
    w = QT.from_float(torch.randn(48, 256), spec)
    assert prepare(w).spec.layout == "bits"
    assert "of rows that divide 48, not of 32" in str(explain(torch.randn(1, 256), w))
