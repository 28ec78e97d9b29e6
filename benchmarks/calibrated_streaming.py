"""How much memory an algorithm takes for a checkpoint on disk: all weights in memory, and weights that stay in files.

    python benchmarks/calibrated_streaming.py [--depths 4,16] [--hidden 1024] [--algorithm gptq] [--max-memory 1GB]
        [--limit 1GB] [--sequences 16]

Writes a random bfloat16 Llama (ffn 2.75 times the hidden size, vocabulary 8192) of each depth, and quantizes it to int4
in groups of 128 in a child process, once with quantize_ and once with quantize_checkpoint. Printed are the peaks of the
child's own memory (``RssAnon`` of Linux, every 10 ms; clean pages of mapped files are the system's to take back) less
that of the imports, its time, and whether both files have the same bytes.

--limit runs the second way in a control group of Linux that the kernel holds to so many bytes in all, pages of mapped
files and the interpreter with its libraries included; it needs the right to make one. "killed" is then what the table
says of a way that the kernel ended, and the peak that the kernel counted stands beside the child's own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pennyweight.planning.quantize_report import nbytes_of

ROOT = Path(__file__).resolve().parents[1]
VOCABULARY, LENGTH = 8192, 256
WAYS = ("in memory", "in files")

CHILD = """
import json, re, sys, threading, time
import torch
import pennyweight as pw
import pennyweight.io.calibrated_streaming
from pennyweight.report.evaluation_inputs import load_folder
import transformers.models.llama.modeling_llama
src, dst, way, algorithm, limit, length, count, vocabulary = sys.argv[1:]
def own():
    with open("/proc/self/status") as f:
        return int(re.search(r"RssAnon:\\s+(\\d+)", f.read())[1]) << 10
torch.manual_seed(0)
recipe = algorithm.split("+")
ids = torch.randint(int(vocabulary), (int(count), int(length)))
batches = [{"input_ids": some} for some in ids.split(1)]
config = pw.Int4WeightOnlyConfig(group_size=128)
before, peak, done = own(), 0, False
def watch():
    global peak
    while not done:
        peak = max(peak, own())
        time.sleep(0.01)
thread = threading.Thread(target=watch, daemon=True)
thread.start()
start, processor = time.perf_counter(), time.process_time()
if way == "in memory":
    model = load_folder(src)
    pw.quantize_(model, config, calibration=batches, algorithm=recipe, skip=["lm_head"])
    pw.save(model, dst)
else:
    more = {"calibration": batches, "algorithm": recipe, "max_memory": limit}
    pw.quantize_checkpoint(src, dst, config, skip=["lm_head"], **more)
seconds, processor = time.perf_counter() - start, time.process_time() - processor
done = True
thread.join()
print(json.dumps({"peak": peak - before, "seconds": seconds, "processor": processor}))
"""


@contextmanager
def control_group(limit: int) -> Iterator[Path]:
    """A control group, of version 1 or 2, that limits its processes to so many bytes. OSError: no right to make one."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        two = number == "0" and Path("/sys/fs/cgroup/cgroup.controllers").exists()
        if two or "memory" in controllers.split(","):
            root, name = ("", "memory.max") if two else ("memory", "memory.limit_in_bytes")
            folder = Path("/sys/fs/cgroup", root, path.lstrip("/"), f"pennyweight-{os.getpid()}")
            folder.mkdir()
            try:
                (folder / name).write_text(str(limit))
                yield folder
            finally:
                folder.rmdir()
            return
    raise OSError("this system has no control group that limits memory")


def write_model(folder: Path, hidden: int, depth: int) -> int:
    """Weights of its linear layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=depth, vocab_size=VOCABULARY,
        num_key_value_heads=min(8, hidden // 64), num_attention_heads=hidden // 64, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(p.numel() for p in model.model.layers.parameters() if p.ndim > 1)


def run_limited(command: list[str], limit: int | None, source: Path) -> tuple[subprocess.CompletedProcess[str], int]:
    """The process, and the peak of its control group in bytes; 0 without a limit."""
    if limit is None:
        return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT), 0
    for file in source.iterdir():  # pages that are there already would be charged to this process
        with file.open("rb") as f:
            os.fsync(f.fileno())
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with control_group(limit) as group:
        enter = ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh", *command]
        ended = subprocess.run(enter, stdout=subprocess.PIPE, text=True, check=False, cwd=ROOT)
        peaks = [group / name for name in ("memory.peak", "memory.max_usage_in_bytes")]
        return ended, next((int(file.read_text()) for file in peaks if file.exists()), 0)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--depths", default="4,16")
    p.add_argument("--hidden", type=int, default=1024)
    p.add_argument("--algorithm", default="gptq")
    p.add_argument("--max-memory", default="1GB")
    p.add_argument("--limit", help="bytes that the kernel allows the way in files, such as 1GB")
    p.add_argument("--sequences", type=int, default=16, help=f"of {LENGTH} tokens")
    p.add_argument("--ways", default=",".join(WAYS))
    p.add_argument("--folder", help="for the files; default: the system's temporary folder")
    o = p.parse_args()
    title = f"int4 g128 by {o.algorithm}, hidden size {o.hidden}, max_memory {o.max_memory}"
    table = Table(title=title + (f", in files at most {o.limit}" if o.limit else ""))
    for column in (
        "blocks",
        "float MB",
        "weights are",
        "peak MB",
        "kernel's peak",
        "seconds",
        "processor s / 1e9 weights",
        "same bytes",
    ):
        table.add_column(column, justify="right")
    for depth in map(int, o.depths.split(",")):
        with tempfile.TemporaryDirectory(dir=o.folder) as scratch:
            src = Path(scratch) / "float"
            weights = write_model(src, o.hidden, depth)
            size = sum(file.stat().st_size for file in src.glob("*.safetensors"))
            written: list[bytes] = []
            for way in o.ways.split(","):
                dst = Path(scratch) / way.replace(" ", "-")
                command = [sys.executable, "-c", CHILD, str(src), str(dst), way, o.algorithm, o.max_memory]
                command += [str(LENGTH), str(o.sequences), str(VOCABULARY)]
                run, counted = run_limited(command, nbytes_of(o.limit) if o.limit and way == "in files" else None, src)
                if run.returncode == -9:
                    table.add_row(str(depth), f"{size / 1e6:.0f}", way, "killed", f"{counted / 1e6:.0f}", "", "", "")
                    continue
                if run.returncode:
                    sys.exit(f"{way}: the child ended with exit code {run.returncode}")
                got = json.loads(run.stdout.splitlines()[-1])
                written.append(b"".join(f.read_bytes() for f in sorted(dst.glob("*.safetensors"))))
                same = "" if len(written) < 2 else str(written[0] == written[1])
                table.add_row(
                    str(depth), f"{size / 1e6:.0f}", way, f"{got['peak'] / 1e6:.0f}",
                    f"{counted / 1e6:.0f}" if counted else "", f"{got['seconds']:.0f}",
                    f"{got['processor'] / weights * 1e9:.0f}", same,
                )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
