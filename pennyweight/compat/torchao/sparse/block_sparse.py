"""BlockSparseTensor: a matrix without its blocks of zeros, in the parts of torch's BSR layout.

A product with it is one batched product of the stored blocks, on any device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..base_tensor import TorchAOBaseTensor

__all__ = ["BlockSparseTensor", "blocksparse_addmm", "blocksparse_int_addmm", "bsr_to_dense"]

aten = torch.ops.aten


def _rows(crow_indices: Tensor, count: int) -> Tensor:
    """The row of blocks of each stored block."""
    each = crow_indices.diff()
    return torch.arange(len(each), device=each.device).repeat_interleave(each, output_size=count)


def bsr_to_dense(crow_indices: Tensor, col_indices: Tensor, values: Tensor, M: int, K: int) -> Tensor:
    """The dense matrix [M, K] of blocks: values [n, b, b], col_indices [n], crow_indices [M / b + 1]."""
    b = values.shape[-1]
    out = values.new_zeros(M // b, K // b, b, b)
    out[_rows(crow_indices, len(values)), col_indices] = values
    return out.transpose(1, 2).reshape(M, K)


def blocksparse_addmm(
    x_padded: Tensor, crow_indices: Tensor, col_indices: Tensor, values: Tensor, M: int, K: int, bias: None = None
) -> Tensor:
    """The sparse matrix [M, K] times x [K, N], without a bias: [M, N]."""
    if bias is not None:
        raise ValueError("blocksparse_addmm takes no bias; add it to the result")
    b, n = values.shape[-1], x_padded.shape[1]
    return _add_up(
        values, x_padded.reshape(K // b, b, n).index_select(0, col_indices), _rows(crow_indices, len(values)), M // b
    ).reshape(M, n)


def _add_up(a: Tensor, b: Tensor, to: Tensor, count: int) -> Tensor:
    """Products a_i b_i of matrices [n, .., ..], those with the same index ``to`` summed: [count, .., ..]. Sums of
    products are in float32 for narrower dtypes."""
    dtype = torch.promote_types(a.dtype, torch.float32)
    out = torch.zeros(count, a.shape[1], b.shape[2], dtype=dtype, device=a.device)
    return out.index_add_(0, to, torch.bmm(a.to(dtype), b.to(dtype))).to(b.dtype)


def blocksparse_int_addmm(
    crow_indices: Tensor, col_indices: Tensor, values: Tensor, A: Tensor, left_alpha: Tensor, right_alpha: Tensor
) -> Tensor:
    """The int8 sparse matrix [M, K] times A [K, N] of int8 codes, times left_alpha [M] and right_alpha [N]: [N, M] in
    bfloat16. Sums are exact in float64."""
    if values.dtype is not torch.int8:
        raise AssertionError(f"values must be int8, got {values.dtype}")
    rows = left_alpha.shape[-1]
    sums = blocksparse_addmm(A.double(), crow_indices, col_indices, values.double(), rows, A.shape[0])
    return (sums * left_alpha.reshape(-1, 1) * right_alpha.reshape(1, -1)).to(torch.bfloat16).t()


class BlockSparseTensor(TorchAOBaseTensor):
    """A matrix in square blocks of ``blocksize``, without those that are all zero.

    bsr_crow_indices  [rows / blocksize + 1], where each row of blocks begins
    bsr_col_indices   [n], bsr_values [n, blocksize, blocksize]: the stored blocks
    ``F.linear`` with it as the weight uses the stored blocks only, with a gradient for the input.
    """

    tensor_data_names = ["bsr_crow_indices", "bsr_col_indices", "bsr_values"]  # noqa: RUF012
    tensor_attribute_names = ["shape_", "blocksize"]  # noqa: RUF012

    bsr_crow_indices: Tensor
    bsr_col_indices: Tensor
    bsr_values: Tensor
    blocksize: int

    @staticmethod
    def __new__(
        cls, shape: Any, blocksize: int, bsr_crow_indices: Tensor | None, bsr_col_indices: Tensor | None,
        bsr_values: Tensor | None, requires_grad: bool = False,
    ) -> BlockSparseTensor:  # fmt: skip
        if bsr_values is None or bsr_crow_indices is None or bsr_col_indices is None:
            raise ValueError("No values passed to BlockSparseTensor: bsr_values and both indices must be provided!")
        self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=bsr_values.dtype, device=bsr_values.device, requires_grad=requires_grad
        )
        self.blocksize = blocksize
        self.bsr_crow_indices, self.bsr_col_indices = bsr_crow_indices, bsr_col_indices
        self.bsr_values = bsr_values
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{type(self).__name__}(shape={self.shape})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.tensor_data_names), (self.shape, self.requires_grad, self.blocksize)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], meta: Any, outer_size: Any, outer_stride: Any) -> Any:
        shape, requires_grad, blocksize = meta
        return cls(shape, blocksize, **inner, requires_grad=requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (tuple(self.shape), self.blocksize, *self._parts(), self.requires_grad)

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.bsr_crow_indices, self.bsr_col_indices, self.bsr_values

    @classmethod
    def from_dense(cls, dense_tensor: Tensor, blocksize: int) -> BlockSparseTensor:
        """The stored blocks of a matrix. Raises ValueError if the block size does not divide it."""
        if dense_tensor.ndim != 2 or any(n % blocksize for n in dense_tensor.shape):
            raise ValueError(
                f"BlockSparseTensor: blocks of {blocksize} do not divide a tensor of {list(dense_tensor.shape)}"
            )
        rows, columns = (n // blocksize for n in dense_tensor.shape)
        blocks = dense_tensor.detach().reshape(rows, blocksize, columns, blocksize).transpose(1, 2)
        used = (blocks != 0).flatten(2).any(-1)
        crow = torch.cat((used.new_zeros(1, dtype=torch.int64), used.sum(1).cumsum(0)))
        return cls(dense_tensor.shape, blocksize, crow, used.nonzero()[:, 1], blocks[used])

    def apply_fn_to_shard(self, func: Callable[[Tensor], Tensor]) -> BlockSparseTensor:
        """The same matrix with ``func`` of its three parts."""
        return type(self)(self.shape, self.blocksize, *map(func, self._parts()), self.requires_grad)

    def dequantize(self) -> Tensor:
        """The dense matrix."""
        return bsr_to_dense(*self._parts(), *self.shape)

    to_dense = dequantize  # type: ignore[assignment]

    def crow_indices(self) -> Tensor:
        return self.bsr_crow_indices.detach()

    def col_indices(self) -> Tensor:
        return self.bsr_col_indices.detach()

    def values(self) -> Tensor:
        return self.bsr_values.detach()

    def _nnz(self) -> int:
        return self.bsr_values.shape[0]


class _Linear(torch.autograd.Function):
    """x [N, K] times the transposed sparse weight. The weight has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, crow: Tensor, col: Tensor, values: Tensor, rows: int, columns: int) -> Tensor:
        ctx.save_for_backward(crow, col, values)
        ctx.sizes = rows, columns
        return blocksparse_addmm(x.t(), crow, col, values, rows, columns).t()

    @staticmethod
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        crow, col, values = ctx.saved_tensors
        rows, columns = ctx.sizes
        b = values.shape[-1]
        found = gy.reshape(-1, rows // b, b).index_select(1, _rows(crow, len(values))).transpose(0, 1)
        out = _add_up(found, values, col, columns // b)
        return out.transpose(0, 1).reshape(-1, columns), None, None, None, None, None


implements = BlockSparseTensor.implements
implements_torch_function = BlockSparseTensor.implements_torch_function


@implements_torch_function(torch.nn.functional.linear)
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
    x, w, *rest = args
    bias = rest[0] if rest else (kwargs or {}).get("bias")
    if not isinstance(w, BlockSparseTensor):
        raise NotImplementedError("F.linear takes a BlockSparseTensor as the weight, not as the input")
    out = _Linear.apply(x.reshape(-1, x.shape[-1]), *w._parts(), *w.shape).reshape(*x.shape[:-1], w.shape[0])
    return out if bias is None else out + bias


@implements([aten.detach.default, aten.alias.default])
def _detach(func: Any, types: Any, args: Any, kwargs: Any) -> BlockSparseTensor:
    return args[0].apply_fn_to_shard(Tensor.detach)


@implements([aten.clone.default])
def _clone(func: Any, types: Any, args: Any, kwargs: Any) -> BlockSparseTensor:
    return args[0].apply_fn_to_shard(Tensor.clone)


@implements([aten._to_copy.default])
def _to_copy(func: Any, types: Any, args: Any, kwargs: Any) -> BlockSparseTensor:
    w, device = args[0], kwargs.get("device")
    crow, col, values = (part.to(device) for part in w._parts())
    return type(w)(w.shape, w.blocksize, crow, col, values.to(kwargs.get("dtype")), w.requires_grad)
