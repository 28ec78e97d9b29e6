"""prepare_qat: batch norms in training, folding after it, dropout, learned ranges."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.kernels.cpu import library
from pennyweight_torchao import graph_mode as gm
from pennyweight_torchao.graph_mode.fake_quantize import disable_fake_quant

from .graphs import exported, targets, x86


class Net(nn.Module):
    def __init__(self, bias: bool = True, eps: float = 1e-3) -> None:
        super().__init__()
        self.c, self.n = nn.Conv2d(3, 4, 3, bias=bias), nn.BatchNorm2d(4, eps=eps, momentum=0.3)
        self.d = nn.Dropout(0.5)
        nn.init.uniform_(self.n.weight, 0.5, 2)
        nn.init.normal_(self.n.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.d(torch.relu(self.n(self.c(x))))


@pytest.mark.parametrize("bias", [True, False])
def test_without_rounding_a_step_is_that_of_the_model(bias: bool) -> None:
    """The rewritten graph computes the same outputs, gradients and statistics; eps and momentum are the layer's own."""
    model, x = Net(bias), torch.randn(5, 3, 6, 6)
    model.d.p = 0.0
    prepared = gm.prepare_qat(exported(model.train(), x), x86(is_qat=True))
    prepared.apply(disable_fake_quant)
    expected, found = model(x), prepared(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    expected.square().sum().backward()
    found.square().sum().backward()
    gradients = {n: p.grad for n, p in prepared.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-3)
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(dict(prepared.named_buffers())[name], buffer)


def plain_config(kind: type[gm.QuantizationSpec], per_channel: bool) -> gm.QuantizationConfig:
    """Fake quantizers that round with the parameters of their observers; torch's fused ones have their own formula."""

    def spec(dtype: torch.dtype, low: int, high: int, scheme: torch.qscheme, observer: Any) -> gm.QuantizationSpec:
        make = gm.FakeQuantize.with_args(observer=observer, eps=2**-12)
        return kind(dtype, make, low, high, scheme, ch_axis=0)

    act = spec(torch.uint8, 0, 255, torch.per_tensor_affine, gm.MovingAverageMinMaxObserver)
    scheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric
    observer = gm.MovingAveragePerChannelMinMaxObserver if per_channel else gm.MovingAverageMinMaxObserver
    return gm.QuantizationConfig(act, act, spec(torch.int8, -127, 127, scheme, observer), None, is_qat=True)


@pytest.mark.parametrize("kind", [gm.X86InductorQuantizer, gm.XNNPACKQuantizer])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_the_converted_graph_is_the_trained_one(kind: Any, per_channel: bool, bias: bool) -> None:
    """In evaluation, folding changes nothing but the rounding of sums."""
    quantizer = kind().set_global(plain_config(gm.QuantizationSpec, per_channel))
    model, x = Net(bias), torch.randn(5, 3, 6, 6)
    prepared = gm.prepare_qat(exported(model.train(), x), quantizer)
    for _ in range(3):
        prepared(x).square().mean().backward()
        with torch.no_grad():
            for p in prepared.parameters():
                p -= 0.05 * p.grad  # type: ignore[operator]
                p.grad = None
    gm.move_exported_model_to_eval(prepared)
    prepared(x)  # the fake quantizers see the last weights
    for m in prepared.modules():
        if isinstance(m, gm.FakeQuantize):
            m.disable_observer()
    expected = prepared(x)
    graph = gm.convert(prepared)
    assert not [t for t in targets(graph) if "batch_norm" in t or "div" in t or "add_" in t]
    torch.testing.assert_close(graph(x), expected, rtol=1e-3, atol=1.01 * _step(graph))
    assert ((graph(x) - expected).abs() > 1e-4).float().mean() < 0.02


def _step(graph: Any) -> float:
    """The scale of the output."""
    found = [
        n.args[1] for n in graph.graph.nodes if n.target is torch.ops.quantized_decomposed.quantize_per_tensor.default
    ]
    return float(found[-1])


def test_a_module_called_twice_is_folded_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c, self.n = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
            self.n.running_var.fill_(4.0)  # type: ignore[union-attr]

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.n(self.c(torch.relu(self.n(self.c(x))))))

    x = torch.randn(5, 3, 6, 6)
    prepared = gm.prepare_qat(exported(Twice().train(), x), x86(is_qat=True))
    prepared(x)
    gm.move_exported_model_to_eval(prepared)
    expected = prepared(x)
    graph = gm.convert(prepared)
    assert len({n.target for n in graph.graph.nodes if n.op == "get_attr" and "frozen" in str(n.target)}) >= 1
    torch.testing.assert_close(graph(x), expected, rtol=0.1, atol=0.1)


def test_dropout_and_batch_norm_switch() -> None:
    model, x = Net(), torch.randn(5, 3, 6, 6)
    graph = exported(model.train(), x)
    assert not torch.equal(graph(x), graph(x))
    gm.move_exported_model_to_eval(graph)
    model.eval()
    model.n.load_state_dict({k.removeprefix("n."): v for k, v in graph.state_dict().items() if k.startswith("n.")})
    torch.testing.assert_close(graph(x), model(x))
    gm.allow_exported_model_train_eval(graph)
    graph.train()
    assert not torch.equal(graph(x), graph(x))
    graph.eval()
    assert torch.equal(graph(x), graph(x))


@pytest.mark.skipif(library.available() is not True, reason=str(library.available()))
def test_lowered_after_training() -> None:
    model, x = Net(), torch.randn(5, 3, 6, 6)
    prepared = gm.prepare_qat(exported(model.train(), x), x86(is_qat=True))
    prepared(x)
    gm.move_exported_model_to_eval(prepared)
    graph = gm.convert(prepared)
    lowered, report = pw.lower(graph)
    assert report.rows[0].quantized
    torch.testing.assert_close(lowered(x), graph(x), atol=1.01 * _step(graph), rtol=0)
