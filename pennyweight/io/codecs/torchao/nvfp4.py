"""torchao's NVFP4Tensor as stored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....core.formats import E2M1, E4M3
from ....core.numerics import Parts
from ....core.spec import ActivationSpec, QuantSpec
from ....core.tensor import AffineQuantizedTensor as QT
from .enums import NVFP4MMConfig
from .int8_float8 import QuantizeTensorKwargs
from .mx import FP4_BYTES, block_scales, fp4_codes, logical, need, pack_uint4, stored_order, swap_halves, transposed
from .tensor_class import View, plain_codes, whole

ALONE, UNDER_ONE = QuantSpec(E4M3, (1,), scale=None), QuantSpec(E4M3, None)


@dataclass
class QuantizeTensorToNVFP4Kwargs(QuantizeTensorKwargs):
    """An NVFP4 activation. Its scale per tensor is chosen per call, is the weight's ``act_per_tensor_scale``, or
    absent if there is neither."""

    block_size: int = 16
    is_swizzled_scales: bool = False
    use_triton_kernel: bool = False
    use_dynamic_per_tensor_scale: bool = False

    def spec(self, static: Tensor | None) -> ActivationSpec:
        """Our spec of this activation. Raises ValueError for a stored scale next to one chosen per call."""
        if self.use_dynamic_per_tensor_scale and static is not None:
            raise ValueError(
                "act_per_tensor_scale would not be used with use_dynamic_per_tensor_scale=True; give one of them"
            )
        two = self.use_dynamic_per_tensor_scale or static is not None
        spec = QuantSpec(E2M1, (self.block_size,), UNDER_ONE if two else ALONE)
        return ActivationSpec(spec, "dynamic" if static is None else "static")


def _one_number(what: str, scale: Tensor) -> Tensor:
    need(what, scale, (torch.float32, torch.float16, torch.bfloat16))
    if scale.numel() != 1:
        raise ValueError(f"{what} must be one number, got {list(scale.shape)}")
    return scale.detach().float().reshape(1)


class NVFP4Tensor(View):
    """e2m1 in blocks of 16 with e4m3 scales, and optionally one float32 scale, or one per expert [E, 1, 1]."""

    tensor_data_names = ["qdata", "scale"]  # noqa: RUF012
    tensor_attribute_names = ["block_size", "orig_dtype"]  # noqa: RUF012
    optional_tensor_data_names = ["per_tensor_scale", "act_per_tensor_scale"]  # noqa: RUF012
    optional_tensor_attribute_names = ["is_swizzled_scales", "use_triton_kernel", "act_quant_kwargs"]  # noqa: RUF012

    @staticmethod
    def holds(w: QT) -> bool:
        return (
            _is_nvfp4(w.spec) and w.spec.block is not None and len(w.spec.block) == 1 and whole(w)
            and (w.act is None or _is_nvfp4(w.act.spec))
        )  # fmt: skip

    @classmethod
    def build(
        cls, qdata: Tensor, scale: Tensor, block_size: int, orig_dtype: torch.dtype,
        per_tensor_scale: Tensor | None = None, act_per_tensor_scale: Tensor | None = None,
        is_swizzled_scales: bool = False, use_triton_kernel: bool = False,
        act_quant_kwargs: QuantizeTensorToNVFP4Kwargs | None = None,
    ) -> QT:  # fmt: skip
        """Transposed pieces (of ``w.t()``) make a transposed tensor. ``use_triton_kernel`` has no effect."""
        need("qdata", qdata, FP4_BYTES, 2)
        need("scale", scale, (torch.float8_e4m3fn,))
        if transposed(qdata):
            scale = scale if is_swizzled_scales and scale.ndim < 2 else scale.transpose(-2, -1)
            pieces = (qdata.transpose(-2, -1), scale, block_size, orig_dtype, per_tensor_scale, act_per_tensor_scale)
            upright = cls.build(*pieces, is_swizzled_scales, use_triton_kernel, act_quant_kwargs)
            return upright.transpose(-2, -1)  # type: ignore[return-value]
        codes = fp4_codes(qdata)
        shape = tuple(codes.shape)
        inner = Parts(block_scales(scale, shape, block_size, swizzled=is_swizzled_scales))
        outer = ALONE
        if per_tensor_scale is not None and per_tensor_scale.ndim == 3 and per_tensor_scale.numel() > 1:
            if len(shape) != 3 or tuple(per_tensor_scale.shape) != (shape[0], 1, 1):
                raise ValueError(
                    f"per_tensor_scale must be one number, or [E, 1, 1] of a tensor of E experts; got "
                    f"{list(per_tensor_scale.shape)} for {list(shape)}"
                )
            inner, outer = inner._replace(scale=per_tensor_scale.float()), QuantSpec(E4M3, (1, -1, -1))
        elif per_tensor_scale is not None:
            one = _one_number("per_tensor_scale", per_tensor_scale)
            inner, outer = inner._replace(scale=one.reshape((1,) * len(shape))), UNDER_ONE
        act, static = None, None
        if act_quant_kwargs is not None:
            if act_per_tensor_scale is not None:
                static = _one_number("act_per_tensor_scale", act_per_tensor_scale)
            act = act_quant_kwargs.spec(static)
        elif act_per_tensor_scale is not None:
            raise ValueError("act_per_tensor_scale is of a quantized activation: it needs act_quant_kwargs")
        spec = QuantSpec(E2M1, (block_size,), outer)
        return QT(Parts(codes, inner, act_scale=static), spec, shape, orig_dtype, act)

    @classmethod
    def restore(cls, state: dict[str, Any], shell: Tensor) -> QT:
        """Also of a pickle by torchao before 0.13."""
        if "qdata" in state:
            return super().restore(state, shell)
        dynamic = state["mm_config"] is NVFP4MMConfig.DYNAMIC
        return cls.build(
            swap_halves(state["_data"]), state["_scale_e4m3"], state["_block_size"], state["_orig_dtype"],
            state["_per_tensor_scale"], is_swizzled_scales=state["_is_swizzled_scales"],
            act_quant_kwargs=QuantizeTensorToNVFP4Kwargs() if dynamic else None,
        )  # fmt: skip

    @staticmethod
    def take(w: QT) -> dict[str, Any]:
        upright = stored_order(w)
        scale, kwargs = upright._plain("scale"), None
        assert w.spec.block is not None
        outer = scale.scale
        if outer is not None:
            outer = outer.reshape(()) if outer.numel() == 1 else outer
        if w.act is not None:
            assert w.act.spec.block is not None
            assert isinstance(w.act.spec.scale, QuantSpec)
            per_call = w.act.mode == "dynamic" and w.act.spec.scale.scale is not None
            kwargs = QuantizeTensorToNVFP4Kwargs(w.act.spec.block[0], use_dynamic_per_tensor_scale=per_call)
        pieces = {
            "qdata": pack_uint4(plain_codes(upright)), "scale": scale.codes, "block_size": w.spec.block[0],
            "orig_dtype": w.dtype, "per_tensor_scale": outer,
            "act_per_tensor_scale": None if w.act_scale is None else w.act_scale.reshape(()),
            "is_swizzled_scales": False, "use_triton_kernel": False, "act_quant_kwargs": kwargs,
        }  # fmt: skip
        return logical(w, pieces, "qdata", "scale")


def _is_nvfp4(spec: QuantSpec) -> bool:
    scale = spec.scale
    return (
        spec.format is E2M1 and isinstance(scale, QuantSpec) and scale.format is E4M3 and scale.offset is None
        and scale.block in (None, (1,), (-1, -1), (1, -1, -1))
        and (scale.scale is None) == (scale.block == (1,))
    )  # fmt: skip
