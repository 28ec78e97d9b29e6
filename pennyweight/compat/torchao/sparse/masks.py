"""Masks of N:M sparsity, and random sparse matrices."""

from __future__ import annotations

import torch
from torch import Tensor

from ....algorithms.sparsify import SparsityPattern

__all__ = ["create_block_sparse_tensor", "create_semi_structured_tensor", "inject_24", "mask_creator"]


def mask_creator(tensor: Tensor, N: int = 2, M: int = 4) -> Tensor:
    """1 for the N largest magnitudes of each M consecutive elements, else 0; float32, in the shape of the tensor.

    Raises ValueError if the number of elements is not a multiple of M.
    """
    if tensor.numel() % M:
        raise ValueError(f"Tensor of size {tensor.shape} can't be evenly divided into {M} groups")
    if N >= M:
        return torch.ones(tensor.shape, device=tensor.device, dtype=torch.float32)
    if N <= 0:
        return torch.zeros(tensor.shape, device=tensor.device, dtype=torch.float32)
    keep = SparsityPattern(f"{N}:{M}", N, M).keep(tensor.detach().abs().reshape(-1, M))
    return keep.to(torch.float32).reshape(tensor.shape)


def inject_24(w: Tensor, size_k: int, size_n: int) -> tuple[Tensor, Tensor]:
    """(w with two zeros in every four elements of each column, contiguous; its mask, bool). w: [size_k, size_n]."""
    if tuple(w.shape) != (size_k, size_n):
        raise ValueError(f"inject_24: w is {list(w.shape)}, not [{size_k}, {size_n}]")
    mask = mask_creator(w.t()).t().bool()
    return (mask * w).contiguous(), mask.contiguous()


def create_block_sparse_tensor(
    M: int, N: int, blocksize: int, sparsity: float, dtype: torch.dtype, device: torch.device | str | None = None
) -> Tensor:
    """[M, N] of ones with the fraction ``sparsity`` of its blocks zero, at random. device: default CUDA if any."""
    if not 0 <= sparsity <= 1:
        raise AssertionError(f"sparsity should be a value between 0 and 1, got {sparsity}")
    kept = torch.bernoulli(torch.full((M // blocksize, N // blocksize), 1 - sparsity, dtype=dtype))
    return kept.repeat_interleave(blocksize, 0).repeat_interleave(blocksize, 1).contiguous().to(_device(device))


def create_semi_structured_tensor(
    r: int, c: int, dtype: torch.dtype, device: torch.device | str | None = None
) -> Tensor:
    """[r, c] with one random number from 1 to 2 in each two elements, the other zero. device: as above."""
    kept = torch.nn.functional.one_hot(torch.randint(0, 2, (r * c // 2,)), 2).reshape(r, c).to(_device(device))
    return (kept + torch.rand(r, c, device=kept.device) * kept).to(dtype)


def _device(device: torch.device | str | None) -> torch.device | str:
    return device if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
