"""ResNet-18, ResNet-50 and MobileNetV2 for images of 224 x 224, in plain torch.nn, with random weights.

He et al. 2016 (the stride of a bottleneck stands at its 3x3 convolution, as in most libraries), Sandler et al. 2018.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, SIZE = 1000, 224


def images(count: int, seed: int) -> Tensor:
    """[count, 3, 224, 224] with the smoothness of photographs: noise at four resolutions, mean 0, deviation about 1."""
    g = torch.Generator().manual_seed(seed)
    parts = [torch.randn(count, 3, n, n, generator=g) for n in (4, 16, 64, SIZE)]
    weights = (0.7, 0.6, 0.4, 0.2)
    return sum(w * F.interpolate(p, SIZE, mode="bilinear") for w, p in zip(weights, parts, strict=True))  # type: ignore[return-value]


def convolution(inputs: int, outputs: int, size: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """A convolution that keeps height and width at stride 1, and its normalization."""
    return [
        nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
    ]


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x))"""

    def __init__(self, branch: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch, self.shortcut, self.activation = branch, shortcut, nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.branch(x) + self.shortcut(x))


def residual(inputs: int, width: int, stride: int, bottleneck: bool) -> Residual:
    outputs = 4 * width if bottleneck else width
    steps = (
        [(inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1)]
        if bottleneck
        else [(inputs, width, 3, stride), (width, width, 3, 1)]
    )
    branch = [m for step in steps for m in (*convolution(*step), nn.ReLU())][:-1]
    same = stride == 1 and inputs == outputs
    shortcut = nn.Identity() if same else nn.Sequential(*convolution(inputs, outputs, 1, stride))
    return Residual(nn.Sequential(*branch), shortcut)


def resnet(depths: tuple[int, ...], bottleneck: bool) -> nn.Sequential:
    layers: list[nn.Module] = [*convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for i in range(depth):
            layers.append(residual(channels, width, 2 if stage and not i else 1, bottleneck))
            channels = 4 * width if bottleneck else width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class Inverted(nn.Module):
    """A 1x1 convolution that expands, a depthwise 3x3, a 1x1 that projects; x is added where the shapes are equal."""

    def __init__(self, inputs: int, outputs: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        expand = [*convolution(inputs, hidden, 1), nn.ReLU6()] if expansion != 1 else []
        depthwise = [*convolution(hidden, hidden, 3, stride, groups=hidden), nn.ReLU6()]
        self.branch = nn.Sequential(*expand, *depthwise, *convolution(hidden, outputs, 1))
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x) if self.adds else self.branch(x)


# Table 2 of the paper: expansion, channels, repetitions, stride of the first
STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))


def mobilenet_v2() -> nn.Sequential:
    layers: list[nn.Module] = [*convolution(3, 32, 3, 2), nn.ReLU6()]
    channels = 32
    for expansion, outputs, repetitions, stride in STAGES:
        for i in range(repetitions):
            layers.append(Inverted(channels, outputs, 1 if i else stride, expansion))
            channels = outputs
    layers += [*convolution(channels, 1280, 1), nn.ReLU6()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, CLASSES))


def make(name: str) -> nn.Sequential:
    """resnet18, resnet50 or mobilenet_v2."""
    if name == "mobilenet_v2":
        return mobilenet_v2()
    return {"resnet18": resnet((2, 2, 2, 2), False), "resnet50": resnet((3, 4, 6, 3), True)}[name]


def settled(name: str) -> nn.Sequential:
    """With random weights and gains, and the normalizations' statistics from two batches of images; in eval mode."""
    torch.manual_seed(0)
    net = make(name)
    for m in net.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.kaiming_normal_(m.weight, nonlinearity="relu")
        elif isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.uniform_(m.bias, -0.2, 0.2)
            m.momentum = None  # a plain average
    with torch.no_grad():
        for seed in (1, 2):
            net(images(8, seed))
    return net.eval()
