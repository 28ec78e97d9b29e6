"""Int8LutTensor: int1 to int4 weights with int8 inputs, which torchao packs as lookup tables for ARM processors."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....core.tensor import AffineQuantizedTensor as QT
from ..class_view import View, ready
from ..int8_float8_views import IntxUnpackedToInt8Tensor

__all__ = ["Int8LutTensor"]


class Int8LutTensor(View):
    """The weights of IntxUnpackedToInt8Tensor with int8 inputs, packed for the kernel that runs here."""

    tensor_data_names = ["packed_weights"]  # noqa: RUF012
    tensor_attribute_names = ["bit_width", "block_size", "shape", "dtype", "packed_weights_has_bias"]  # noqa: RUF012

    @staticmethod
    def holds(w: QT) -> bool:
        return IntxUnpackedToInt8Tensor.holds(w) and w.act is not None and w.spec.format.bits <= 4

    @classmethod
    def build(cls, *args: Any, **kwargs: Any) -> QT:
        """Raises NotImplementedError: the parts are those that torchao packed for one processor."""
        raise NotImplementedError(
            "Int8LutTensor is packed for ARM processors: load it with torchao there, save its dequantized weights, and "
            "quantize them; or Int8LutTensor.from_intx_unpacked_to_int8_tensor(weight)"
        )

    @classmethod
    def from_intx_unpacked_to_int8_tensor(cls, tensor: QT, *, bias: Tensor | None = None) -> QT:
        """The weight packed for this processor. Raises AssertionError unless it has int8 inputs per token and at most
        4 bits, NotImplementedError for a bias: keep it in the layer."""
        if bias is not None:
            raise NotImplementedError("Int8LutTensor with a bias: keep the bias in the layer")
        assert cls.holds(tensor), (
            f"needs an IntxUnpackedToInt8Tensor of 1 to 4 bits with INT8_ASYM_PER_TOKEN inputs, got {tensor.spec}"
        )
        return ready(tensor)
