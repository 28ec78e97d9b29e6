"""torchao's integer weights with two codes per byte: Int4Tensor, Int4OpaqueTensor, and the device-packed classes.

The values of device-packed int4 and intx classes are those of the plain classes. Their ``from_hp`` gives the same
weight as the plain class, packed for the kernel selected here; weights packed for another device cannot be read, and
constructing them from their parts raises an error.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ...algorithms.sparsify import prune
from ...core import blocks
from ...core.formats import UINT4
from ...core.numerics import Parts
from ...core.spec import QuantSpec
from ...core.tensor import AffineQuantizedTensor as QT
from ...planning.granularity import Granularity
from .class_view import View, block_of, block_size, int_codes, part, plain_codes, ready, whole
from .int8_float8_views import Float8Tensor, IntxUnpackedToInt8Tensor
from .pre_scaled import pre_scaled

__all__ = [
    "Float8Sparse2x4_1DData1DMetadataTensor", "Float8Sparse2x4_2DData2DMetadataTensor", "Int4OpaqueTensor",
    "Int4PlainInt32Tensor", "Int4PreshuffledTensor", "Int4Tensor", "Int4TilePackedTo4dTensor", "IntxOpaqueTensor",
    "Sparse2x4CUTLASSFloat8Tensor",
]  # fmt: skip


def _unpack_nibbles(packed: Tensor) -> Tensor:
    """Signed nibbles of bytes, the even element low: [.., K / 2] -> [.., K], int8 -8..7."""
    low, high = packed.view(torch.uint8) & 15, packed.view(torch.uint8) >> 4
    codes = torch.stack([low, high], -1).flatten(-2).to(torch.int8)
    return torch.where(codes > 7, codes - 16, codes)


def _pack_nibbles(codes: Tensor) -> Tensor:
    """The inverse: int8 [.., K] -> int8 bytes [.., K / 2]."""
    nibbles = codes.to(torch.uint8) & 15
    return (nibbles[..., ::2] | nibbles[..., 1::2] << 4).view(torch.int8)


class Int4Tensor(View):
    """4-bit codes, two per byte (signed, the even one low), scale and real zero point [K / group, N] in bfloat16."""

    tensor_data_names = ["qdata", "scale", "zero_point"]  # noqa: RUF012
    tensor_attribute_names = ["block_size", "shape"]  # noqa: RUF012
    optional_tensor_data_names = ["act_pre_scale"]  # noqa: RUF012
    optional_tensor_attribute_names = ["activation_dtype"]  # noqa: RUF012

    @staticmethod
    def holds(w: QT) -> bool:
        spec = w.spec
        return (
            spec.format is UINT4 and spec.mid == 8 and isinstance(spec.scale, torch.dtype) and spec.offset == spec.scale
            and w.act is None and w.ndim == 2 and w.axes is None and whole(w)
            and w.shape[-1] % 2 == 0
        )  # fmt: skip

    @classmethod
    def build(
        cls, qdata: Tensor, scale: Tensor, zero_point: Tensor, block_size: Any, shape: Any,
        act_pre_scale: Tensor | None = None, activation_dtype: torch.dtype | None = None,
    ) -> QT:  # fmt: skip
        if activation_dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
            raise NotImplementedError(f"Int4Tensor with {activation_dtype} activations; only bfloat16 is supported")
        if any(t.ndim != 2 for t in (qdata, scale, zero_point)) or qdata.dtype not in (torch.uint8, torch.int8):
            sizes = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (qdata, scale, zero_point))
            raise ValueError(f"qdata (bytes), scale and zero_point must have 2 axes, got {sizes}")
        codes = (_unpack_nibbles(qdata) + 8).to(torch.uint8)
        assert tuple(codes.shape) == tuple(shape), f"qdata is {list(qdata.shape)}, so not of shape {list(shape)}"
        w = int_codes(
            codes, scale.t().contiguous(), zero_point.t().contiguous(), block_size, scale.dtype, 0, 15, real=True
        )
        return pre_scaled(w, act_pre_scale)

    @classmethod
    def from_hp(cls, w: Tensor, block_size: Any, activation_dtype: torch.dtype | None = torch.bfloat16) -> QT:
        """tinygemm's numbers: scale = (max - min) / 15, zero point min + 8 * scale, in the weight's dtype."""
        if activation_dtype not in (None, torch.bfloat16, torch.float16, torch.float32):
            raise NotImplementedError(f"Int4Tensor with {activation_dtype} activations; only bfloat16 is supported")
        block = block_of(block_size, w.shape)
        spec = QuantSpec(UINT4, block, scale=w.dtype, offset=w.dtype, mid=8)
        return QT.from_float(w, spec, "minmax", 1e-6)

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        scale, offset = part(w, "scale"), part(w, "offset")
        assert scale is not None
        assert offset is not None
        return {
            "qdata": _pack_nibbles(plain_codes(w).to(torch.int8) - 8), "scale": scale.t().contiguous(),
            "zero_point": offset.t().contiguous(), "block_size": block_size(w), "shape": w.shape,
            "act_pre_scale": None, "activation_dtype": torch.bfloat16,
        }  # fmt: skip


def packed_by_aten(packed: Tensor, scale_and_zero: Tensor, block: Any, shape: Any, dtype: torch.dtype) -> QT:
    """A weight that ``_convert_weight_to_int4pack_for_cpu`` packed: packed [N, K / 2], scale_and_zero [K / g, N, 2].

    The byte order depends on the CPU that packed them; a file from another kind of CPU cannot be detected.
    """
    shape = tuple(shape)
    spec = QuantSpec(
        UINT4,
        block_of(block, shape),
        scale=scale_and_zero.dtype,
        offset=scale_and_zero.dtype,
        mid=8,
        layout="torch_int4",
    )
    n, k = blocks.padded(spec.block, shape) if len(shape) == 2 else (0, 0)
    counts = (*reversed(blocks.counts(spec.block, shape)), 2)
    if packed.numel() * 2 != n * k or packed.dtype.itemsize != 1 or tuple(scale_and_zero.shape) != counts:
        raise ValueError(
            f"packed {packed.dtype} {list(packed.shape)} with scales {list(scale_and_zero.shape)} is not a weight of "
            f"{list(shape)}, which needs {n * k // 2} bytes and scales {list(counts)}"
        )
    return QT(Parts(packed, scale_and_zero), spec, shape, dtype).to_layout("plain")


class Int4OpaqueTensor(View):
    """torchao's int4 weights for CPUs, in the byte order of torch's kernel on the packing machine."""

    tensor_data_names = ["qdata", "scale_and_zero"]  # noqa: RUF012
    tensor_attribute_names = ["block_size", "shape"]  # noqa: RUF012
    optional_tensor_data_names = ["act_pre_scale", "qzeros", "compensation"]  # noqa: RUF012
    optional_tensor_attribute_names = ["act_mapping_type"]  # noqa: RUF012

    holds = staticmethod(Int4Tensor.holds)

    @classmethod
    def build(
        cls, qdata: Tensor, scale_and_zero: Tensor, block_size: Any, shape: Any, act_pre_scale: Tensor | None = None,
        qzeros: Tensor | None = None, compensation: Tensor | None = None, act_mapping_type: Any = None,
    ) -> QT:  # fmt: skip
        if any(part is not None for part in (qzeros, compensation, act_mapping_type)):
            raise NotImplementedError(
                "Int4OpaqueTensor of int8 activations: its layout is specific to a kernel in torchao's own builds; "
                "quantize the float model with Int8DynamicActivationInt4WeightConfig"
            )
        w = packed_by_aten(qdata, scale_and_zero, block_size, shape, scale_and_zero.dtype)
        return pre_scaled(w, act_pre_scale)

    @classmethod
    def from_hp(cls, w: Tensor, block_size: Any, use_hqq: bool = False, **kwargs: Any) -> QT:
        """As :meth:`Int4Tensor.from_hp`."""
        if use_hqq or kwargs:
            raise NotImplementedError(
                f"Int4OpaqueTensor.from_hp: use_hqq and {sorted(kwargs)} are not supported; "
                "pennyweight.quantize_(model, config, algorithm='hqq') quantizes a model with HQQ"
            )
        return Int4Tensor.from_hp(w, block_size)

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        packed = w.to_layout("torch_int4")
        return {
            "qdata": packed.parts.codes, "scale_and_zero": packed.parts.scale, "block_size": block_size(w),
            "shape": w.shape, "act_pre_scale": None, "qzeros": None, "compensation": None, "act_mapping_type": None,
        }  # fmt: skip


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
