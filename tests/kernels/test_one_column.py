"""A weight of one input, and pieces of weights whose scales do not lie in one piece of memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pennyweight as pw
from pennyweight.core.formats import E4M3, INT8
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.kernels.repack import prepare


@pytest.mark.parametrize("rows", [1, 7, 40])
def test_one_input(rows: int) -> None:
    """torch._int_mm gives what lay in memory there (torch 2.13)."""
    layer, x = nn.Linear(1, 96), torch.randn(rows, 1)
    pw.quantize_(layer, pw.Int8DynamicActivationInt8WeightConfig(granularity=(pw.PerTensor(), pw.PerRow())))
    exact = x @ layer.weight.dequantize().t() + layer.bias
    assert (layer(x) - exact).abs().max() <= x.abs().max() / 127.5 * layer.weight.dequantize().abs().max()


@pytest.mark.parametrize("form", [E4M3, INT8], ids=str)
def test_a_piece_of_blocks_of_rows_and_columns(form: object) -> None:
    w = AffineQuantizedTensor.from_float(torch.randn(96, 128), pw.QuantSpec(form, (16, 16)))  # type: ignore[arg-type]
    x = torch.randn(5, 64)
    for piece in (w[:, :64], w[:, 64:]):
        torch.testing.assert_close(F.linear(x, prepare(piece)), x @ piece.dequantize().t(), rtol=1e-5, atol=1e-5)
