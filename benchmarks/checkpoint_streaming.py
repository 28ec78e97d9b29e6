"""How much memory and time quantize_checkpoint takes for a checkpoint of some gigabytes.

    python benchmarks/checkpoint_streaming.py [--gigabytes 3] [--config int4] [--folder DIR] [--threads N]

Writes a synthetic bfloat16 checkpoint (the shapes of an 8-billion-parameter Llama, fewer layers), quantizes it in a
child process, and prints the child's peak resident memory beside the size of the file and of its largest tensor. All
files are deleted afterwards; room for about 1.5 times the size is needed.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from pennyweight.io.safetensors_file import Writer, place

HIDDEN, INNER, VOCABULARY = 4096, 14336, 32000
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (1024, HIDDEN), "self_attn.v_proj": (1024, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
}  # fmt: skip
CONFIGS = {"int4": "Int4WeightOnlyConfig()", "int8": "Int8WeightOnlyConfig()", "nf4": "NF4WeightOnlyConfig()"}

CHILD = """
import json, resource, sys, time
import torch
import pennyweight as pw
from pennyweight.io import quantize_checkpoint
src, dst, config, threads = sys.argv[1:]
if int(threads):
    torch.set_num_threads(int(threads))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
imports, start = peak(), time.perf_counter()
report = quantize_checkpoint(src, dst, eval(f"pw.{config}"))
seconds = time.perf_counter() - start
worst = min(r.sqnr for r in report.quantized)
print(json.dumps({"imports": imports, "peak": peak(), "seconds": seconds, "summary": report.summary(), "worst": worst}))
"""


def shapes(total: float) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a model of about ``total`` bytes in bfloat16."""
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    layer = 2 * sum(torch.Size(s).numel() for s in LAYER.values())
    for i in range(max(1, round((total - 4 * VOCABULARY * HIDDEN) / layer))):
        for name, shape in LAYER.items():
            yield f"model.layers.{i}.{name}.weight", shape
    yield "lm_head.weight", (VOCABULARY, HIDDEN)


def write_checkpoint(path: Path, total: float) -> tuple[int, int]:
    """(bytes, bytes of the largest tensor). Values: normal, from a block of 2**22 numbers used again and again."""
    entries = place({name: (torch.bfloat16, shape) for name, shape in shapes(total)})
    block = (torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)) * 0.02).bfloat16()
    writer = Writer(str(path), entries, {"format": "pt"})
    for name, entry in entries.items():
        for start in range(0, entry.numel, block.numel()):
            piece = block[: min(block.numel(), entry.numel - start)]
            writer.put(name, piece.reshape(entry.shape) if piece.numel() == entry.numel else piece, start)
    writer.finish()
    return path.stat().st_size, max(e.end - e.begin for e in entries.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--config", choices=CONFIGS, default="int4")
    parser.add_argument("--folder", help="where to put the files; default: the system's temporary folder")
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pennyweight-", dir=args.folder))
    try:
        (folder / "src").mkdir()
        size, largest = write_checkpoint(folder / "src" / "model.safetensors", args.gigabytes * 1e9)
        command = [sys.executable, "-c", CHILD, str(folder / "src"), str(folder / "dst"), CONFIGS[args.config]]
        run = subprocess.run([*command, str(args.threads)], capture_output=True, text=True, check=False)
        if run.returncode:
            sys.exit(run.stderr)
        got = json.loads(run.stdout)
        written = sum(f.stat().st_size for f in (folder / "dst").iterdir())
    finally:
        shutil.rmtree(folder)
    print(
        f"{CONFIGS[args.config]}, torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    )
    print(
        f"checkpoint      {size / 1e9:8.2f} GB, largest tensor {largest / 1e6:.0f} MB, written {written / 1e9:.2f} GB"
    )
    print(f"peak memory     {got['peak'] / 1e6:8.0f} MB ({got['peak'] / size:.2f} of the file), of which")
    print(f"  imports       {got['imports'] / 1e6:8.0f} MB")
    over = got["peak"] - got["imports"]
    print(f"  quantizing    {over / 1e6:8.0f} MB ({over / largest:.2f} of the largest tensor)")
    print(f"time            {got['seconds']:8.1f} s ({size / got['seconds'] / 1e6:.0f} MB/s)")
    print(f"{got['summary']}; worst SQNR {got['worst']:.1f} dB")


if __name__ == "__main__":
    main()
