"""torchao.prototype.spinquant.hadamard_utils: Hadamard transforms of activations and weights.

    matmul_hadU(x, hadK, K) = x (hadK^T x H) / sqrt(n),  n = K 2^m, H of Sylvester's [2^m, 2^m]

For powers of two the numbers are torchao's; other hadK are our own matrices, whose signs differ from its tables.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pennyweight.algorithms.rewrites.hadamard import hadamard, has_hadamard

__all__ = [
    "apply_exact_had_to_linear", "get_hadK", "hadamard_matrix", "is_pow2", "matmul_hadU", "matmul_hadU_fast",
    "matmul_hadU_slow", "random_hadamard_matrix",
]  # fmt: skip


def _table(n: int) -> Tensor:
    """A Hadamard matrix of +1 and -1, float32 [n, n]."""
    found = hadamard(n)
    assert found is not None
    return found.float()


def is_pow2(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


def get_hadK(n: int, transpose: bool = False) -> tuple[Tensor, int]:
    """(a Hadamard matrix [K, K], K) with n / K a power of two: the smallest K there is, ([[1]], 1) for powers of two.

    Raises AssertionError for a size without one: odd factors above 1 need a multiple of 4.
    """
    odd = n // (n & -n) if n > 0 else 0
    k = (
        next((odd << i for i in range(n.bit_length()) if n % (odd << i) == 0 and has_hadamard(odd << i)), 0)
        if odd
        else 0
    )
    assert k, f"there is no Hadamard matrix here for {n}; sizes are powers of two times 12, 20, 28, 36, 40, 44, 60, .."
    found = _table(k)
    return (found.t() if transpose else found), k


def _sylvester(x: Tensor) -> Tensor:
    """x H along the last axis, a power of two."""
    n, step = x.shape[-1], 1
    while step < n:
        pairs = x.unflatten(-1, (n // (2 * step), 2, step))
        first, second = pairs.unbind(-2)
        x = torch.stack([first + second, first - second], -2).flatten(-3)
        step *= 2
    return x


def matmul_hadU_slow(X: Tensor, hadK: Tensor, K: int) -> Tensor:
    """The transform of each row of X [.., n], in X's dtype."""
    n = X.shape[-1]
    y = _sylvester(X.reshape(-1, K, n // K))
    if K > 1:
        y = hadK.to(y) @ y
    return y.reshape(X.shape) / torch.tensor(n).sqrt()


matmul_hadU = matmul_hadU_fast = matmul_hadU_slow


def random_hadamard_matrix(size: int, device: Any, seed: int = 0) -> Tensor:
    """An orthogonal float64 [size, size]: the transform with random signs of its rows."""
    generator = torch.Generator(device=device).manual_seed(seed)
    signs = torch.randint(0, 2, (size,), generator=generator, device=device).to(torch.float64) * 2 - 1
    return matmul_hadU_slow(torch.diag(signs), *get_hadK(size)).to(device)


def hadamard_matrix(size: int, device: Any) -> Tensor:
    """The transform as an orthogonal float32 [size, size]."""
    return matmul_hadU_slow(torch.eye(size, dtype=torch.float32, device="cpu"), *get_hadK(size)).to(device)


@torch.no_grad()
def apply_exact_had_to_linear(
    module: nn.Linear, had_dim: int = -1, output: bool = False, R2: Tensor | None = None
) -> None:
    """Rotate the inputs of a linear layer in place, or with ``output`` its outputs, bias included.

    had_dim  -1: the whole axis; else each ``had_dim`` neighbours, a power of two, by R2 [had_dim, had_dim] if given
    """
    assert isinstance(module, nn.Linear), f"expected nn.Linear, got {type(module).__name__}"
    assert had_dim == -1 or is_pow2(had_dim), "Hadamard dimension must be a power of 2!"

    def rotate(x: Tensor) -> Tensor:
        if had_dim == -1:
            return matmul_hadU(x.float(), *get_hadK(x.shape[-1]))
        r = hadamard_matrix(had_dim, x.device) if R2 is None else R2
        return (x.float().to(torch.float64).unflatten(-1, (-1, had_dim)) @ r.to(x.device, torch.float64)).flatten(-2)

    w = module.weight
    w.data = (rotate(w.data.t()).t() if output else rotate(w.data)).to(w.dtype).contiguous()
    if output and module.bias is not None:
        module.bias.data = rotate(module.bias.data).to(module.bias.dtype)
