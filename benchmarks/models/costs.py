"""What a case costs at least: operations of its products, and bytes that must be read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from . import llama
from .base import Case

CACHE_BITS = {"plain": 16, "int8": 8}


def count(net: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, float]:
    """Operations of linear layers and convolutions ("linear"), of products of activations ("attention"), two for each
    product and its addition; and the weights that take part ("weights")."""
    from torch.utils.flop_counter import FlopCounterMode

    used: dict[int, int] = {}
    hooks = [
        m.register_forward_hook(lambda m, i, o: used.update({id(m.weight): m.weight.numel()}))
        for m in net.modules()
        if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d)
    ]
    known = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}  # torch 2.13 counts other devices'
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=known) as counter:
        net(*inputs)
    for hook in hooks:
        hook.remove()
    totals = {"linear": 0.0, "attention": 0.0}
    for op, flops in counter.get_flop_counts()["Global"].items():
        name = str(op)
        totals["attention" if "bmm" in name or "attention" in name else "linear"] += flops
    return {**totals, "weights": float(sum(used.values())), "cache_bytes": 0.0}


def _attention(query: Any, key: Any, value: Any, *rest: Any, **named: Any) -> int:
    """Operations of q.k and p.v, of shapes [batch, heads, tokens, channels]."""
    b, h, n, d = query
    return 2 * b * h * n * key[2] * (d + value[3])


def of_language(case: Case) -> dict[str, float]:
    """The same for a language model. The head is computed for the last token only; attention is causal. Generating
    reads the weights for the prompt and for each token."""
    shape = llama.SHAPES[case.model]
    blocks, head = shape.linear_elements()
    per_pair = 4 * shape.layers * shape.hidden  # operations of q.k and p.v over all heads, for a query and a key
    prompted = case.tokens if case.task in ("prompt", "generate") else 0
    steps = llama.GENERATED if case.task == "generate" else 0 if prompted else 1
    pairs = prompted * (prompted + 1) / 2 + steps * (case.tokens + (steps + 1) / 2)
    calls = steps + bool(prompted)
    held = 0 if case.task != "decode" else case.batch * case.tokens * shape.cache_elements()
    return {
        "linear": 2.0 * case.batch * (blocks * (prompted + steps) + head * calls),
        "attention": float(case.batch * per_pair * pairs),
        "weights": float((blocks + head) * calls),
        "cache_bytes": held * CACHE_BITS[case.cache] / 8,
    }


def limit_seconds(
    cost: dict[str, float], stored_bits: float, arithmetic: str, limits: dict[str, float]
) -> tuple[float, str] | None:
    """The least time, and what binds: reading weights and cache once ("read"), or all products at the measured peaks.

    Products of activations count at bf16's peak, in float32 models at float32's; a machine without bf16 has float32's.
    None where a limit was not measured.
    """
    fp32 = limits.get("fp32")
    bf16 = limits.get("bf16") or fp32
    peak = {"int8": limits.get("int8") or fp32, "bf16": bf16, "fp32": fp32}[arithmetic]
    other = fp32 if arithmetic == "fp32" else bf16
    if "read" not in limits or peak is None or other is None:
        return None
    read = (cost["weights"] * stored_bits / 8 + cost["cache_bytes"]) / limits["read"]
    compute = cost["linear"] / peak + cost["attention"] / other
    return max((read, "read"), (compute, arithmetic))


def describe(cost: dict[str, Any]) -> str:
    return f"{(cost['linear'] + cost['attention']) / 1e9:.2f} GOP, {cost['weights'] / 1e6:.1f} M weights"
