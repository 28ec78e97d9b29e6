"""Reshapes weights of any rank to matrices [outputs, inputs] for the solvers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from ...core import blocks
from ...core.numerics import Parts
from ...core.spec import QuantSpec


def as_matrix(x: Tensor, unfolded: bool) -> Tensor:
    """[O, I, *kernel] as [O, I * kernel] where ``unfolded`` (a convolution), else [.., N, K] as [.. * N, K]."""
    return x.flatten(1) if unfolded else x.reshape(-1, x.shape[-1])


def flat_spec(spec: QuantSpec, shape: Sequence[int], unfolded: bool) -> QuantSpec | None:
    """The spec of the matrix from :func:`as_matrix`, or None if its blocks or nested scales cannot be flattened."""
    spec = spec.with_(layout="plain")
    if len(shape) == 2:
        return spec
    if unfolded and shape[-1] % spec.format.dim:  # codes end with the last axis
        return None
    if len(shape) < 2 or any(isinstance(kind, QuantSpec) for kind in (spec.scale, spec.offset)):
        return None
    sizes = blocks.resolve(spec.block, shape)
    if spec.block is None:
        return spec
    if not unfolded:
        return spec.with_(block=(1, sizes[-1])) if set(sizes[:-1]) == {1} else None
    rows, *rest = sizes
    # A block is contiguous in the flattened axis if it covers all axes after the one it splits
    cut = next((i for i, b in enumerate(rest) if b != 1), len(rest) - 1)
    if any(b != n for b, n in zip(rest[cut + 1 :], shape[2 + cut :], strict=True)) or shape[1 + cut] % rest[cut]:
        return None
    return spec.with_(block=(rows, math.prod(rest)))


def unflatten(parts: Parts, spec: QuantSpec, shape: Sequence[int]) -> Parts:
    """Reshape the parts of the matrix to those of a weight of ``shape`` under its own spec."""
    if len(shape) == 2:
        return parts
    part_shape, stored = blocks.counts(spec.block, shape), spec.codes_shape(shape)

    def part(p: Tensor | None) -> Tensor | None:
        return None if p is None else p.reshape(part_shape)

    return parts._replace(
        codes=parts.codes.reshape(stored),
        scale=part(parts.scale),
        zero_point=part(parts.zero_point),
        offset=part(parts.offset),
    )
