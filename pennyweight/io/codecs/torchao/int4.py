"""torchao's int4 weights as stored: Int4Tensor, and Int4OpaqueTensor, which torch's CPU kernel packed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....core import blocks
from ....core.formats import UINT4
from ....core.numerics import Parts
from ....core.spec import QuantSpec
from ....core.tensor import AffineQuantizedTensor as QT
from .tensor_class import (
    View,
    act_pre_scale_of,
    block_of,
    block_size,
    int_codes,
    part,
    plain_codes,
    whole,
    with_pre_scale,
)


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
        return with_pre_scale(w, act_pre_scale)

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        scale, offset = part(w, "scale"), part(w, "offset")
        assert scale is not None
        assert offset is not None
        return {
            "qdata": _pack_nibbles(plain_codes(w).to(torch.int8) - 8), "scale": scale.t().contiguous(),
            "zero_point": offset.t().contiguous(), "block_size": block_size(w), "shape": w.shape,
            "act_pre_scale": act_pre_scale_of(w), "activation_dtype": torch.bfloat16,
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
        return with_pre_scale(w, act_pre_scale)

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        packed = w.to_layout("torch_int4")
        return {
            "qdata": packed.parts.codes, "scale_and_zero": packed.parts.scale, "block_size": block_size(w),
            "shape": w.shape, "act_pre_scale": act_pre_scale_of(w), "qzeros": None, "compensation": None,
            "act_mapping_type": None,
        }  # fmt: skip
