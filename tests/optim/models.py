"""Parameters and gradients for tests of optimizers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Whole blocks; columns that a block does not divide; more than two axes; one; fewer columns than a block; odd; primes;
# one column; too small to be quantized.
SHAPES = (
    (64, 256), (60, 300), (16, 64, 3, 3), (4099,), (300, 17), (90, 1, 7, 7), (2, 50, 64), (70, 70), (5, 1021),
    (5000, 1), (3, 5),
)  # fmt: skip


def parameters(dtype: torch.dtype = torch.float32, shapes: Any = SHAPES) -> list[nn.Parameter]:
    g = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in shapes]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    """Of one order of magnitude or several, the same for every set of parameters."""
    g = torch.Generator().manual_seed(100 + step)
    for p in params:
        x = torch.randn(p.shape, generator=g) * torch.rand(p.shape, generator=g) ** 4
        p.grad = x.to(p.dtype)


def trained(make: Callable[[Any], torch.optim.Optimizer], steps: int, **kwargs: Any) -> tuple[Any, Any]:
    """(parameters, optimizer) after so many steps."""
    params = parameters(**kwargs)
    optimizer = make(params)
    for step in range(steps):
        set_gradients(params, step)
        optimizer.step()
    return params, optimizer


class Net(nn.Module):
    """Two matrices that are quantized, and biases that are not."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 128, dtype=dtype), nn.Linear(128, 64, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Of a regression whose data depend on the step alone."""
    found = []
    for step in steps:
        g = torch.Generator().manual_seed(step)
        x = torch.randn(32, 64, generator=g).to(next(model.parameters()).dtype)
        loss = (model(x) - x.roll(1, -1)).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found
