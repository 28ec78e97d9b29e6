"""A chain of convolutions: steps of a convolution net between its input and its pooling, with a plain reference.

Tensors are numbered; each is written by one step. A step computes

    InputStep   y = input of the call
    ConvStep    y = clip(f(conv(x, weight) + bias) + residual, lo, hi), f an activation function or nothing
    MaxStep     y = clip(maximum over windows of x, lo, hi)
    MeanStep    y = clip(mean over height and width of x, lo, hi)
    AddStep     y = clip(x + residual, lo, hi)

Weights are int8, inputs of convolutions have one static scale. The input of a convolution is kept as codes; a tensor is
kept as float32 only if something else reads it. :func:`formats` decides that, :func:`run_reference` computes the steps
with torch, native/conv_chain.py compiles them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.numerics import dequantize, quantize
from ..core.tensor import AffineQuantizedTensor
from .activation import static_params
from .block import ACTIVATIONS
from .cpu import conv
from .cpu.abi import NONE, STATIC, Conv
from .table import case_of

FUNCTIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    **ACTIVATIONS,  # type: ignore[dict-item]
    "relu6": F.relu6,
    "hardswish": F.hardswish,
}
MOST_TAPS = 512  # of a depthwise kernel: its sums are exact in float32

Pair = tuple[int, int]


@dataclass(frozen=True, eq=False)
class InputStep:
    """y = input number ``index`` of the call."""

    index: int
    y: int


@dataclass(frozen=True, eq=False)
class ConvStep:
    """y = clip(f(conv(x, weight) + bias) + residual, lo, hi). weight: int8 [O, C / groups, kh, kw]; see fits()."""

    x: int
    y: int
    weight: AffineQuantizedTensor
    bias: Tensor | None = None
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    function: str | None = None
    residual: int | None = None
    lo: float = -math.inf
    hi: float = math.inf


@dataclass(frozen=True, eq=False)
class MaxStep:
    """y = clip(maximum over windows of x, lo, hi); the padding counts as minus infinity."""

    x: int
    y: int
    kernel: Pair
    stride: Pair
    padding: Pair = (0, 0)
    lo: float = -math.inf
    hi: float = math.inf


@dataclass(frozen=True, eq=False)
class MeanStep:
    """y = clip(mean over height and width of x, lo, hi), [N, C, 1, 1]."""

    x: int
    y: int
    lo: float = -math.inf
    hi: float = math.inf


@dataclass(frozen=True, eq=False)
class AddStep:
    """y = clip(x + residual, lo, hi); residual None: nothing is added."""

    x: int
    y: int
    residual: int | None = None
    lo: float = -math.inf
    hi: float = math.inf


Step = InputStep | ConvStep | MaxStep | MeanStep | AddStep


@dataclass(frozen=True, eq=False)
class ConvChain:
    """Steps in an order in which they can run. outputs: numbers of the tensors that a call returns."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]


class Codes(NamedTuple):
    """How a convolution reads its input: x = (q - zero_point) * scale, lo <= q <= hi."""

    scale: float
    zero_point: int
    lo: int
    hi: int
    kind: int  # Kind to which the reciprocal of the scale is rounded


class Format(NamedTuple):
    """How a tensor is kept."""

    codes: Codes | None
    numbers: bool


