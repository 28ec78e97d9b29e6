"""Module.to, share_memory and swap_tensors while an autograd graph that used the weights is alive.

torch swaps quantized parameters, and refuses while C++ code refers to one. Graphs get an alias of frozen weights.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pennyweight as pw
from pennyweight.core.tensor import AffineQuantizedTensor

KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.LSTM, nn.MultiheadAttention)


class Product(nn.Module):
    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.product = nn.Linear(64, 64), product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.layer.weight)


ROWS = (2, 3, 64)
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), ROWS),
    "conv1d": (lambda: nn.Conv1d(16, 16, 3), (1, 16, 5)),
    "conv2d": (lambda: nn.Conv2d(16, 16, 3), (1, 16, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(16, 16, 3), (1, 16, 5, 5)),
    "lstm": (lambda: nn.LSTM(64, 64), ROWS),
    "attention": (lambda: nn.TransformerEncoderLayer(64, 2, 64, batch_first=True), ROWS),
    "matmul": (lambda: Product(lambda x, w: x @ w), ROWS),
    "matmul of a transpose": (lambda: Product(lambda x, w: torch.matmul(x, w.t())), ROWS),
    "einsum": (lambda: Product(lambda x, w: torch.einsum("abi,oi->abo", x, w)), ROWS),
    "addmm": (lambda: Product(lambda x, w: torch.addmm(torch.zeros(64), x[0], w.t())), ROWS),
}


def swap(model: nn.Module) -> None:
    for p in model.parameters():
        if isinstance(p, AffineQuantizedTensor):
            torch.utils.swap_tensors(p, nn.Parameter(p.detach().clone(), requires_grad=False))


def to_half(model: nn.Module) -> None:
    for layer in model.modules():  # torch changes float parameters under the graph, so that backward fails
        if all(isinstance(p, AffineQuantizedTensor) for p in layer.parameters(recurse=False)):
            layer._apply(lambda t: t.half() if isinstance(t, AffineQuantizedTensor) else t, recurse=False)


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "to half": to_half, "share_memory": nn.Module.share_memory, "swap_tensors": swap,
}  # fmt: skip


def make(build: Callable[[], nn.Module], config: str) -> nn.Module:
    torch.manual_seed(0)
    model = build().eval()
    pw.quantize_(model, config, lambda module, name: isinstance(module, KINDS))
    assert any(isinstance(p, AffineQuantizedTensor) for p in model.parameters())
    return model


def gradient(model: nn.Module, shape: tuple[int, ...], between: Callable[[nn.Module], Any]) -> Tensor:
    torch.manual_seed(1)
    x = torch.randn(shape, requires_grad=True)
    y = model(x)
    between(model)
    (y[0] if isinstance(y, tuple) else y).square().sum().backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("config", ["int8", "int4"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("build", "shape"), MODELS.values(), ids=MODELS)
def test_a_living_graph_keeps_its_gradient(
    build: Callable[[], nn.Module], shape: tuple[int, ...], way: Callable[[nn.Module], Any], config: str
) -> None:
    model = make(build, config)
    if way is swap and isinstance(model, nn.LSTM):
        pytest.skip("torch refuses to swap weights of nn.LSTM, which holds weak references to them")
    expected = gradient(model, shape, lambda m: None)
    assert torch.equal(gradient(model, shape, way), expected)


def test_other_values_before_backward_are_noticed_or_not_used() -> None:
    model = make(MODELS["linear"][0], "int8")
    expected = gradient(model, ROWS, lambda m: None)

    def replace(m: nn.Module) -> None:
        for p in m.parameters():
            if isinstance(p, AffineQuantizedTensor):
                p.data = torch.ones(p.shape)

    assert torch.equal(gradient(model, ROWS, replace), expected)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(model, ROWS, lambda m: m[0].weight.copy_(torch.zeros(64, 64)))  # type: ignore[index]


def test_hooks_see_a_saved_weight_as_a_parameter() -> None:
    """Those that offload activations leave parameters where they are."""
    model, saved = make(MODELS["linear"][0], "int8"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(torch.randn(2, 64, requires_grad=True))
    weights = [t for t in saved if isinstance(t, AffineQuantizedTensor)]
    assert len(weights) == 2
    assert all(isinstance(t, nn.Parameter) for t in weights)


def test_a_weight_that_requires_grad_is_refused_by_torch() -> None:
    model = make(MODELS["linear"][0], "int8")
    weight = model[0].weight.requires_grad_()  # type: ignore[index]
    y = model(torch.randn(2, 64))
    with pytest.raises(RuntimeError, match=r"_apply\(\): Couldn't swap Linear.weight"):
        model.half()
    y.sum().backward()
    assert weight.grad is not None
