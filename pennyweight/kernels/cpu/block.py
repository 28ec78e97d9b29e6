"""The structures of src/abi.h for the steps of a transformer block, and the layout of scratch buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from typing import NamedTuple

from .attention import RowNorm
from .library import IntLinear, LinearArgs

STEP_LINEAR, STEP_NORM, STEP_ROTARY, STEP_ATTENTION = range(4)
FUNCTIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "quick_gelu": 4, "silu": 5}


class Buffer(ctypes.Structure):
    """A matrix with one row for each row of the call; see src/abi.h."""

    _fields_ = (("data", c_void_p), ("width", c_int64), ("offset", c_int64), ("kind", c_int32))


class BlockLinear(ctypes.Structure):
    """Linear layers with one input; see src/abi.h."""

    _fields_ = (
        ("norm", RowNorm), ("weights", POINTER(IntLinear)), ("args", POINTER(LinearArgs)), ("out", POINTER(c_int32)),
        *((name, c_int32) for name in ("count", "x", "normed", "residual", "function", "gated")),
    )  # fmt: skip


class BlockNorm(ctypes.Structure):
    """A normalization with residual; see src/abi.h."""

    _fields_ = (("norm", RowNorm), *((name, c_int32) for name in ("x", "out", "residual")))


class Columns(ctypes.Structure):
    """Heads in a buffer; see src/abi.h."""

    _fields_ = (("buffer", c_int32), ("start", c_int32))


class BlockRotary(ctypes.Structure):
    """Normalization and rotation of heads, and the new tokens of a cache; see src/abi.h."""

    _fields_ = (
        ("q_norm", RowNorm), ("k_norm", RowNorm), *((name, Columns) for name in ("q", "k", "v")),
        *((name, c_int32) for name in ("heads", "shared", "size", "rotation", "rotated")),
    )  # fmt: skip


class BlockAttention(ctypes.Structure):
    """Attention; see src/abi.h."""

    _fields_ = (
        *((name, Columns) for name in ("q", "k", "v")),
        *((name, c_int32) for name in ("out", "heads", "shared", "size")), ("scale", c_float), ("softcap", c_float),
    )  # fmt: skip


class BlockStep(ctypes.Structure):
    """One step; see src/abi.h."""

    _fields_ = (
        ("linear", POINTER(BlockLinear)), ("norm", POINTER(BlockNorm)), ("rotary", POINTER(BlockRotary)),
        ("attention", POINTER(BlockAttention)), ("kind", c_int32),
    )  # fmt: skip


class Block(ctypes.Structure):
    """A call; see src/abi.h."""

    _fields_ = (
        ("steps", POINTER(BlockStep)), ("buffers", POINTER(Buffer)),
        *((name, c_void_p) for name in ("keys", "values", "cos", "sin", "mask")),
        ("key_strides", c_int64 * 3), ("value_strides", c_int64 * 3), ("cos_strides", c_int64 * 2),
        ("sin_strides", c_int64 * 2), ("mask_strides", c_int64 * 4),
        *((name, c_int64) for name in ("batch", "tokens", "past", "length", "window", "scratch", "coded")),
        ("past_keys", c_void_p), ("past_values", c_void_p),
        *((name, c_int32) for name in ("cache_kind", "angle_kind", "mask_kind", "causal")),
        *((name, c_int32) for name in ("step_count", "buffer_count", "threads")),
    )  # fmt: skip


class Span(NamedTuple):
    """The first and the last step that uses a buffer, and the first and the last segment (see src/block.h).

    A buffer of one segment alone may share memory with others by steps, because each thread has its own.
    """

    first: int
    last: int
    begin: int
    end: int
    alone: bool

    def meets(self, other: Span) -> bool:
        if self.alone and other.alone and self.begin == other.begin:
            return self.first <= other.last and other.first <= self.last
        return self.begin <= other.end and other.begin <= self.end


def place_buffers(widths: Sequence[int], used: Sequence[Span | None]) -> tuple[list[int], int]:
    """Positions of buffers in the scratch, and its size, in floats per row. used: None for a buffer without scratch."""
    offsets, total = [0] * len(widths), 0
    placed: list[tuple[Span, int, int]] = []  # and begin and end in the scratch
    for i in sorted((i for i, span in enumerate(used) if span), key=lambda i: -widths[i]):
        span, width, at = used[i], -(-widths[i] // 16) * 16, 0
        assert span is not None
        for begin, end in sorted((b, e) for other, b, e in placed if span.meets(other)):
            if at + width <= begin:
                break
            at = max(at, end)
        placed.append((span, at, at + width))
        offsets[i], total = at, max(total, at + width)
    return offsets, total
