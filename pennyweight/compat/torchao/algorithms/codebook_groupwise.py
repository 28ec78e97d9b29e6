"""torchao.prototype.quantization.codebook_utils and codebook_groupwise (0.13 on): one lookup table per group of rows or
columns, with or without scales.

lut_block_shape  [rows, -1]: a table for these rows; [-1, columns]: for these columns
scale_block_shape  [1, columns]: a scale for these columns of a row; only with tables for rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ....planning.configs import AOBaseConfig
from ....planning.module_handlers import register_quantize_module_handler
from .codebook import choose_qparams_codebook, dequantize_codebook, quantize_codebook
from .codebook_coreml import BITS, CodebookQuantizedTensor, choose_qparams_and_quantize_codebook_coreml
from .codebook_coreml import dequantize_codebook as dequantize_tables

__all__ = [
    "GroupwiseLutWeightConfig", "block_shape_to_group_size", "dequantize_dispatch", "dequantize_with_flexible_grouping",
    "group_size_to_block_shapes", "load_quantized_data", "quantize_dispatch", "quantize_flexible_grouping",
    "save_quantized_data",
]  # fmt: skip


def block_shape_to_group_size(block_shape: Sequence[int], tensor_shape: Sequence[int]) -> int:
    """Elements of a block; -1 is the whole axis."""
    rows, columns = (n if b == -1 else b for b, n in zip(block_shape, tensor_shape, strict=True))
    return rows * columns


def group_size_to_block_shapes(lut_group_size: int, tensor_shape: Sequence[int]) -> list[int]:
    """[rows, -1] of a number of elements per table. Raises ValueError unless they are whole rows."""
    columns = tensor_shape[1]
    if lut_group_size % columns:
        raise ValueError(
            f"lut_group_size ({lut_group_size}) must be divisible by the number of columns ({columns}): whole rows"
        )
    return [lut_group_size // columns, -1]


def _rows_or_columns(block: Sequence[int], shape: Sequence[int]) -> None:
    assert len(shape) == 2, f"a matrix is expected, got {list(shape)}"
    assert len(block) == 2, f"lut_block_shape must have two elements, got {list(block)}"
    if -1 not in block:
        raise NotImplementedError(
            f"lut_block_shape pattern '{list(block)}' is not supported: use [rows, -1] or [-1, k]"
        )
    for name, b, n in zip(("rows", "cols"), block, shape, strict=True):
        assert b == -1 or n % b == 0, f"Tensor {name} ({n}) must be divisible by the group size ({b})."


@torch.no_grad()
def quantize_flexible_grouping(
    input_tensor: Tensor, lut_block_shape: Sequence[int], code_dtype: torch.dtype
) -> tuple[Tensor, Tensor, None]:
    """(codes [N, K] uint8, tables [groups, 2^bits], None) without scales."""
    _rows_or_columns(lut_block_shape, input_tensor.shape)
    tables, codes = choose_qparams_and_quantize_codebook_coreml(input_tensor, code_dtype, list(lut_block_shape))
    return codes, tables.reshape(-1, tables.shape[-2]), None


@torch.no_grad()
def dequantize_with_flexible_grouping(
    codes: Tensor, luts: Tensor, lut_block_shape: Sequence[int], code_dtype: torch.dtype,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """The inverse of :func:`quantize_flexible_grouping`."""
    _rows_or_columns(lut_block_shape, codes.shape)
    rows = lut_block_shape[0] != -1
    entries = luts.shape[-1]
    tables = luts.reshape((-1, 1, entries, 1) if rows else (1, -1, entries, 1))
    return dequantize_tables(codes, tables, BITS[code_dtype], list(lut_block_shape), output_dtype)


def _with_scales(lut_block_shape: Sequence[int], scale_block_shape: Sequence[int] | None) -> tuple[int, int]:
    """(rows per table, columns per scale). Raises ValueError for what has no scales."""
    if scale_block_shape is None:
        raise ValueError("'scale' backend requires a `scale_block_shape` to be set.")
    rows, columns = lut_block_shape
    if rows == -1 or columns != -1:
        raise ValueError(f"the 'scale' backend only supports tables for rows, [N, -1], got {list(lut_block_shape)}")
    if scale_block_shape[0] != 1:
        raise ValueError(f"the 'scale' backend only supports scales [1, K], got {list(scale_block_shape)}")
    return rows, scale_block_shape[1]


def _backend(name: str, scaled: bool) -> str:
    name = ("scale" if scaled else "coreml") if name == "auto" else name
    if name not in ("scale", "coreml"):
        raise ValueError(f"Unknown backend: {name}; use 'auto', 'scale' or 'coreml'")
    return name


@torch.no_grad()
def quantize_dispatch(
    input_tensor: Tensor, lut_block_shape: Sequence[int], code_dtype: torch.dtype,
    scale_block_shape: Sequence[int] | None = None, backend: str = "auto",
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(codes [N, K], tables [groups, 2^bits], scales of row after row or None).

    backend  "coreml": without scales; "scale": with; "auto": with, if ``scale_block_shape`` is given
    """
    if _backend(backend, scale_block_shape is not None) == "coreml":
        return quantize_flexible_grouping(input_tensor, lut_block_shape, code_dtype)
    rows, columns = _with_scales(lut_block_shape, scale_block_shape)
    _rows_or_columns(lut_block_shape, input_tensor.shape)
    codes, tables, scales = [], [], []
    for part in input_tensor.split(rows):
        table, scale = choose_qparams_codebook(part, (1, 1), columns, code_dtype)
        codes.append(quantize_codebook(part, table, scale, code_dtype=code_dtype))
        tables.append(table.flatten())
        scales.append(scale)
    return torch.cat(codes), torch.stack(tables), torch.cat(scales).flatten()


