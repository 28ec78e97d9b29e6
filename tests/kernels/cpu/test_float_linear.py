"""The native kernel for small floats and tables: every instruction set, exact numbers, no row depends on its batch."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from pennyweight.core.formats import DYNAMIC4, DYNAMIC8, E2M1, E2M3, E3M2, E4M3, E5M2, E8M0, INT8, NF4, table
from pennyweight.core.spec import (
    FP8_BLOCK,
    FP8_ROW,
    IQ4_XS,
    MXFP4,
    MXFP6,
    MXFP8,
    NF4_BLOCK,
    NF4_DOUBLE,
    NVFP4,
    QuantSpec,
)
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels import cpu_float_linear as cpu_float
from pennyweight.kernels.cpu import library
from pennyweight.kernels.table import Case, case_of, select

pytestmark = pytest.mark.skipif(library.available() is not True, reason="no native library here")

SPECS = {
    "fp8_row": FP8_ROW,
    "fp8_bf16_scale": FP8_ROW.with_(scale=torch.bfloat16),
    "fp8_tensor": QuantSpec(E5M2, None, scale=torch.float16),
    "fp8_block": FP8_BLOCK,
    "fp8_small_block": QuantSpec(E4M3, (16, 48)),
    "mxfp8": MXFP8,
    "mxfp8_e5m2": MXFP8.with_(format=E5M2),
    "mxfp6": MXFP6,
    "fp6_row": QuantSpec(E3M2, (-1,)),
    "e2m3_group": QuantSpec(E2M3, (80,), scale=torch.float16),
    "mxfp4": MXFP4,
    "nvfp4": NVFP4,
    "nvfp4_float64": NVFP4.with_(scale=QuantSpec(E4M3, None, torch.float64)),
    "nvfp4_one_scale": QuantSpec(E2M1, (16,), scale=QuantSpec(E4M3, (1,), scale=None)),
    "nf4": NF4_BLOCK,
    "nf4_offset": NF4_BLOCK.with_(offset=torch.bfloat16),
    "nf4_row_offset": QuantSpec(NF4, (-1,), offset=torch.float32),
    "iq4_xs": IQ4_XS,
    "nf4_double": NF4_DOUBLE,
    "nf4_double_small": NF4_DOUBLE.with_(block=(16,), scale=QuantSpec(INT8, (4,), offset=torch.float32)),
    "nf4_large_group": QuantSpec(NF4, (640,)),
    "table3": QuantSpec(table("test_table3", (-1.0, -0.3, 0.0, 0.1, 0.4, 1.0)), (32,)),
    "table5": QuantSpec(table("test_table5", tuple(float(v) ** 3 for v in range(-15, 16))), (-1,)),
    "dynamic4": QuantSpec(DYNAMIC4, (-1,)),
    "dynamic8": QuantSpec(DYNAMIC8, (64,)),
}
SHAPES = [(1, 16), (17, 37), (70, 700), (128, 256)]


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    library.use_isa("")
    torch.set_num_threads(threads)


def make(name: str, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> QT:
    w = QT.from_float(torch.randn(*shape).to(dtype), SPECS[name])
    assert cpu_float.fits(w.spec, shape) is True
    return w.to_layout("cpu_float")


def products_in_bfloat16(isa: str, dtype: torch.dtype) -> bool:
    return isa == "avx512_bf16" and dtype is torch.bfloat16


@pytest.mark.parametrize("isa", library.isas())
@pytest.mark.parametrize("name", SPECS)
def test_one_hot_inputs_read_the_weights(name: str, isa: str) -> None:
    library.use_isa(isa)
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            w = make(name, shape, dtype)
            got = cpu_float.run(torch.eye(shape[1], dtype=dtype), w, None).t()
            want = w.dequantize()
            if products_in_bfloat16(isa, dtype) and w.spec.format.kind == "table":  # rounded there, and once more
                cancels = w.scale is not None and w.offset is not None
                near = float(w.scale.max()) * 2**-8 if cancels else 0.0
                torch.testing.assert_close(got, want, rtol=2**-7, atol=near)
            else:
                assert torch.equal(got, want), (shape, dtype)


@pytest.mark.parametrize("isa", library.isas())
@pytest.mark.parametrize("name", SPECS)
def test_values_and_no_row_depends_on_its_batch(name: str, isa: str) -> None:
    library.use_isa(isa)
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            w, x = make(name, shape, dtype), torch.randn(23, shape[1]).to(dtype)
            bias = torch.randn(shape[0])
            whole = cpu_float.run(x, w, bias)
            wide = w.dequantize(torch.float64)
            exact, size = x.double() @ wide.t() + bias.double(), x.double().abs() @ wide.abs().t() + bias.abs().double()
            unit = 2.0**-20 if dtype is torch.float32 else 2.0**-7
            assert bool(((whole.double() - exact).abs() <= unit * size).all()), (shape, dtype)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                for m in (1, 2, 3, 4, 5, 7, 13, 23):
                    for at in {0, 23 - m}:
                        part = cpu_float.run(x[at : at + m], w, bias)
                        assert torch.equal(part, whole[at : at + m]), (shape, dtype, m)


@pytest.mark.parametrize("name", ["fp8_row", "mxfp6", "nvfp4", "nf4_double", "dynamic8"])
def test_instruction_sets_agree_in_float32(name: str) -> None:
    w, x = make(name, (70, 700)), torch.randn(9, 700)
    results = []
    for isa in library.isas():
        library.use_isa(isa)
        results.append((cpu_float.run(x, w, None), cpu_float.run(x.half(), w, None)))
    for a, b in results[1:]:
        assert torch.equal(a, results[0][0])
        assert torch.equal(b, results[0][1])


def test_many_rows_in_two_units_of_work() -> None:
    w, x = make("nf4", (40, 128)), torch.randn(1500, 128)
    torch.set_num_threads(2)
    whole = cpu_float.run(x, w, None)
    torch.set_num_threads(1)
    assert all(torch.equal(whole[i : i + 1], cpu_float.run(x[i : i + 1], w, None)) for i in range(0, 1500, 7))


@pytest.mark.parametrize("name", SPECS)
def test_layout_of_a_tensor_comes_and_goes(name: str) -> None:
    plain = QT.from_float(torch.randn(33, 100), SPECS[name])
    packed = plain.to_layout("cpu_float")
    assert torch.equal(packed.dequantize(), plain.dequantize())
    assert torch.equal(packed.clone().to_layout("plain").dequantize(), plain.dequantize())
    assert torch.equal(packed.detach().to_layout("bits").dequantize(), plain.dequantize())
    assert torch.equal(F.linear(torch.eye(100), packed), F.linear(torch.eye(100), plain.to_layout("cpu_float")))


@pytest.mark.parametrize("isa", library.isas())
@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_codes_beyond_the_numbers_stay_what_they_are(fmt: object, isa: str) -> None:
    library.use_isa(isa)
    spec = QuantSpec(fmt, (-1,))  # type: ignore[arg-type]
    w = QT.from_float(torch.randn(16, 32), spec)
    codes = torch.arange(256).to(torch.uint8).repeat(2).reshape(16, 32).view(w.codes.dtype)
    w = w.with_(codes=codes).to_layout("cpu_float")
    for dtype in (torch.float32, torch.bfloat16):
        got = torch.stack(
            [cpu_float.run(torch.full((1, 1), 1, dtype=dtype), _column(w, i), None)[0] for i in range(32)]
        )
        want = w.plain_parts().codes.float() * w.plain_parts().scale
        torch.testing.assert_close(got.t(), want.to(dtype), rtol=0, atol=0, equal_nan=True)


def _column(w: QT, i: int) -> QT:
    parts = w.plain_parts()
    one = QT(parts._replace(codes=parts.codes[:, i : i + 1]), w.spec.with_(layout="plain"), (16, 1))
    return one.to_layout("cpu_float")


@pytest.mark.parametrize("name", ["fp8_block", "mxfp6", "nvfp4", "nf4_double"])
def test_a_compiled_graph_may_read_the_weight_itself(name: str) -> None:
    w = make(name, (33, 96))
    compiled = torch.compile(lambda x: x @ w.dequantize(), backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 33)
    assert torch.equal(compiled(x), x @ w.dequantize())


@pytest.mark.parametrize("name", ["fp8_row", "mxfp4", "nvfp4", "nf4_double"])
def test_gradients_and_compiled_graphs(name: str) -> None:
    w = make(name, (48, 96))
    bias = torch.randn(48)
    x = torch.randn(2, 3, 96, requires_grad=True)
    y = F.linear(x, w, bias)
    up = torch.randn_like(y)
    y.backward(up)
    torch.testing.assert_close(x.grad, up @ w.dequantize())
    compiled = torch.compile(lambda x: F.linear(x, w, bias), backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x.detach()), y.detach())


def test_the_table_prefers_it_and_says_why_not() -> None:
    def case(spec: QuantSpec, shape: tuple[int, ...] = (64, 64), dtype: torch.dtype = torch.bfloat16) -> Case:
        return Case(spec, None, shape, dtype, "cpu")

    for name, spec in SPECS.items():
        assert select("linear", case(spec), any_layout=True).name == "cpu_float", name
    for spec, shape, dtype, reason in (
        (QuantSpec(INT8, (-1,)), (64, 64), torch.float32, "is for non-integer formats"),
        (QuantSpec(E8M0, (-1,)), (64, 64), torch.float32, "a fixed table"),
        (QuantSpec(NF4, (24,)), (64, 64), torch.float32, "multiples of 16"),
        (QuantSpec(E4M3, (8, 16)), (64, 64), torch.float32, "multiples of 16"),
        (QuantSpec(E4M3, (16,), scale=QuantSpec(NF4, (1,))), (64, 64), torch.float32, "e8m0 or e4m3"),
        (FP8_ROW, (2, 64, 64), torch.float32, "2-d"),
        (FP8_ROW, (0, 64), torch.float32, "non-empty"),
        (FP8_ROW, (64, 64), torch.float64, "float32, bfloat16 and float16"),
    ):
        verdict = cpu_float._accepts(case(spec, shape, dtype))
        assert isinstance(verdict, str), spec
        assert reason in verdict, spec
    w = make("nf4", (16, 64))
    assert select("linear", case_of(w)).name == "cpu_float"


def test_the_default_device_is_left_out_of_it() -> None:
    cpu_float.numbers.cache_clear()
    cpu_float.bind.cache_clear()
    plain, x = QT.from_float(torch.randn(20, 48), NF4_BLOCK), torch.randn(3, 48)
    want = F.linear(x, plain.to_layout("cpu_float"))
    cpu_float.numbers.cache_clear()
    cpu_float.bind.cache_clear()
    with torch.device("meta"):
        assert torch.equal(F.linear(x, plain.to_layout("cpu_float")), want)


def test_strides_dtypes_of_bias_and_no_rows() -> None:
    w = make("mxfp8", (40, 96), torch.bfloat16)
    x = torch.randn(6, 192).to(torch.bfloat16)
    for view in (x[:, :96], x[::2, 96:], x[:, ::2], x[:4].reshape(2, 2, 192)[..., :96], x[:0, :96], x[0, :96]):
        for bias in (None, torch.randn(40), torch.randn(40, dtype=torch.float64), torch.randn(80).half()[::2]):
            got = cpu_float.run(view, w, bias)
            assert got.shape == (*view.shape[:-1], 40)
            assert torch.equal(got, cpu_float.run(view.clone().contiguous(), w, bias))
    weights = w.dequantize(torch.float64)
    torch.testing.assert_close(
        cpu_float.run(x[:, :96], w, torch.ones(40)).double(), x[:, :96].double() @ weights.t() + 1, rtol=0.02, atol=0.05
    )