def fits(w: Any, groups: int) -> str:
    """Why native code cannot run a convolution with this weight as a :class:`ConvStep`, or ""."""
    if type(w) is not AffineQuantizedTensor:
        return "the weight is not quantized"
    if w.spec.layout != conv.LAYOUT.name or w.axes is not None or w.ndim != 4:
        return "the weight is not one of two dimensions in the layout of native convolutions"
    if w.act is None or w.act.mode != "static":
        return "its input is not quantized with a static scale"
    if w.act_scale is None or w.act_scale.numel() != 1:
        return "the static scale of its input is missing"
    case = case_of(w, torch.float32)
    plain = replace(case, spec=case.spec.with_(layout="plain"))
    verdict = conv._accepts(plain)
    if verdict is not True:
        return str(verdict)
    s = conv.describe(plain)
    if s.bits != 8 or s.center != 128 or s.zero_point != NONE or s.channels != s.c or s.act != STATIC:
        return "the weight is not int8, symmetric, with scales of rows"
    o, c = int(w.shape[0]), int(w.shape[1])
    if c == 1 and (groups != o or math.prod(w.shape[2:]) > MOST_TAPS):
        return "it has one input channel per group, but is not depthwise"
    if c > 1 and groups > 1 and (c % 4 or o // groups % 16):
        return "groups are not multiples of 4 input channels and 16 output channels"
    bound = torch.finfo(torch.float32).max
    if (
        w.scale is None
        or not bool((w.scale.float().abs().amax() * float(w.act_scale) * 2.0**31 < bound).item())
        or not float(w.act_scale) > 0
    ):
        return "scales are not finite"
    return ""


def structure(w: AffineQuantizedTensor) -> Conv:
    """The weight as the struct of src/abi.h."""
    case = case_of(w, torch.float32)
    return conv.describe(replace(case, spec=case.spec.with_(layout="plain")))


def input_codes(w: Any) -> Codes:
    """How a convolution with this weight reads its input."""
    s = structure(w)
    shift = 128 if w.act.spec.format.lo == 0 and w.act.spec.format.hi == 255 else 0
    scale = float(w.act_scale.to(w.act.spec.scale).float())
    zero = 0 if w.act_zero_point is None else int(w.act_zero_point)
    return Codes(scale, zero - shift, int(s.act_lo), int(s.act_hi), int(s.act_scale))


def formats(chain: ConvChain) -> tuple[ConvChain, dict[int, Format]]:
    """The formats of all tensors. Where convolutions read a tensor with different scales, a step that makes the other
    codes is added to the chain."""
    steps = list(chain.steps)
    count = 1 + max(step.y for step in steps)
    read: dict[int, dict[Codes, int]] = {}  # tensor -> codes -> the tensor that has them
    more: dict[int, list[Step]] = {}
    for i, step in enumerate(steps):
        if isinstance(step, ConvStep):
            same, codes = read.setdefault(step.x, {}), input_codes(step.weight)
            if same and codes not in same:
                more.setdefault(step.x, []).append(AddStep(step.x, count))
                same[codes], count = count, count + 1
            steps[i] = replace(step, x=same.setdefault(codes, step.x))
    ordered: list[Step] = []
    for step in steps:
        ordered += [step, *more.get(step.y, ())]
    coded = {t: codes for same in read.values() for codes, t in same.items()}
    numbers = set(chain.outputs)
    for step in reversed(ordered):
        if step.y not in coded:
            numbers.add(step.y)  # also if nothing reads it
        if isinstance(step, MaxStep):
            whole = step.y in numbers or step.x in numbers or step.lo > -math.inf or step.hi < math.inf
            if not whole and coded.get(step.x, coded[step.y]) == coded[step.y]:
                coded[step.x] = coded[step.y]  # codes have the order of the numbers
            else:
                numbers.add(step.x)
        elif isinstance(step, (MeanStep, AddStep)):
            numbers.add(step.x)
        residual = getattr(step, "residual", None)
        if residual is not None:
            numbers.add(residual)
    found = {step.y: Format(coded.get(step.y), step.y in numbers) for step in ordered}
    return ConvChain(tuple(ordered), chain.outputs), found


def run_reference(chain: ConvChain, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs for inputs [N, C, H, W], with torch ops in float32 on dequantized codes.

    Products are summed in float64: a sum of codes is exact, and only scale, bias and activation round.
    """
    buffers: dict[int, Tensor] = {}
    for step in chain.steps:
        if isinstance(step, InputStep):
            buffers[step.y] = inputs[step.index].float()
            continue
        x = buffers[step.x]
        if isinstance(step, ConvStep):
            w: Any = step.weight
            params = static_params(x, w.act_scale, w.act_zero_point)
            q = dequantize(quantize(x, w.act.spec, w.act.rule, w.act.eps, params), w.act.spec, x.shape, torch.float64)
            bias = None if step.bias is None else step.bias.double()
            rest = (step.stride, step.padding, step.dilation, step.groups)
            y = FUNCTIONS[step.function](F.conv2d(q, w.dequantize(torch.float64), bias, *rest).float())
        elif isinstance(step, MaxStep):
            y = F.max_pool2d(x, step.kernel, step.stride, step.padding)
        elif isinstance(step, MeanStep):
            y = x.mean((2, 3), keepdim=True)
        else:
            y = x
        residual = getattr(step, "residual", None)
        if residual is not None:
            y = y + buffers[residual]
        buffers[step.y] = y.clamp(step.lo, step.hi)
    return [buffers[i] for i in chain.outputs]
