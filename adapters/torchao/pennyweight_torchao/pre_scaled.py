"""Weights whose input is scaled before the product: the run-time part of AWQ and SmoothQuant.

linear(x, w) = linear(x * act_pre_scale, weight),  act_pre_scale [in_features]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.io.codecs.torchao.tensor_class import PRE_SCALED

from .base_tensor import TorchAOBaseTensor

__all__ = ["PreScaledTensor"]

aten = torch.ops.aten
# Attributes of the quantized weight that its pre-scaled form shows too.
SHOWN = frozenset((
    "act_quant_kwargs", "act_quant_scale", "act_quant_zero_point", "block_size", "qdata", "scale", "spec",
    "tensor_impl", "zero_point",
))  # fmt: skip


class PreScaledTensor(TorchAOBaseTensor):
    """A quantized weight [N, K] and ``act_pre_scale``, one number per input channel or one for all.

    ``dequantize()`` is the weight itself, as in torchao: it does not contain ``act_pre_scale``. ``isinstance`` with
    Int4Tensor, Int8Tensor and the other classes that have ``act_pre_scale`` answers for the weight inside.
    """

    tensor_data_names = ["original_weight_tensor", "act_pre_scale"]  # noqa: RUF012
    tensor_attribute_names: list[str] = []  # noqa: RUF012
    original_weight_tensor: Tensor
    act_pre_scale: Tensor

    @staticmethod
    def __new__(cls: Any, original_weight_tensor: Tensor, act_pre_scale: Tensor) -> PreScaledTensor:
        w = original_weight_tensor
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[return-value]
            cls, w.shape, strides=w.stride(), dtype=w.dtype, device=w.device
        )

    def __init__(self, original_weight_tensor: Tensor, act_pre_scale: Tensor) -> None:
        k = original_weight_tensor.shape[-1]
        if act_pre_scale.numel() not in (1, k) or not act_pre_scale.is_floating_point():
            raise ValueError(
                f"act_pre_scale must have one number per input channel, [{k}], got {act_pre_scale.dtype} "
                f"{list(act_pre_scale.shape)}"
            )
        self.original_weight_tensor, self.act_pre_scale = original_weight_tensor, act_pre_scale.reshape(-1)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:  # type: ignore[override]
        """The weight as floats, without the pre-scale."""
        w: Any = self.original_weight_tensor
        kept = dtype or self.dtype
        return w.dequantize(kept) if isinstance(w, AffineQuantizedTensor) else w.to(kept)

    def __getattr__(self, name: str) -> Any:
        if name in SHOWN:
            return getattr(self.original_weight_tensor, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PreScaledTensor({self.original_weight_tensor!r}, act_pre_scale=[{self.act_pre_scale.numel()}])"


torch.serialization.add_safe_globals([PreScaledTensor])


@PreScaledTensor.implements([aten.slice.Tensor])
def _slice(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Rows keep the pre-scale; columns take their part of it."""
    w, dim, *rest = (*args, 0)[:2] if len(args) == 1 else args
    pre = w.act_pre_scale
    if dim % w.ndim == w.ndim - 1 and pre.numel() > 1:
        pre = func(pre, 0, *rest, **kwargs)
    return PreScaledTensor(func(w.original_weight_tensor, dim, *rest, **kwargs), pre)


@PreScaledTensor.implements_torch_function([F.linear, aten.linear.default])
def _linear(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    x, w = given["input"], given["weight"]
    return F.linear(x * w.act_pre_scale.to(x.dtype), w.original_weight_tensor, given.get("bias"))


@PreScaledTensor.implements([aten.t.default, aten.mm.default, aten.addmm.default])
def _refused(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Other products would lose the pre-scale."""
    raise NotImplementedError(
        f"{func} of a weight with act_pre_scale: write F.linear(x, weight), which scales the input first"
    )


PRE_SCALED[:] = [PreScaledTensor]
