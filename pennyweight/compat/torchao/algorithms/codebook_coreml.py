"""torchao.prototype.quantization.codebook_coreml: scalar lookup tables as Core ML stores them, by our own k-means.

x[i, j] = codebook[i / b0, j / b1, codes[i, j], 0]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....core import codebook as kmeans
from ....planning.configs import AOBaseConfig
from ....planning.module_handlers import register_quantize_module_handler
from ..base_tensor import TorchAOBaseTensor
from .codebook import FLOATS

__all__ = [
    "CodebookQuantizedTensor", "CodebookWeightOnlyConfig", "choose_qparams_and_quantize_codebook_coreml",
    "dequantize_codebook",
]  # fmt: skip

BITS = {getattr(torch, f"uint{bits}"): bits for bits in range(1, 9)}


def _sizes(block_size: Sequence[int], shape: Sequence[int]) -> list[int]:
    assert len(block_size) == len(shape), f"block_size {list(block_size)} must match the axes of {list(shape)}"
    sizes = [n if b == -1 else b for b, n in zip(block_size, shape, strict=True)]
    for i, (b, n) in enumerate(zip(sizes, shape, strict=True)):
        assert b >= 1, f"block_size[{i}] must be positive or -1, got {b}"
        assert n % b == 0, f"block_size[{i}] must divide the shape: {n} is not divisible by {b}"
    return sizes


@torch.no_grad()
def choose_qparams_and_quantize_codebook_coreml(
    input_tensor: Tensor, code_dtype: torch.dtype, block_size: Sequence[int], force_kmeans1d: bool = False,
    cluster_dim: int = 1, vector_axis: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(tables [N / b0, K / b1, 2^bits, 1] float32, codes [N, K] uint8) of a matrix.

    block_size  rows and columns that share a table, -1 for all; at least one of them must be all
    force_kmeans1d, vector_axis  accepted and ignored: our k-means needs no package
    """
    assert code_dtype in BITS, f"code_dtype must be torch.uint1 to torch.uint8, got {code_dtype}"
    assert input_tensor.ndim == 2, "Currently only rank 2 tensors are supported"
    assert cluster_dim == 1, f"only cluster_dim == 1 is supported right now, got {cluster_dim}"
    (n, k), entries = input_tensor.shape, 2 ** BITS[code_dtype]
    rows, columns = _sizes(block_size, (n, k))
    assert rows == n or columns == k, f"block_size {list(block_size)} must span all rows or all columns of {[n, k]}"
    x = input_tensor.detach().float()
    tables = torch.empty(n // rows, k // columns, entries, 1, dtype=torch.float32, device=x.device)
    codes = torch.empty(n, k, dtype=torch.uint8, device=x.device)
    for i in range(n // rows):
        for j in range(k // columns):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            block = x[at].reshape(-1, 1)
            tables[i, j] = kmeans.fit(block, entries).sort(0).values
            codes[at] = kmeans.nearest(block, tables[i, j]).reshape(rows, columns)
    return tables, codes


def dequantize_codebook(
    codes: Tensor, codebook: Tensor, nbits: int, block_size: Sequence[int], output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """The numbers of the codes [d0, ..] in tables [d0 / b0, .., 2^nbits, vec]; [d0, .., vec], without a vec of 1."""
    assert output_dtype in FLOATS, f"Unsupported output dtype: {output_dtype}"
    assert 1 <= nbits <= 8, f"nbits must be in [1, 8], got {nbits}"
    sizes = _sizes(block_size, codes.shape)
    assert codebook.ndim == codes.ndim + 2, f"codebook must have {codes.ndim + 2} axes, got {list(codebook.shape)}"
    assert codebook.shape[-2] == 2**nbits, f"Codebook shape mismatch with nbits: {list(codebook.shape)}, {nbits}"
    groups = torch.meshgrid(
        *(
            torch.arange(n, device=codes.device, dtype=torch.int64) // b
            for n, b in zip(codes.shape, sizes, strict=True)
        ),
        indexing="ij",
    )
    x = codebook[(*groups, codes.to(torch.int64))]
    return (x.squeeze(-1) if x.shape[-1] == 1 else x).to(output_dtype)


class CodebookQuantizedTensor(TorchAOBaseTensor):
    """codes [N, K] uint8 and tables [N / b0, K / b1, 2^bits, 1]; used dequantized."""

    tensor_data_names = ["codes", "codebook"]  # noqa: RUF012
    tensor_attribute_names = ["code_dtype", "block_size", "shape", "dtype"]  # noqa: RUF012
    codes: Tensor
    codebook: Tensor

    @staticmethod
    def __new__(
        cls: Any, codes: Tensor, codebook: Tensor, code_dtype: torch.dtype, block_size: Sequence[int], shape: Any,
        dtype: torch.dtype | None = None,
    ) -> CodebookQuantizedTensor:  # fmt: skip
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[return-value]
            cls, shape, dtype=dtype or codebook.dtype, device=codes.device, requires_grad=False
        )

    def __init__(
        self, codes: Tensor, codebook: Tensor, code_dtype: torch.dtype, block_size: Sequence[int], shape: Any,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.codes, self.codebook, self.code_dtype, self.block_size = codes, codebook, code_dtype, list(block_size)

    @classmethod
    def from_float(
        cls, input_tensor: Tensor, code_dtype: torch.dtype, block_size: Sequence[int]
    ) -> CodebookQuantizedTensor:
        """Tables and codes of a matrix."""
        tables, codes = choose_qparams_and_quantize_codebook_coreml(input_tensor, code_dtype, block_size)
        return cls(codes, tables, code_dtype, block_size, input_tensor.shape, input_tensor.dtype)

    def dequantize(self, output_dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        bits = BITS[self.code_dtype]
        return dequantize_codebook(self.codes, self.codebook, bits, self.block_size, output_dtype or self.dtype)

    def _quantization_type(self) -> str:
        return (
            f"shape={self.shape}, codebook_shape={self.codebook.shape}, code_dtype={self.code_dtype}, "
            f"block_size={self.block_size}, device={self.device}"
        )


@CodebookQuantizedTensor.implements_torch_function([F.linear, torch.ops.aten.linear.default])
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x = given["input"]
    return F.linear(x, given["weight"].dequantize(x.dtype), given.get("bias"))


@CodebookQuantizedTensor.implements([torch.ops.aten.embedding.default])
def _embedding(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0].dequantize(), *args[1:], **kwargs)


@dataclass
class CodebookWeightOnlyConfig(AOBaseConfig):
    """Lookup tables of linear layers and embeddings: ``dtype`` torch.uint1 to uint8, ``block_size`` as above."""

    dtype: Any
    block_size: list[int]


@register_quantize_module_handler(CodebookWeightOnlyConfig)
def _codebook_weight_only_transform(module: nn.Module, config: CodebookWeightOnlyConfig) -> nn.Module:
    made = CodebookQuantizedTensor.from_float(module.weight, config.dtype, config.block_size)  # type: ignore[arg-type]
    module.weight = nn.Parameter(made, requires_grad=False)
    return module


torch.serialization.add_safe_globals([CodebookQuantizedTensor])
