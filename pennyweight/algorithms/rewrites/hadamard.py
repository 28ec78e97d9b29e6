"""Orthogonal matrices that spread outliers over all channels: Hadamard matrices of many sizes, with random signs."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...core.hadamard import sylvester


@lru_cache(maxsize=64)
def hadamard(n: int) -> Tensor | None:
    """A matrix of +1 and -1, int8 [n, n], with H H^T = n I; None if no construction here supports n.

    Sylvester: H(2) x H(n/2). Paley: n = q + 1 for a prime q = 3 mod 4, n = 2 (q + 1) for a prime q = 1 mod 4. Gives all
    n = 4, 8, .. 48 and most multiples of 4 thereafter, all multiples of 16 up to 672; none of odd n above 1.
    """
    if not has_hadamard(n):
        return None
    if n & (n - 1) == 0:
        return sylvester(n).to(torch.int8)
    if has_hadamard(n // 2):
        half = hadamard(n // 2)
        assert half is not None
        return torch.kron(hadamard(2), half)  # type: ignore[arg-type]
    if _is_prime(n - 1):
        core = torch.ones(n, n, dtype=torch.int8, device="cpu")
        core[1:, 1:] = _jacobsthal(n - 1) - torch.eye(n - 1, dtype=torch.int8, device="cpu")
        core[1:, 0] = -1
        core[1:, 1:] = -core[1:, 1:]
        return _checked(core)
    q = n // 2 - 1
    s = torch.ones(q + 1, q + 1, dtype=torch.int8, device="cpu")
    s[0, 0] = 0
    s[1:, 1:] = _jacobsthal(q)
    eye = torch.eye(q + 1, dtype=torch.int8, device="cpu")
    return _checked(
        torch.kron(s, hadamard(2)) + torch.kron(eye, torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8, device="cpu"))
    )


def has_hadamard(n: int) -> bool:
    """Whether :func:`hadamard` supports n."""
    if n in (1, 2):
        return True
    if n % 4 or n < 1:
        return False
    q = n // 2 - 1
    return has_hadamard(n // 2) or _is_prime(n - 1) or (q % 4 == 1 and _is_prime(q))


@lru_cache(maxsize=1024)
def hadamard_factors(n: int) -> tuple[int, int]:
    """(a, b) with a b = n, both sizes of Hadamard matrices and as close to each other as possible; (0, 0) if none."""
    found = [(a, n // a) for a in range(1, n + 1) if n % a == 0 and a * a <= n]
    good = [(a, b) for a, b in found if has_hadamard(a) and has_hadamard(b)]
    return max(good, default=(0, 0))


@lru_cache(maxsize=16)
def rotation(n: int, seed: int) -> Tensor:
    """A random orthogonal matrix, float64 [n, n]: a Hadamard matrix whose rows have random signs, over sqrt(n).

    If there is none for n: the Kronecker product of one for the largest power of two in n and a random rotation of the
    rest. Deterministic in n and seed; on every machine if it is a Hadamard matrix. Do not change it in place.
    """
    generator = torch.Generator().manual_seed(seed)
    signs = (torch.randint(0, 2, (n,), generator=generator, dtype=torch.int64, device="cpu") * 2 - 1).double()
    h = hadamard(n)
    if h is not None:
        return signs.unsqueeze(1) * h.double() / n**0.5
    two = n & -n
    h = hadamard(two)
    assert h is not None
    return signs.unsqueeze(1) * torch.kron(random_orthogonal(n // two, generator), h.double() / two**0.5)


def random_orthogonal(n: int, generator: torch.Generator) -> Tensor:
    """float64 [n, n], uniform over all rotations (QR of a Gaussian matrix, R's diagonal above 0)."""
    q, r = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64, device="cpu"))
    return (q * r.diagonal().sign()).contiguous()


@lru_cache(maxsize=16)
def mean_preserving_rotation(n: int, seed: int) -> Tensor:
    """A random orthogonal float64 [n, n] with (1, .. 1) as fixed point. It preserves the mean and the variance of a
    vector, so it commutes with LayerNorm."""
    if n == 1:
        return torch.ones(1, 1, dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    inner = torch.eye(n, dtype=torch.float64, device="cpu")
    inner[1:, 1:] = random_orthogonal(n - 1, generator)
    return householder(n) @ inner @ householder(n)


def householder(n: int) -> Tensor:
    """The reflection that swaps (1, 0, .. 0) and (1, .. 1) / sqrt(n): float64 [n, n], n > 1."""
    u = torch.full((n,), n**-0.5, dtype=torch.float64, device="cpu")
    u[0] -= 1
    return torch.eye(n, dtype=torch.float64, device="cpu") - 2 * torch.outer(u, u) / u.dot(u)


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


def _jacobsthal(q: int) -> Tensor:
    """int8 [q, q]: the Legendre symbol of j - i."""
    symbol = torch.full((q,), -1, dtype=torch.int8, device="cpu")
    symbol[[x * x % q for x in range(1, q)]] = 1
    symbol[0] = 0
    at = torch.arange(q, dtype=torch.int64, device="cpu")
    return symbol[(at.unsqueeze(0) - at.unsqueeze(1)) % q]


def _checked(h: Tensor) -> Tensor:
    n = h.shape[0]
    if n > 1024:  # the constructions are proven; this checks their implementation
        return h
    wide = h.double()
    if not torch.equal(wide @ wide.t(), n * torch.eye(n, dtype=torch.float64, device="cpu")):
        raise AssertionError(f"the matrix of size {n} is not a Hadamard matrix")
    return h
