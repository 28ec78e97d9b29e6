"""torchao.prototype.quantization.codebook: lookup tables found by k-means, over our own k-means.

A tensor is divided by its scales and cut into blocks [b1, .., bN]; each block is the entry ``codes`` of a codebook
[entries, b1, .., bN]. ``pennyweight.CodebookWeightOnlyConfig`` has a kernel of its own for blocks along a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....core import codebook as kmeans
from ....planning.configs import AOBaseConfig
from ....planning.module_handlers import register_quantize_module_handler
from ..base_tensor import TorchAOBaseTensor

__all__ = [
    "CodebookQuantizedTensor", "CodebookWeightOnlyConfig", "choose_qparams_codebook", "codebook_weight_only",
    "dequantize_codebook", "fit_kmeans", "function_detach", "function_requires_grad_", "implements_torch_function",
    "quantize_codebook",
]  # fmt: skip

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
BITS = {getattr(torch, f"uint{bits}"): bits for bits in range(1, 9)} | {torch.int32: 16}
LARGEST = 2**27  # elements of a weight that CodebookWeightOnlyConfig quantizes, as in torchao


def _blocks(x: Tensor, block_size: Sequence[int]) -> Tensor:
    """[numbers of blocks.., block sizes..] of x. Raises AssertionError for blocks that do not divide it."""
    assert len(block_size) == x.ndim, f"block_size {tuple(block_size)} must match the {x.ndim} axes of the input"
    for i, (n, b) in enumerate(zip(x.shape, block_size, strict=True)):
        assert n % b == 0, f"dimension {i} of input ({n}) must be divisible by block_size ({b})."
    split = x.reshape([size for n, b in zip(x.shape, block_size, strict=True) for size in (n // b, b)])
    return split.permute([*range(0, 2 * x.ndim, 2), *range(1, 2 * x.ndim, 2)])


def _scaled(x: Tensor, scales: Tensor, fn: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """fn(x, scales) with scales [.., K / scale_block_size, 1] spread over the last axis."""
    return fn(x.reshape(*x.shape[:-1], scales.shape[-2], -1), scales).reshape(x.shape)


def quantize_codebook(
    input: Tensor, codebook: Tensor, scales: Tensor, chunk_size: int = 1024, code_dtype: torch.dtype = torch.uint4
) -> Tensor:
    """Index of the nearest entry of each block of input / scales, [d1 / b1, ..]; uint8 for dtypes below a byte.

    codebook: [entries, b1, ..]; scales: [.., dN / scale_block_size, 1]. chunk_size is ignored: memory is bounded.
    """
    assert input.dtype in FLOATS, f"Unsupported input dtype: {input.dtype}"
    assert codebook.ndim == input.ndim + 1, f"codebook dim ({codebook.ndim}) must be input dim + 1 ({input.ndim + 1})"
    view = _blocks(_scaled(input, scales, torch.div), codebook.shape[1:])
    flat = view.reshape(*view.shape[: input.ndim], -1).float()
    codes = kmeans.nearest(flat, codebook.reshape(codebook.shape[0], -1).float())
    return codes.to(torch.uint8 if BITS.get(code_dtype, 16) < 8 else code_dtype)


def dequantize_codebook(
    codes: Tensor, codebook: Tensor, scales: Tensor, output_dtype: torch.dtype = torch.float32
) -> Tensor:
    """The inverse: entries of the codes times scales."""
    assert output_dtype in FLOATS, f"Unsupported output dtype: {output_dtype}"
    d, blocks = codes.ndim, codebook.shape[1:]
    found = codebook[codes.to(torch.int32)]  # [numbers of blocks.., block sizes..]
    x = found.permute([axis for i in range(d) for axis in (i, d + i)])
    x = x.reshape([n * b for n, b in zip(codes.shape, blocks, strict=True)])
    return _scaled(x, scales, torch.mul).to(output_dtype)


@torch.no_grad()
def choose_qparams_codebook(
    input_tensor: Tensor, block_size: Sequence[int], scale_block_size: int, code_dtype: torch.dtype,
    max_iter: int = 200, devices: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(codebook [2^bits, b1, ..], scales [.., dN / scale_block_size, 1]) by k-means; at most 64 rounds.

    scales: for blocks of one element the largest value of the scale block, else its norm; at least 1e-9
    """
    assert code_dtype in BITS, f"code_dtype must be one of {[*map(str, BITS)]}, got {code_dtype}"
    k = input_tensor.shape[-1]
    assert k % scale_block_size == 0, (
        f"input_features ({k}) must be divisible by scale_block_size ({scale_block_size})."
    )
    x = input_tensor.reshape(*input_tensor.shape[:-1], k // scale_block_size, scale_block_size)
    one = math.prod(block_size) == 1
    scales = x.amax(-1, keepdim=True) if one else torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    scales = scales.clamp(min=1e-9)
    view = _blocks((x / scales).reshape(input_tensor.shape), block_size)
    flat = view.reshape(-1, math.prod(block_size)).float()
    table = kmeans.fit(flat, 2 ** BITS[code_dtype], rounds=min(max_iter, 64))
    return table.reshape(-1, *block_size).to(input_tensor.dtype), scales


def fit_kmeans(
    data: Tensor, k: int, max_iter: int = 200, check_every: int = 10, rtol: float = 1e-6, atol: float = 1e-8,
    greedy_init: bool = True, block_size_vals: int = 2**30, devices: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(clusters [k, dim], index of each row's cluster, clusters[index]) of data [n, dim]. The result depends on nothing
    but the data; the arguments after max_iter are accepted and ignored."""
    clusters = kmeans.fit(data.float(), k, rounds=min(max_iter, 64)).to(data.dtype)
    index = kmeans.nearest(data.float(), clusters.float()).long()
    return clusters, index, clusters[index]


class CodebookQuantizedTensor(TorchAOBaseTensor):
    """codes [d1 / b1, ..] (uint8 below a byte), codebook [entries, b1, ..], scales; used dequantized."""

    tensor_data_names = ["codes", "codebook", "scales"]  # noqa: RUF012
    tensor_attribute_names: list[str] = []  # noqa: RUF012
    codes: Tensor
    codebook: Tensor
    scales: Tensor

    @staticmethod
    def __new__(
        cls: Any, codes: Tensor, codebook: Tensor, block_size: Sequence[int], scales: Tensor, shape: Any,
        dtype: torch.dtype | None = None, strides: Any = None,
    ) -> CodebookQuantizedTensor:  # fmt: skip
        more = {} if strides is None else {"strides": strides}
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[return-value]
            cls, shape, dtype=dtype or codebook.dtype, device=codes.device, requires_grad=False, **more
        )

    def __init__(
        self, codes: Tensor, codebook: Tensor, block_size: Sequence[int], scales: Tensor, shape: Any,
        dtype: torch.dtype | None = None, strides: Any = None,
    ) -> None:  # fmt: skip
        self.codes, self.codebook, self.scales, self.block_size = codes, codebook, scales, tuple(block_size)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "codebook", "scales"], (self.block_size, self.dtype)

    @classmethod
    def __tensor_unflatten__(
        cls, tensor_data_dict: Any, tensor_attributes: Any, outer_size: Any, outer_stride: Any
    ) -> Any:
        block_size, dtype = tensor_attributes
        data = tensor_data_dict
        return cls(data["codes"], data["codebook"], block_size, data["scales"], outer_size, dtype, outer_stride)

    def _apply_fn_to_data(self, fn: Callable[[Tensor], Tensor]) -> CodebookQuantizedTensor:
        return type(self)(
            fn(self.codes), fn(self.codebook), self.block_size, fn(self.scales), self.shape, dtype=self.dtype
        )

    def _to(self, device: Any, dtype: torch.dtype) -> CodebookQuantizedTensor:
        parts = (self.codes.to(device), self.codebook.to(device, dtype), self.scales.to(device, dtype))
        return type(self)(parts[0], parts[1], self.block_size, parts[2], self.shape, dtype)

    @classmethod
    def from_float(
        cls, input_tensor: Tensor, block_size: Sequence[int], code_dtype: torch.dtype, scale_block_size: int,
        chunk_size: int = 1024,
    ) -> CodebookQuantizedTensor:  # fmt: skip
        """Codebook and codes of a float tensor."""
        x = input_tensor.detach().float()
        table, scales = choose_qparams_codebook(x, block_size, scale_block_size, code_dtype)
        codes = quantize_codebook(x, table, scales, chunk_size, code_dtype)
        kept = input_tensor.dtype
        return cls(codes, table.to(kept), block_size, scales.to(kept), input_tensor.shape, dtype=kept)

    def dequantize(self, output_dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        return dequantize_codebook(self.codes, self.codebook, self.scales, output_dtype or self.dtype)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"CodebookQuantizedTensor({self._quantization_type()}, dtype={self.dtype})"

    def _quantization_type(self) -> str:
        return (
            f"shape={self.shape}, block_size={self.block_size}, codebook_size={self.codebook.shape[0]}, "
            f"device={self.device}, code_dtype={self.codes.dtype}"
        )


@CodebookQuantizedTensor.implements([torch.ops.aten._to_copy.default])
def _to_copy(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    w = args[0]
    return w._to(kwargs.get("device") or w.device, kwargs.get("dtype") or w.dtype)


@CodebookQuantizedTensor.implements_torch_function([F.linear, torch.ops.aten.linear.default])
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x = given["input"]
    return F.linear(x, given["weight"].dequantize(x.dtype), given.get("bias"))


@CodebookQuantizedTensor.implements([
    torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.t.default, torch.ops.aten.embedding.default,
])  # fmt: skip
def _dequantized(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    plain = [a.dequantize() if isinstance(a, CodebookQuantizedTensor) else a for a in args]
    return func(*plain, **kwargs)


def implements_torch_function(torch_function: Any) -> Callable[[Any], Any]:
    """Decorator: ``handler(*args, **kwargs)`` of a torch function for CodebookQuantizedTensor."""

    def add(handler: Any) -> Any:
        @CodebookQuantizedTensor.implements_torch_function([torch_function])
        def call(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            return handler(*args, **kwargs)

        return handler

    return add


def function_detach(tensor: CodebookQuantizedTensor, *args: Any, **kwargs: Any) -> CodebookQuantizedTensor:
    """``tensor.detach()``."""
    return tensor.detach()  # type: ignore[return-value]


def function_requires_grad_(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``tensor.requires_grad_(..)``."""
    return tensor.requires_grad_(*args, **kwargs)


@dataclass
class CodebookWeightOnlyConfig(AOBaseConfig):
    """Codebooks of linear layers: ``dtype`` of the codes, torch.uint1 to uint8 or int32 (65,536 entries).

    block_size        elements (of rows, of columns) that one code represents
    scale_block_size  columns that share a scale; None: a row
    """

    dtype: Any = torch.uint4
    block_size: tuple[int, int] = (1, 1)
    scale_block_size: int | None = None


codebook_weight_only = CodebookWeightOnlyConfig


@register_quantize_module_handler(CodebookWeightOnlyConfig)
def _codebook_weight_only_transform(module: nn.Module, config: CodebookWeightOnlyConfig) -> nn.Module:
    w: Any = module.weight
    if w.numel() <= LARGEST:
        columns = config.scale_block_size or w.shape[1]
        made = CodebookQuantizedTensor.from_float(w, config.block_size, config.dtype, columns)
        module.weight = nn.Parameter(made, requires_grad=False)
    return module


torch.serialization.add_safe_globals([CodebookQuantizedTensor])
