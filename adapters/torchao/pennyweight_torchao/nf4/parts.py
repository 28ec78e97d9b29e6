"""NF4 weights from floats as torchao makes them, and their parts under torchao's names."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pennyweight.core import blocks
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.core.tensor import check_finite
from pennyweight.io.codecs.torchao.nf4 import DIGITS, SubclassTensorArgs, build, describe
from pennyweight.io.codecs.torchao.tensor_class import plain_codes

from ..qparams import require
from . import scalers

__all__ = ["SubclassTensorArgs"]


def is_torchao(w: Any) -> bool:
    """Whether w is an NF4 weight with torchao's numbers."""
    return isinstance(w, QT) and w.spec.format.name.startswith(DIGITS)


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
