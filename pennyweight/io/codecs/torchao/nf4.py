"""torchao's NF4Tensor as stored: QLoRA's 4-bit normal floats.

A weight from it has torchao's table of four-digit numbers (format ``nf4_digits_*``). Its scales are quantized parts:
int8 codes under scales 1 / factor with the mean as their offset. torchao's blocks lie along the flattened weight, ours
along its axes: where a block of torchao is neither whole rows nor a part of one, its scale is stored for each of the
smaller blocks that fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....core import blocks
from ....core.formats import INT8, Format, all_formats, get_format
from ....core.numerics import Parts
from ....core.spec import QuantSpec
from ....core.tensor import AffineQuantizedTensor as QT
from .tensor_class import View, ready

DIGITS = "nf4_digits_"
_LEAST = (
    16  # elements of a block that is smaller than torchao's: fewer would need more memory for scales than for codes
)


@dataclass(frozen=True)
class SubclassTensorArgs:
    """The description of a tensor subclass, as in torchao."""

    original_shape: torch.Size
    original_strides: tuple[int, ...]
    storage_offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def describe(x: Tensor, shape: Sequence[int] | None = None) -> SubclassTensorArgs:
    """torchao's description of a tensor, or of one with its properties and another shape."""
    size = torch.Size(x.shape if shape is None else shape)
    strides = tuple(x.stride()) if shape is None else tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
    return SubclassTensorArgs(size, strides, 0, x.dtype, x.device, x.requires_grad)


def build(
    tensor_meta: Any, block_size: int, n_blocks: int, scaler_block_size: int, quantized_scalers: Tensor,
    quantization_factor: Tensor, scaler_mean: Tensor, quantized_data: Tensor, nf4: Tensor,
) -> QT:  # fmt: skip
    """scaler = quantized_scalers / quantization_factor + scaler_mean; the first of two codes in a byte is high.

    Raises ValueError for another table of numbers, for parts of other sizes, and for blocks that leave fewer than
    16 elements of a row under one scale.
    """
    shape, dtype = tuple(tensor_meta.original_shape), tensor_meta.dtype
    elements = math.prod(shape)
    sizes = {
        "quantized_data": (quantized_data, elements // 2), "quantized_scalers": (quantized_scalers, n_blocks),
        "quantization_factor": (quantization_factor, n_blocks // scaler_block_size),
    }  # fmt: skip
    if n_blocks * block_size != elements or any(t.numel() != n for t, n in sizes.values()):
        found = ", ".join(f"{name} of {t.numel()}, expected {n}" for name, (t, n) in sizes.items())
        raise ValueError(f"NF4Tensor {list(shape)} in {n_blocks} blocks of {block_size}: {found}")
    block, inner = _fit(shape, block_size, scaler_block_size)
    counts = blocks.counts(block, shape)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    scale = reciprocal(quantization_factor.flatten(), wide)
    outer = blocks.counts(inner, counts)
    offset = scaler_mean.to(wide).reshape(-1).expand(scale.numel() if scaler_mean.numel() == 1 else -1)
    parts = Parts(
        unpack_pairs(quantized_data.flatten()).reshape(shape),
        Parts(
            _repeat(quantized_scalers.flatten(), math.prod(counts)).reshape(counts),
            _repeat(scale, math.prod(outer)).reshape(outer), None,
            _repeat(offset, math.prod(outer)).reshape(outer).contiguous(),
        ),
    )  # fmt: skip
    spec = QuantSpec(_table(nf4, dtype), block, scale=QuantSpec(INT8, inner, scale=wide, offset=wide))
    w = QT(parts, spec, shape, dtype)
    w = ready(w) if w.ndim == 2 and not w.is_meta else w.to_layout("bits")
    return w.requires_grad_(bool(getattr(tensor_meta, "requires_grad", False)))  # type: ignore[return-value]


def unpack_pairs(data: Tensor) -> Tensor:
    """Inverse of :func:`pack_pairs`."""
    return torch.stack([data >> 4, data & 15], -1).flatten()


def reciprocal(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale 1 / factor in ``dtype``, such that 1 / scale, rounded to the dtype of the factor, is the factor again.

    1 / x in float32 is not invertible: of the numbers next to the quotient, one is the scale from which torchao
    computed the factor.
    """
    scale = 1.0 / factor.to(dtype)
    if factor.dtype.itemsize == 2 or factor.is_meta:
        return scale
    for toward in (torch.inf, -torch.inf):
        near = torch.nextafter(scale, torch.full_like(scale, toward))
        scale = torch.where((1.0 / scale != factor) & (1.0 / near == factor), near, scale)
    return scale


def _table(nf4: Tensor, dtype: torch.dtype) -> Format:
    """Our format with these sixteen numbers. Raises ValueError if there is none."""
    if nf4.is_meta or isinstance(nf4, torch._subclasses.FakeTensor):
        kind = dtype if dtype.itemsize == 2 else torch.float32
        return get_format(DIGITS + str(kind).removeprefix("torch."))
    known = (fmt for fmt in all_formats() if fmt.kind == "table" and len(fmt.values) == 16)
    fmt = next((f for f in known if f.values == tuple(nf4.float().tolist())), None)
    if fmt is None:
        raise ValueError(f"NF4Tensor with an unsupported table: {nf4.tolist()}")
    return fmt


def _fit(shape: tuple[int, ...], block: int, scaler_block: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Our blocks of elements and of scales, each as large as torchao's or, where those cross rows, a divisor."""
    ours = _block(shape, block)
    if math.prod(ours) < min(block, _LEAST):
        raise ValueError(
            f"NF4 {list(shape)} in blocks of {block}: rows of {shape[-1]} share blocks of only {math.prod(ours)}; "
            f"use a block_size that divides {shape[-1]} or is a multiple of it"
        )
    return ours, _block(blocks.counts(ours, shape), scaler_block * (block // math.prod(ours)))


def _block(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """``size`` consecutive elements of the flattened shape as a block; if they are no block, a divisor of them."""
    n = shape[-1]
    if n % size == 0:
        return (size,)
    if len(shape) == 2 and size % n == 0 and shape[0] % (size // n) == 0:
        return (size // n, n)
    return (math.gcd(n, size),)


def _repeat(t: Tensor, count: int) -> Tensor:
    """Each number of a flat tensor repeated, to ``count`` in all."""
    return t if t.numel() == count else t.repeat_interleave(count // t.numel())


class NF4Tensor(View):
    """QLoRA's NF4: blocks of 64 codes of the flattened tensor; their scales, minus the mean, in int8."""

    tensor_data_names = ["quantized_scalers", "quantization_factor", "scaler_mean", "quantized_data", "nf4"]  # noqa: RUF012

    holds = staticmethod(lambda w: w.spec.format.name.startswith("nf4"))

    @classmethod
    def build(
        cls, tensor_meta: Any, block_size: int, n_blocks: int, scaler_block_size: int, quantized_scalers: Tensor,
        quantization_factor: Tensor, scaler_mean: Tensor, quantized_data: Tensor, nf4: Tensor,
    ) -> QT:  # fmt: skip
        """The weight of these parts, see :func:`build`."""
        return build(
            tensor_meta, block_size, n_blocks, scaler_block_size, quantized_scalers, quantization_factor, scaler_mean,
            quantized_data, nf4,
        )  # fmt: skip

    @classmethod
    def restore(cls, state: dict[str, Any], shell: Tensor) -> QT:
        names = ("block_size", "n_blocks", "scaler_block_size", *cls.tensor_data_names)
        return cls.build(describe(shell), **{name: state[name] for name in names})
