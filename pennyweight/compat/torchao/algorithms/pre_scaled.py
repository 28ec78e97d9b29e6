"""Weights whose input is scaled before the product: the run-time part of AWQ and SmoothQuant.

linear(x, w) = linear(x * act_pre_scale, weight),  act_pre_scale [in_features]
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....planning.configs import AOBaseConfig
from ..class_view import PRE_SCALED
from ..legacy_weights import WeightTensorWithLinearActivationScaleMetadata, _BeforeLinear
from ..quant_api import _ExtraRepr, quantize_

__all__ = ["PreScaledTensor"]

aten = torch.ops.aten
# Attributes of the quantized weight that its pre-scaled form shows too.
SHOWN = frozenset((
    "act_quant_kwargs", "act_quant_scale", "act_quant_zero_point", "block_size", "original_weight_tensor", "qdata",
    "scale", "spec", "tensor_impl", "zero_point",
))  # fmt: skip


class PreScaledTensor(_BeforeLinear):
    """A quantized weight [N, K] and ``act_pre_scale``, one number per input channel or one for all.

    ``dequantize()`` is the weight itself, as in torchao: it does not contain ``act_pre_scale``. ``isinstance`` with
    Int4Tensor, Int8Tensor and the other classes that have ``act_pre_scale`` answers for the weight inside.
    """

    tensor_data_names = ["original_weight_tensor", "act_pre_scale"]  # noqa: RUF012
    tensor_attribute_names: list[str] = []  # noqa: RUF012
    act_pre_scale: Tensor

    def __init__(self, original_weight_tensor: Tensor, act_pre_scale: Tensor) -> None:
        k = original_weight_tensor.shape[-1]
        if act_pre_scale.numel() not in (1, k) or not act_pre_scale.is_floating_point():
            raise ValueError(
                f"act_pre_scale must have one number per input channel, [{k}], got {act_pre_scale.dtype} "
                f"{list(act_pre_scale.shape)}"
            )
        self.original_weight_tensor, self.act_pre_scale = original_weight_tensor, act_pre_scale.reshape(-1)

    def before(self, x: Tensor) -> Tensor:
        return x * self.act_pre_scale.to(x.dtype)

    def __getattr__(self, name: str) -> Any:
        if name in SHOWN and name != "original_weight_tensor":
            return getattr(self.original_weight_tensor, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PreScaledTensor({self.original_weight_tensor!r}, act_pre_scale=[{self.act_pre_scale.numel()}])"


PRE_SCALED.append(PreScaledTensor)
torch.serialization.add_safe_globals([PreScaledTensor, WeightTensorWithLinearActivationScaleMetadata])


@PreScaledTensor.implements([aten.slice.Tensor])
def _slice(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Rows keep the pre-scale; columns take their part of it."""
    w, dim, *rest = (*args, 0)[:2] if len(args) == 1 else args
    pre = w.act_pre_scale
    if dim % w.ndim == w.ndim - 1 and pre.numel() > 1:
        pre = func(pre, 0, *rest, **kwargs)
    return PreScaledTensor(func(w.original_weight_tensor, dim, *rest, **kwargs), pre)


@PreScaledTensor.implements_torch_function([aten.linear.default])
def _aten_linear(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    return F.linear(*args, **kwargs)


@PreScaledTensor.implements([aten.t.default, aten.mm.default, aten.addmm.default])
def _refused(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """Other products would lose the pre-scale."""
    raise NotImplementedError(
        f"{func} of a weight with act_pre_scale: write F.linear(x, weight), which scales the input first"
    )


def quantized_weight(weight: Tensor, config: AOBaseConfig | Any) -> Tensor:
    """One weight [N, K] under a config, as quantize_ makes it in a linear layer."""
    k, n = weight.shape[1], weight.shape[0]
    layer = nn.Linear(k, n, bias=False, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    model = nn.Sequential(layer)
    quantize_(model, config)
    return model[0].weight.detach()


def quantized_linear(observed: nn.Linear, weight: Tensor) -> nn.Linear:
    """A linear layer with this weight, whose input is scaled, and the bias of ``observed``."""
    layer = nn.Linear(observed.in_features, observed.out_features, False, device="meta", dtype=observed.weight.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    layer.bias = observed.bias
    layer.extra_repr = _ExtraRepr(layer)  # type: ignore[method-assign]
    return layer.train(observed.training)


def is_static(config: Any) -> bool:
    """Whether a config wants a static scale of the activation."""
    return hasattr(config, "act_quant_scale")


def with_scale(config: Any, scale: Tensor, zero_point: Tensor | None) -> Any:
    """A copy of a static config with these activation parameters."""
    given = {"act_quant_scale": scale, "act_quant_zero_point": zero_point}
    known = {f.name for f in dataclasses.fields(config)}
    return dataclasses.replace(config, **{name: value for name, value in given.items() if name in known})
