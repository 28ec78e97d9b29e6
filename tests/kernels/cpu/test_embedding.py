"""Native embedding lookup against the dequantized table."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pennyweight as pw
from pennyweight.core.formats import E8M0
from pennyweight.core.spec import INT8_ROW, SPECS, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.kernels import get_kernel
from pennyweight.kernels.cpu import float_linear, int_linear, library
from pennyweight.kernels.table import case_of, select

pytestmark = pytest.mark.skipif(library.available() is not True, reason=f"native library: {library.available()}")

INT3, INT5 = (QuantSpec(pw.core.formats.get_format(f), (32,), scale=torch.bfloat16) for f in ("int3", "uint5"))
MXINT8 = QuantSpec(INT8_ROW.format, (32,), scale=QuantSpec(E8M0, (1,), scale=None))
PACKINGS: dict[str, Any] = {"cpu": int_linear, "cpu_float": float_linear}
NAMES = ("int8_row", "int4_group", "uint4_group", "tinygemm", "fp8_row", "fp8_block", "mxfp4", "nf4_block")
TABLES = {name: SPECS[name] for name in NAMES}
TABLES |= {"tensor": QuantSpec(INT8_ROW.format, None), "int3": INT3, "int5": INT5, "mxint8": MXINT8}


@pytest.fixture(params=library.isas())
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    library.use_isa(request.param)
    yield
    library.use_isa("")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rows_are_those_of_the_dequantized_table(name: str, dtype: torch.dtype, isa: None) -> None:
    spec = TABLES[name]
    for shape in ((37, 96), (5, 130), (1, 64), (33, 2100)):
        table = torch.randn(shape).to(dtype)
        for layout in ("plain", "bits", "cpu", "cpu_float"):
            if layout in PACKINGS and PACKINGS[layout].fits(spec, shape) is not True:
                continue
            w = QT.from_float(table, spec.with_(layout=layout))
            kernel = select("embedding", case_of(w))
            assert kernel.name == (f"{layout}_tiles" if layout in PACKINGS else "cpu_rows")
            full = w.dequantize()
            for index in (
                torch.randint(shape[0], (7,)), torch.randint(shape[0], (2, 3, 4)), torch.tensor(shape[0] - 1),
                torch.empty(0, dtype=torch.int64), torch.randint(shape[0], (6, 4), dtype=torch.int32)[:, ::2],
            ):  # fmt: skip
                assert torch.equal(F.embedding(index, w), F.embedding(index, full)), (layout, shape, index)


@pytest.mark.parametrize("layout", ["plain", "bits", "cpu_float"])
def test_rows_under_a_quantized_scale(layout: str) -> None:
    for name in ("nf4_double", "nvfp4"):
        w = QT.from_float(torch.randn(20, 512), SPECS[name].with_(layout=layout))
        assert select("embedding", case_of(w)).rank > 0
        index = torch.randint(20, (3, 4))
        assert torch.equal(F.embedding(index, w), w.dequantize()[index])


def test_a_quantized_scale_that_rows_share_is_left_to_others() -> None:
    w = QT.from_float(torch.randn(8, 512), SPECS["nf4_double"].with_(scale=QuantSpec(INT8_ROW.format, (2, 4))))
    reason = "its scale is itself quantized, in blocks shared by rows"
    assert get_kernel("embedding", "cpu_rows").refuses(case_of(w)) == reason
    assert select("embedding", case_of(w)).name == "dequantize"


@pytest.mark.parametrize("layout", ["plain", "bits", "cpu"])
def test_an_index_out_of_range_is_an_index_error(layout: str) -> None:
    w = QT.from_float(torch.randn(20, 64), INT8_ROW.with_(layout=layout))
    for index in (torch.tensor([0, 20]), torch.tensor([[-1]]), torch.tensor(2**40)):
        with pytest.raises(IndexError, match="rows 0 to 19"):
            F.embedding(index, w)
    with pytest.raises(RuntimeError, match="must be int32 or int64"):
        F.embedding(torch.tensor([1.0]), w)


class Tied(nn.Module):
    def __init__(self, vocab: int = 48, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(index))


@pytest.mark.parametrize(
    "config", [pw.Int8WeightOnlyConfig(), pw.Int4WeightOnlyConfig(group_size=32)], ids=["int8", "int4"]
)
def test_a_tied_head_keeps_the_packing_of_linear(config: Any) -> None:
    model, index = Tied(), torch.randint(48, (2, 5))
    pw.quantize_(model, config, lambda module, fqn: True)
    w = model.head.weight
    assert w is model.embed.weight
    assert isinstance(w, QT)
    assert w.spec.layout == "cpu"
    assert select("linear", case_of(w)).name == "cpu_int"
    assert select("embedding", case_of(w)).name == "cpu_tiles"
    pw.reset_fallbacks()
    y = model(index)
    assert pw.fallbacks() == {}
    full = w.dequantize()
    torch.testing.assert_close(y, F.linear(F.embedding(index, full), full), atol=1e-4, rtol=1e-4)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(index), y)


@pytest.mark.parametrize("name", ["int8_row", "int4_group", "mxint8"])
@pytest.mark.parametrize("layout", ["plain", "bits", "cpu"])
def test_it_compiles(name: str, layout: str) -> None:
    torch._dynamo.reset()
    w = QT.from_float(torch.randn(40, 64), TABLES[name].with_(layout=layout))
    run = torch.compile(lambda index, w: F.embedding(index, w) * 2, backend="aot_eager", fullgraph=True)
    for n in (1, 3, 7):
        index = torch.randint(40, (n, 2))
        assert torch.equal(run(index, w), w.dequantize()[index] * 2)


def test_an_embedding_alone_is_stored_by_rows() -> None:
    model = nn.Sequential(nn.Embedding(48, 64))
    pw.quantize_(model, pw.Int8WeightOnlyConfig(), lambda module, fqn: True)
    assert model[0].weight.spec.layout == "plain"
    pw.quantize_(model, pw.Int4WeightOnlyConfig(group_size=32), lambda module, fqn: True)
    assert model[0].weight.spec.layout == "bits"
