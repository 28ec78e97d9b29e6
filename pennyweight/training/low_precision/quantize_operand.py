"""Operands of a training product: Hadamard rotation, quantization, stochastic rounding, and NaN propagation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import stochastic_rounding
from ...core.hadamard import sylvester
from ...core.numerics import Parts, quantize
from ...core.qparams import BY_RANGE, default_rule
from ...core.spec import QuantSpec
from ...distributed.all_reduce import reduce_over_groups
from .gemm_table import QuantizedOperand, wide_dtype
from .recipes import Operand

_SIGNS = 1 << 16  # salt of the random signs, distinct from those of operands


def quantize_operand(
    x: Tensor, side: Any, seed: int, salt: int, hadamard: int, over: tuple[str, ...] = ()
) -> Tensor | QuantizedOperand:
    """A matrix [rows, contracted] as one side of a product: quantized, or unchanged if the recipe's operand is None.

    over: process groups over which the matrix is sharded. A single scale is then that of the whole matrix. Raises
    ValueError if its rule cannot be computed from parts.
    """
    if not isinstance(side, Operand):
        return x
    rule = rule_of_whole(side.spec, side.rule) if over else None
    if rule is None:
        over = ()
    if x.numel() == 0:
        if rule is not None:  # the others wait
            _of_whole(x, rule, torch.zeros((), device=x.device, dtype=torch.float32), over)
        return x
    shape = _turned_shape(x, hadamard)
    plain = isinstance(side.spec.scale, torch.dtype) and side.spec.block in (None, (-1,))
    if not torch.compiler.is_compiling() or (plain and not side.chance and not hadamard and not over):
        leaves = _quantized(x, side, seed, salt, hadamard, over)
    else:
        # A custom op in the graph: torch 2.13's inductor differs from eager mode for padded blocks with e8m0 scales,
        # and for int32 products that wrap around. Only plain specs are left to it, for fusion.
        leaves = torch.ops.pennyweight.training_operand.default(x, side.key, seed, salt, hadamard, not plain, over)
        if not plain:
            return QuantizedOperand(Parts(leaves[0]), side.spec, shape, dense=True)
    *parts, nan = leaves
    return QuantizedOperand(_nest(side.spec, list(parts)), side.spec, shape, nan)


def hadamard_rotated(x: Tensor, n: int, seed: int) -> Tensor:
    """x · D H / √n for every n neighbours of the last axis, zero-padded to a multiple of n: D random signs, the same
    for all; H Sylvester's Hadamard matrix. Rotating both sides leaves the product unchanged."""
    x = F.pad(x, (0, -x.shape[-1] % n))
    signs = (
        stochastic_rounding.random_bits((n,), stochastic_rounding.make_key(seed, _SIGNS), x.device).to(torch.int64) & 1
    )
    matrix = sylvester(n, x.device) * (1 - 2 * signs).unsqueeze(1)
    return (x.unflatten(-1, (-1, n)) @ (matrix.to(x.dtype) / n**0.5)).flatten(-2)


def _turned_shape(x: Tensor, hadamard: int) -> tuple[int, int]:
    """Sizes of a matrix after :func:`hadamard_rotated`."""
    return x.shape[0], x.shape[1] + (-x.shape[1] % hadamard if hadamard else 0)


def rule_of_whole(spec: QuantSpec, rule: str | None) -> str | None:
    """The rule of the scale, or scale of scales, that is shared by the whole matrix; None if there is none."""
    if spec.scale is None:
        return None
    if spec.block is not None:
        return rule_of_whole(spec.scale, None) if isinstance(spec.scale, QuantSpec) else None
    rule = rule or default_rule(spec)
    if rule != "absmean" and rule not in BY_RANGE:
        raise ValueError(
            f"operand {spec} of a sharded matrix has one scale by rule {rule!r}, which cannot be computed across "
            f"ranks; rules that can: {', '.join(sorted(BY_RANGE | {'absmean'}))}. Or use block scales"
        )
    return rule


def _of_whole(t: Tensor, rule: str, nan: Tensor, over: Sequence[str]) -> tuple[Tensor, Tensor]:
    """(values [1, n] for which the rule gives the same scale as for the parts t of all ranks, whether any has NaN)."""
    bad = nan.isnan().any().double()
    if rule == "absmean":
        sums = reduce_over_groups(
            torch.stack([t.abs().sum(dtype=torch.float64), t.new_full((), t.numel()).double(), bad]), "sum", over
        )
        return (sums[:1] / sums[1:2]).reshape(1, 1), sums[2]
    ends = torch.stack([-t.amin(), t.amax()]) if t.numel() else t.new_full((2,), -math.inf)
    low, high, bad = reduce_over_groups(torch.cat([ends.double().nan_to_num(), bad.reshape(1)]), "max", over).unbind()
    return torch.stack([-low, high]).to(t.dtype).reshape(1, 2), bad


def _quantized(x: Tensor, side: Operand, seed: int, salt: int, hadamard: int, over: Sequence[str] = ()) -> list[Tensor]:
    """Codes, scales from the outermost to the innermost, and nan: see :class:`QuantizedOperand`."""
    floats = x.to(wide_dtype(x.dtype))
    low, high = floats.amin(-1, keepdim=True), floats.amax(-1, keepdim=True)
    nan = (low - low) + (high - high)
    if _shares_rows(side.spec):
        nan = nan.sum().reshape(1, 1)
    if hadamard:
        floats = hadamard_rotated(floats, hadamard, seed)
    words = None
    if side.chance:
        one, two = stochastic_rounding.make_key(seed, salt)
        words = stochastic_rounding.random_bits(
            floats.shape, (stochastic_rounding.content_key(x) ^ stochastic_rounding.as_int32(one), two), x.device
        )

    def of_whole(t: Tensor, rule: str) -> Tensor:
        nonlocal nan
        numbers, bad = _of_whole(t, rule, nan, over)
        nan = torch.where(bad > 0, math.nan, nan)
        return numbers

    parts = quantize(floats, side.spec, side.rule, words=words, of_whole=of_whole if over else None)
    return [*_leaves(parts), nan]


def _shares_rows(spec: QuantSpec) -> bool:
    """Whether rows share a scale at any level."""
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


# -- custom op for graphs ----------------------------------------------------------------------------------------------

LIBRARY = torch.library.Library("pennyweight", "FRAGMENT")
LIBRARY.define(
    "training_operand(Tensor x, str side, int seed, int salt, int hadamard, bool dense, str[] over) -> Tensor[]"
)


@lru_cache(maxsize=1024)
def _side(key: str) -> Operand:
    return Operand.from_key(key)


def _op(x: Tensor, side: str, seed: int, salt: int, hadamard: int, dense: bool, over: Sequence[str]) -> list[Tensor]:
    """Codes, scales and nan, or only the dequantized value."""
    how = _side(side)
    *parts, nan = _quantized(x, how, seed, salt, hadamard, over)
    if not dense:
        return [*parts, nan]
    return [
        QuantizedOperand(_nest(how.spec, parts), how.spec, _turned_shape(x, hadamard), nan).value(wide_dtype(x.dtype))
    ]


LIBRARY.impl("training_operand", _op, "CompositeExplicitAutograd")
torch.library.register_fake("pennyweight::training_operand", _op, lib=LIBRARY)
