"""Rounding column by column with terms that are computed once: the results of rounding a column by itself."""

from typing import Any

import pytest
import torch

from pennyweight.algorithms.solvers.qparam_grid import make_grid
from pennyweight.core import formats
from pennyweight.core.qparams import choose, default_rule
from pennyweight.core.spec import QuantSpec

F = formats
SPECS = {
    "symmetric": QuantSpec(F.INT4, (1, 16)),
    "float16 scales": QuantSpec(F.INT8, (1, 32), scale=torch.float16),
    "bfloat16 scales": QuantSpec(F.INT3, (1, 16), scale=torch.bfloat16),
    "mid": QuantSpec(F.UINT4, (1, 16), mid=8),
    "zero points": QuantSpec(F.UINT4, (1, 16), zero_point=torch.int8),
    "offsets": QuantSpec(F.UINT4, (1, 16), offset=torch.float32),
    "offsets and mid": QuantSpec(F.UINT4, (1, 16), offset=torch.bfloat16, scale=torch.bfloat16, mid=8),
    "signed codes and offsets": QuantSpec(F.INT4, (1, 16), offset=torch.float32),
    "a scale of all": QuantSpec(F.INT2, None),
    "float": QuantSpec(F.E4M3, (1, 16)),
    "table": QuantSpec(F.NF4, (1, 16)),
    "table and offsets": QuantSpec(F.IQ4_NL, (1, 16), offset=torch.bfloat16),
    "few floats": QuantSpec(F.E2M1, (1, 16)),
    "few floats, quantized scales": QuantSpec(F.E2M1, (1, 16), scale=QuantSpec(F.E8M0, (1,), scale=None)),
    "64 floats": QuantSpec(F.E3M2, (1, 32), scale=torch.bfloat16),
}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("size", [1.0, 1e-38, 3e38, 0.0])
def test_a_column_is_rounded_as_alone(name: str, size: float) -> None:
    spec: Any = SPECS[name]
    torch.manual_seed(0)
    w = (torch.rand(24, 64) * 2 - 1) * size
    w[3] = 0
    w[4, :16] = 1e-30 * size
    grid = make_grid(choose(w, spec, default_rule(spec), None), spec, w.shape)
    aim = (w + torch.randn(24, 64) * min(size, 1e37) / 4).t().contiguous()
    for start, end in ((0, 64), (16, 40)):
        nearest = grid.rounder(start, end)
        for j in range(end - start):
            codes, values = nearest(j, aim[start + j])
            want_codes, want = grid.nearest(aim[start + j : start + j + 1], start + j)
            assert torch.equal(codes.to(want_codes.dtype), want_codes[0])
            assert torch.equal(values, want[0])
            assert values.dtype is torch.float32
