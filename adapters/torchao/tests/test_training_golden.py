"""Optimizer steps on a user's own tensor class: over our base class what they are over torchao's."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pennyweight.kernels.cpu import library
from pennyweight_torchao.quantization import quant_primitives
from pennyweight_torchao.utils import TorchAOBaseTensor

GOLDEN = Path(__file__).parent / "golden"
sys.path.append(str(GOLDEN))
from own_trainable import train  # noqa: E402

# Golden numbers depend on torch's own float kernels, which round otherwise on processors without bf16 instructions.
RECORDED_HERE = pytest.mark.skipif(
    "avx512_bf16" not in library.isas(), reason="recorded on a processor with avx512_bf16"
)


@RECORDED_HERE
def test_steps_are_those_that_torchao_makes() -> None:
    told, got = load_file(GOLDEN / "torchao_0.18_training.safetensors"), train(TorchAOBaseTensor, quant_primitives)
    assert got.keys() == told.keys()
    assert told["losses"][-1] < told["losses"][0]
    for name, value in told.items():
        if value.dtype is torch.int8:  # products of floats differ in their last bits between processors
            difference = (got[name].int() - value.int()).abs()
            assert difference.max() <= 1
            assert (difference > 0).float().mean() < 0.01
        else:
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6)
