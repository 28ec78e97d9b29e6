"""The native integer linear: every width, instruction set and number of threads, to the bit where that is promised."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pennyweight.core.formats import E8M0, INT8, TERNARY, get_format
from pennyweight.core.numerics import dequantize, quantize
from pennyweight.core.spec import Q4_K, ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels.cpu import library
from pennyweight.kernels.table import case_of, select
from tests.every.test_kernels import seen
from tests.tensors import INT8_GROUPS, INT8_GROUPS_ASYMMETRIC, INT8_STATIC, INT8_TOKEN, UINT8_TOKEN

pytestmark = pytest.mark.skipif(library.available() is not True, reason="the native library was not built")

ASYMMETRIC = ActivationSpec(QuantSpec(INT8, (-1,), zero_point=True))
HALF = ActivationSpec(QuantSpec(INT8, (-1,), scale=torch.bfloat16))
ACTIVATIONS = {
    "float": None, "int8": INT8_TOKEN, "asymmetric": ASYMMETRIC, "uint8": UINT8_TOKEN, "bf16 scale": HALF,
    "static": INT8_STATIC, "groups": INT8_GROUPS, "asymmetric groups": INT8_GROUPS_ASYMMETRIC,
    "groups with bf16 scale": ActivationSpec(QuantSpec(INT8, (96,), scale=torch.bfloat16)),
}  # fmt: skip
SPECS = {
    **{f"int{b}": QuantSpec(get_format(f"int{b}"), (32,), scale=torch.bfloat16) for b in range(1, 9)},
    **{f"uint{b}": QuantSpec(get_format(f"uint{b}"), (96,), zero_point=True) for b in (2, 3, 5, 7, 8)},
    "row": QuantSpec(INT8, (-1,)),
    "row with zero points": QuantSpec(INT8, (-1,), zero_point=True, scale=torch.float16),
    "tensor": QuantSpec(INT8, None),
    "tinygemm": QuantSpec(get_format("uint4"), (64,), scale=torch.bfloat16, offset=torch.bfloat16, mid=8),
    "row with offsets": QuantSpec(get_format("uint6"), (-1,), offset=torch.float32),
    "ternary": QuantSpec(TERNARY, (-1,)),
    "codes under scales": Q4_K,
    "codes under scales, no offset": QuantSpec(get_format("int5"), (64,), scale=QuantSpec(INT8, (3,), torch.bfloat16)),
    "power of two": QuantSpec(get_format("int4"), (32,), scale=QuantSpec(E8M0, (1,), scale=None)),
}
SHAPES = [(1, 1), (16, 32), (37, 100), (50, 352)]  # [N, K]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(params=library.isas() if library.available() is True else [])
def isa(request: Any) -> Iterator[str]:
    library.use_isa(request.param)
    yield request.param
    library.use_isa("")


def make(name: str, shape: tuple[int, int], dtype: torch.dtype, act: ActivationSpec | None = None) -> QT:
    generator = torch.Generator().manual_seed(sum(shape))
    w = QT.from_float(torch.randn(*shape, generator=generator).to(dtype), SPECS[name], act=act)
    if act is not None and act.mode == "static":
        w = w.with_(act_scale=torch.tensor([0.03]))
    return w


def inputs(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("name", SPECS)
def test_values_on_every_instruction_set(isa: str, name: str, act: str) -> None:
    """Within 8 units of the output's dtype of the exact sums; inputs of two digits keep 15 bits of their block."""
    for shape, dtype in zip(SHAPES, [*DTYPES, torch.bfloat16], strict=True):
        w = make(name, shape, dtype, ACTIVATIONS[act])
        packed = w.to_layout("cpu")
        x, bias = inputs(14, shape[1], dtype), torch.randn(shape[0])
        y = F.linear(x, packed, bias)
        wide = w.dequantize(torch.float64)
        exact, size = seen(x, w) @ wide.T + bias.double(), seen(x, w).abs() @ wide.abs().T + bias.abs().double()
        digits = 2.0**-22 if dtype is torch.float32 else 2.0**-14
        least = digits * seen(x, w).abs().amax(-1, keepdim=True) * wide.abs().sum(-1) if act == "float" else 0.0
        assert ((y.double() - exact).abs() <= 8 * torch.finfo(dtype).eps * size + least).all(), (shape, dtype)


