"""Integer products are exact for every shape, stride and CPU, also compiled."""

import pytest
import torch

from pennyweight_torchao import int8_matmul
from pennyweight_torchao.int8_matmul import int_matmul, int_scaled_matmul, safe_int_mm

SHAPES = [(1, 1, 1), (5, 300, 7), (17, 8, 8), (0, 4, 3), (4, 0, 3), (3, 2048, 16)]


def exact(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a.long().unsqueeze(2) * b.long().unsqueeze(0)).sum(1).to(torch.int32)


@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
@pytest.mark.parametrize("saturates", [False, True])
def test_exact(m: int, k: int, n: int, saturates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if saturates:  # the way of CPUs whose torch._int_mm is wrong
        monkeypatch.setattr(int8_matmul, "_saturates", lambda: True)
    elif int8_matmul.int_mm_saturates():
        pytest.skip("torch._int_mm saturates on this CPU")
    a = torch.randint(-128, 128, (m, k), dtype=torch.int8)
    b = torch.randint(-128, 128, (k, n), dtype=torch.int8)
    want = exact(a, b)
    for left in (a, a.t().contiguous().t()):
        for right in (b, b.t().contiguous().t()):
            for product in (safe_int_mm, int_matmul):
                got = product(left, right)
                assert got.dtype is torch.int32
                assert torch.equal(got, want)


def test_sums_beyond_float32() -> None:
    """A float32 product is wrong from K * 127**2 > 2**24 on."""
    a, b = torch.full((1, 4096), 127, dtype=torch.int8), torch.full((4096, 1), 127, dtype=torch.int8)
    a[0, 0] = 1
    want = 127 + 4095 * 127 * 127
    assert int(a.float() @ b.float()) != want
    assert int(safe_int_mm(a, b)) == want
    assert int(torch.compile(safe_int_mm, fullgraph=True, backend="aot_eager")(a, b)) == want


def test_other_integers() -> None:
    a = torch.randint(0, 256, (3, 9), dtype=torch.uint8)
    b = torch.randint(-128, 128, (9, 4), dtype=torch.int8)
    assert torch.equal(safe_int_mm(a, b), exact(a, b))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled(dtype: torch.dtype) -> None:
    a = torch.randint(-128, 128, (5, 40), dtype=torch.int8)
    b = torch.randint(-128, 128, (40, 6), dtype=torch.int8)
    scale = torch.rand(5, 1).to(dtype)
    for s in (scale, scale[:1]):
        got = int_scaled_matmul(a, b, s)
        assert got.dtype is dtype
        assert torch.equal(got, exact(a, b).to(dtype) * s)


def test_errors() -> None:
    a, b = torch.ones(5, 40, dtype=torch.int8), torch.ones(40, 6, dtype=torch.int8)
    with pytest.raises(AssertionError, match="on the same device"):
        safe_int_mm(a, b.to("meta"))
    for scale in (torch.ones(5), torch.ones(4, 1), torch.ones(5, 2), torch.ones(5, 6)[:, :1]):
        with pytest.raises(AssertionError):
            int_scaled_matmul(a, b, scale)
    with pytest.raises(AssertionError, match="cannot multiply"):
        int_scaled_matmul(a, b.t(), torch.ones(5, 1))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("m", "k", "n"), SHAPES)
def test_exact_on_cuda(m: int, k: int, n: int) -> None:
    a = torch.randint(-128, 128, (m, k), dtype=torch.int8)
    b = torch.randint(-128, 128, (k, n), dtype=torch.int8)
    for right in (b.cuda(), b.cuda().t().contiguous().t()):
        assert torch.equal(safe_int_mm(a.cuda(), right).cpu(), exact(a, b))
