"""How long a GGUF file of some gigabytes takes to open, and how much memory to convert.

    python benchmarks/convert.py [--gigabytes 3] [--type Q4_0] [--to pennyweight compressed-tensors ...] [--folder DIR]

Writes a synthetic GGUF file (the tensors of a Llama of 8 billion parameters, fewer layers, a vocabulary of 128 256),
runs ``pennyweight inspect`` on it and ``pennyweight convert`` from it, each in a process of its own, and prints seconds
and peak resident memory, imports included. A converted folder is converted back to GGUF and compared byte for byte
where the format kept the numbers. All files are deleted afterwards; room for about three times the size is needed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from pennyweight.core.numerics import Parts
from pennyweight.io.gguf.blocks import TYPES
from pennyweight.io.gguf.config import kv_from_config
from pennyweight.io.gguf.gguf_file import File, Writer
from pennyweight.io.gguf.metadata import Value
from pennyweight.io.gguf.quantize import quantize

HIDDEN, INNER, VOCABULARY = 4096, 14336, 128256
LAYER = {
    "attn_q": (HIDDEN, HIDDEN), "attn_k": (1024, HIDDEN), "attn_v": (1024, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN), "ffn_up": (INNER, HIDDEN), "ffn_down": (HIDDEN, INNER),
    "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
}  # fmt: skip
CHILD = """
import json, resource, sys, time
from pennyweight.cli import main
start = time.perf_counter()
try:
    main()
except SystemExit as end:
    if end.code:
        raise
scale = 1 if sys.platform == "darwin" else 1024
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
print(json.dumps({"seconds": time.perf_counter() - start, "peak": peak}), file=sys.stderr)
"""


def write_model(path: Path, total: float, kind: str) -> int:
    """Layers until the file has about ``total`` bytes. Rows come from a block of 1024 that is used again and again."""
    type_ = TYPES[kind]
    shapes = {"token_embd.weight": (VOCABULARY, HIDDEN), "output_norm.weight": (HIDDEN,)}
    shapes["output.weight"] = (VOCABULARY, HIDDEN)
    per_layer = sum(type_.row_bytes(s) * s[0] for s in LAYER.values() if len(s) == 2)
    layers = max(1, round((total - 2 * VOCABULARY * type_.row_bytes((1, HIDDEN))) / per_layer))
    shapes |= {f"blk.{i}.{name}.weight": shape for i in range(layers) for name, shape in LAYER.items()}
    config = {
        "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": VOCABULARY, "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192, "rope_theta": 5e5,
    }  # fmt: skip
    kv = {key: Value(kind.lower(), value) for key, (kind, value) in kv_from_config(config, 0).items()}
    tokens = [f"token {i}" for i in range(VOCABULARY)]
    kv |= {"tokenizer.ggml.model": Value("string", "none"), "tokenizer.ggml.tokens": Value("[string]", tokens)}
    writer = Writer(str(path), kv, {n: (type_ if len(s) == 2 else TYPES["F32"], s) for n, s in shapes.items()})
    torch.manual_seed(0)
    rows = {n: type_.encode(quantize(torch.randn(1024, n) * 0.02, kind), (1024, n)) for n in (HIDDEN, INNER)}
    for name, shape in shapes.items():
        if len(shape) == 1:
            writer.put(name, TYPES["F32"].encode(Parts(torch.ones(shape)), shape))
            continue
        for start in range(0, shape[0], 1024):
            writer.put(name, rows[shape[1]][: min(1024, shape[0] - start)], start)
    writer.finish()
    return path.stat().st_size


def run(*arguments: object) -> dict[str, float]:
    """Seconds and peak memory of a command, in a process of its own."""
    command = [sys.executable, "-c", CHILD, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stderr.splitlines()[-1])


def same_data(a: Path, b: Path) -> bool:
    """Whether two files hold the same bytes under the same names."""
    with File(str(a)) as first, File(str(b)) as second:
        return first.entries.keys() == second.entries.keys() and all(
            torch.equal(first.mapped(name), second.mapped(name)) for name in first.entries
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=float, default=3.0)
    parser.add_argument("--type", default="Q4_0")
    parser.add_argument("--to", nargs="+", default=["pennyweight"])
    parser.add_argument("--folder", help="where to put the files; default: the system's temporary folder")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="pennyweight-", dir=args.folder))
    try:
        source = folder / "model.gguf"
        size = write_model(source, args.gigabytes * 1e9, args.type)
        print(f"{args.type} file of {size / 1e9:.2f} GB, vocabulary of {VOCABULARY}")
        for _ in range(2):
            show("inspect", run("inspect", source), size)
        for to in args.to:
            shutil.rmtree(folder / "out", ignore_errors=True)
            show(f"to {to}", run("convert", source, folder / "out", "--to", to), size)
            if to != "float":
                back = folder / "back.gguf"
                show("  and back", run("convert", folder / "out", back, "--to", "gguf", "--force"), size)
                print(f"  the same bytes: {same_data(source, back)}")
    finally:
        shutil.rmtree(folder)


def show(what: str, got: dict[str, float], size: int) -> None:
    rate = f", {size / got['seconds'] / 1e6:.0f} MB/s" if what != "inspect" else ""
    print(f"{what:24} {got['seconds']:7.2f} s{rate}, peak {got['peak'] / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