@torch.no_grad()
def dequantize_dispatch(
    codes: Tensor, luts: Tensor, scales: Tensor | None, lut_block_shape: Sequence[int],
    scale_block_shape: Sequence[int] | None = None, backend: str = "auto", code_dtype: torch.dtype = torch.int4,
    output_dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """The inverse of :func:`quantize_dispatch`. The number of bits is read from the tables."""
    if _backend(backend, scales is not None) == "coreml":
        dtype = getattr(torch, f"uint{luts.shape[-1].bit_length() - 1}")
        return dequantize_with_flexible_grouping(codes, luts, lut_block_shape, dtype, output_dtype)
    rows, columns = _with_scales(lut_block_shape, scale_block_shape)
    assert scales is not None, "the 'scale' backend needs the scales"
    every = scales.reshape(codes.shape[0], -1, 1)
    assert every.shape[1] * columns == codes.shape[1], f"{scales.numel()} scales do not fit {list(codes.shape)}"
    parts = zip(codes.split(rows), luts, every.split(rows), strict=True)
    return torch.cat([dequantize_codebook(c, t.reshape(-1, 1, 1), s, output_dtype) for c, t, s in parts])


def save_quantized_data(data: Mapping[str, Any], filepath: Any) -> None:
    """Save a dictionary of tensors with torch.save; creates the folder."""
    path = Path(filepath)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(dict(data), path)
    print(f"Saved quantization results to '{path}'")


def load_quantized_data(filepath: Any) -> dict[str, Any] | None:
    """The dictionary of a file, or None if there is no such file. Only tensors and plain values are read."""
    path = Path(filepath)
    if not path.exists():
        return None
    data = torch.load(path, weights_only=True)
    print(f"Loaded quantization results from cache: '{path}'")
    return data


@dataclass
class GroupwiseLutWeightConfig(AOBaseConfig):
    """Lookup tables of linear layers, without scales.

    code_dtype         torch.int1 to int8 or uint1 to uint8: 2^bits entries per table
    use_qdq_reference  keep float weights, with the values of the tables, in ``weight_dtype``

    torchao packs the codes for a kernel on ARM; here the weight is a CodebookQuantizedTensor, which computes the same
    everywhere. backend, target and cache_dir are accepted and ignored.
    """

    code_dtype: Any = torch.int4
    weight_dtype: torch.dtype = torch.float32
    backend: str = "auto"
    lut_block_shape: list[int] = field(default_factory=lambda: [2, -1])
    scale_block_shape: Any = None
    use_qdq_reference: bool = False
    target: str | None = None
    cache_dir: str | None = None
    has_scale: bool = False

    def __post_init__(self) -> None:
        if self.backend not in ("auto", "scale", "coreml"):
            raise ValueError(f"Invalid backend: {self.backend}")
        if not isinstance(self.lut_block_shape, list) or len(self.lut_block_shape) != 2:
            raise ValueError("`lut_block_shape` must be a list of length 2 (e.g., [N, -1] or [-1, K]).")
        if self.lut_block_shape.count(-1) != 1:
            raise ValueError(f"`lut_block_shape` must contain exactly one '-1', got {self.lut_block_shape}")
        if self.has_scale:
            raise ValueError("currently only support lut quantization without scale")

    def table_dtype(self) -> torch.dtype:
        """The unsigned dtype of ``code_dtype``'s bits."""
        return getattr(
            torch, "uint" + str(self.code_dtype).removeprefix("torch.").removeprefix("u").removeprefix("int")
        )


@register_quantize_module_handler(GroupwiseLutWeightConfig)
def _groupwise_lut_weight_transform(module: nn.Module, config: GroupwiseLutWeightConfig) -> nn.Module:
    weight: Any = module.weight
    made = CodebookQuantizedTensor.from_float(weight, config.table_dtype(), config.lut_block_shape)
    if config.use_qdq_reference:
        made = made.dequantize(config.weight_dtype).to(weight.dtype)  # type: ignore[assignment]
    module.weight = nn.Parameter(made, requires_grad=False)
    return module
