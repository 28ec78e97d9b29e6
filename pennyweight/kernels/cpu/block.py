"""Names of norms, rotations and activations in the native library, and the layout of a block's scratch buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import abi

FUNCTIONS = {
    None: abi.IDENTITY, "relu": abi.RELU, "gelu": abi.GELU, "gelu_tanh": abi.GELU_TANH, "quick_gelu": abi.QUICK_GELU,
    "silu": abi.SILU, "relu6": abi.RELU6, "hardswish": abi.HARDSWISH,
}  # fmt: skip
ROTATIONS = {None: abi.UNROTATED, "half": abi.HALVES, "interleaved": abi.INTERLEAVED}
NORMS = {None: abi.NO_NORM, "layer": abi.LAYER_NORM, "rms": abi.RMS_NORM}


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
