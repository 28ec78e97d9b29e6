"""NF4 and MX tensors, small floats."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from adapters.torchao.tests.snippets.table import Y, filled, inputs, normal, snippet

# A scale of 8 bits may be one step away: the mean of the scales is summed in another order.
SCALES = {"values": 2e-3, "y": 2e-3, "gradient": 2e-3}


@snippet("0.12", approx=SCALES)
def an_nf4_tensor() -> dict[str, Any]:
    from torchao.dtypes.nf4tensor import to_nf4

    w = to_nf4(normal(64, 64, seed=1), 64, 64)
    return {"values": w.get_original_weight(), "shape": w.shape, "dtype": w.dtype}


@snippet("0.12")
def an_nf4_tensor_of_bfloat16() -> dict[str, Any]:
    from torchao.dtypes.nf4tensor import to_nf4

    return {"values": to_nf4(normal(64, 64, seed=1, dtype=torch.bfloat16), 64, 64).get_original_weight()}


@snippet("0.12", approx=SCALES)
def an_nf4_tensor_by_its_class() -> dict[str, Any]:
    from torchao.dtypes import NF4Tensor

    w = NF4Tensor.from_tensor(normal(64, 64, seed=1), 64, 64)
    return {"values": w.get_original_weight(), "is": isinstance(w, NF4Tensor)}


@snippet("0.12", approx=SCALES)
def a_linear_over_nf4() -> dict[str, Any]:
    from torchao.dtypes.nf4tensor import linear_nf4, to_nf4

    x = normal(5, 64, seed=2).requires_grad_()
    y = linear_nf4(input=x, weight=to_nf4(normal(64, 64, seed=1), 64, 64))
    y.sum().backward()
    return {"y": y, "gradient": x.grad}


@snippet("0.12", approx=SCALES)
def nf4_through_linear() -> dict[str, Any]:
    from torchao.dtypes.nf4tensor import to_nf4

    w = to_nf4(normal(64, 64, seed=1), 64, 64)
    return {"y": F.linear(normal(5, 64, seed=2), w)}


def _mx(element: Any, **more: Any) -> dict[str, Any]:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    t = MXTensor.to_mx(normal(8, 64, seed=3), element, block_size=32, **more)
    return {"values": t.dequantize(torch.float32), "shape": t.shape}


@snippet()
def mxfp8() -> dict[str, Any]:
    return _mx(torch.float8_e4m3fn)


@snippet()
def mxfp8_e5m2() -> dict[str, Any]:
    return _mx(torch.float8_e5m2)


@snippet()
def mxfp4() -> dict[str, Any]:
    return _mx(torch.float4_e2m1fn_x2)


@snippet()
def mx_scales_rounded_up() -> dict[str, Any]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    return _mx(torch.float8_e4m3fn, scaling_mode=ScaleCalculationMode.RCEIL)


@snippet()
def mx_scales_to_even() -> dict[str, Any]:
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    return _mx(torch.float8_e4m3fn, scaling_mode=ScaleCalculationMode.EVEN)


@snippet("0.12")
def nf4_of_the_older_release() -> dict[str, Any]:
    from torchao.dtypes import to_nf4

    w = to_nf4(normal(256, 64, seed=6))
    return {"values": w.get_original_weight()}


@snippet(approx=Y)
def float8_training_shapes() -> dict[str, Any]:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    model = filled(torch.nn.Sequential(torch.nn.Linear(64, 32)))
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True))
    y = model(inputs())
    y.sum().backward()
    return {"shape": y.shape, "gradient": model[0].weight.grad.shape, "class": type(model[0]).__name__}
