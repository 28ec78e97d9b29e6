"""The input of an op: its dtype under autocast, and its quantization under the weight's ActivationSpec."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.numerics import Parts, dequantize, fake_quantize, quantize, quantize_under
from ..core.qparams import Params
from ..core.spec import ActivationSpec, QuantSpec
from ..core.tensor import AffineQuantizedTensor
from ..support.errors import ArgumentError


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Dtype to which autocast casts the input of a matrix product; None if autocast is off or unavailable for the
    device, and for float64, which it does not change."""
    kind = x.device.type
    if x.dtype is torch.float64 or not (_has_autocast(kind) and torch.is_autocast_enabled(kind)):
        return None
    return torch.get_autocast_dtype(kind)


def _has_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


# torch.compiler.assume_constant_result, which would import torch._dynamo: that of torch 2.11 cannot trace the call
_has_autocast._dynamo_marked_constant = True  # type: ignore[attr-defined]


def scale_input(x: Tensor, w: AffineQuantizedTensor) -> tuple[Tensor, AffineQuantizedTensor]:
    """x [.., K] times the weight's ``pre_scale``, in x's dtype, and the weight without it: what its kernels see."""
    if w._pre_scale is None:
        return x, w
    return (x * w._pre_scale).to(x.dtype), w.with_(pre_scale=None)


def quantize_activation(
    x: Tensor, act: ActivationSpec | None, scale: Tensor | None, zero_point: Tensor | None
) -> Tensor:
    """x quantized and dequantized under ``act``, in x's dtype."""
    if act is None:
        return x
    if act.mode == "dynamic":
        return fake_quantize(x, act.spec, act.rule, act.eps)
    return dequantize(static_parts(x, act, scale, zero_point), act.spec, x.shape, x.dtype)


def static_parts(x: Tensor, act: ActivationSpec, scale: Tensor | None, zero_point: Tensor | None) -> Parts:
    """Parts of x under a static activation with these stored parameters."""
    params = static_params(x, scale, zero_point)
    if not isinstance(act.spec.scale, QuantSpec):
        return quantize(x, act.spec, act.rule, act.eps, params)
    assert params.scale is not None
    return quantize_under(x, act.spec, params.scale, act.rule, act.eps)


def static_params(x: Tensor, scale: Tensor | None, zero_point: Tensor | None) -> Params:
    """Stored activation parameters, one for x or one per row, reshaped to the rank of x.

    Raises ArgumentError if there is one per row, and x has another number of rows.
    """
    if scale is None:
        raise ArgumentError("a static activation needs act_scale on the weight; calibrate, or pass it in the config")
    shape: tuple[int, ...] = (1,) * x.ndim
    if scale.numel() > 1:
        shape = (*x.shape[:-1], 1)
        rows = x.numel() // max(x.shape[-1], 1)
        if rows != scale.numel():
            raise ArgumentError(
                f"the input has {rows} rows of {x.shape[-1]}, and act_scale has {scale.numel()} scales, one per row; "
                "pass as many rows, or quantize the model with one scale for all or with a dynamic config"
            )
    if zero_point is not None:
        zero_point = zero_point.reshape(-1).expand(scale.numel()).reshape(shape)
    return Params(scale.reshape(shape), zero_point)


def encode_activation(x: Tensor, act: ActivationSpec, scale: Tensor | None, zero_point: Tensor | None) -> Parts:
    """Codes, scale and zero point of x, bit-identical to :func:`quantize`; three times as fast in the common case."""
    if act.mode == "static":
        return static_parts(x, act, scale, zero_point)
    spec = act.spec
    if (
        spec.block != (-1,) or spec.scale is not torch.float32 or spec.zero_point or spec.mid or spec.offset is not None
        or spec.format.lo >= 0 or spec.format.kind != "int" or act.rule not in (None, "symmetric")
        or x.dtype not in _FLOORS or x.numel() == 0
    ):  # fmt: skip
        return quantize(x, spec, act.rule, act.eps)
    f, (floor, least) = spec.format, _FLOORS[x.dtype]
    if act.eps is not None:
        floor = max(act.eps, least)
    scale = x.abs().amax(-1, keepdim=True).div_((f.hi - f.lo) / 2)
    scale = scale.clamp_(floor, torch.finfo(x.dtype).max).float()
    return Parts((x * scale.reciprocal()).round_().clamp_(f.lo, f.hi).to(f.code_dtype), scale)


# Minimum scale without and with eps, as in core.qparams.choose.
_FLOORS = {
    d: (torch.finfo(d).smallest_normal, torch.finfo(d).smallest_normal * torch.finfo(d).eps)
    for d in (torch.float32, torch.bfloat16, torch.float16)
}
