"""Attention over the caches of a decoder: native, beside torch's scaled_dot_product_attention, in one run.

    python benchmarks/attention.py [--threads 2] [--rounds 40] [--prompt 512]

One token after 4,096 others, and a prompt, for 32 query heads; keys and values float32, bfloat16, or quantized to 8 and
4 bits as inference/kv_cache.py holds them (the newest 128 or more stay bfloat16), those of 4 bits also rotated. Each
call of a token reads another cache, and all of them together do not fit a processor's cache. torch's way over a
quantized cache is what transformers does: dequantize all of it, then attend.

"ns/key" is time per key and value of a shared head; "of read" the bytes of the cache per second, of the measured rate
at which memory is read. All ways and the limit take turns; a figure is the lower quartile over the rounds, since other
processes only add time. Outputs must agree before times are printed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.limits import Limits
from pennyweight.inference.kv_cache import QuantizedLayer
from pennyweight.kernels.native import attention as native_attention

CACHES = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4, "rotated": 4}
SHAPES = ((1, 8, 64), (8, 8, 64), (1, 8, 128), (1, 32, 64))  # batch, heads of keys, channels
HEADS, LENGTH = 32, 4096
BYTES = 160_000_000  # of the caches of one case together
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-2, "int8": 2e-2, "int4": 2e-2, "rotated": 2e-2}


@dataclass
class Case:
    """Calls of one way, each with a cache of its own; seconds of each call."""

    calls: list[Callable[[], Tensor]]
    nbytes: int = 0
    times: list[float] = field(default_factory=list)

    def visit(self) -> None:
        call = self.calls[len(self.times) % len(self.calls)]
        begin = time.perf_counter()
        call()
        self.times.append(time.perf_counter() - begin)

    @property
    def took(self) -> float:
        return sorted(self.times)[len(self.times) // 4]


def cases(kind: str, batch: int, shared: int, size: int, tokens: int, length: int) -> tuple[Case, Case]:
    """The native way and torch's."""
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    count = max(1, BYTES * 8 // (2 * batch * shared * length * size * CACHES[kind])) if tokens == 1 else 1
    q = torch.randn(batch, HEADS, tokens, size).to(dtype)
    native, peer, nbytes = Case([]), Case([]), 0
    causal = tokens > 1

    def attend(k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared < HEADS)

    for _ in range(count):
        k, v = torch.randn(2, batch, shared, length, size).to(dtype)
        if CACHES[kind] > 8:
            nbytes = k.nbytes + v.nbytes
            native.calls.append(lambda k=k, v=v: native_attention.attention(q, k, v, causal=causal))
            peer.calls.append(lambda k=k, v=v: attend(k, v))
            continue
        layer = QuantizedLayer(CACHES[kind], rotate=kind == "rotated")
        layer.update(k, v)
        past, k, v = layer.past, layer.keys, layer.values
        nbytes = sum(t.nbytes for t in layer.stored if t is not None)
        native.calls.append(lambda k=k, v=v, past=past: native_attention.attention(q, k, v, causal=causal, past=past))
        peer.calls.append(lambda layer=layer: attend(*layer.floats()))
    native.nbytes = peer.nbytes = nbytes
    return native, peer


def check(kind: str, native: Case, peer: Case) -> None:
    y, expected = native.calls[0](), peer.calls[0]()
    error = ((y.float() - expected.float()).norm() / expected.float().norm()).item()
    if not error <= BOUNDS[kind]:
        raise SystemExit(f"{kind}: the two ways differ by {error:.3g}, at most {BOUNDS[kind]} expected")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=40)
    p.add_argument("--prompt", type=int, default=512, help="tokens of a prompt; 0: none")
    o = p.parse_args()
    torch.set_num_threads(o.threads)
    torch.manual_seed(0)
    limits = Limits(o.threads)
    print(f"{o.threads} threads, {HEADS} query heads; batch x heads of keys x channels")
    print(f"{'':36}{'cache':10}{'us':>9}{'ns/key':>8}{'GB/s':>7}{'of read':>9}{'torch us':>10}{'ratio':>7}")
    with torch.inference_mode():
        for tokens, length in ((1, LENGTH), (o.prompt, o.prompt)):
            for batch, shared, size in SHAPES if tokens else ():
                named = {kind: cases(kind, batch, shared, size, tokens, length) for kind in CACHES}
                for kind, pair in named.items():
                    check(kind, *pair)
                rates = []
                for _ in range(o.rounds):
                    for case in (c for pair in named.values() for c in pair):
                        case.visit()
                    rates.append(limits.rate("read", 0) or 0.0)
                read = sorted(rates)[3 * len(rates) // 4]
                title = f"{'a token after' if tokens == 1 else 'a prompt of'} {length}, {batch} x {shared} x {size}"
                for kind, (native, peer) in named.items():
                    took, rate = native.took, native.nbytes / native.took
                    each = f"{took * 1e9 / (batch * shared * length):8.1f}{rate / 1e9:7.1f}{rate / read:9.2f}"
                    print(
                        f"{title:36}{kind:10}{took * 1e6:9.0f}{each if tokens == 1 else '':24}"
                        f"{peer.took * 1e6:10.0f}{peer.took / took:7.2f}", flush=True,
                    )  # fmt: skip
                    title = ""
    print(f"read: {read / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
