"""A single row of input, with the strides that vectors have after unsqueeze and transpose."""

import pytest
import torch
import torch.nn.functional as F

from pennyweight.kernels.repack import prepare
from tests.tensors import INT8_TOKEN, SPECS, UINT8_TOKEN, quantized


@pytest.mark.parametrize("act", [None, INT8_TOKEN, UINT8_TOKEN], ids=["float", "int8", "uint8"])
@pytest.mark.parametrize("name", SPECS)
def test_matrix_times_vector_is_the_linear_layer_of_one_row(name: str, act: object) -> None:
    w, v = quantized(name, act=act), torch.randn(96)  # type: ignore[arg-type]
    for weight in (w, prepare(w)):
        expected = F.linear(v, weight)
        torch.testing.assert_close(torch.mv(weight, v), expected)
        torch.testing.assert_close(F.linear(v.unsqueeze(1).t(), weight)[0], expected)
