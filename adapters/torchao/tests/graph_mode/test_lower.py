"""lower: int8 kernels equal the converted graph within one rounding step, and what stays is named."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

import pennyweight as pw
from pennyweight.kernels.cpu import library
from pennyweight.kernels.table import get_kernel
from pennyweight_torchao import graph_mode as gm

from .graphs import converted, targets, x86, xnnpack

pytestmark = pytest.mark.skipif(library.available() is not True, reason=str(library.available()))

QUANTIZERS = {
    "x86": x86(), "x86-7-bit": x86(reduce_range=True), "x86-dynamic": x86(is_dynamic=True), "xnnpack": xnnpack(),
    "xnnpack-channels": xnnpack(is_per_channel=True), "xnnpack-dynamic": xnnpack(is_dynamic=True),
}  # fmt: skip


def largest_scale(graph: GraphModule) -> float:
    """The largest scale of a static activation: one step of rounding inside the graph is at most that much."""
    static = torch.ops.quantized_decomposed.quantize_per_tensor.default
    return max(float(n.args[1]) for n in graph.graph.nodes if n.target is static)


def assert_equal_but_for_rounding(lowered: Any, graph: GraphModule, x: Tensor) -> None:
    """One layer: equal up to float32 sums. After layers whose codes may differ by one, few values may."""
    with torch.no_grad():
        expected, found = graph(x), lowered(x)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize(("k", "n", "bias"), [(32, 16, True), (37, 5, False), (1, 3, True), (130, 65, True)])
def test_linear_layers(name: str, k: int, n: int, bias: bool) -> None:
    x = torch.randn(6, k)
    graph = converted(nn.Sequential(nn.Linear(k, n, bias=bias)), QUANTIZERS[name], x, free=True)
    lowered, report = pw.lower(graph)
    assert [(row.name, row.quantized) for row in report.rows] == [("0", True)]
    assert not [t for t in targets(lowered) if "aten.linear" in t]
    for rows in (1, 2, 6, 33):
        assert_equal_but_for_rounding(lowered, graph, torch.randn(rows, k))


@pytest.mark.parametrize("name", [q for q in QUANTIZERS if q != "xnnpack-dynamic"])
@pytest.mark.parametrize(
    ("layer", "size"),
    [
        (nn.Conv2d(3, 8, 3, padding=1), (2, 3, 9, 7)),
        (nn.Conv2d(8, 8, 3, stride=2, groups=4, bias=False), (1, 8, 9, 9)),
        (nn.Conv2d(4, 4, (3, 1), dilation=(2, 1), groups=4), (3, 4, 9, 5)),
        (nn.Conv2d(3, 5, 3, padding="same"), (2, 3, 6, 6)),
        (nn.Conv1d(3, 8, 5, padding=2), (2, 3, 17)),
    ],
    ids=["padded", "groups", "depthwise", "same", "one dimension"],
)
def test_convolutions(name: str, layer: nn.Module, size: tuple[int, ...]) -> None:
    x = torch.randn(size)
    graph = converted(nn.Sequential(layer, nn.ReLU()), QUANTIZERS[name], x)
    lowered, report = pw.lower(graph)
    taken = [row for row in report.rows if row.type.startswith("conv")]
    quantized = "dequantize_per" in " ".join(targets(graph))
    assert [row.quantized for row in taken] == [quantized]
    assert_equal_but_for_rounding(lowered, graph, torch.randn(size))


class Net(nn.Module):
    """Residual sum, pooling, a layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.MaxPool2d(2)
        self.l, self.o = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.a(x)))
        x = F.relu(self.b(x) + x).mean((2, 3))
        return self.o(F.relu(self.l(F.relu(self.l(x)))))


@pytest.mark.parametrize("name", ["x86", "xnnpack-channels"])
def test_a_net(name: str) -> None:
    """Codes between layers differ by at most one, so outputs by a few steps of the weights' size."""
    x = torch.randn(4, 3, 8, 8)
    graph = converted(Net(), QUANTIZERS[name], x, free=True)
    before = [str(n) for n in graph.graph.nodes]
    lowered, report = pw.lower(graph)
    assert [str(n) for n in graph.graph.nodes] == before
    assert sum(row.quantized for row in report.rows) == 5
    assert all(row.note for row in report.rows if not row.quantized)
    assert not [t for t in targets(lowered) if "aten.linear" in t or "conv2d" in t]
    for samples in (1, 4, 5):
        y = torch.randn(samples, 3, 8, 8)
        with torch.no_grad():
            expected, found = graph(y), lowered(y)
        torch.testing.assert_close(found, expected, rtol=0, atol=largest_scale(graph))
        assert (found - expected).norm() < 0.02 * expected.norm()


def test_pooling_of_codes_is_exact() -> None:
    """The maximum of rounded values is the rounded maximum."""
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    x = torch.randn(2, 3, 9, 9)
    graph = converted(model, x86(), x)
    lowered, _ = pw.lower(graph)
    assert not [t for t in targets(lowered) if "quantize_per" in t]
    torch.testing.assert_close(lowered(x), graph(x))


def test_what_stays_says_why() -> None:
    class Rest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l, self.m, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv3d(1, 1, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.m(self.l(x)) * torch.sigmoid(x)

    x = torch.randn(3, 4)
    graph = converted(Rest(), x86().set_module_name_qconfig("m", None), x)
    lowered, report = pw.lower(graph)
    notes = {row.name: row.note for row in report.rows}
    assert notes["l"] == ""
    assert notes["m"] == "its input is not quantized"
    assert notes["mul"] == "no int8 kernel for aten.mul.Tensor"
    torch.testing.assert_close(lowered(x), graph(x))
    per_channel = gm.get_symmetric_quantization_config(act_qmin=-100, act_qmax=100)
    odd = converted(nn.Sequential(nn.Linear(4, 4)), gm.XNNPACKQuantizer().set_global(per_channel), x)
    (row,) = pw.lower(odd).report.rows
    assert "codes -100 to 100" in row.note
    with pytest.raises(pw.ArgumentError, match="needs a graph of torch"):
        pw.lower(nn.Linear(2, 2))


def test_an_input_without_rows() -> None:
    for quantizer in (x86(), x86(is_dynamic=True)):
        graph = converted(nn.Sequential(nn.Linear(4, 3)), quantizer, torch.randn(2, 4), free=True)
        assert pw.lower(graph).model(torch.empty(0, 4)).shape == (0, 3)


def test_a_lowered_graph_holds_int8() -> None:
    x = torch.randn(2, 256)
    graph = converted(nn.Sequential(nn.Linear(256, 256)), x86(), x)
    lowered, report = pw.lower(graph)
    assert report.rows[0].bytes_before == 256 * 256
    assert sum(t.nbytes for t in lowered.state_dict().values()) < 1.2 * 256 * 256
    assert isinstance(lowered.lowered_0, pw.inference.FrozenLinear)
    assert torch.equal(lowered(x), lowered(x))


def test_without_a_kernel_each_call_of_a_layer_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3, 8, 8)
    graph = converted(Net(), x86(), x)
    monkeypatch.setattr("pennyweight.export.lower_graph.select", lambda op, case: get_kernel(op, "dequantize"))
    lowered, report = pw.lower(graph)
    assert not any(row.quantized for row in report.rows)
    assert sum("no int8 kernel of this machine" in row.note for row in report.rows) == 5
    torch.testing.assert_close(lowered(x), graph(x))
