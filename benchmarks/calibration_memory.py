"""How much memory calibration takes beside the model, for models of any depth.

    python benchmarks/calibration_memory.py [--depths 4,16,32] [--ways memory,spill,max_ram] [--json FILE]

Each run is a process of its own: a chain of transformer-like blocks of 28 MB (float32) is quantized to int4 by gptq,
and the peak of its resident memory is read from the kernel. What counts is that peak less what was resident before
quantize_ was called: the float model, the data, the libraries. It is compared with six times the weights of a block
(its statistics, and the solver's matrices in float64 among them) plus the hidden states and a batch's activations.

glibc keeps what was freed for later, more or less of it from run to run: 15 to 85 MB here. So that need is measured
and not its habits, children run with MALLOC_MMAP_THRESHOLD_=131072 unless the environment says otherwise;
``--allocator`` leaves it alone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pennyweight as pw

HIDDEN, INNER = 768, 2048
BATCHES, SIZE, LENGTH = 16, 2, 128
MAX_RAM = 40e6  # below hidden states and statistics together, which are 13 + 31 MB
FACTOR = 6  # of a block's weights
WAYS = ("memory", "spill", "max_ram")


class Block(nn.Module):
    """The seven linear layers of a decoder layer, without attention, which would only take time."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.o = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.o(torch.sigmoid(self.q(y) * self.k(y)) * self.v(y))
        y = self.after(x)
        return x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))


def block_bytes() -> int:
    with torch.device("meta"):
        return sum(p.nbytes for p in Block().parameters())


def hidden_bytes() -> int:
    return BATCHES * SIZE * LENGTH * HIDDEN * 4


def allowed(way: str) -> int:
    """Bytes beside the model: a batch's activations are its inputs to each layer and what they put out."""
    activations = SIZE * LENGTH * (6 * HIDDEN + 4 * INNER) * 4
    return FACTOR * block_bytes() + activations + (hidden_bytes() if way == "memory" else 0)


def resident() -> int:
    """Bytes of this process that are in memory. Linux."""
    fields = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in fields if line.startswith("VmRSS"))


def peak() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def child(depth: int, way: str) -> dict[str, Any]:
    """One run, in this process."""
    import time

    torch.manual_seed(0)
    pw.quantize_(nn.Linear(64, 64), pw.Int4WeightOnlyConfig(32), calibration=[torch.randn(128, 64)], algorithm="gptq")
    model = nn.Sequential(*(Block() for _ in range(depth))).eval().requires_grad_(False)
    data = [torch.randn(SIZE, LENGTH, HIDDEN) for _ in range(BATCHES)]
    before, highest = resident(), peak()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        how = {"memory": {}, "spill": {"spill": folder}, "max_ram": {"max_ram": int(MAX_RAM)}}[way]
        report = pw.quantize_(model, pw.Int4WeightOnlyConfig(128), calibration=data, algorithm="gptq", **how)
    assert all(row.error is not None and row.error <= 1 for row in report.quantized)
    return {
        "depth": depth, "way": way, "model": sum(r.bytes_before for r in report.rows), "before": before,
        "made": highest, "peak": peak(), "beside": peak() - before, "allowed": allowed(way),
        "seconds": time.perf_counter() - start,
    }  # fmt: skip


def table(runs: list[dict[str, Any]]) -> str:
    """As in docs/algorithms/README.md."""
    lines = ["| blocks | hidden states | float model | peak beside it | allowed |", "|---|---|---|---|---|"]
    told = {"memory": "in memory", "spill": "on disk: `spill`", "max_ram": f"on disk: `max_ram` {MAX_RAM / 1e6:.0f} MB"}
    lines += [
        f"| {r['depth']} | {told[r['way']]} | {r['model'] / 1e6:.0f} MB | {r['beside'] / 1e6:.0f} MB "
        f"| {r['allowed'] / 1e6:.0f} MB |"
        for r in runs
    ]
    return "\n".join(lines)


def in_processes(module: str, children: list[list[str]], file: str, *, allocator: bool = False) -> list[dict[str, Any]]:
    """What a module prints as its last line, as JSON, for each list of arguments; into a file too if one is named.

    allocator  whether glibc may keep what was freed, as it does by default
    """
    environment = dict(os.environ) if allocator else {"MALLOC_MMAP_THRESHOLD_": "131072", **os.environ}
    runs = []
    for arguments in children:
        command = [sys.executable, "-m", module, *arguments]
        out = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        runs.append(json.loads(out.splitlines()[-1]))
        print(runs[-1], file=sys.stderr, flush=True)
    if file:
        Path(file).write_text(json.dumps(runs, indent=2) + "\n", encoding="utf-8")
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", default="4,16,32")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--json", default="")
    parser.add_argument("--allocator", action="store_true", help="leave the allocator as it is")
    parser.add_argument("--child", nargs=2, metavar=("DEPTH", "WAY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(int(args.child[0]), args.child[1])))
        return
    unknown = set(args.ways.split(",")) - set(WAYS)
    if unknown:
        parser.error(f"--ways are of {', '.join(WAYS)}, got {', '.join(sorted(unknown))}")
    children = [["--child", depth, way] for depth in args.depths.split(",") for way in args.ways.split(",")]
    runs = in_processes("benchmarks.calibration_memory", children, args.json, allocator=args.allocator)
    print(f"block {block_bytes() / 1e6:.1f} MB, hidden states {hidden_bytes() / 1e6:.1f} MB\n")
    print(table(runs))


if __name__ == "__main__":
    main()
