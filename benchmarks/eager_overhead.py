"""What the tensor class costs in eager mode, and what is left of it in a frozen model.

    python benchmarks/eager_overhead.py [seconds per figure, default 0.3]

A 64x64 layer at one row, one thread, no gradients: the arithmetic takes next to nothing, so the rest is seen. "kernel"
is the selected kernel called by itself; then F.linear with a float and a quantized weight, and what the second takes
beyond the kernel; "graph op" is the op that a compiled graph calls, which checks the parts of the weight at each call;
then whole modules: nn.Linear float, quantized, and frozen. Each figure is the least of many short
runs, interleaved so that a busy machine slows all of them alike.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import pennyweight as pw
from pennyweight.core.formats import INT4, INT8
from pennyweight.core.spec import ActivationSpec, QuantSpec
from pennyweight.core.tensor import AffineQuantizedTensor
from pennyweight.kernels.graph_weight import flatten
from pennyweight.kernels.linear import bind
from pennyweight.kernels.linear_graph import graph_key
from pennyweight.kernels.repack import prepare
from pennyweight.kernels.table import case_of, select

CALLS = 200
ROW = QuantSpec(INT8, (-1,))
CASES = {
    "int8 weight-only, bfloat16": (ROW, None, torch.bfloat16),
    "int8 weight-only, float32": (ROW, None, torch.float32),
    "int8 dynamic, float32": (ROW, ActivationSpec(ROW, eps=1e-5), torch.float32),
    "int4 weight-only, bfloat16": (
        QuantSpec(INT4, (32,), scale=torch.bfloat16), None, torch.bfloat16,
    ),
}  # fmt: skip


def least(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Microseconds a call of each, the least over interleaved rounds."""
    best = dict.fromkeys(runs, float("inf"))
    end = time.perf_counter() + seconds * len(runs)
    while time.perf_counter() < end:
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                run()
            best[name] = min(best[name], (time.perf_counter() - start) / CALLS * 1e6)
    return best


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 0.3
    torch.set_num_threads(1)
    print(f"{'microseconds a call, 64x64, M=1':<31}{'':>7} |{'F.linear':^24} |{'graph':>8} |{'nn.Linear':^24} |")
    op = torch.ops.pennyweight.linear.default
    names = ("kernel", " |", "float", "quant.", "class", " |", "op", " |", "float", "quant.", "frozen", " |")
    print(" " * 30 + "".join(n if n == " |" else f"{n:>8}" for n in names))
    for name, (spec, act, dtype) in CASES.items():
        plain, layer, frozen = (nn.Linear(64, 64, bias=False, dtype=dtype) for _ in range(3))
        w = prepare(AffineQuantizedTensor.from_float(plain.weight, spec, act=act))
        layer.weight = frozen.weight = nn.Parameter(w, requires_grad=False)
        pw.inference.freeze_(frozen)
        x = torch.randn(1, 64, dtype=dtype)
        chosen, (_, kernel, parts) = select("linear", case_of(w, dtype)).name, bind(w, dtype)
        tensors, key = flatten(w)[0], graph_key(w, dtype)
        with torch.no_grad():
            took = least(
                {
                    "kernel": lambda x=x, w=parts or w, run=kernel: run(x, w, None),
                    "float": lambda x=x, p=plain.weight: F.linear(x, p),
                    "tensor": lambda x=x, w=w: F.linear(x, w),
                    "op": lambda x=x, parts=tensors, key=key: op(x, parts, None, key),
                    "float layer": lambda x=x, f=plain: f(x),
                    "layer": lambda x=x, f=layer: f(x),
                    "frozen": lambda x=x, f=frozen: f(x),
                },
                seconds,
            )
        took["class"] = took["tensor"] - took["kernel"]
        order = (("kernel",), ("float", "tensor", "class"), ("op",), ("float layer", "layer", "frozen"))
        print(f"{name:<30}" + "".join("".join(f"{took[n]:8.2f}" for n in group) + " |" for group in order), chosen)


if __name__ == "__main__":
    main()
