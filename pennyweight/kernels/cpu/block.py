"""Names of norms, rotations and activations in the native library, and the layout of a block's scratch buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .abi import (
    GELU,
    GELU_TANH,
    HALVES,
    IDENTITY,
    INTERLEAVED,
    LAYER_NORM,
    NO_NORM,
    QUICK_GELU,
    RELU,
    RMS_NORM,
    SILU,
    UNROTATED,
)

FUNCTIONS = {
    None: IDENTITY, "relu": RELU, "gelu": GELU, "gelu_tanh": GELU_TANH, "quick_gelu": QUICK_GELU, "silu": SILU,
}  # fmt: skip
ROTATIONS = {None: UNROTATED, "half": HALVES, "interleaved": INTERLEAVED}
NORMS = {None: NO_NORM, "layer": LAYER_NORM, "rms": RMS_NORM}


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
