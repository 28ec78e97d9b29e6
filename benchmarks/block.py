"""One transformer block: as torch modules with frozen quantized layers, and as native steps in one call.

    python benchmarks/block.py [--threads 2] [--seconds 1]

A layer of BERT in the shape of MiniLM (384, 1536, 12 heads; float32, int8 weights and inputs) at 1x16, 1x128 and 16x64
tokens, and one of Llama (2048, 5632, 32 heads of which 4 have keys; bfloat16, int4 weights in groups of 128) for one
token after 200 others and for a prompt of 128. Both ways run in turn, and the minimum counts. "products" is the rate of
the products alone if nothing else took time, beside the measured peak of int8 products; of Llama, the bytes of the
weights per second. The two ways must agree before times are printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from transformers import BertConfig, DynamicCache, LlamaConfig
from transformers.models.bert.modeling_bert import BertLayer
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import pennyweight as pw
from benchmarks.limits import Limits
from pennyweight.kernels.block import (
    AttentionStep,
    Call,
    Columns,
    Heads,
    Layer,
    LinearStep,
    Norm,
    NormStep,
    RotaryStep,
    Steps,
)
from pennyweight.kernels.native.block import NativeBlock, compile_steps


def linear(m: torch.nn.Module) -> Layer:
    return Layer(m.weight, m.bias)


def layer_norm(m: torch.nn.LayerNorm) -> Norm:
    return Norm("layer", m.eps, m.weight, m.bias)


def native(steps: Steps) -> NativeBlock:
    block = compile_steps(steps)
    if isinstance(block, str):
        raise SystemExit(f"the block has no native form: {block}")
    return block


def bert() -> tuple[BertLayer, NativeBlock, int]:
    """The module, its native form, and its products per token."""
    d, f, heads = 384, 1536, Heads(12, 12, 32)
    config = BertConfig(hidden_size=d, intermediate_size=f, num_attention_heads=12, attn_implementation="sdpa")
    m = BertLayer(config).eval()
    pw.quantize_(m, "int8-dynamic")
    own, out = m.attention.self, m.attention.output
    steps = (
        LinearStep(0, (linear(own.query), linear(own.key), linear(own.value)), (2, 3, 4)),
        AttentionStep(Columns(2), 5, heads, heads.size**-0.5, Columns(3), Columns(4)),
        LinearStep(5, (linear(out.dense),), (6,), residual=0),
        LinearStep(6, (linear(m.intermediate.dense),), (7,), layer_norm(out.LayerNorm), normed=8, act="gelu"),
        LinearStep(7, (linear(m.output.dense),), (6,), residual=8),
        NormStep(6, 1, layer_norm(m.output.LayerNorm)),
    )
    block = native(Steps(steps, (d, d, d, d, d, d, d, f, d), torch.float32))
    pw.inference.freeze_(m)
    return m, block, 4 * d * d + 2 * d * f


def llama() -> tuple[LlamaDecoderLayer, NativeBlock, LlamaConfig, int]:
    """The module, its native form, its config, and the bytes of its weights."""
    d, f, heads = 2048, 5632, Heads(32, 4, 64)
    config = LlamaConfig(
        hidden_size=d, intermediate_size=f, num_attention_heads=32, num_key_value_heads=4, num_hidden_layers=1,
        attn_implementation="sdpa",
    )  # fmt: skip
    m = LlamaDecoderLayer(config, 0).to(torch.bfloat16).eval()
    pw.quantize_(m, "int4")
    nbytes = sum(p.nbytes for p in m.parameters())
    own, mlp = m.self_attn, m.mlp
    columns = Columns(2), Columns(3), Columns(4)
    first, second = (Norm("rms", n.variance_epsilon, n.weight) for n in (m.input_layernorm, m.post_attention_layernorm))
    steps = (
        LinearStep(0, (linear(own.q_proj), linear(own.k_proj), linear(own.v_proj)), (2, 3, 4), first),
        RotaryStep(*columns, heads, "half", heads.size),
        AttentionStep(columns[0], 5, heads, heads.size**-0.5),
        LinearStep(5, (linear(own.o_proj),), (6,), residual=0),
        LinearStep(6, (linear(mlp.gate_proj), linear(mlp.up_proj)), (7,), second, act="silu", gated=True),
        LinearStep(7, (linear(mlp.down_proj),), (1,), residual=6),
    )
    kv = heads.shared * heads.size
    block = native(Steps(steps, (d, d, d, kv, kv, d, d, f), torch.bfloat16))
    pw.inference.freeze_(m)
    return m, block, config, nbytes


def least(runs: list[Callable[[], object]], seconds: float) -> list[float]:
    """Seconds per call of each, the least over interleaved calls."""
    best, end = [float("inf")] * len(runs), time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end:
        for i, run in enumerate(runs):
            begin = time.perf_counter()
            run()
            best[i] = min(best[i], time.perf_counter() - begin)
    return best


def agree(x: torch.Tensor, y: torch.Tensor | None, bound: float) -> float:
    if y is None:
        raise SystemExit("the native block did not run")
    error = ((x.float() - y.float()).norm() / x.float().norm()).item()
    if not error <= bound:
        raise SystemExit(f"the two ways differ by {error:.3g}, at most {bound} expected")
    return error


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--seconds", type=float, default=1.0, help="for each figure")
    o = p.parse_args()
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    peak = (Limits(o.threads).rate("int8", 0.3) or 0) / 2
    print(f"{o.threads} threads; int8 products: {peak / 1e9:.0f} G/s")
    print(f"{'us per block':28}{'modules':>10}{'native':>10}{'ratio':>8}{'rate':>14}{'of peak':>9}{'error':>10}")
    with torch.inference_mode():
        m, block, products = bert()
        for batch, tokens in ((1, 16), (1, 128), (16, 64)):
            x = torch.randn(batch, tokens, 384)
            old, new = lambda x=x: m(x), lambda x=x: block.run(x, Call())
            y = old()
            error = agree(y[0] if isinstance(y, tuple) else y, new(), 2e-2)
            took = least([old, new], o.seconds)
            rate = products * batch * tokens / took[1]
            print(
                f"{f'MiniLM, {batch}x{tokens}':28}{took[0] * 1e6:10.0f}{took[1] * 1e6:10.0f}{took[0] / took[1]:8.2f}"
                f"{rate / 1e9:8.0f} GMAC/s{rate / peak:9.2f}{error:10.1e}"
            )
        layer, block, config, nbytes = llama()
        rotary = LlamaRotaryEmbedding(config)
        for past, tokens in ((200, 1), (0, 128)):
            x = torch.randn(1, tokens, 2048, dtype=torch.bfloat16)
            cos, sin = rotary(x, torch.arange(past, past + tokens)[None])
            length = past + tokens
            stored = torch.randn(2, 1, 4, past, 64, dtype=torch.bfloat16)
            causal = torch.ones(tokens, length, dtype=torch.bool).tril(past)[None, None]

            def old(x=x, cos=cos, sin=sin, stored=stored, causal=causal) -> torch.Tensor:
                cache = DynamicCache()
                if stored.shape[3]:
                    cache.update(stored[0], stored[1], 0)
                y = layer(x, attention_mask=causal, position_embeddings=(cos, sin), past_key_values=cache)
                return y[0] if isinstance(y, tuple) else y

            keys, values = torch.zeros(2, 1, 4, length, 64, dtype=torch.bfloat16)
            keys[:, :, :past], values[:, :, :past] = stored
            call = Call(cos, sin, None, True, 0, keys, values, past, length)
            new = lambda x=x, call=call: block.run(x, call)  # noqa: E731
            error = agree(old(), new(), 2e-2)
            took = least([old, new], o.seconds)
            print(
                f"{f'Llama, {tokens} after {past}':28}{took[0] * 1e6:10.0f}{took[1] * 1e6:10.0f}"
                f"{took[0] / took[1]:8.2f}{nbytes / took[1] / 1e9:8.1f} GB/s  {'':9}{error:10.1e}"
            )


if __name__ == "__main__":
    main()
