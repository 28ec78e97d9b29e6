"""PrototypeFloat8Tensor: torchao's float8 weights whose inputs may have a static scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ....core.formats import E4M3, E5M2
from ....core.spec import ActivationSpec, QuantSpec
from ....core.tensor import AffineQuantizedTensor as QT
from ....planning.granularity import Granularity, PerRow, PerTensor
from ..class_view import FLOAT8, View, float_codes, whole
from ..enums import KernelPreference
from ..format_primitives import _choose_scale_float8, _quantize_affine_float8
from ..int8_float8_views import Float8Tensor, QuantizeTensorToFloat8Kwargs
from ..qparams import get_block_size

__all__ = ["PrototypeFloat8Tensor", "_choose_quant_func_and_quantize_tensor"]


class PrototypeFloat8Tensor(View):
    """float8 codes with a float32 scale per row, block or tensor; inputs as they are, dynamic, or static float8."""

    tensor_data_names = ["qdata", "scale"]  # noqa: RUF012
    optional_tensor_data_names = ["act_quant_scale", "output_act_quant_scale"]  # noqa: RUF012
    optional_tensor_attribute_names = [  # noqa: RUF012
        "block_size", "mm_config", "act_quant_kwargs", "kernel_preference", "dtype", "output_act_quant_kwargs",
    ]  # fmt: skip

    @staticmethod
    def holds(w: QT) -> bool:
        if w.act is None or w.act.mode == "dynamic":
            return Float8Tensor.holds(w)
        spec, act = w.spec, w.act.spec
        plain = spec.format in (E4M3, E5M2) and spec.scale is torch.float32 and spec.offset is None and whole(w)
        return plain and act.format in (E4M3, E5M2) and act.block is None

    @classmethod
    def build(
        cls, qdata: Tensor, scale: Tensor, act_quant_scale: Tensor | None = None,
        output_act_quant_scale: Tensor | None = None, block_size: Any = None, mm_config: Any = None,
        act_quant_kwargs: QuantizeTensorToFloat8Kwargs | None = None, kernel_preference: Any = KernelPreference.AUTO,
        dtype: torch.dtype | None = None, output_act_quant_kwargs: Any = None,
    ) -> QT:  # fmt: skip
        if output_act_quant_scale is not None or output_act_quant_kwargs is not None:
            raise NotImplementedError(
                "a weight does not round the outputs of its layer here; Float8StaticActivationFloat8WeightConfig("
                "output_act_quant_scale=..) makes a layer that does"
            )
        if act_quant_scale is None:
            return Float8Tensor.build(qdata, scale, block_size, mm_config, act_quant_kwargs, kernel_preference, dtype)
        if act_quant_scale.numel() != 1:
            raise ValueError(f"act_quant_scale of {list(act_quant_scale.shape)}: a static scale is one for the tensor")
        fmt = FLOAT8[(act_quant_kwargs or QuantizeTensorToFloat8Kwargs()).float8_dtype]
        if not block_size and scale.numel() > 1:
            block_size = [n // c for n, c in zip(qdata.shape, scale.shape, strict=True)]
        w = float_codes(qdata, scale.float(), FLOAT8[qdata.dtype], block_size, dtype or torch.get_default_dtype())
        act = ActivationSpec(QuantSpec(fmt, None), "static")
        return w.with_(act=act, act_scale=act_quant_scale.detach().float().reshape(1))

    @classmethod
    def from_hp(
        cls, hp_tensor: Tensor, float8_dtype: torch.dtype = torch.float8_e4m3fn, granularity: Granularity | None = None,
        mm_config: Any = None, hp_value_lb: float | None = None, hp_value_ub: float | None = None,
        kernel_preference: Any = KernelPreference.AUTO, act_quant_kwargs: QuantizeTensorToFloat8Kwargs | None = None,
        scale: Tensor | None = None, act_quant_scale: Tensor | None = None,
        output_act_quant_scale: Tensor | None = None, output_act_quant_kwargs: Any = None,
    ) -> QT:  # fmt: skip
        """Round-to-nearest with a given scale, or absmax / the largest float8 number; per row by default."""
        block = list(get_block_size(tuple(hp_tensor.shape), granularity or PerRow()))
        if scale is None:
            scale = _choose_scale_float8(
                hp_tensor, block, float8_dtype, hp_value_lb=hp_value_lb, hp_value_ub=hp_value_ub
            )
        counts = [n // b for n, b in zip(hp_tensor.shape, block, strict=True)]
        if list(scale.shape) != counts:
            raise AssertionError(f"scale is {list(scale.shape)}; {granularity or PerRow()} needs {counts}")
        return cls.build(
            _quantize_affine_float8(hp_tensor, scale, float8_dtype), scale, act_quant_scale, output_act_quant_scale,
            block, mm_config, act_quant_kwargs, kernel_preference, hp_tensor.dtype, output_act_quant_kwargs,
        )  # fmt: skip

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        static = w.act is not None and w.act.mode == "static"
        members = Float8Tensor.take(w)
        return {
            **members, "act_quant_scale": w.act_scale.reshape((1,) * w.ndim) if static else None,
            "output_act_quant_scale": None, "output_act_quant_kwargs": None,
        }  # fmt: skip


def _choose_quant_func_and_quantize_tensor(
    tensor: Tensor, quant_kwargs: Any, *, act_quant_scale: Tensor | None = None
) -> QT:
    """``tensor`` quantized according to the kwargs, with ``act_quant_scale`` if given."""
    k = quant_kwargs
    if not isinstance(k, QuantizeTensorToFloat8Kwargs):
        raise NotImplementedError(f"Quant kwargs not supported: {k}")
    scale = None if act_quant_scale is None else act_quant_scale.reshape((1,) * tensor.ndim)
    return PrototypeFloat8Tensor.from_hp(
        tensor, k.float8_dtype, PerTensor() if scale is not None and scale.numel() == 1 else k.granularity, k.mm_config,
        k.hp_value_lb, k.hp_value_ub, k.kernel_preference, scale=scale,
    )  # fmt: skip
