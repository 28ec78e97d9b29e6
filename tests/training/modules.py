"""Modules of all kinds, at module level so that they can be pickled."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D


class Doubling(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(2 * x, self.weight, self.bias)


class Named(nn.Linear):
    """A linear layer under another name."""


class Experts(nn.Module):
    """A bare parameter, and a layer before it."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(0.1 * torch.randn(4, 32, 64))
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.linear(x), self.w.transpose(1, 2))


class Attention(nn.Module):
    """Attention to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def tied() -> nn.Sequential:
    """An embedding whose table is the last layer's weight."""
    model = nn.Sequential(nn.Embedding(50, 64, padding_idx=3), nn.Linear(64, 50))
    model[1].weight = model[0].weight
    return model


def convolution(kind: type[nn.Module]) -> nn.Sequential:
    return nn.Sequential(kind(8, 16, 3, padding="same", padding_mode="circular"), nn.ReLU(), kind(16, 8, 3, groups=2))


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 2)


def conv1d() -> nn.Sequential:
    return nn.Sequential(Conv1D(48, 64), nn.GELU(), Conv1D(16, 48))


# name -> (how it is made, shape of its input or None for tokens, whether all modules are asked for)
KINDS = {
    "linear": (lambda: nn.Sequential(nn.Linear(64, 48), nn.GELU(), Named(48, 16, bias=False)), (3, 5, 64), False),
    "own forward": (lambda: Doubling(64, 32), (3, 64), False),
    "experts": (Experts, (4, 3, 64), False),
    "attention": (Attention, (2, 5, 64), False),
    "encoder": (encoder, (2, 5, 64), False),
    "tied": (tied, None, True),
    "tied, asked for by the layer": (tied, None, False),
    "embedding": (lambda: nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 50)), None, True),
    "conv1d of transformers": (conv1d, (3, 5, 64), False),
    "conv1d": (lambda: convolution(nn.Conv1d), (2, 8, 9), True),
    "conv2d": (lambda: convolution(nn.Conv2d), (2, 8, 9, 9), True),
    "conv3d": (lambda: convolution(nn.Conv3d), (2, 8, 5, 5, 5), True),
}
