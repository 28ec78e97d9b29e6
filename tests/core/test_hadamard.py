"""Rotation of blocks of channels by Hadamard matrices: what it preserves, and the matrix by another construction."""

import pytest
import torch

from pennyweight.core.hadamard import rotate_blocks, sylvester


def by_doubling(n: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


@pytest.mark.parametrize("n", [1, 2, 4, 8, 64, 1024])
def test_the_matrix(n: int) -> None:
    h = sylvester(n)
    assert torch.equal(h.double(), by_doubling(n))
    assert torch.equal(h, h.t())
    assert torch.equal(h @ h, n * torch.eye(n, dtype=torch.int64))


@pytest.mark.parametrize(("channels", "n"), [(64, 64), (80, 16), (96, 32), (6, 2), (5, 1), (256, 256)])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float64, 1e-6), (torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
def test_it_is_its_own_inverse_and_preserves_products(channels: int, n: int, dtype: torch.dtype, close: float) -> None:
    x, y = torch.randn(2, 3, 7, channels).to(dtype), torch.randn(2, 3, 7, channels).to(dtype)
    matrix = torch.block_diag(*[by_doubling(n) / n**0.5] * (channels // n))
    turned = rotate_blocks(x, n)
    assert turned.dtype == dtype
    assert turned.shape == x.shape
    torch.testing.assert_close(turned.double(), x.double() @ matrix, rtol=close, atol=close)
    torch.testing.assert_close(rotate_blocks(turned, n), x, rtol=close, atol=2 * close)
    scores = (x.double() * y.double()).sum(-1)
    found = (turned.double() * rotate_blocks(y, n).double()).sum(-1)
    torch.testing.assert_close(found, scores, rtol=0, atol=close * 2 * channels**0.5)


def test_one_large_channel_is_spread() -> None:
    x = torch.zeros(4, 64)
    x[:, 9] = 8
    assert torch.equal(rotate_blocks(x, 64).abs(), torch.ones(4, 64))