@pytest.mark.parametrize("act", ["float", "int8", "asymmetric", "groups", "asymmetric groups"])
@pytest.mark.parametrize("name", ["int3", "int4", "row", "tinygemm", "uint8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_depends_on_nothing_else(isa: str, name: str, act: str, dtype: torch.dtype) -> None:
    """Bit for bit the same in any batch, on any number of threads, on the plain C++ build and on this one."""
    w, x = make(name, (50, 352), dtype, ACTIVATIONS[act]).to_layout("cpu"), inputs(40, 352, dtype)
    threads = torch.get_num_threads()
    try:
        library.use_isa("scalar")
        torch.set_num_threads(1)
        expected = F.linear(x, w)
        library.use_isa(isa)
        for count in (1, 2):
            torch.set_num_threads(count)
            for rows in (1, 2, 3, 5, 8, 9, 13, 40):
                assert torch.equal(F.linear(x[-rows:], w), expected[-rows:]), (count, rows)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SPECS)
def test_one_hot_inputs_read_the_weight_to_the_bit(isa: str, name: str, dtype: torch.dtype) -> None:
    w = make(name, (37, 100), dtype)
    assert torch.equal(F.linear(torch.eye(100, dtype=dtype), w.to_layout("cpu")), w.dequantize(dtype).t())


@pytest.mark.parametrize("act", ["int8", "asymmetric", "uint8", "groups", "asymmetric groups"])
def test_zero_rows_are_zero_and_nan_rows_are_nan(isa: str, act: str) -> None:
    w, x = make("uint8", (37, 100), torch.float32, ACTIVATIONS[act]).to_layout("cpu"), inputs(4, 100, torch.float32)
    x[1], x[2, 5], x[3, 7] = 0, float("nan"), float("inf")
    y = F.linear(x, w)
    assert not y[1].any()
    assert y[2:].isnan().all()
    assert torch.equal(y[:1], F.linear(x[:1], w))


@pytest.mark.parametrize("act", ["float", "int8"])
def test_strides_shapes_and_poisoned_outputs(isa: str, act: str) -> None:
    w, x = make("int4", (37, 100), torch.bfloat16, ACTIVATIONS[act]).to_layout("cpu"), inputs(6, 200, torch.bfloat16)
    plain = F.linear(x[:, :100].contiguous(), w)
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    try:
        assert torch.equal(F.linear(x[:, :100], w), plain)  # rows apart
        assert torch.equal(F.linear(x[:, :100].t().contiguous().t(), w), plain)  # columns apart
        assert torch.equal(F.linear(x[:1, :100].expand(4, 100), w), plain[:1].expand(4, 37))
        assert torch.equal(F.linear(x[:, :100].reshape(2, 3, 100), w), plain.reshape(2, 3, 37))
        assert torch.equal(F.linear(x[0, :100], w), plain[0])
    finally:
        torch.use_deterministic_algorithms(False)
    assert F.linear(x[:0, :100], w).shape == (0, 37)


def test_gradient_and_compile() -> None:
    w = make("int4", (37, 100), torch.float32).to_layout("cpu")
    x = inputs(5, 100, torch.float32).requires_grad_()
    F.linear(x, w).sum().backward()
    assert torch.allclose(x.grad, w.dequantize().sum(0).expand(5, 100), atol=1e-5)
    compiled = torch.compile(lambda x: F.linear(x, w), fullgraph=True)
    assert torch.equal(compiled(x.detach()), F.linear(x.detach(), w))


def test_every_scale_kind_packs_and_unpacks(isa: str) -> None:
    for name in SPECS:
        for shape in SHAPES:
            w = make(name, shape, torch.float32)
            back = w.to_layout("cpu").to_layout("plain")
            assert torch.equal(back.codes, w.codes), (name, shape)
            assert torch.equal(back.dequantize(), w.dequantize()), (name, shape)


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="is not available"):
        library.use_isa("avx1024")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("m", [1, 5, 33])
def test_inputs_scaled_by_their_greatest(isa: str, dtype: torch.dtype, m: int) -> None:
    """The rule "absmax": codes from -127 to 127, the greatest of a token always one of the two."""
    act = ActivationSpec(QuantSpec(INT8, (-1,)), "dynamic", "absmax", 1e-5)
    w = make("row", (40, 96), dtype).with_(act=act).to_layout("cpu")
    x = inputs(m, 96, dtype)
    x[0] = 0
    parts = quantize(x, act.spec, act.rule, act.eps)
    assert m == 1 or (parts.codes[1:].abs().amax(1) == 127).all()
    assert select("linear", case_of(w, dtype)).name == "cpu_int"
    told = dequantize(parts, act.spec, x.shape) @ w.dequantize(torch.float32).t()
    got = F.linear(x, w)
    assert got.dtype is dtype
    assert (got.float() - told).norm() <= {torch.float32: 1e-6}.get(dtype, 5e-3) * told.norm() + 1e-12
