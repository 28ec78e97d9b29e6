"""Train quantized weights: a differentiable constructor, gradients, and optimizers that write into the codes.

python examples/tutorials/trainable_tensor.py
"""

import copy
import warnings

import torch
from torch import Tensor, nn

import pennyweight as pw

SPEC = pw.QuantSpec(pw.get_format("int8"), (-1,))  # int8, one scale per row


class Quantize(torch.autograd.Function):
    """A differentiable constructor: forward quantizes, backward is the straight-through estimator."""

    @staticmethod
    def forward(ctx, x: Tensor, spec: pw.QuantSpec) -> Tensor:
        return pw.AffineQuantizedTensor.from_float(x, spec)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Rounded(nn.Module):
    """Quantizes a weight with SPEC; the gradient goes to the float weight."""

    def forward(self, weight: Tensor) -> Tensor:
        return Quantize.apply(weight, SPEC)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 8, bias=False))


def make_trainable_(model: nn.Module) -> None:
    """Convert every linear weight to a quantized parameter that requires grad."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Quantize.apply(module.weight.detach(), SPEC), requires_grad=True)


def train(model: nn.Module, x: Tensor, label: Tensor, optimizer: torch.optim.Optimizer, steps: int) -> float:
    """The loss after ``steps`` steps over all of x."""
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), label).backward()
        optimizer.step()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(x), label).item()


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 32)
    label = network()(x).argmax(1)  # labels from another network of this shape
    start = network()

    # The constructor: the float tensor gets the gradient of the quantized one.
    master = torch.randn(8, 32, requires_grad=True)
    weight = Quantize.apply(master, SPEC)
    assert isinstance(weight, pw.AffineQuantizedTensor)
    nn.functional.linear(x, weight).sum().backward()
    torch.testing.assert_close(master.grad, x.sum(0).expand(8, 32))

    # The quantized weight as the parameter: the gradient is a plain tensor, the update changes the codes.
    model = copy.deepcopy(start)
    make_trainable_(model)
    first = model[0].weight
    address, codes = first.data_ptr(), first.codes.clone()
    # Weight decay adds the weight to its gradient. That dequantizes the weight, which warns; the warning is expected.
    warnings.simplefilter("ignore", pw.FallbackWarning)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-5)
    before = nn.functional.cross_entropy(model(x), label).item()
    after = train(model, x, label, optimizer, 100)
    print(f"SGD on int8 weights: loss {before:.3f} -> {after:.3f}")
    assert after < before / 3
    assert type(first.grad) is Tensor
    assert model[0].weight is first
    assert first.data_ptr() == address  # the same storage, so every alias of the weight sees the update
    changed = float((first.codes != codes).double().mean())
    print(f"  {100 * changed:.0f} % of the codes of the first layer have changed; it is still {first.nbytes} bytes")
    assert changed > 0.5

    reference = copy.deepcopy(start)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-5)
    print(f"  the same in float: {train(reference, x, label, optimizer, 100):.3f}")

    # The limitation: codes change only by integers. An update below half a step of the scale is rounded away, however
    # often it is repeated.
    stuck = copy.deepcopy(start)
    make_trainable_(stuck)
    codes = stuck[0].weight.codes.clone()
    optimizer = torch.optim.SGD(stuck.parameters(), lr=1e-3)
    after_stuck = train(stuck, x, label, optimizer, 150)
    moved = float((stuck[0].weight.codes != codes).double().mean())
    print(f"small steps on int8 weights: loss {before:.3f} -> {after_stuck:.3f}; {100 * moved:.1f} % of codes changed")
    assert moved < 0.01

    # The solution: a float master weight for each layer, which accumulates the small updates, and the differentiable
    # constructor applied to it. It needs the memory of the float weights during training.
    aware = copy.deepcopy(start)
    for module in aware.modules():
        if isinstance(module, nn.Linear):
            nn.utils.parametrize.register_parametrization(module, "weight", Rounded(), unsafe=True)
    optimizer = torch.optim.SGD(aware.parameters(), lr=1e-3)
    after_aware = train(aware, x, label, optimizer, 150)
    print(f"small steps with a float master: loss {before:.3f} -> {after_aware:.3f}")
    assert after_aware < after_stuck - 0.03

    # After training, replace the master weights by quantized ones.
    for module in aware.modules():
        if isinstance(module, nn.Linear):
            nn.utils.parametrize.remove_parametrizations(module, "weight", leave_parametrized=False)
    with torch.no_grad():
        pw.quantize_(aware, pw.SpecConfig(SPEC))
        final = nn.functional.cross_entropy(aware(x), label).item()
    assert abs(final - after_aware) < 1e-5


if __name__ == "__main__":
    main()
