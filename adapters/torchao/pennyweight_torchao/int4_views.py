"""torchao's integer weights with two codes per byte: Int4Tensor, Int4OpaqueTensor, and the device-packed classes.

The values of device-packed int4 and intx classes are those of the plain classes. Their ``from_hp`` gives the same
weight as the plain class, packed for the kernel selected here; weights packed for another device cannot be read, and
constructing them from their parts raises an error.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from pennyweight.algorithms.sparsify import prune
from pennyweight.core.formats import UINT4
from pennyweight.core.spec import QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor as QT
from pennyweight.io.codecs.torchao import int4 as files
from pennyweight.io.codecs.torchao.tensor_class import View, block_of, ready
from pennyweight.planning.granularity import Granularity

from .int8_float8_views import Float8Tensor, IntxUnpackedToInt8Tensor

__all__ = [
    "Float8Sparse2x4_1DData1DMetadataTensor", "Float8Sparse2x4_2DData2DMetadataTensor", "Int4OpaqueTensor",
    "Int4PlainInt32Tensor", "Int4PreshuffledTensor", "Int4Tensor", "Int4TilePackedTo4dTensor", "IntxOpaqueTensor",
    "Sparse2x4CUTLASSFloat8Tensor",
]  # fmt: skip


class Int4Tensor(files.Int4Tensor):
    """4-bit codes, two per byte (signed, the even one low), scale and real zero point [K / group, N] in bfloat16."""

    @classmethod
    def from_hp(cls, w: Tensor, block_size: Any, activation_dtype: torch.dtype | None = torch.bfloat16) -> QT:
        """tinygemm's numbers: scale = (max - min) / 15, zero point min + 8 * scale, in the weight's dtype."""
        if activation_dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
            raise NotImplementedError(f"Int4Tensor with {activation_dtype} activations; only bfloat16 is supported")
        block = block_of(block_size, w.shape)
        spec = QuantSpec(UINT4, block, scale=w.dtype, offset=w.dtype, mid=8)
        return QT.from_float(w, spec, "minmax", 1e-6)


class Int4OpaqueTensor(files.Int4OpaqueTensor):
    """torchao's int4 weights for CPUs, in the byte order of torch's kernel on the packing machine."""

    @classmethod
    def from_hp(cls, w: Tensor, block_size: Any, use_hqq: bool = False, **kwargs: Any) -> QT:
        """As :meth:`Int4Tensor.from_hp`."""
        if use_hqq or kwargs:
            raise NotImplementedError(
                f"Int4OpaqueTensor.from_hp: use_hqq and {sorted(kwargs)} are not supported; "
                "pennyweight.quantize_(model, config, algorithm='hqq') quantizes a model with HQQ"
            )
        return Int4Tensor.from_hp(w, block_size)


# -- device-packed classes ---------------------------------------------------------------------------------------------


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
    holds = staticmethod(Int4Tensor.holds)

    @classmethod
    def from_hp(cls, w: Tensor, block_size: Any, *args: Any, **kwargs: Any) -> QT:
        """As :meth:`Int4Tensor.from_hp`. Other arguments control the packing, and are ignored."""
        return ready(Int4Tensor.from_hp(w, block_size))


def _packed(base: Any, name: str, doc: str, what: str) -> Any:
    """A class for one packing; ``what`` reads it."""
    return type(base)(name, (base,), {"__module__": __name__, "__doc__": doc, "what": what})


Int4TilePackedTo4dTensor = _packed(
    _PackedInt4, "Int4TilePackedTo4dTensor", "int4 in tiles of NVIDIA's tensor cores.", "NVIDIA's tensor cores"
)
Int4PlainInt32Tensor = _packed(
    _PackedInt4, "Int4PlainInt32Tensor", "int4, eight to an int32.", "Intel's GPUs and Ascend NPUs"
)


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

    holds = staticmethod(IntxUnpackedToInt8Tensor.holds)

    @classmethod
    def from_intx_unpacked_to_int8_tensor(
        cls, tensor: QT, *, bias: Tensor | None = None, intx_packing_format: Any = None
    ) -> QT:
        """The weight packed for this processor. Raises NotImplementedError for a bias: keep it in the layer."""
        if bias is not None:
            raise NotImplementedError("IntxOpaqueTensor with a bias: keep the bias in the layer")
        return ready(tensor)


class _Sparse(_Packed):
    holds = staticmethod(lambda w: False)

    @classmethod
    def from_hp(
        cls, hp_tensor: Tensor, float8_dtype: torch.dtype = torch.float8_e4m3fn, granularity: Granularity | None = None,
        hp_value_lb: float | None = None, hp_value_ub: float | None = None, act_quant_kwargs: Any = None,
        alg_id: int = 0, **kwargs: Any,
    ) -> QT:  # fmt: skip
        """:meth:`Float8Tensor.from_hp` of the tensor pruned 2:4, per row by default, stored dense, with its zeros."""
        return Float8Tensor.from_hp(
            prune(hp_tensor.detach(), "2:4"), float8_dtype, granularity, hp_value_lb=hp_value_lb,
            hp_value_ub=hp_value_ub, act_quant_kwargs=act_quant_kwargs, **kwargs,
        )  # fmt: skip


Float8Sparse2x4_2DData2DMetadataTensor, Float8Sparse2x4_1DData1DMetadataTensor = (
    _packed(_Sparse, f"Float8Sparse2x4_{which}MetadataTensor", "2:4 sparse float8.", "sparse tensor cores")
    for which in ("2DData2D", "1DData1D")
)
Sparse2x4CUTLASSFloat8Tensor = Float8Sparse2x4_2DData2DMetadataTensor
