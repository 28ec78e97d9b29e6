"""Points in the cells of codes that were chosen before."""

import pytest
import torch

from pennyweight.algorithms.tuners.trainable_qparams import clamp_to_interval
from pennyweight.core.formats import INT4, NF4


@pytest.mark.parametrize("fmt", [INT4, NF4], ids=str)
def test_points_keep_their_codes_and_go_towards_the_float(fmt: object) -> None:
    x = torch.linspace(1.2 * fmt.lo, 1.2 * fmt.hi, 4001)
    nearest = fmt.encode(x)
    numbers = torch.unique(fmt.decode(nearest, torch.float32))
    step = float((numbers[-1] - numbers[0]) / (len(numbers) - 1))
    for shift in (0, 1, -1, 5):  # the code of the nearest number, of its neighbours, of one far away
        at = (torch.searchsorted(numbers, fmt.decode(nearest, torch.float32)) + shift).clamp(0, len(numbers) - 1)
        value = numbers[at]
        codes = fmt.encode(value)
        found = clamp_to_interval(x, value, step, lambda y, codes=codes: fmt.encode(y) == codes)
        assert torch.equal(fmt.encode(found), codes)
        assert ((found - value) * (x - value) >= 0).all()
        assert ((found - x).abs() <= (value - x).abs()).all()
        if shift == 0:
            torch.testing.assert_close(found - value, 0.9 * (x - value))
        else:
            moved = (codes != nearest).float()
            assert float(((found - value).abs() * moved).sum() / moved.sum()) > 0.1 * step
