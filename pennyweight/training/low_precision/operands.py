"""Operands of a training product: a matrix turned, quantized, rounded by chance, and watched for what is not finite."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import chance
from ...core.numerics import Parts, quantize
from ...core.spec import QuantSpec
from .products import Quantized, wide
from .recipes import Operand

_SIGNS = 1 << 16  # tells the random numbers of signs from those of operands


def operand(x: Tensor, side: Any, seed: int, salt: int, hadamard: int) -> Tensor | Quantized:
    """A matrix [rows, contracted] as one side of a product: quantized, or as it is where the recipe says None."""
    if not isinstance(side, Operand) or x.numel() == 0:
        return x
    shape = _turned_shape(x, hadamard)
    plain = isinstance(side.spec.scale, torch.dtype) and side.spec.block in (None, (-1,))
    if not torch.compiler.is_compiling() or (plain and not side.chance and not hadamard):
        leaves = _quantized(x, side, seed, salt, hadamard)
    else:
        # One op in the graph: torch 2.13's inductor gives other numbers than eager mode for padded blocks under e8m0
        # scales, and for int32 products that wrap. Only what is plain is left to it, to fuse.
        leaves = torch.ops.pennyweight.training_operand.default(x, side.key, seed, salt, hadamard, not plain)
        if not plain:
            return Quantized(Parts(leaves[0]), side.spec, shape, dense=True)
    *parts, nan = leaves
    return Quantized(_nest(side.spec, list(parts)), side.spec, shape, nan)


def turned(x: Tensor, n: int, seed: int) -> Tensor:
    """x · D H / √n for each n neighbours of the last axis, padded with zeros to whole ones: D random signs, the same
    everywhere, H Sylvester's Hadamard matrix. Both sides of a product turned so give the same product."""
    x = F.pad(x, (0, -x.shape[-1] % n))
    i = torch.arange(n, device=x.device)
    ones = i.unsqueeze(0) & i.unsqueeze(1)  # H[i, j] = -1 to the number of ones that i and j share
    for shift in (16, 8, 4, 2, 1):
        ones = ones ^ (ones >> shift)
    signs = chance.words((n,), chance.key(seed, _SIGNS), x.device).to(torch.int64) & 1
    matrix = (1 - 2 * (ones & 1)) * (1 - 2 * signs).unsqueeze(1)
    return (x.unflatten(-1, (-1, n)) @ (matrix.to(x.dtype) / n**0.5)).flatten(-2)


def _turned_shape(x: Tensor, hadamard: int) -> tuple[int, int]:
    """Sizes of a matrix after :func:`turned`."""
    return x.shape[0], x.shape[1] + (-x.shape[1] % hadamard if hadamard else 0)


def _quantized(x: Tensor, side: Operand, seed: int, salt: int, hadamard: int) -> list[Tensor]:
    """Codes, scales from the outermost in, and nan: see :class:`Quantized`."""
    floats = x.to(wide(x.dtype))
    low, high = floats.amin(-1, keepdim=True), floats.amax(-1, keepdim=True)
    nan = (low - low) + (high - high)
    if _shares_rows(side.spec):
        nan = nan.sum().reshape(1, 1)
    if hadamard:
        floats = turned(floats, hadamard, seed)
    words = None
    if side.chance:
        one, two = chance.key(seed, salt)
        words = chance.words(floats.shape, (chance.digest(x) ^ chance.signed(one), two), x.device)
    return [*_leaves(quantize(floats, side.spec, side.rule, words=words)), nan]


def _shares_rows(spec: QuantSpec) -> bool:
    """Whether rows have a scale in common, at any depth."""
    if spec.block is None or len(spec.block) > 1:
        return True
    return isinstance(spec.scale, QuantSpec) and _shares_rows(spec.scale)


def _leaves(parts: Any) -> list[Tensor]:
    if parts.scale is None:
        return [parts.codes]
    return [parts.codes, *(_leaves(parts.scale) if isinstance(parts.scale, Parts) else [parts.scale])]


def _nest(spec: QuantSpec, leaves: list[Tensor]) -> Parts:
    codes, *rest = leaves
    if not rest:
        return Parts(codes)
    return Parts(codes, _nest(spec.scale, rest) if isinstance(spec.scale, QuantSpec) else rest[0])


# -- the op that graphs hold -------------------------------------------------------------------------------------------

LIBRARY = torch.library.Library("pennyweight", "FRAGMENT")
LIBRARY.define("training_operand(Tensor x, str side, int seed, int salt, int hadamard, bool dense) -> Tensor[]")


@lru_cache(maxsize=1024)
def _side(key: str) -> Operand:
    return Operand.from_key(key)


def _op(x: Tensor, side: str, seed: int, salt: int, hadamard: int, dense: bool) -> list[Tensor]:
    """Codes, scales and nan, or the value alone."""
    how = _side(side)
    *parts, nan = _quantized(x, how, seed, salt, hadamard)
    if not dense:
        return [*parts, nan]
    return [Quantized(_nest(how.spec, parts), how.spec, _turned_shape(x, hadamard), nan).value(wide(x.dtype))]


LIBRARY.impl("training_operand", _op, "CompositeExplicitAutograd")
torch.library.register_fake("pennyweight::training_operand", _op, lib=LIBRARY)

__all__ = ["operand", "turned"]
