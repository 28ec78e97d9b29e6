"""Quantized optimizer states: their formats, blocks, and requantization."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import blocks, stochastic_rounding
from ..core.layouts import get_layout
from ..core.numerics import Parts, quantize
from ..core.ops.inplace import copy_parts_
from ..core.qparams import choose
from ..core.spec import ADAM4, ADAM4_SQUARES, ADAM8, ADAM8_SQUARES, ADAM_FP8, QuantSpec
from ..core.tensor import AffineQuantizedTensor
from ..kernels.cpu.optimizer import ufloat

QT = AffineQuantizedTensor
LEAST = 4096  # elements: smaller parameters keep float32 states, as torchao's and bitsandbytes' do


@dataclass(frozen=True)
class StateFormat:
    """spec: its block is adapted to each parameter; stochastic: rounded stochastically, hence unbiased; power: scales
    are powers of two, so that unchanged elements of a block are not rounded again."""

    spec: QuantSpec
    stochastic: bool = False
    power: bool = False


# A second moment changes by less than half an 8-bit step at a time; RTN would leave it unchanged, so it is rounded
# stochastically. Its maximum (AMSGrad) is not, because stochastic rounding would only make it grow.
KEPT: dict[str, dict[str, StateFormat]] = {
    "8bit": {
        "signed": StateFormat(ADAM8),
        "squares": StateFormat(ADAM8_SQUARES, True, True),
        "peaks": StateFormat(ADAM8_SQUARES),
    },
    "4bit": {
        "signed": StateFormat(ADAM4),
        "squares": StateFormat(ADAM4_SQUARES, True),
        "peaks": StateFormat(ADAM4_SQUARES),
    },
    "fp8": {
        "signed": StateFormat(ADAM_FP8),
        "squares": StateFormat(ADAM8_SQUARES, True, True),
        "peaks": StateFormat(ADAM8_SQUARES),
    },
}


class StateBlocks(NamedTuple):
    """Blocks in memory; see src/abi.h."""

    slab: int
    block: int
    inner: int
    row: int


def state_spec(shape: Sequence[int], size: int) -> tuple[int, ...]:
    """A block of about ``size`` neighbouring elements of a parameter: part of its last axis, or several whole entries
    of an earlier axis. All axes but the first are divided evenly to avoid padding; the first is not, so that its shards
    have the same blocks."""
    axis, inner = len(shape) - 1, 1
    while axis > 0 and inner * shape[axis] <= size:
        inner *= shape[axis]
        axis -= 1
    n, entries = shape[axis], max(1, size // max(1, inner))
    if axis > 0 and n > entries:
        entries = -(-n // -(-n // entries))
        entries += entries % 2 if inner == 1 else 0  # a block of 4-bit codes starts at a byte boundary
    return (entries, *[-1] * (len(shape) - 1 - axis))


def state_blocks(shape: Sequence[int], block: tuple[int, ...]) -> StateBlocks:
    """Memory positions of the blocks of :func:`state_spec`."""
    axis = len(shape) - len(block)
    inner = math.prod(shape[axis + 1 :])
    n = shape[axis]
    numel = (n if block[0] == -1 else min(block[0], n)) * inner
    return StateBlocks(math.prod(shape[axis:]), numel, inner, numel if axis == len(shape) - 1 else shape[-1])


def zeros(shape: Sequence[int], kept: StateFormat, size: int, device: torch.device) -> QT:
    """A zero-initialized state."""
    spec = kept.spec.with_(block=state_spec(shape, size))
    codes = torch.zeros(blocks.padded(spec.block, shape), dtype=spec.format.code_dtype, device=device)
    scale = torch.zeros(blocks.counts(spec.block, shape), dtype=torch.float32, device=device)
    return QT(get_layout(spec.layout).pack(Parts(codes, scale), spec, shape), spec, shape, torch.float32)


def write_(state: QT, x: Tensor, kept: StateFormat, key: tuple[int, int] | None = None, turn: int = 0) -> None:
    """Requantize float32 x into a state; RTN without a key. NaN and inf are not checked; they propagate."""
    spec, rule = state.spec.with_(layout="plain"), "mx_rceil" if kept.power else "symmetric"
    if kept.stochastic and key is not None:
        wide = blocks.pad(x, spec.block)
        params = choose(wide, spec, rule)
        assert params.scale is not None
        y = (blocks.split(wide, params.scale.shape) / blocks.expand(params.scale)).reshape(wide.shape)
        bits16 = blocks.pad(
            stochastic_rounding.high_bits(stochastic_rounding.random_bits(x.shape, key, x.device), turn), spec.block
        )
        shift, base, split, low = ufloat(spec.format)
        fine, coarse = (stochastic_rounding.round_high_bits(y, bits16, s) for s in (shift, shift + 1))
        codes = torch.where(y >= spec.format.values[split], fine - base, coarse - low)
        parts = Parts(codes.clamp(0, (1 << spec.format.bits) - 1).to(torch.uint8), params.scale)
    else:
        parts = quantize(x, spec, rule)
    packed = get_layout(state.spec.layout).pack(parts, state.spec, x.shape)
    copy_parts_(state, QT(packed, state.spec, x.shape, torch.float32))


def read(state: Tensor) -> Tensor:
    """A state as a float tensor that may be changed in place: the state itself if it is float."""
    return state.dequantize(torch.float32) if isinstance(state, QT) else state
