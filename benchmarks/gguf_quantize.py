"""Quantizing to GGUF's types, ours and ggml's in turn: millions of weights per second, and the errors of both.

    python benchmarks/gguf_quantize.py [--rows 2048] [--columns 4096] [--rounds 5] [--threads 1 2] [--types Q4_K ...]
    python benchmarks/gguf_quantize.py --convert [--gigabytes 0.6] [--types Q8_0 Q4_0 Q4_K_M]

ggml is that of llama-cpp-python or of pywhispercpp; its threads take chunks of rows from each other, as in llama.cpp's
quantizer. Speed is that of the best round. Errors are root mean squares relative to ggml's (below 1: ours is smaller),
plain and, with an importance matrix, weighted by it. --convert: a bfloat16 Llama with random weights to a GGUF file, in
GB of the source per second, next to a copy of the source that is flushed to disk; the source is in the page cache.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

import pennyweight as pw
from pennyweight.core.numerics import dequantize
from pennyweight.io.gguf.blocks import TYPES, BlockType
from pennyweight.io.gguf.quantize import quantize_native
from pennyweight.kernels.native.convert import GGUF_BLOCKS

NAMES = tuple(name for name, kind in TYPES.items() if kind.id in GGUF_BLOCKS)
CHUNK = 64  # rows that a thread of ggml takes at a time


def ggml() -> ctypes.CDLL | None:
    """ggml's library, or None."""
    for package, pattern in (("llama_cpp", "llama_cpp/lib/*ggml-base.*"), ("pywhispercpp", "*.libs/libggml-base*")):
        found = find_spec(package)
        if found is not None and found.origin is not None:
            for path in sorted(Path(found.origin).parents[1].glob(pattern)):
                library = ctypes.CDLL(str(path))
                library.ggml_quantize_chunk.restype = ctypes.c_size_t
                return library
    return None


def theirs(library: ctypes.CDLL, x: Tensor, kind: BlockType, importance: Tensor | None, threads: int) -> Tensor:
    """[rows, row bytes] of x by ggml."""
    out = torch.empty((x.shape[0], kind.row_bytes(x.shape)), dtype=torch.uint8)
    weights = None if importance is None else ctypes.c_void_p(importance.data_ptr())

    def chunk(start: int) -> None:
        count = min(CHUNK, x.shape[0] - start)
        library.ggml_quantize_chunk(
            ctypes.c_int(kind.id), ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(start * x.shape[1]), ctypes.c_int64(count), ctypes.c_int64(x.shape[1]), weights,
        )  # fmt: skip

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(chunk, range(0, x.shape[0], CHUNK)))
    return out


def ours(x: Tensor, kind: BlockType, importance: Tensor | None, threads: int) -> Tensor:
    torch.set_num_threads(threads)
    found = quantize_native(x, kind.name, importance)
    if found is None:
        raise SystemExit("pennyweight's native library is missing")
    return found.raw


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def error(raw: Tensor, x: Tensor, kind: BlockType, weights: Tensor | None) -> float:
    off = (dequantize(kind.decode(raw, tuple(x.shape)), kind.spec, x.shape) - x).double().square()  # type: ignore[arg-type]
    return float((off if weights is None else off * weights).mean().sqrt())


def compare(o: argparse.Namespace) -> None:
    library = ggml()
    torch.manual_seed(0)
    x = torch.randn(o.rows, o.columns) * 0.02
    heavy = torch.distributions.StudentT(4.0).sample((o.rows // 8, o.columns)) * 0.02
    importance = torch.rand(o.columns) ** 4 + 0.01
    head = " ".join(f"{f'ours {n}t':>9}{f'ggml {n}t':>9}{'ratio':>7}" for n in o.threads)
    print(f"{'M weights/s':8}{head}   error ratio: normal  heavy-tailed  importance")
    for name in o.types or NAMES:
        kind, cells = TYPES[name], []
        for threads in o.threads:
            best = [float("inf")] * 2
            for _ in range(o.rounds):
                best[0] = min(best[0], seconds(partial(ours, x, kind, None, threads)))
                if library is not None:
                    best[1] = min(best[1], seconds(partial(theirs, library, x, kind, None, threads)))
            cells.append(f"{x.numel() / best[0] / 1e6:9.0f}{x.numel() / best[1] / 1e6:9.0f}{best[1] / best[0]:7.1f}")
        ratios = []
        for data, by in ((x[: o.rows // 8], None), (heavy, None), (heavy, importance)) if library is not None else ():
            a, b = ours(data, kind, by, 1), theirs(library, data, kind, by, 1)
            ratios.append(error(a, data, kind, by) / error(b, data, kind, by))
        print(f"{name:11}{' '.join(cells)}{'':16}" + "".join(f"{r:10.3f}" for r in ratios), flush=True)


# -- conversion --------------------------------------------------------------------------------------------------------


def write_model(folder: Path, gigabytes: float) -> int:
    """A bfloat16 Llama of about that size. Returns its bytes."""
    hidden, inner, vocabulary = 1536, 4096, 32000
    layers = max(
        1, round((gigabytes * 1e9 / 2 - 2 * vocabulary * hidden) / (8 * hidden * hidden / 3 + 3 * hidden * inner))
    )
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": hidden, "vocab_size": vocabulary,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 12, "num_key_value_heads": 4,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    torch.manual_seed(0)
    shapes = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden), "model.norm": (hidden,)}
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.self_attn.{n}_proj": (hidden, hidden) for n in "qo"}
        shapes |= {f"{at}.self_attn.{n}_proj": (hidden // 3, hidden) for n in "kv"}
        shapes |= {f"{at}.mlp.{n}_proj": (inner, hidden) for n in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj": (hidden, inner)}
        shapes |= {f"{at}.{n}_layernorm": (hidden,) for n in ("input", "post_attention")}
    tensors = {f"{name}.weight": (torch.randn(shape) * 0.02).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return (folder / "model.safetensors").stat().st_size


def convert(o: argparse.Namespace) -> None:
    torch.set_num_threads(max(o.threads))
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name), Path(name) / "m.gguf"
        size = write_model(folder, o.gigabytes)
        source = folder / "model.safetensors"

        def copy() -> None:
            shutil.copyfile(source, out)
            with out.open("rb") as file:
                os.fsync(file.fileno())

        def job(kind: str) -> Callable[[], object]:
            return lambda: pw.convert(folder, out, to="gguf", gguf_type=kind)

        jobs = {"copy": copy} | {kind: job(kind) for kind in o.types or ("BF16", "Q8_0", "Q4_0", "Q4_K_M")}
        best = dict.fromkeys(jobs, float("inf"))
        for _ in range(o.rounds):
            for kind, run in jobs.items():
                out.unlink(missing_ok=True)
                best[kind] = min(best[kind], seconds(run))
        for kind, took in best.items():
            print(f"{kind:8}{took:8.2f} s{size / took / 1e9:8.2f} GB/s")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", type=int, default=2048)
    p.add_argument("--columns", type=int, default=4096)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    p.add_argument("--types", nargs="+")
    p.add_argument("--convert", action="store_true")
    p.add_argument("--gigabytes", type=float, default=0.6)
    o = p.parse_args()
    (convert if o.convert else compare)(o)


if __name__ == "__main__":
    main()
