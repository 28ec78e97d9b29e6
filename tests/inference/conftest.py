"""Fused blocks run natively where native code can run them, else by the plain reference."""

import pytest
import torch

from pennyweight.core.spec import INT8_ROW
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.inference import bound_block
from pennyweight.inference.bound_block import Reference
from pennyweight.kernels.block import AttentionStep, Columns, Heads, Layer, LinearStep, Steps
from pennyweight.kernels.native.block import compile_steps
from pennyweight.kernels.repack import prepare


def native() -> bool:
    """Whether native code runs a block with attention."""
    heads = Heads(2, 2, 16)
    layers = tuple(Layer(prepare(AffineQuantizedTensor.from_float(torch.ones(32, 32), INT8_ROW))) for _ in range(3))
    attention = AttentionStep(Columns(2), 5, heads, 0.25, Columns(3), Columns(4))
    steps = (LinearStep(0, layers, (2, 3, 4)), attention, LinearStep(5, layers[:1], (1,)))
    return not isinstance(compile_steps(Steps(steps, (32,) * 6, torch.float32)), str)


@pytest.fixture(autouse=True)
def _runner(monkeypatch: pytest.MonkeyPatch) -> None:
    if not native():
        monkeypatch.setattr(bound_block, "compile_steps", Reference)
