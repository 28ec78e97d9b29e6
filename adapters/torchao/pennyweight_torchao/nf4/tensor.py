"""NF4Tensor: torchao's QLoRA weight as a view of our tensor class."""

from __future__ import annotations

from torch import Tensor

from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs.torchao import nf4 as files

from .. import attributes
from . import operators, parts, scalers

__all__ = ["NF4Tensor", "to_nf4"]
assert operators.NF4_OPS_TABLE is not None  # weights of this kind have torchao's operators
assert attributes.ATTRIBUTES  # and attributes


class NF4Tensor(files.NF4Tensor):
    """QLoRA's NF4: blocks of 64 codes of the flattened tensor; their scales, minus the mean, in int8."""

    double_quantize_scalers = staticmethod(scalers.double_quantize_scalers)
    convert_to_norm_float_weight = staticmethod(scalers.convert_to_norm_float_weight)
    quantize_tensor_nearest = staticmethod(scalers.nearest)
    dequantize_scalers = staticmethod(parts.dequantize_scalers)
    get_original_weight = staticmethod(parts.get_original_weight)
    dequantize = staticmethod(lambda value, nf4: nf4[value])  # type: ignore[assignment]

    @classmethod
    def from_tensor(cls, input_tensor: Tensor, block_size: int = 64, scaler_block_size: int = 256) -> QT:
        """torchao's numbers for a weight, see :func:`.parts.quantize`."""
        return parts.quantize(input_tensor, block_size, scaler_block_size)


def to_nf4(tensor: Tensor, block_size: int = 64, scaler_block_size: int = 256) -> QT:
    """``tensor`` in 4-bit normal floats (QLoRA, Dettmers et al. 2023), with scales of 8 bits."""
    return parts.quantize(tensor, block_size, scaler_block_size)
