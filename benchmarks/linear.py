"""One linear layer on a CPU: every kernel of the table against float, against dequantizing, and against torchao.

    python benchmarks/linear.py [--n 4096] [--k 4096] [--rows 1,16,128] [--threads 2]

All candidates are visited in turn, round after round, in one process; the best visit counts, because the machine may
be shared. Reported: speed relative to float F.linear of the same dtype (above 1 is faster), and the fraction of the
limit at one row: weight bytes / measured read bandwidth / time. Each candidate rotates over copies of its layer, 160 MB
together, so that weights come from memory and not from a cache. torchao's rows appear where it is installed; torch's
own dynamic quantization always, in float32.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
import warnings
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

import pennyweight as pw
from pennyweight.kernels import reference

CONFIGS = {
    "int8 weight-only": pw.Int8WeightOnlyConfig(),
    "int8 dynamic": pw.Int8DynamicActivationInt8WeightConfig(),
    "int4 g128": pw.Int4WeightOnlyConfig(128),
}


def best(candidates: dict[str, Callable[[], object]], seconds: float = 0.03, rounds: int = 5) -> dict[str, float]:
    """Least seconds per call of each, visited round-robin."""
    least = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, call in candidates.items():
            call()
            end = time.perf_counter() + seconds
            while True:
                start = time.perf_counter()
                call()
                now = time.perf_counter()
                least[name] = min(least[name], now - start)
                if now > end:
                    break
    return least


def bandwidth() -> float:
    """Bytes per second of reading memory: the best of summing 256 MiB and of multiplying it with a vector."""
    block, vector = torch.ones(8192, 8192), torch.ones(8192)
    return block.nbytes / min(best({"sum": block.sum, "mv": lambda: torch.mv(block, vector)}, 0.2).values())


def rotated(module: nn.Module, nbytes: int, x: torch.Tensor) -> Callable[[], object]:
    """Calls of copies of a module in turn, 160 MB of them."""
    copies = itertools.cycle([module, *(copy.deepcopy(module) for _ in range(160_000_000 // nbytes))])
    return lambda: next(copies)(x)


def peers(layer: nn.Linear) -> dict[str, nn.Module]:
    """What a user would pick instead."""
    found: dict[str, nn.Module] = {}
    if layer.weight.dtype is torch.float32:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found["torch quantize_dynamic"] = torch.ao.quantization.quantize_dynamic(
                nn.Sequential(copy.deepcopy(layer)), {nn.Linear}, dtype=torch.qint8
            )
    try:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
    except ImportError:
        return found
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig

    for name, config in (
        ("torchao int8 weight-only", Int8WeightOnlyConfig(set_inductor_config=False)),
        ("torchao int8 dynamic", Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)),
        ("torchao int4 g128 (prototype)", PrototypeInt4WeightOnlyConfig(128)),
    ):
        model = nn.Sequential(copy.deepcopy(layer))
        quantize_(model, config)
        found[name] = model
    return found


def run(n: int, k: int, rows: list[int], dtype: torch.dtype, read: float) -> Table:
    torch.manual_seed(0)
    layer = nn.Linear(k, n).to(dtype)
    models: dict[str, nn.Module] = {"float": layer}
    for name, config in CONFIGS.items():
        models[name] = copy.deepcopy(layer)
        pw.quantize_(models[name], config)
    models |= peers(layer)
    width = {name: dtype.itemsize if name == "float" else 0.5 if "int4" in name else 1 for name in models}
    short = str(dtype).removeprefix("torch.")
    table = Table(title=f"{n}x{k}, {short}: speed relative to float F.linear (fraction of the read bandwidth)")
    for column in ("", *(f"{m} row{'s' * (m > 1)}" for m in rows)):
        table.add_column(column)
    cells: dict[str, list[str]] = {}
    for m in rows:
        x = torch.randn(m, k, dtype=dtype)
        with torch.no_grad():
            calls = {name: rotated(f, int(n * k * width[name]), x) for name, f in models.items()}
            for name in CONFIGS:
                w, bias = models[name].weight, models[name].bias
                calls[f"{name}, dequantize row"] = lambda w=w, bias=bias, x=x: reference.linear(x, w, bias)
            seconds = best(calls)
        rate = 2 * m * n * k / seconds["float"] if m == max(rows) else 0
        for name, s in seconds.items():
            weight = getattr(models.get(name), "weight", None)
            limit = weight.nbytes / read if isinstance(weight, torch.Tensor) else None  # of what is stored
            shown = f"{seconds['float'] / s:.2f}x"
            cells.setdefault(name, []).append(shown if limit is None or m > 1 else f"{shown} ({limit / s:.2f} of read)")
        if rate:
            table.caption = f"float at {m} rows: {rate / 1e9:.0f} GFLOP/s; read bandwidth {read / 1e9:.0f} GB/s"
    for name, row in cells.items():
        table.add_row(name, *row)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=4096)
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--rows", default="1,16,128")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    read = bandwidth()
    for dtype in (torch.bfloat16, torch.float32):
        Console(width=130).print(run(options.n, options.k, [int(m) for m in options.rows.split(",")], dtype, read))


if __name__ == "__main__":
    main()
