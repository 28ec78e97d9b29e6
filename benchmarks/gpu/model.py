"""Stage "model": eight layers of Llama-3-8B's shape with random weights, in plain torch, decoding in CUDA graphs.

nn.Linear, scaled dot product attention over a cache of 1024 positions, RMSNorm. No embedding, no head and no rotary
embedding: what is left is what quantization changes, and the same attention in each variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .schemes import MODEL_GOALS, SCHEMES
from .stages import Case, Context

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, HEAD = 8, 4096, 32, 8, 14336, 128
CONTEXT, PREFILL = 1024, 2048
BATCHES = (1, 16, 64)
SHAPES = ((HIDDEN, HIDDEN), (KV_HEADS * HEAD, HIDDEN), (FFN, HIDDEN), (HIDDEN, FFN))  # of its linear layers
VARIANTS = ("bf16", "int4", "int8", "float8-dynamic", "int8-dynamic", "int4-symmetric")
_COMPILE_SECONDS = 120.0


class Layer(nn.Module):
    """One layer; ``shrink`` divides hidden sizes and heads."""

    def __init__(self, shrink: int = 1) -> None:
        super().__init__()
        hidden, ffn = HIDDEN // shrink, FFN // shrink
        self.heads, self.kv_heads = max(1, HEADS // shrink), max(1, KV_HEADS // shrink)
        self.head = hidden // self.heads
        linear = partial(nn.Linear, bias=False, dtype=torch.bfloat16)
        self.q, self.o = linear(hidden, hidden), linear(hidden, hidden)
        self.k, self.v = (linear(hidden, self.kv_heads * self.head) for _ in range(2))
        self.gate, self.up, self.down = linear(hidden, ffn), linear(hidden, ffn), linear(ffn, hidden)
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(hidden, dtype=torch.bfloat16)) for _ in range(2))

    def forward(self, x: Tensor, cache: Tensor | None) -> Tensor:
        """x [batch, tokens, hidden]; cache [2, batch, kv heads, positions, head], whose last position is written."""
        batch, tokens, hidden = x.shape
        h = F.rms_norm(x, (hidden,), self.norms[0])
        q = self.q(h).view(batch, tokens, self.heads, self.head).transpose(1, 2)
        k, v = (p(h).view(batch, tokens, self.kv_heads, self.head).transpose(1, 2) for p in (self.k, self.v))
        if cache is not None:
            cache[0, :, :, -tokens:] = k
            cache[1, :, :, -tokens:] = v
            k, v = cache[0], cache[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(batch, tokens, hidden))
        h = F.rms_norm(x, (hidden,), self.norms[1])
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Layers(nn.Module):
    def __init__(self, count: int = LAYERS, shrink: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shrink) for _ in range(count))

    def forward(self, x: Tensor, caches: list[Tensor] | None) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, None if caches is None else caches[i])
        return x


def cases(ctx: Context) -> Iterator[Case]:
    """Batch 1 of each variant first; a variant's model is made once and kept until the next."""
    for variant in VARIANTS:
        for batch in BATCHES:
            yield Case(f"{variant} batch {batch}", partial(decode, ctx, variant, batch), 60)
        yield Case(f"{variant} batch 1 eager", partial(decode, ctx, variant, 1, how="eager"), 60)
        yield Case(f"{variant} prefill {PREFILL}", partial(prefill, ctx, variant), 60)
    if ctx.dry:
        return  # Inductor needs a C compiler
    for variant in ("bf16", "int4"):
        if ctx.left() > 45:  # otherwise it would be cut off, and take the worker with it
            yield Case(
                f"{variant} batch 1 compiled", partial(decode, ctx, variant, 1, how="compiled"), _COMPILE_SECONDS
            )


def model(ctx: Context, variant: str) -> Layers:
    kept = ctx.kept.get("model")
    if kept is not None and kept[0] == variant:
        return kept[1]
    ctx.kept.pop("model", None)
    ctx.timer.release()
    import pennyweight as pw

    with torch.device(ctx.device):
        made = Layers(LAYERS if not ctx.dry else 2, ctx.shrink).requires_grad_(False).eval()
    if variant != "bf16":
        pw.quantize_(made, SCHEMES[variant]())
    ctx.kept["model"] = (variant, made)
    return made


def decode(ctx: Context, variant: str, batch: int, how: str = "") -> dict[str, Any]:
    """Tokens per second of one step of every sequence; times the speed of bf16.

    how: "" in a CUDA graph; "compiled" by torch.compile, in a graph; "eager" without a graph: the host decides.
    """
    net = model(ctx, variant)
    layer: Any = net.layers[0]
    positions = CONTEXT if not ctx.dry else 64
    shape = (2, batch, layer.kv_heads, positions, layer.head)
    caches = [torch.randn(shape, device=ctx.device, dtype=torch.bfloat16) for _ in net.layers]
    x = torch.randn(batch, 1, HIDDEN // ctx.shrink, device=ctx.device, dtype=torch.bfloat16)
    run: Any = net
    if how == "compiled":
        run = torch.compile(net, fullgraph=True, dynamic=False)
        ctx.kept.clear()  # the model keeps compiled code
    call = partial(run, x, caches)
    timing = ctx.timer.events(call) if how == "eager" else ctx.timer.time([call], samples=7, sample_us=20000.0)
    found = {
        "variant": variant, "batch": batch, "how": how, "layers": len(net.layers), **timing.values(),
        "tokens_per_s": batch / timing.us * 1e6, "weight_bytes": sum(int(p.nbytes) for p in net.parameters()),
        "goal": MODEL_GOALS.get((variant, batch)) if how != "eager" else None, "kernel": _kernel(net),
    }  # fmt: skip
    return _ratio(ctx, found, f"bf16 batch {batch} {how}".strip())


def prefill(ctx: Context, variant: str) -> dict[str, Any]:
    net = model(ctx, variant)
    tokens = PREFILL if not ctx.dry else 64
    x = torch.randn(1, tokens, HIDDEN // ctx.shrink, device=ctx.device, dtype=torch.bfloat16)
    timing = ctx.timer.time([partial(net, x, None)], samples=5, sample_us=20000.0)
    found = {"variant": variant, "tokens": tokens, **timing.values(), "tokens_per_s": tokens / timing.us * 1e6}
    return _ratio(ctx, found, f"bf16 prefill {PREFILL}")


def _ratio(ctx: Context, found: dict[str, Any], base: str) -> dict[str, Any]:
    bf16 = ctx.results.value("model", base, "us")
    return {**found, "ratio": bf16 / found["us"]} if bf16 else found


def _kernel(net: Layers) -> str:
    from pennyweight import AffineQuantizedTensor

    from .weights import kernel_of

    first: Any = net.layers[0]
    weight = first.q.weight
    return kernel_of(weight) if isinstance(weight, AffineQuantizedTensor) else "cuBLAS"
