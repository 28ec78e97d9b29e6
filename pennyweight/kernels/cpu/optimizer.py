"""Native optimizer steps with quantized states: reads, updates and requantizes each block while it is in the cache.

The arithmetic is in src/optimizer.h. States can use any table format or float8.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...core.formats import E4M3, UFLOAT4, UFLOAT8, Format, decision_levels
from ...core.tensor import AffineQuantizedTensor
from ...core.tracing import in_memory, plain_tensors
from ...support.errors import ArgumentError
from ..native import arguments
from ..native import convert as native_convert
from .abi import OPTIM_STATES, STATE_FLOAT, STATE_TABLE, STATE_UFLOAT, CodeTable, OptimJob
from .library import KINDS, usable

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# Mantissa bits, and the first code that has them; smaller codes have one bit less.
UFLOATS = {UFLOAT8: (4, 128), UFLOAT4: (1, 0)}
_CHUNK = 1024  # elements of a float state per chunk


class Job(OptimJob):
    """One step of one parameter; see src/abi.h."""

    kept: list[Any]  # owners of the memory of tables


def _cells(levels: list[int], shift: int, first: int, last: int, code: int, step: int) -> list[int] | None:
    """An entry per cell of |x|: the code at its lower end and the level within; None if a cell has two levels.

    levels: decision levels as bits of float32, ascending; ``code`` below the first, ``step`` more above each.
    """
    none = (1 << shift) - 1
    entries, i = [], 0
    for cell in range(first, first + last + 1):
        within = [b for b in levels[i : i + 2] if b >> shift == cell]
        if len(within) > 1:
            return None
        entries.append(code | (within[0] & none if within else none) << 8)
        i, code = i + len(within), code + step * len(within)
    return entries


def _bits(x: Tensor) -> list[int]:
    return x.contiguous().view(torch.int32).tolist()


@lru_cache(maxsize=64)
def code_table(f: Format) -> tuple[CodeTable, tuple[Tensor, Tensor]]:
    """The numbers and decision levels of a format, and the tensors that hold them."""
    with plain_tensors():
        cpu, float32 = torch.device("cpu"), torch.float32
        if f is E4M3:
            numbers = f.decode(torch.arange(256, dtype=torch.uint8, device=cpu).view(f.code_dtype), float32)
            up = decision_levels(tuple(numbers[:127].tolist()), cpu, even=True)
            down = torch.empty(0, dtype=float32, device=cpu)
        else:
            numbers = torch.zeros(256, dtype=float32, device=cpu)
            numbers[: len(f.values)] = torch.tensor(f.values, dtype=float32, device=cpu)
            levels = decision_levels(f.values, cpu, even=False)
            up, down = levels[levels >= 0], levels[levels < 0].abs().flip(0)
        # x is above a negative level if |x| is below it, and |x| at the level counts as above
        down = torch.nextafter(down, torch.zeros_like(down))
        ends = _bits(up), _bits(down)
        for shift in range(24, 8, -1):
            every = [b >> shift for b in (*ends[0], *ends[1])]
            first, last = min(every) - 1, max(every) - min(every) + 2  # a cell without a level at either end
            below = 0 if f is E4M3 else len(ends[1])
            halves = [_cells(ends[0], shift, first, last, below, 1)]
            halves += [_cells(ends[1], shift, first, last, below, -1)] if ends[1] else []
            if all(half is not None for half in halves):
                break
        else:
            raise ValueError(f"number format {f}: two of its numbers are too close to each other for native code")
        cells = torch.tensor([e for half in halves for e in half or ()], dtype=torch.int64, device=cpu).to(torch.int32)
        negative = last + 1 if ends[1] else 0
        at = (
            arguments.address(cells, "cells of a table", (torch.int32,), 1),
            arguments.address(numbers, "numbers", (float32,), 256),
        )
        table = CodeTable(*at, shift, first, last, negative, int(f is E4M3))
        return table, (cells, numbers)


def ufloat(f: Format) -> tuple[int, int, int, int]:
    """(shift, base, split, low): codes >= split are (bits of a float32 >> shift) - base; codes below split are
    (bits >> (shift + 1)) - low."""
    mantissa, split = UFLOATS[f]
    shift = 23 - mantissa
    first, least = _bits(torch.tensor([f.values[split], f.lo], dtype=torch.float32, device="cpu"))
    return shift, (first >> shift) - split, split, (least >> (shift + 1)) + (0 if split else 1)


def _takes(state: Tensor) -> bool:
    if not isinstance(state, AffineQuantizedTensor):
        return state.dtype is torch.float32 and state.is_contiguous()
    spec = state.spec
    return (
        spec.scale is torch.float32 and spec.offset is None and not spec.mid and state.axes is None
        and state.perm is None and (spec.format is E4M3 or spec.format.kind == "table")
        and (spec.format.bits, spec.layout) in ((8, "plain"), (8, "bits"), (4, "bits"))
        and all(part is None or part.is_contiguous() for part in state.parts)
    )  # fmt: skip


def accepts(p: Tensor, g: Tensor, states: Sequence[Tensor]) -> bool | str:
    """True if native code supports this step, else the reason why not."""
    there = usable()
    if there is not True:
        return f"native CPU kernels: {there}"
    if p.device.type != "cpu" or g.device.type != "cpu":
        return f"on {p.device}: native steps run on CPUs only"
    if p.dtype not in FLOATS or g.dtype not in FLOATS:
        return f"{p.dtype} with a gradient of {g.dtype}: native steps support float32, bfloat16 and float16"
    if isinstance(p, AffineQuantizedTensor) or isinstance(g, AffineQuantizedTensor):
        return "the parameter itself is quantized"
    if not (in_memory(p) and in_memory(g)):
        return f"{type(p).__name__} with a gradient {type(g).__name__} is not plain memory"
    if not all(map(_takes, states)):
        return "a state has a spec that native steps do not support"
    return True


def job(
    p: Tensor, states: Sequence[Tensor], kept: Sequence[tuple[bool, bool]], rule: int,
    geometry: tuple[int, int, int, int], key: tuple[int, int],
) -> Job:  # fmt: skip
    """The Job fields that are constant over steps. p: contiguous. kept: for each state, whether it uses stochastic
    rounding, and whether its scales are powers of two. geometry: slab, block, inner and row of src/abi.h;
    ignored if all states are floats."""
    if not any(isinstance(s, AffineQuantizedTensor) for s in states):
        geometry = (max(1, p.numel()), _CHUNK, 1, _CHUNK)
    at = arguments.address(p, "optimizer step: parameter", FLOATS, p.numel(), exact=True)
    j = Job(at, None, p.numel(), *geometry, KINDS[p.dtype], 0, rule, 0, len(states))
    j.key[:], j.kept = key, []
    for slot, state, (stochastic, power) in zip(j.state, states, kept, strict=False):
        if not isinstance(state, AffineQuantizedTensor):
            slot.kind = STATE_FLOAT
            continue
        f = state.spec.format
        if state.shape != p.shape or state._scale is None:
            raise ArgumentError(f"{_what(state)} does not match a parameter {list(p.shape)}")
        slot.bits = f.bits
        slot.hi, slot.stochastic, slot.power = max(f.hi, -f.lo), int(stochastic), int(power)
        if f in UFLOATS:
            slot.kind, slot.top = STATE_UFLOAT, (1 << f.bits) - 1
            slot.shift, slot.base, slot.split, slot.low = ufloat(f)
        else:
            j.kept.append(code_table(f))
            slot.kind, slot.table = STATE_TABLE, ctypes.addressof(j.kept[-1][0])
    parts = iter(arguments.extents(OPTIM_STATES, j))
    for slot, state in zip(j.state, states, strict=False):
        codes, scale, what = next(parts), next(parts), _what(state)
        if not isinstance(state, AffineQuantizedTensor):
            slot.codes = arguments.address(state, what, (torch.float32,), codes.least, exact=True)
            continue
        dtype = torch.uint8 if state.spec.layout == "bits" else state.spec.format.code_dtype
        slot.codes = arguments.address(state._codes, f"{what}: codes", (dtype,), codes.least, exact=True)
        assert state._scale is not None  # as above
        slot.scale = arguments.address(state._scale, f"{what}: scale", (torch.float32,), scale.least, exact=True)
    return j


def _what(state: Tensor) -> str:
    if not isinstance(state, AffineQuantizedTensor):
        return "optimizer step: float state"
    return f"optimizer step: state {list(state.shape)} {state.spec}"


def set_step(j: Job, g: Tensor, flags: int, turn: int, c: Sequence[float]) -> None:
    """Set the fields that change per step: gradient (contiguous), flags, step mask of the random bits, coefficients."""
    j.g = arguments.address(g, "optimizer step: gradient", FLOATS, j.count, exact=True)
    j.g_kind, j.flags = KINDS[g.dtype], flags
    j.turn = turn
    j.c[: len(c)] = c


def run(jobs: Sequence[Any]) -> None:
    """Run all steps, with torch's number of threads."""
    every = (OptimJob * len(jobs))(*jobs)
    elements = sum(j.count for j in jobs)
    threads = max(1, min(torch.get_num_threads(), elements >> 15))
    native_convert.optimizer_steps(every, len(jobs), threads)
