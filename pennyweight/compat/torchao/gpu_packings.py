"""torchao's device-packed int4 and intx weight classes. Their values are those of the plain classes.

``from_hp`` gives the same weight as the plain class, packed for the kernel selected here; weights packed for another
device cannot be read, and constructing them from their parts raises an error.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ...core.tensor import AffineQuantizedTensor as QT
from .class_view import View
from .int4_views import Int4Tensor
from .int_views import IntxUnpackedToInt8Tensor
from .part_conversion import ready

__all__ = [
    "Float8Sparse2x4_1DData1DMetadataTensor", "Float8Sparse2x4_2DData2DMetadataTensor", "Int4PlainInt32Tensor",
    "Int4PreshuffledTensor", "Int4TilePackedTo4dTensor", "IntxOpaqueTensor", "Sparse2x4CUTLASSFloat8Tensor",
]  # fmt: skip


class _Packed(View):
    """A class that can be constructed from floats, but not from its parts."""

    what: ClassVar[str] = ""

    @classmethod
    def build(cls, *args: Any, **kwargs: Any) -> QT:
        raise NotImplementedError(
            f"{cls.__name__} is packed for {cls.what}, which is not supported: load it with torchao there, save its "
            "dequantized weights, and quantize them"
        )


class _PackedInt4(_Packed):
    @staticmethod
    def holds(w: QT) -> bool:
        return Int4Tensor.holds(w)

    @classmethod
    def from_hp(cls, w: Tensor, block_size: Any, *args: Any, **kwargs: Any) -> QT:
        """As :meth:`Int4Tensor.from_hp`. Other arguments control the packing, and are ignored."""
        return ready(Int4Tensor.from_hp(w, block_size))


class Int4TilePackedTo4dTensor(_PackedInt4):
    """int4 in tiles of NVIDIA's tensor cores."""

    what = "NVIDIA's tensor cores"


class Int4PlainInt32Tensor(_PackedInt4):
    """int4, eight to an int32."""

    what = "Intel's GPUs and Ascend NPUs"


class Int4PreshuffledTensor(_PackedInt4):
    """int4 in the order of the mslk kernels."""

    what = "the mslk kernels of NVIDIA GPUs"

    @classmethod
    def from_int4_tensor(cls, tensor: QT) -> QT:
        """The weight unchanged."""
        return tensor


class IntxOpaqueTensor(_Packed):
    """int1 to int8 weights packed for ARM processors."""

    what = "ARM processors"

    @staticmethod
    def holds(w: QT) -> bool:
        return IntxUnpackedToInt8Tensor.holds(w)

    @classmethod
    def from_intx_unpacked_to_int8_tensor(
        cls, tensor: QT, *, bias: Tensor | None = None, intx_packing_format: Any = None
    ) -> QT:
        """The weight packed for this processor. Raises NotImplementedError for a bias: keep it in the layer."""
        if bias is not None:
            raise NotImplementedError("IntxOpaqueTensor with a bias: keep the bias in the layer")
        return ready(tensor)


class _Sparse(_Packed):
    what = "sparse tensor cores"

    @staticmethod
    def holds(w: QT) -> bool:
        return False

    @classmethod
    def from_hp(cls, *args: Any, **kwargs: Any) -> QT:
        """Rejected: sparsity changes the values, half of them to zero."""
        raise NotImplementedError(f"{cls.__name__}: sparse weights are not supported; use Float8Tensor")


class Float8Sparse2x4_2DData2DMetadataTensor(_Sparse):
    """2:4 sparse float8."""


class Float8Sparse2x4_1DData1DMetadataTensor(_Sparse):
    """2:4 sparse float8."""


Sparse2x4CUTLASSFloat8Tensor = Float8Sparse2x4_2DData2DMetadataTensor
