"""Weights of 1 to 8 bits with 8-bit inputs, as torchao 0.9 to 0.12 packed them for ARM processors.

Here they are packed for the processor at hand, whatever the target.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from ....core.tensor import AffineQuantizedTensor as QT
from ..class_view import int_codes, ready
from ..qparams import require
from ..v0_8_layouts import AQTTensorImpl, PackedLinearInt8DynamicActivationIntxWeightLayout, Pieces

__all__ = [
    "PackedLinearInt8DynamicActivationIntxWeightAQTTensorImpl", "Target",
    "make_packed_linear_int8_dynamic_activation_intx_weight_tensor", "target_from_str", "target_to_str",
    "to_affine_quantized_packed_linear_int8_dynamic_activation_intx_weight",
]  # fmt: skip


class Target(Enum):
    """Which kernels torchao packed for."""

    AUTO = auto()
    UNIVERSAL = auto()
    KLEIDIAI = auto()
    ATEN = auto()


def target_to_str(target: Target) -> str:
    """ "auto", "universal", "kleidiai" or "aten"."""
    return target.name.lower()


def target_from_str(target: str) -> Target:
    """Inverse of :func:`target_to_str`, in any case. Raises ValueError for another name."""
    if target.upper() not in Target.__members__:
        raise ValueError(f"Invalid target: {target}; expected one of {', '.join(map(target_to_str, Target))}")
    return Target[target.upper()]


class PackedLinearInt8DynamicActivationIntxWeightAQTTensorImpl(AQTTensorImpl):
    """Codes, scales and zero points, as plain pieces; torchao had only their packed bytes."""

    layouts = (PackedLinearInt8DynamicActivationIntxWeightLayout,)

    @classmethod
    def from_plain(  # type: ignore[override]
        cls, int_data: Tensor, scale: Tensor, zero_point: Tensor | None, layout: Any, bias: Tensor | None = None, *,
        validate_inputs: bool = True,
    ) -> Pieces:  # fmt: skip
        _no_bias(bias)
        return Pieces(int_data, scale, zero_point, layout)


def _no_bias(bias: Tensor | None) -> None:
    if bias is not None:
        raise ValueError("the bias stays in the layer: pass bias=None, and the bias to F.linear")


def make_packed_linear_int8_dynamic_activation_intx_weight_tensor(
    int_data: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None, data_dtype: torch.dtype,
    target: str | Target = "auto", *, validate_inputs: bool = True,
) -> QT:  # fmt: skip
    """The weight (int_data - zero_point) * scale. int_data: int [N, K]; scale, zero_point: [N, K / group].

    data_dtype: torch.int1 to torch.int8. Its 8-bit inputs: ``to_linear_activation_quantized``. Raises AssertionError
    for codes or zero points outside of the dtype and for scales that do not divide the rows, ValueError for a bias.
    """
    if isinstance(target, str):
        target_from_str(target)
    _no_bias(bias)
    bits = int(str(data_dtype).removeprefix("torch.int"))
    lo, hi = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    groups = scale.shape[-1]
    require(
        int_data.ndim == scale.ndim == 2 and scale.shape[0] == int_data.shape[0] and int_data.shape[1] % groups == 0,
        f"scale is {list(scale.shape)}, expected [{int_data.shape[0]}, groups] that divide {list(int_data.shape)}",
    )
    for name, part in (("int_data", int_data), ("zero_point", zero_point)):
        if validate_inputs and part is not None:
            least, most = int(part.min()), int(part.max())
            require(lo <= least and most <= hi, f"{name} from {least} to {most} is not within {lo} to {hi}")
    group = int_data.shape[1] // groups
    return ready(int_codes(int_data.to(torch.int8), scale.float(), zero_point, (1, group), torch.float32, lo, hi))


to_affine_quantized_packed_linear_int8_dynamic_activation_intx_weight = (
    make_packed_linear_int8_dynamic_activation_intx_weight_tensor
)
