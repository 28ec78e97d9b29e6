"""Weights and inputs of the timed cases: random, quantized on the device, in as many copies as the cache requires."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .schemes import SCHEMES
from .stages import Context


def float_weight(ctx: Context, n: int, k: int) -> Tensor:
    """As trained layers have: the output of a normal input is about normal."""
    return torch.randn(n, k, device=ctx.device, dtype=torch.bfloat16) * k**-0.5


def quantized(ctx: Context, scheme: str, n: int, k: int, weight: Tensor | None = None) -> Any:
    """An AffineQuantizedTensor, packed for the kernel that the table selects. The last one is kept."""
    key = f"{scheme} {n}x{k}"
    if weight is None and ctx.kept.get("quantized", ("",))[0] == key:
        return ctx.kept["quantized"][1]
    import pennyweight as pw

    with torch.device(ctx.device):
        layer = nn.Linear(k, n, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    layer.weight = nn.Parameter(float_weight(ctx, n, k) if weight is None else weight, requires_grad=False)
    pw.quantize_(layer, SCHEMES[scheme](), filter_fn=lambda module, name: True)
    held: Any = layer.weight.data
    if weight is None:
        ctx.kept["quantized"] = (key, held)
    return held


def copies(ctx: Context, tensor: Any) -> list[Any]:
    """The tensor and clones of it, together larger than the cache."""
    return [tensor, *(tensor.clone() for _ in range(ctx.timer.copies(int(tensor.nbytes)) - 1))]


def inputs(ctx: Context, m: int, k: int, count: int) -> list[Tensor]:
    """Rotated as the weights are; beyond 64 MB together, two are enough."""
    few = min(count, max(2, (64 << 20) // max(1, 2 * m * k)))
    made = [torch.randn(m, k, device=ctx.device, dtype=torch.bfloat16) for _ in range(few)]
    return [made[i % few] for i in range(count)]


def linear_calls(ctx: Context, m: int, weights: Sequence[Any], xs: Sequence[Tensor] | None = None) -> list[Any]:
    k = int(weights[0].shape[-1])
    xs = xs or inputs(ctx, m, k, len(weights))
    return [partial(F.linear, x, w) for x, w in zip(xs, weights, strict=True)]


def kernel_of(weight: Any) -> str:
    """The row of the kernel table that runs F.linear."""
    from pennyweight.kernels import select
    from pennyweight.kernels.table import case_of

    return select("linear", case_of(weight, torch.bfloat16)).name


def traffic(weight: Any, m: int) -> int:
    """The least bytes of one product: the weight with its scales, the input, the output."""
    n, k = weight.shape[-2:]
    return int(weight.nbytes) + 2 * m * (int(n) + int(k))
