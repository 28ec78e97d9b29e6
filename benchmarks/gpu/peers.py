"""What runs beside ours in the benchmark: torch's own low-precision products, torchao, bitsandbytes.

A peer: (ctx, m, weight, count of copies) -> calls that compute x @ weight.t(), x in bfloat16. One that is not installed
or refuses raises, and the row says so.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import weights
from .stages import Context

Peer = Callable[[Context, int, Tensor], list[Callable[[], Any]]]


def _clones(ctx: Context, parts: tuple[Tensor, ...]) -> list[tuple[Tensor, ...]]:
    count = ctx.timer.copies(sum(part.nbytes for part in parts))
    return [parts, *(tuple(part.clone() for part in parts) for _ in range(count - 1))]


def _calls(ctx: Context, m: int, k: int, run: Any, held: list[tuple[Tensor, ...]]) -> list[Callable[[], Any]]:
    xs = weights.inputs(ctx, m, k, len(held))
    return [partial(run, x, *parts) for x, parts in zip(xs, held, strict=True)]


def int4pack(ctx: Context, m: int, weight: Tensor) -> list[Callable[[], Any]]:
    """torch._weight_int4pack_mm (tinygemm), groups of 64."""
    n, k = weight.shape
    u = torch.randint(0, 16, (n, k), device=weight.device, dtype=torch.int32)
    packed = torch._convert_weight_to_int4pack((u[:, ::2] << 4 | u[:, 1::2]).to(torch.uint8), 8)
    scales = torch.rand(k // 64, n, 2, device=weight.device).to(torch.bfloat16)

    def run(x: Tensor, packed: Tensor, scales: Tensor) -> Tensor:
        return torch._weight_int4pack_mm(x, packed, 64, scales)

    return _calls(ctx, m, k, run, _clones(ctx, (packed, scales)))


def scaled_mm(ctx: Context, m: int, weight: Tensor) -> list[Callable[[], Any]]:
    """torch._scaled_mm by rows, the input quantized by torch operators."""
    top = torch.finfo(torch.float8_e4m3fn).max
    sw = (weight.abs().amax(1, keepdim=True).float() / top).clamp_min(1e-12)
    codes = (weight.float() / sw).to(torch.float8_e4m3fn)

    def run(x: Tensor, codes: Tensor, sw: Tensor) -> Tensor:
        sx = (x.abs().amax(1, keepdim=True).float() / top).clamp_min(1e-12)
        x8 = (x.float() / sx).to(torch.float8_e4m3fn)
        return torch._scaled_mm(
            x8, codes.t(), scale_a=sx, scale_b=sw.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return _calls(ctx, m, int(weight.shape[1]), run, _clones(ctx, (codes, sw)))


def scaled_mm_alone(ctx: Context, m: int, weight: Tensor) -> list[Callable[[], Any]]:
    """torch._scaled_mm by rows on an input that is quantized already."""
    k = int(weight.shape[1])
    codes = weight.to(torch.float8_e4m3fn)
    x8 = torch.randn(m, k, device=weight.device).to(torch.float8_e4m3fn)
    sx, sw = torch.rand(m, 1, device=weight.device), torch.rand(1, weight.shape[0], device=weight.device)

    def run(x: Tensor, codes: Tensor, sw: Tensor) -> Tensor:
        return torch._scaled_mm(x8, codes.t(), scale_a=sx, scale_b=sw, out_dtype=torch.bfloat16, use_fast_accum=True)

    return _calls(ctx, m, k, run, _clones(ctx, (codes, sw)))


def int_mm(ctx: Context, m: int, weight: Tensor) -> list[Callable[[], Any]]:
    """torch._int_mm, the input quantized and the sums scaled by torch operators; at least 32 rows."""
    sw = weight.abs().amax(1, keepdim=True).float() / 127
    codes = (weight.float() / sw).round().to(torch.int8)

    def run(x: Tensor, codes: Tensor, sw: Tensor) -> Tensor:
        sx = x.abs().amax(1, keepdim=True).float() / 127
        x8 = (x.float() / sx).round().to(torch.int8)
        x8 = F.pad(x8, (0, 0, 0, 32 - m)) if m < 32 else x8
        return (torch._int_mm(x8, codes.t())[:m] * sx * sw.t()).to(torch.bfloat16)

    return _calls(ctx, m, int(weight.shape[1]), run, _clones(ctx, (codes, sw)))


def torchao(config: Callable[[], Any]) -> Peer:
    def calls(ctx: Context, m: int, weight: Tensor) -> list[Callable[[], Any]]:
        from torchao.quantization import quantize_

        layers = []
        for _ in range(ctx.timer.copies(weight.nbytes // 4)):
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device=weight.device, dtype=weight.dtype)
            layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
            quantize_(layer, config())
            layers.append(layer)
        xs = weights.inputs(ctx, m, int(weight.shape[1]), len(layers))
        return [partial(layer, x) for layer, x in zip(layers, xs, strict=True)]

    return calls


def _ao(name: str, **arguments: Any) -> Callable[[], Any]:
    def config() -> Any:
        import torchao.quantization

        return getattr(torchao.quantization, name)(**arguments)

    return config


def nf4(ctx: Context, m: int, weight: Tensor) -> list[Callable[[], Any]]:
    """bitsandbytes' NF4 product."""
    import bitsandbytes

    codes, state = bitsandbytes.functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")

    def run(x: Tensor, codes: Tensor) -> Tensor:
        return bitsandbytes.matmul_4bit(x, codes.t(), quant_state=state)

    return _calls(ctx, m, int(weight.shape[1]), run, _clones(ctx, (codes,)))


PEERS: dict[str, dict[str, Peer]] = {
    "int4": {
        "torch._weight_int4pack_mm": int4pack,
        "torchao int4": torchao(_ao("Int4WeightOnlyConfig", group_size=64)),
    },
    "int4-symmetric": {"torch._weight_int4pack_mm": int4pack},
    "int8": {"torchao int8": torchao(_ao("Int8WeightOnlyConfig"))},
    "nf4": {"bitsandbytes NF4": nf4},
    "float8-dynamic": {
        "torch._scaled_mm + quantizing": scaled_mm,
        "torch._scaled_mm alone": scaled_mm_alone,
        "torchao float8": torchao(_ao("Float8DynamicActivationFloat8WeightConfig")),
    },
    "int8-dynamic": {"torch._int_mm + scaling": int_mm},
}
