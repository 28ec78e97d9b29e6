"""Training with 2:4 sparse weights or activations: pruned at each step, with straight-through gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "SemiSparseActivationLinear", "SemiSparseLinear", "semi_structured_sparsify", "semi_structured_sparsify_like",
    "swap_linear_with_semi_sparse_linear", "swap_semi_sparse_linear_with_linear",
]  # fmt: skip


def _tile_mask(x: Tensor) -> Tensor:
    """True for the kept elements of a matrix: in each tile of 4 x 4, at most two of each row and of each column.

    As in torch's kernel the elements of a tile are taken from the largest magnitude down, unless their row or column
    already has two.
    """
    rows, columns = x.shape
    tiles = x.abs().reshape(rows // 4, 4, columns // 4, 4).transpose(1, 2).reshape(-1, 16)
    order = tiles.argsort(dim=1, descending=True, stable=True)
    keep = torch.zeros_like(tiles, dtype=torch.bool)
    in_row, in_column = (torch.zeros(len(tiles), 4, dtype=torch.int8, device=x.device) for _ in range(2))
    for rank in range(16):
        at = order[:, rank : rank + 1]
        row, column = at // 4, at % 4
        fits = (in_row.gather(1, row) < 2) & (in_column.gather(1, column) < 2)
        keep.scatter_(1, at, fits)
        in_row.scatter_add_(1, row, fits.to(torch.int8))
        in_column.scatter_add_(1, column, fits.to(torch.int8))
    return keep.reshape(rows // 4, columns // 4, 4, 4).transpose(1, 2).reshape(rows, columns)


class _Sparsify(torch.autograd.Function):
    """x * mask; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor) -> Tensor:
        return x * mask

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None]:
        return gy, None


def semi_structured_sparsify(x: Tensor, algo: str = "", backend: str = "cutlass") -> Tensor:
    """A matrix pruned so that it and its transpose are 2:4 sparse; the gradient is that of the result.

    The result is dense, with zeros, on every device. backend, algo: which kernel of torch would prune it; the default
    algorithm is used. Raises ValueError unless x is a matrix whose sizes are multiples of 4.
    """
    if backend not in ("cutlass", "cusparselt"):
        raise ValueError(f"backend must be 'cutlass' or 'cusparselt', got {backend!r}")
    if x.ndim != 2 or x.shape[0] % 4 or x.shape[1] % 4:
        raise ValueError(
            f"semi_structured_sparsify needs a matrix with sizes that are multiples of 4, got {list(x.shape)}"
        )
    return _Sparsify.apply(x, _tile_mask(x.detach()))


def semi_structured_sparsify_like(x: Tensor, pattern: Tensor, gradient: Any = None) -> Tensor:
    """x, zero where ``pattern`` is. gradient: "STE" passes the gradient unchanged, else it is masked too."""
    mask = pattern != 0
    return _Sparsify.apply(x, mask) if getattr(gradient, "name", gradient) == "STE" else x * mask


class _SemiSparse(nn.Linear):
    @classmethod
    def from_dense(cls, linear: nn.Linear) -> Any:
        """A layer of this class with the weight and bias of another."""
        return _with_parameters(cls, linear)

    @classmethod
    def to_dense(cls, semi_sparse_linear: nn.Linear) -> nn.Linear:
        """A plain layer with the same parameters, not pruned."""
        return _with_parameters(nn.Linear, semi_sparse_linear)


def _with_parameters(cls: Any, linear: nn.Linear) -> Any:
    new = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
    new.weight, new.bias = linear.weight, linear.bias
    new.train(linear.training)
    return new


class SemiSparseLinear(_SemiSparse):
    """A linear layer that prunes its weight at each call, see :func:`semi_structured_sparsify`."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, semi_structured_sparsify(self.weight, backend="cusparselt"), self.bias)


class SemiSparseActivationLinear(_SemiSparse):
    """A linear layer that prunes its input at each call; the number of tokens must be a multiple of 4."""

    def forward(self, x: Tensor) -> Tensor:
        rows = semi_structured_sparsify(x.reshape(-1, x.shape[-1]), backend="cusparselt")
        return nn.functional.linear(rows.view(x.shape), self.weight, self.bias)


def swap_linear_with_semi_sparse_linear(model: nn.Module, config: Mapping[str, Any], current: str = "") -> None:
    """Replace the linear layers named in ``config`` (full name -> class) by a layer of that class, in place."""
    for name, child in list(model.named_children()):
        fqn = f"{current}.{name}" if current else name
        if isinstance(child, nn.Linear):
            if fqn in config:
                setattr(model, name, config[fqn].from_dense(child))
        else:
            swap_linear_with_semi_sparse_linear(child, config, fqn)


def swap_semi_sparse_linear_with_linear(model: nn.Module, current: str = "") -> None:
    """Undo :func:`swap_linear_with_semi_sparse_linear`, in place."""
    for name, child in list(model.named_children()):
        if isinstance(child, _SemiSparse):
            setattr(model, name, child.to_dense(child))
        else:
            swap_semi_sparse_linear_with_linear(child, name)
