"""8-bit rows that torch itself offers on a CPU.

``torch._int_mm`` multiplies int8 by int8 into int32 for every shape. ``aten._weight_int8pack_mm`` is fast in bfloat16
only (float32 and float16 take a scalar loop) and reads past its buffers where K is not a multiple of 16, so it is
offered for neither.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.formats import INT7, INT8
from ..core.numerics import quantize
from ..core.spec import QuantSpec
from ..core.tensor import AffineQuantizedTensor
from .reference import static_params
from .table import Case, Kernel, register_kernel


# From this many rows on, casting the codes and calling the float product is faster (2048x2048, two threads: at 16 rows
# 0.9x, at 128 rows 2.4x).
PACK_ROWS = 15


def _row_int8(spec: QuantSpec, shape: tuple[int, ...]) -> bool | str:
    if spec.format not in (INT7, INT8) or spec.zero_point or spec.offset is not None or spec.mid:
        return "needs symmetric int8 (or 7-bit) weights"
    if not isinstance(spec.scale, torch.dtype):
        return "its scale is itself quantized"
    if spec.block is not None and spec.block[-1] != -1 and spec.block[-1] < shape[-1]:
        return "needs one scale per row, the weight has groups"
    return True


def _accepts_dynamic(case: Case) -> bool | str:
    verdict = _row_int8(case.spec, case.shape)
    if verdict is not True:
        return verdict
    act = case.act
    if act is None:
        return "weight-only: the activation is not quantized"
    if (
        act.spec.format not in (INT7, INT8)
        or act.spec.offset is not None
        or not isinstance(act.spec.scale, torch.dtype)
    ):
        return "needs int8 activations with a plain scale"
    if act.mode == "dynamic" and act.spec.block not in ((-1,), None):
        return "needs one activation scale per token or per tensor"
    return True


def int8_int8(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
    """y = (qx @ qw.T - zx * sum_k qw) * sx * sw + bias; sums exact in int32, scaled in float32.

    x: [.., K]; w: int8 [N, K] with a scale per row or one for all.
    """
    act = w.act
    assert act is not None
    params = None if act.mode == "dynamic" else static_params(x, w.act_scale, w.act_zero_point)
    q = quantize(x, act.spec, act.rule, act.eps, params)
    k = x.shape[-1]
    total = torch._int_mm(q.codes.reshape(-1, k), w.codes.t()).reshape(*x.shape[:-1], -1)
    if q.zero_point is not None:
        total = total - q.zero_point.to(torch.int32) * w.codes.sum(-1, dtype=torch.int32)
    y = total.float() * q.scale.float() * w.scale.float().reshape(-1)  # type: ignore[union-attr]
    return (y if bias is None else y + bias).to(x.dtype)


def _accepts_cast(case: Case) -> bool | str:
    return "the activation is quantized" if case.act is not None else _row_int8(case.spec, case.shape)


def int8_cast(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
    """y = (x @ qw.T) * sw + bias: the codes are cast, the scale is applied to the result. x: [.., K]."""
    y = torch.matmul(x, w.codes.to(x.dtype).t()).float() * w.scale.float().reshape(-1)  # type: ignore[union-attr]
    return (y if bias is None else y + bias).to(x.dtype)


def _accepts_pack(case: Case) -> bool | str:
    verdict = _accepts_cast(case)
    if verdict is not True:
        return verdict
    if case.dtype is not torch.bfloat16:
        return "fast in bfloat16 only"
    if case.shape[-1] % 16:
        return f"reads out of bounds unless K is a multiple of 16, K is {case.shape[-1]}"
    return len(case.shape) == 2 or "needs a 2-d weight"


def int8_pack(x: Tensor, w: AffineQuantizedTensor, bias: Tensor | None) -> Tensor:
    """As :func:`int8_cast`, fused. The scale is applied outside, in float32: inside it would be rounded to bfloat16."""
    if x.numel() > PACK_ROWS * x.shape[-1]:
        return int8_cast(x, w, bias)
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    ones = flat.new_ones(w.codes.shape[0])
    y = torch.ops.aten._weight_int8pack_mm.default(flat, w.codes, ones).float() * w.scale.float().reshape(-1)  # type: ignore[union-attr]
    return (y if bias is None else y + bias).to(x.dtype).reshape(*x.shape[:-1], -1)


register_kernel(
    Kernel("linear", "torch_int_mm", int8_int8, _accepts_dynamic, ("cpu",), "plain", rank=20, tolerance="float32")
)
register_kernel(
    Kernel("linear", "torch_int8pack", int8_pack, _accepts_pack, ("cpu",), "plain", rank=20, tolerance="bfloat16")
)
register_kernel(
    Kernel("linear", "torch_int8_cast", int8_cast, _accepts_cast, None, "plain", rank=10, tolerance="float32")
)
