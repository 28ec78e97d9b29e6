"""4-bit weights with HQQ's zero points, and symmetric 8-bit weights: torchao's configs for gemlite's GPU kernels.

Values are gemlite's; codes are packed for the kernel that runs here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ....core.formats import INT8, UINT4
from ....core.spec import ActivationSpec, QuantSpec
from ....core.tensor import AffineQuantizedTensor as QT
from ....planning.configs import AOBaseConfig
from ....planning.configs.integer import INT8_EPS
from ....planning.granularity import MappingType
from ....planning.module_handlers import register_quantize_module_handler
from ..class_view import View, int_codes, plain_codes, ready, whole
from ..config_json import register_config_type
from ..hqq import _choose_qparams_and_quantize_affine_hqq
from ..primitives import choose_qparams_affine, quantize_affine
from ..quant_api import _ExtraRepr

__all__ = ["Int8DynamicActivationUIntxWeightConfig", "UIntxBitPackedTensor", "UIntxWeightOnlyConfig"]

_GROUPS = (32, 64, 128, 256, 512, 1024, None)


class UIntxBitPackedTensor(View):
    """uint4 codes with a scale and a real zero point for each group of a row, or int8 codes with a scale per row."""

    tensor_data_names = ["qdata", "scale", "zero_point"]  # noqa: RUF012
    tensor_attribute_names = ["gemlite_kwargs", "bit_width", "group_size", "dtype"]  # noqa: RUF012

    @staticmethod
    def holds(w: QT) -> bool:
        spec = w.spec
        if w.ndim != 2 or w.axes is not None or not isinstance(spec.scale, torch.dtype) or not whole(w):
            return False
        return (spec.format is UINT4 and not spec.mid) or (spec.format is INT8 and spec.block == (-1,))

    @classmethod
    def build(cls, *args: Any, **kwargs: Any) -> QT:
        """Raises NotImplementedError: the parts are those that gemlite packed for one GPU."""
        raise NotImplementedError(
            "UIntxBitPackedTensor is packed by gemlite for one GPU: load it with torchao there, save its dequantized "
            "weights, and quantize them; or UIntxBitPackedTensor.from_hp(weight)"
        )

    @classmethod
    def from_hp(
        cls, hp_tensor: Tensor, bit_width: int = 4, group_size: int | None = 128, packing_bitwidth: int | None = None,
        mode: str = "weight_only",
    ) -> QT:  # fmt: skip
        """4 bits: HQQ, x = (code - zero_point) scale; 8 bits: round-to-nearest, symmetric.

        group_size: None, the row. mode "dynamic": int8 inputs with a scale per token. packing_bitwidth: no effect.
        Raises ValueError for other bits or modes, AssertionError if groups do not divide the row.
        """
        if bit_width not in (4, 8) or mode not in ("weight_only", "dynamic"):
            raise ValueError(f"bit_width must be 4 or 8 and mode 'weight_only' or 'dynamic', got {bit_width}, {mode!r}")
        group = hp_tensor.shape[1] if group_size is None else group_size
        if hp_tensor.shape[1] % group:
            raise AssertionError(f"group_size {group} does not divide the rows of {list(hp_tensor.shape)}")
        block = (1, group)
        act = ActivationSpec(QuantSpec(INT8, (-1,)), "dynamic", None, INT8_EPS) if mode == "dynamic" else None
        if bit_width == 8:
            how = (MappingType.SYMMETRIC, block, torch.int8, -128, 127)
            scale, zero = choose_qparams_affine(hp_tensor, *how, eps=1e-5)
            codes = quantize_affine(hp_tensor, block, scale, zero, *how[2:])
            return int_codes(codes, scale, None, block, hp_tensor.dtype, -128, 127, act=act)
        codes, scale, zero, _ = _choose_qparams_and_quantize_affine_hqq(hp_tensor, 4, group, raw_output=True)
        return int_codes(codes.to(torch.uint8), scale, zero, block, hp_tensor.dtype, 0, 15, act=act)

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        scale: Any = w.scale
        zero = w.zero_point
        if zero is None and w.offset is not None:
            zero = -w.offset / scale
        bits = w.spec.format.bits
        return {
            "qdata": plain_codes(w).t(), "scale": scale.t(),
            "zero_point": torch.empty(1, 0, dtype=torch.int32) if zero is None else zero.t(),
            "gemlite_kwargs": {"in_features": w.shape[1], "out_features": w.shape[0]}, "bit_width": bits,
            "group_size": w.shape[1] // scale.shape[1], "dtype": w.dtype,
        }  # fmt: skip


@dataclass(frozen=True)
class _UIntx(AOBaseConfig):
    group_size: int | None = 128
    bit_width: int = 4
    packing_bitwidth: int | None = None
    set_inductor_config: bool = True

    def __post_init__(self) -> None:
        owner = type(self).__name__
        if self.bit_width not in (4, 8):
            raise ValueError(f"{owner}: bit_width must be 4 or 8, got {self.bit_width}")
        if self.group_size not in _GROUPS:
            raise ValueError(f"{owner}: group_size must be one of {list(_GROUPS)}, got {self.group_size}")
        if self.bit_width == 8 and self.group_size is not None:
            raise ValueError(f"{owner}: group_size must be None for bit_width=8")
        if self.packing_bitwidth not in (8, 16, 32, None):
            raise ValueError(f"{owner}: packing_bitwidth must be 8, 16, 32, or None, got {self.packing_bitwidth}")


@register_config_type
@dataclass(frozen=True)
class UIntxWeightOnlyConfig(_UIntx):
    """uint4 weights in groups by HQQ, or int8 weights per row; see :meth:`UIntxBitPackedTensor.from_hp`."""


@register_config_type
@dataclass(frozen=True)
class Int8DynamicActivationUIntxWeightConfig(_UIntx):
    """:class:`UIntxWeightOnlyConfig` with int8 inputs, symmetric, a scale per token."""


def _quantize(module: nn.Module, config: _UIntx, parameter_name: str = "weight") -> nn.Module:
    weight: Any = getattr(module, parameter_name)
    mode = "dynamic" if isinstance(config, Int8DynamicActivationUIntxWeightConfig) else "weight_only"
    new = UIntxBitPackedTensor.from_hp(
        weight.detach(), config.bit_width, config.group_size, config.packing_bitwidth, mode
    )
    setattr(module, parameter_name, nn.Parameter(ready(new), requires_grad=False))
    if type(module) is nn.Linear:
        module.extra_repr = _ExtraRepr(module)  # type: ignore[method-assign]
    return module


for _config in (UIntxWeightOnlyConfig, Int8DynamicActivationUIntxWeightConfig):
    register_quantize_module_handler(_config)(_quantize)
