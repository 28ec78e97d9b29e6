"""Quantizes an activation in the graph: the arithmetic of ``core.qparams`` and ``core.numerics`` as float32 ONNX ops.

DynamicQuantizeLinear is not used: it rounds x / scale where torchao and this package round x * (1 / scale), and has a
different code range for its zero point, so some codes would differ by one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.qparams import scale_floor
from ..core.spec import ActivationSpec
from ..core.tensor import AffineQuantizedTensor
from .graph import Nodes

_RULES = (None, "symmetric", "asymmetric", "absmax")


class QuantizedInput(NamedTuple):
    """x ~ (codes - zero) * scale. codes and zero: integers (or float8 values) as float32; None: 0."""

    codes: Any
    scale: Any
    zero: Any


def refusal(act: ActivationSpec, width: int) -> str | None:
    """Why an activation cannot be quantized in a graph; None if it can. width: size of its last axis."""
    spec = act.spec
    if spec.scale is not torch.float32:
        return f"its activation scale is {spec.scale}; only float32 scales can be computed in a graph"
    if spec.offset is not None or spec.mid:
        return "its activation has a real offset or a constant zero point"
    if not (spec.format.native_float or (spec.format.kind == "int" and spec.format.signed)):
        return f"its activation is {spec.format}; only signed integers and float8 are supported"
    if act.mode == "static":
        return None if spec.block is None else "its static activation scale is not one number"
    if act.rule not in _RULES or (spec.zero_point and act.rule not in (None, "asymmetric")):
        return f"its activation scale is chosen by rule {act.rule!r}"
    block = spec.block
    if block is None or all(b == -1 for b in block):
        return None
    if len(block) == 1 and width % block[0] == 0:
        return None
    return f"its activation has blocks {list(block)}, which do not divide a row of {width}"


def quantized(n: Nodes, x: Any, w: AffineQuantizedTensor) -> QuantizedInput:
    """The codes of x. Blocks along its last axis are not split here: see :func:`rounded`."""
    act = w.act
    assert act is not None
    f, spec = act.spec.format, act.spec
    lo, hi = np.float32(f.lo), np.float32(f.hi)
    if act.mode == "static":
        assert w.act_scale is not None
        scale: Any = np.float32(w.act_scale.item())
        zero: Any = None if w.act_zero_point is None else np.float32(w.act_zero_point.item())
        up: Any = np.float32(1) / scale
    else:
        axes = np.arange(-len(x.shape if spec.block is None else spec.block), 0, dtype=np.int64)
        least = np.float32(scale_floor(torch.float32, spec, act.eps))
        zero = None
        if spec.zero_point:
            bottom = n.op("Min", n.op("ReduceMin", x, axes, keepdims=1), np.float32(0))
            top = n.op("Max", n.op("ReduceMax", x, axes, keepdims=1), np.float32(0))
            scale = n.op("Max", n.op("Div", n.op("Sub", top, bottom), hi - lo), least)
            zero = n.op("Clip", n.op("Sub", lo, n.op("Round", n.op("Div", bottom, scale))), lo, hi)
        else:
            largest = n.op("ReduceMax", n.op("Abs", x), axes, keepdims=1)
            scale = n.op("Max", n.op("Div", largest, np.float32(_reach(act))), least)
        # A true division: onnxruntime rewrites x * (1 / scale), with a constant 1, to x / scale, which changes codes;
        # and its Reciprocal need not round like a division.
        up = n.op("Div", n.op("Div", scale, scale), scale)
    if f.native_float:
        return QuantizedInput(_float8(n, n.op("Clip", n.op("Div", x, scale), lo, hi), f.code_dtype), scale, None)
    steps = n.op("Round", n.op("Mul", x, up))
    return QuantizedInput(n.op("Clip", steps if zero is None else n.op("Add", steps, zero), lo, hi), scale, zero)


def _reach(act: ActivationSpec) -> float:
    """The divisor of the absolute maximum for this rule."""
    f = act.spec.format
    if act.rule == "absmax":
        return min(f.hi, -f.lo)
    return (f.hi - f.lo) / 2 if f.kind == "int" else max(f.hi, -f.lo)


def _float8(n: Nodes, x: Any, dtype: torch.dtype) -> Any:
    import onnx_ir as ir

    kind = ir.DataType.FLOAT8E4M3FN if dtype is torch.float8_e4m3fn else ir.DataType.FLOAT8E5M2
    return n.floats(n.cast(x, kind))


def rounded(n: Nodes, x: Any, w: AffineQuantizedTensor) -> Any:
    """x as the op sees it: quantized and dequantized. x unchanged if its activation is not quantized."""
    if w.act is None:
        return x
    block, rank, width = w.act.spec.block, len(x.shape), x.shape[-1]
    grouped = w.act.mode == "dynamic" and block is not None and len(block) == 1 and block[0] != -1
    if grouped:
        assert block is not None
        x = n.reshape(x, *[0] * (rank - 1), width // block[0], block[0])
    q = quantized(n, x, w)
    y = n.op("Mul", q.codes if q.zero is None else n.op("Sub", q.codes, q.zero), q.scale)
    return n.reshape(y, *[0] * (rank - 1), width) if grouped else y
