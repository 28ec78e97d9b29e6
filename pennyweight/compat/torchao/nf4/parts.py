"""An NF4 weight of ours from torchao's parts, and its parts under torchao's names.

A weight made or loaded here has torchao's table of four-digit numbers (format ``nf4_digits_*``), by which operators.py
recognizes it. Its scales are quantized parts: int8 codes under scales 1 / factor with the
mean as their offset. torchao's blocks lie along the flattened weight, ours along its axes: where a block of torchao is
neither whole rows nor a part of one, its scale is stored for each of the smaller blocks that fit.
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
from ....core.tensor import check_finite
from ..class_view import plain_codes, ready
from ..qparams import require
from . import scalers

__all__ = ["SubclassTensorArgs"]

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


def is_torchao(w: Any) -> bool:
    """Whether w is an NF4 weight with torchao's numbers."""
    return isinstance(w, QT) and w.spec.format.name.startswith(DIGITS)


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
    scale = scalers.reciprocal(quantization_factor.flatten(), wide)
    outer = blocks.counts(inner, counts)
    offset = scaler_mean.to(wide).reshape(-1).expand(scale.numel() if scaler_mean.numel() == 1 else -1)
    parts = Parts(
        scalers.unpack_pairs(quantized_data.flatten()).reshape(shape),
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


@torch.no_grad()
def quantize(input_tensor: Tensor, block_size: int, scaler_block_size: int) -> QT:
    """torchao's numbers for a weight of one or two axes.

    Raises AssertionError for more axes and for partial blocks, ValueError for NaN or inf.
    """
    x = input_tensor
    require(x.dim() <= 2, f"expect input tensor dim <= 2 but got dim = {x.dim()}")
    check_finite(x.detach(), "to_nf4")
    flat = x.detach().dequantize() if isinstance(x, QT) else x.detach()
    flat = flat.flatten()
    q, factor, mean = scalers.double_quantize_scalers(flat, block_size, scaler_block_size)
    nf4 = scalers.normal_floats(x.dtype, x.device)
    n_blocks = flat.numel() // block_size
    data = scalers.convert_to_norm_float_weight(flat, n_blocks, block_size, nf4)
    return build(describe(x), block_size, n_blocks, scaler_block_size, q, factor, mean, data, nf4)


def describe(x: Tensor, shape: Sequence[int] | None = None) -> SubclassTensorArgs:
    """torchao's description of a tensor, or of one with its properties and another shape."""
    size = torch.Size(x.shape if shape is None else shape)
    strides = tuple(x.stride()) if shape is None else tuple(math.prod(size[i + 1 :]) for i in range(len(size)))
    return SubclassTensorArgs(size, strides, 0, x.dtype, x.device, x.requires_grad)


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


# -- torchao's names of the parts --------------------------------------------------------------------------------------


def _nf4(w: QT, name: str) -> QuantSpec | None:
    """The spec of the scales, None if they are not quantized. Raises AttributeError for other formats."""
    if not w.spec.format.name.startswith("nf4"):
        raise AttributeError(f"{name}: an attribute of NF4 weights; this one is {w.spec}")
    return w.spec.scale if isinstance(w.spec.scale, QuantSpec) else None


def _scales(w: QT, name: str) -> QT:
    """The quantized scales. Raises AttributeError if the scales are not quantized."""
    if _nf4(w, name) is None or not isinstance(w.scale, QT):
        raise AttributeError(f"{name}: the scales of {w.spec} are not quantized; to_nf4 and NF4_DOUBLE quantize them")
    return w.scale


def block_size(w: QT) -> int:
    """Elements that share a scale."""
    return math.prod(blocks.resolve(w.spec.block, w.stored_shape))


def scaler_block_size(w: QT) -> int:
    """Scales that share a factor."""
    scale = _scales(w, "scaler_block_size")
    return math.prod(blocks.resolve(scale.spec.block, scale.shape))


def quantized_scalers(w: QT) -> Tensor:
    """int8, one per block, in the order of the flattened weight."""
    return _scales(w, "quantized_scalers").codes.flatten()


def quantization_factor(w: QT) -> Tensor:
    """One per block of scalers, in the dtype of the weight."""
    scale: Any = _scales(w, "quantization_factor").scale
    return (1.0 / scale).to(w.dtype).flatten()


def scaler_mean(w: QT) -> Tensor:
    """One number; one per block of scalers if they differ, as after a write in place."""
    offset: Any = _scales(w, "scaler_mean").offset
    offset = offset.to(w.dtype).flatten()
    return offset[0] if offset.is_meta or bool((offset == offset[0]).all()) else offset


def quantized_data(w: QT) -> Tensor:
    """Two codes per byte, the first in the high half."""
    _nf4(w, "quantized_data")
    codes = plain_codes(w if w.axes is None else w.with_(axes=None, shape=w.stored_shape))
    return scalers.pack_pairs(codes.flatten())


def nf4(w: QT) -> Tensor:
    """The sixteen numbers."""
    _nf4(w, "nf4")
    return torch.tensor(w.spec.format.values, dtype=w.dtype, device=w.device)


def dequantize_scalers(w: QT, input_tensor: Tensor, quantization_factor: Tensor, scaler_block_size: int) -> Tensor:
    """input_tensor / quantization_factor + scaler_mean, in the dtype of the weight."""
    return scalers.dequantize_scalers(
        input_tensor, quantization_factor, scaler_mean(w), scaler_block_size, w.dtype
    )  # fmt: skip


def get_original_weight(w: QT) -> Tensor:
    """The dequantized weight, without a gradient."""
    return w.detach().dequantize()  # type: ignore[attr-defined]


ATTRIBUTES = (
    scaler_block_size, quantized_scalers, quantization_factor, scaler_mean, quantized_data, nf4,
)  # fmt: skip
for _get in ATTRIBUTES:
    setattr(QT, _get.__name__, property(_get, doc=_get.__doc__))
QT.dequantize_scalers = dequantize_scalers  # type: ignore[attr-defined]
QT.get_original_weight = get_original_weight  # type: ignore[attr-defined]
