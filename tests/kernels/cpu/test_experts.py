"""Products with the weights of many experts: each is the product with that expert alone, bit for bit."""

import pytest
import torch
import torch.nn.functional as F

from pennyweight.core import fallback
from pennyweight.core.formats import INT8
from pennyweight.core.spec import FP8_BLOCK, FP8_TENSOR, INT4_GROUP, INT8_ROW, MXFP4, NF4_DOUBLE, NVFP4, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels import cpu_experts
from pennyweight.kernels.cpu import library
from pennyweight.kernels.table import case_of, select
from tests.tensors import INT8_TOKEN

pytestmark = pytest.mark.skipif(library.available() is not True, reason="no native library here")

SPECS = {
    "int8_row": INT8_ROW, "int8_tensor": QuantSpec(INT8, None), "int4_group": INT4_GROUP, "fp8_tensor": FP8_TENSOR,
    "fp8_block": FP8_BLOCK, "mxfp4": MXFP4, "nvfp4": NVFP4, "nf4_double": NF4_DOUBLE,
}  # fmt: skip


def make(name: str, shape: tuple[int, int, int] = (4, 40, 96), dtype: torch.dtype = torch.float32) -> QT:
    torch.manual_seed(0)
    return QT.from_float(torch.randn(*shape).to(dtype), SPECS[name]).to_layout("cpu_experts")


@pytest.mark.parametrize("name", SPECS)
def test_each_expert_is_a_weight_of_its_own(name: str) -> None:
    for shape in ((4, 40, 96), (1, 16, 32), (3, 17, 37)):
        for dtype in (torch.float32, torch.bfloat16):
            w = make(name, shape, dtype)
            plain = w.dequantize()
            x = torch.randn(shape[0], 5, shape[2]).to(dtype)
            y = torch.bmm(x, w.transpose(1, 2))
            for e in range(shape[0]):
                one = w[e]
                assert one.spec.layout in ("cpu", "cpu_float")
                assert torch.equal(one.dequantize(), plain[e])
                assert torch.equal(y[e], F.linear(x[e], one))
                torch.testing.assert_close(y[e], F.linear(x[e], plain[e]), rtol=2e-2, atol=2e-1)
            assert torch.equal(w[-1].dequantize(), plain[-1])
            assert torch.equal(w.to_layout("plain").dequantize(), plain)


@pytest.mark.parametrize("name", SPECS)
def test_groups_of_rows(name: str) -> None:
    w, x = make(name), torch.randn(20, 96)
    for ends in ([3, 3, 12, 20], [0, 20, 20, 20], [0, 0, 0, 0], [5, 6, 7, 20]):
        with fallback.strict():
            y = torch._grouped_mm(x, w.transpose(1, 2), torch.tensor(ends, dtype=torch.int32))
        start = 0
        for e, end in enumerate(ends):
            assert torch.equal(y[start:end], F.linear(x[start:end], w[e]))
            start = end
        assert not y[start:].any()


def test_compiled_graphs_hold_it() -> None:
    w, x, ends = make("nvfp4"), torch.randn(20, 96), torch.tensor([3, 3, 12, 20], dtype=torch.int32)
    batch = torch.randn(4, 5, 96)
    both = torch.compile(
        lambda x, batch, ends: (torch._grouped_mm(x, w.transpose(1, 2), ends), torch.bmm(batch, w.transpose(1, 2))),
        backend="aot_eager", fullgraph=True,
    )  # fmt: skip
    groups, products = both(x, batch, ends)
    assert torch.equal(groups, torch._grouped_mm(x, w.transpose(1, 2), ends))
    assert torch.equal(products, torch.bmm(batch, w.transpose(1, 2)))


def test_gradients_and_quantized_activations() -> None:
    w = make("int4_group").with_(act=INT8_TOKEN)
    x = torch.randn(4, 6, 96, requires_grad=True)
    y = torch.bmm(x, w.transpose(1, 2))
    assert torch.equal(y[2], F.linear(x[2], w[2]))
    up = torch.randn_like(y)
    y.backward(up)
    torch.testing.assert_close(x.grad, torch.bmm(up, w.dequantize()))


def test_the_table_prefers_it() -> None:
    w = make("nf4_double")
    assert select("bmm", case_of(w)).name == "cpu_experts"
    assert select("bmm", case_of(w.to_layout("plain")), any_layout=True).name == "cpu_experts"
    shared = QuantSpec(INT8, (2, 1, 32))
    assert cpu_experts.fits(shared, (4, 8, 64)) == "needs blocks that do not span experts"
