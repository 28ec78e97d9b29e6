"""explain says of a layer or a model what runs in it, fused blocks and convolutions included."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pennyweight as pw
from pennyweight.core.spec import QuantSpec
from pennyweight.inference import LayerKernel, ModelExplanation
from pennyweight.kernels import get_kernel
from pennyweight.kernels.cpu import library
from pennyweight.kernels.table import case_of, op_of, select
from tests.inference.fuse_models import conv_net

native = pytest.mark.skipif(library.available() is not True, reason="the native library was not built")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.volume = nn.Conv2d(8, 16, 3), nn.ConvTranspose2d(64, 16, 4, 2), nn.Conv3d(4, 4, 3)
        self.table, self.rnn = nn.Embedding(10, 64), nn.GRU(64, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


@pytest.fixture
def model() -> Net:
    torch.manual_seed(0)
    net = Net().eval()
    pw.quantize_(net, "int8-dynamic", lambda m, name: name not in ("head", "table"))
    return net


def kernels_of(model: nn.Module, x: Any = torch.float32) -> dict[str, str]:
    explained = pw.explain(x, model)
    assert isinstance(explained, ModelExplanation)
    return {row.name: row.kernel for row in explained.rows}


def test_every_weight_has_the_kernel_that_runs(model: Net) -> None:
    explained = pw.explain(torch.float32, model)
    rows = {row.name: row for row in explained.rows}
    for name, op in (
        ("conv.weight", "convolution"), ("up.weight", "transposed_convolution"), ("volume.weight", "convolution"),
        ("rnn.weight_hh_l0", "linear"), ("encoder.layers.0.self_attn.in_proj_weight", "linear"),
    ):  # fmt: skip
        kernel = select(op, case_of(model.get_parameter(name), torch.float32)).name
        assert (rows[name].op, rows[name].kernel) == (op, kernel)
    assert (rows["head.weight"].kernel, rows["head.weight"].note) == ("", "not quantized")
    assert rows["volume.weight"].kernel == "dequantize"
    assert "dequantizes the weight at each call; cpu_conv: needs a convolution of" in rows["volume.weight"].note
    assert not any("bias" in name or "norm" in name for name in rows)
    assert not explained.unfused
    (line,) = (line for line in str(explained).splitlines() if "head.weight" in line)
    assert line.split() == ["head.weight", "-", "float", "not", "quantized"]


@native
def test_fused_blocks(model: Net) -> None:
    x = torch.randn(2, 5, 64)
    pw.reset_fallbacks()
    before = kernels_of(model, x)
    pw.fuse_(model, x)
    explained = pw.explain(x, model)
    rows = {row.name: row for row in explained.rows}
    assert rows["encoder.layers.1"].note == (
        "TransformerEncoderLayer: one native call for 4 linear layers and what lies between them"
    )
    inner = rows["encoder.layers.1.linear1.weight"]
    assert (inner.kernel, inner.note) == ("block", "in encoder.layers.1; cpu_int in calls that are not fused")
    assert rows["encoder.layers.1.self_attn.in_proj_weight"].kernel == "block"
    assert rows["conv.weight"].kernel == before["conv.weight"] == "cpu_conv"
    with torch.inference_mode():
        model(x)
    assert not pw.explain(x, model).unfused
    model(x)  # gradients are on
    (reason,) = pw.explain(x, model).unfused
    assert "gradients are enabled" in reason
    assert "not fused in 2 calls of fused blocks: gradients are enabled" in str(pw.explain(x, model))
    alone = pw.explain(x, model.encoder.layers[0])
    assert [row.name for row in alone.rows][:2] == ["model", "self_attn.in_proj_weight"]
    pw.inference.thaw_(model)
    assert kernels_of(model, x) == before


@native
def test_fused_convolution_nets() -> None:
    net, x = conv_net(), torch.randn(2, 3, 12, 11)
    pw.reset_fallbacks()
    before = kernels_of(net, x)
    pw.fuse_(net, x)
    explained = pw.explain(x, net)
    whole, first, second = explained.rows
    assert whole == LayerKernel("model", "net", "chains", "Sequential: 2 convolutions in 1 chain")
    for row in (first, second):
        note = f"in the net; {before[row.name]} in calls that are not fused"
        assert row == LayerKernel(row.name, "convolution", "chains", note)
    outer = nn.ModuleDict({"images": net, "other": nn.Linear(4, 4)})
    names = {row.name: row.note for row in pw.explain(x, outer).rows}
    assert list(names) == ["images", "images.0.weight", "images.2.weight", "other.weight"]
    assert names["images.0.weight"].startswith("in images; ")
    with torch.inference_mode():
        net(x)
    assert not pw.explain(x, net).unfused
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        net(x)
    assert pw.explain(x, net).unfused == {"autocast is on": 1}
    assert "not fused in 1 call of fused nets: autocast is on" in str(pw.explain(x, net))
    other = copy.deepcopy(net)
    note = "Sequential: chains of convolutions; bound again at its next call"
    assert pw.explain(x, other).rows[0].note == note
    pw.inference.thaw_(net)
    assert kernels_of(net, x) == before


LAYERS: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: nn.Linear(64, 64), "linear"),
    (lambda: nn.Conv1d(8, 16, 3), "convolution"),
    (lambda: nn.Conv2d(8, 16, 3), "convolution"),
    (lambda: nn.ConvTranspose1d(64, 16, 3), "transposed_convolution"),
    (lambda: nn.ConvTranspose2d(64, 16, 3), "transposed_convolution"),
]


@pytest.mark.parametrize("config", ["int8", "int8-dynamic", "int4"])
@pytest.mark.parametrize(("make", "op"), LAYERS)
def test_a_weight_alone_is_explained_for_the_op_that_it_was_made_for(
    make: Callable[[], nn.Module], op: str, config: str
) -> None:
    layer: Any = make()
    (row,) = pw.quantize_(layer, config, lambda m, name: True).quantized
    told = pw.explain(torch.float32, layer.weight)
    assert told.op == op
    assert [name for name, _, verdict in told.rows if verdict == "RUNS"] == [row.kernel]
    (only,) = pw.explain(torch.float32, layer).rows
    assert (only.op, only.kernel) == (op, row.kernel)
    assert get_kernel(op, row.kernel)


def test_ops_of_shapes() -> None:
    int8 = pw.get_format("int8")
    for block, shape, op in (
        ((-1,), (8, 8), "linear"), (None, (8, 8), "linear"), ((32,), (4, 8, 64), "bmm"), (None, (4, 8, 64), "bmm"),
        ((-1, -1), (4, 8, 3), "convolution"), ((-1, 1, -1), (4, 8, 3), "transposed_convolution"),
        (None, (4, 8, 3, 3), "convolution"), ((32, 1, 1, 1), (64, 8, 3, 3), "transposed_convolution"),
        ((4, -1, -1), (64, 8, 3, 3), "convolution"),
    ):  # fmt: skip
        assert op_of(QuantSpec(int8, block), shape) == op
    w = pw.AffineQuantizedTensor.from_float(torch.randn(4, 64), QuantSpec(int8, (-1,)))
    with pytest.raises(ValueError, match=r"no kernels for op 'lineal' \(did you mean 'linear'\?\); known: "):
        pw.explain(torch.float32, w, "lineal")
    assert pw.explain(torch.float32, w, "embedding").op == "embedding"
