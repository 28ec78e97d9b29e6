"""Block view of a latent weight under its spec (contracted axis last, in stored order, padded) and its inverse."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import blocks
from ...core.numerics import permute_last_axis, unpermute_last_axis
from ...core.spec import QuantSpec


class BlockView:
    """Block view for weights of one shape.

    shape       of the parameter in its module
    transposed  whether its last two axes are swapped
    perm        stored order of the contracted axis
    """

    def __init__(self, spec: QuantSpec, shape: torch.Size, transposed: bool, perm: Tensor | None) -> None:
        self.spec, self.transposed, self.perm = spec, transposed, perm
        self.shape = (*shape[:-2], shape[-1], shape[-2]) if transposed else tuple(shape)
        self.counts = blocks.counts(spec.block, self.shape)
        self.padded = blocks.padded(spec.block, self.shape)
        self.codes_shape = spec.codes_shape(self.padded)
        sizes = blocks.resolve(spec.block, self.shape)
        self.view_shape = tuple(n for pair in zip(self.counts, sizes, strict=True) for n in pair)

    def flip(self, x: Tensor) -> Tensor:
        """Convert between the axes of the parameter and the stored axes."""
        return x.transpose(-2, -1) if self.transposed else x

    def view(self, x: Tensor) -> Tensor:
        """The parameter as [g0, b0, g1, b1, ..]; padding repeats the last entries, as in quantization."""
        return blocks.split(blocks.pad(permute_last_axis(self.flip(x), self.perm), self.spec.block), self.counts)

    def zero_padded(self, x: Tensor, sizes: tuple[int, ...]) -> Tensor:
        """The parameter in stored order, padded with zeros to ``sizes``."""
        y = permute_last_axis(self.flip(x), self.perm)
        short = [m - n for n, m in zip(y.shape, sizes, strict=True)]
        return F.pad(y, [v for s in reversed(short) for v in (0, s)]) if any(short) else y

    def sums(self, x: Tensor) -> Tensor:
        """Sum of each block."""
        view = blocks.split(self.zero_padded(x, self.padded), self.counts)
        return view.sum(blocks.inner_axes(len(self.shape)))

    def back(self, view: Tensor) -> Tensor:
        """Inverse of :meth:`view`."""
        return self.back_flat(view.expand(self.view_shape).reshape(self.padded))

    def back_flat(self, x: Tensor) -> Tensor:
        """Inverse of padding and axis order, for a tensor in stored axes."""
        for axis, n in enumerate(self.shape):
            x = x.narrow(axis, 0, n)
        return self.flip(unpermute_last_axis(x, self.perm))

    def expand(self, part: Tensor) -> Tensor:
        """Expand one value per block to one per element."""
        return self.back(blocks.expand(part))
