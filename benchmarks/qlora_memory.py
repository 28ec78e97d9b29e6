"""How much memory fine-tuning takes: all weights, adapters beside float ones, adapters beside NF4 ones.

    python -m benchmarks.qlora_memory [--depth 16] [--ways full,lora,qlora,bitsandbytes] [--json FILE]

Each run is a process of its own: a chain of transformer-like blocks of 28 MB (float32; those of
`benchmarks/calibration_memory.py`) is made, block by block, and trained for a few steps of AdamW on 2 sequences of 128.
Told is the peak of its resident memory less what was resident before the model was made, and what of it is weights.
Needs peft; "bitsandbytes" needs that, and is left out, with the reason, where it is not there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

import pennyweight as pw
from benchmarks.calibration_memory import HIDDEN, LENGTH, SIZE, Block, block_bytes, in_processes, peak, resident

STEPS = 4
TOLD = {
    "full": "all weights, float32", "lora": "LoRA, float32 base", "qlora": "LoRA, NF4 base",
    "bitsandbytes": "LoRA, NF4 base of bitsandbytes",
}  # fmt: skip


def nf4(block: nn.Module) -> nn.Module:
    pw.quantize_(block, pw.NF4WeightOnlyConfig())
    return block


def theirs(block: nn.Module) -> nn.Module:
    """Every linear layer as bitsandbytes' own."""
    from bitsandbytes.nn import Linear4bit

    for name, module in list(block.named_children()):
        if isinstance(module, nn.Linear):
            new = Linear4bit(
                module.in_features, module.out_features, bias=False, compute_dtype=torch.float32,
                compress_statistics=True, quant_type="nf4",
            )  # fmt: skip
            new.load_state_dict(module.state_dict())
            setattr(block, name, new.to("cpu"))
    return block


MADE = {"full": lambda block: block, "lora": lambda block: block, "qlora": nf4, "bitsandbytes": theirs}


def child(depth: int, way: str) -> dict[str, Any]:
    """One run, in this process."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    MADE[way](Block())  # what libraries load when they are first used is not the model's
    before = resident()
    model: Any = nn.Sequential(*(MADE[way](Block()) for _ in range(depth)))
    weights = sum(p.nbytes for p in model.parameters())
    if way != "full":
        model = get_peft_model(model, LoraConfig(r=16, target_modules=["q", "k", "v", "o", "gate", "up", "down"]))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    x, y = torch.randn(SIZE, LENGTH, HIDDEN), torch.randn(SIZE, LENGTH, HIDDEN)
    losses = []
    start = time.perf_counter()
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    return {
        "depth": depth, "way": way, "weights": weights, "trained": sum(p.numel() for p in trained),
        "peak": peak() - before, "seconds": (time.perf_counter() - start) / STEPS,
    }  # fmt: skip


def table(runs: list[dict[str, Any]]) -> str:
    """As in docs/training.md; memory and time by that of the first row."""
    lines = ["| what is trained | numbers | weights | peak | by the first | a step, by the first |"]
    lines.append("|---|---|---|---|---|---|")
    first = runs[0]
    for r in runs:
        lines.append(
            f"| {TOLD[r['way']]} | {r['trained'] / 1e6:.1f} M | {r['weights'] / 1e6:.0f} MB | {r['peak'] / 1e6:.0f} MB "
            f"| {r['peak'] / first['peak']:.2f} | {r['seconds'] / first['seconds']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=16)
    parser.add_argument("--ways", default=",".join(MADE))
    parser.add_argument("--json", default="")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.depth, args.child)))
        return
    unknown = set(args.ways.split(",")) - MADE.keys()
    if unknown:
        parser.error(f"--ways are of {', '.join(MADE)}, got {', '.join(sorted(unknown))}")
    ways = args.ways.split(",")
    if "bitsandbytes" in ways and find_spec("bitsandbytes") is None:
        ways.remove("bitsandbytes")
        print("bitsandbytes: not installed", file=sys.stderr)
    children = [["--depth", str(args.depth), "--child", way] for way in ways]
    runs = in_processes("benchmarks.qlora_memory", children, args.json)
    print(f"block {block_bytes() / 1e6:.1f} MB, {args.depth} of them\n")
    print(table(runs))


if __name__ == "__main__":
    main()
