"""vLLM on a CPU with our weights and with its own: latency and throughput by vLLM's benchmark client.

    .venv-vllm-0.32.0/bin/python -m benchmarks.serving [--json out.json] [--requests 1 8 32] [--parallel 1 2]

Run it in the environment that ``scripts/test-engines`` makes, on an otherwise idle machine. The model is the Llama of
``benchmarks.models`` (0.85 B parameters, random weights). Ways: bfloat16; vLLM's own int8 (W8A8) and int4 layers, from
compressed-tensors files that ``convert`` writes; ours from native folders: int8-dynamic, int4 and a mixture of
int4 in groups of 64 and 128 with an int8 output layer. Each way is a server of its own, started in turn; ``vllm bench
serve`` sends prompts of 128 random tokens and asks for 64 (32 at 32 requests at once), after one request to warm up.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.models import llama

PROMPT = 128
NEW = {1: 64, 8: 64, 32: 32}  # tokens asked for, by the number of requests at once
PORT = 18733


@dataclass
class Row:
    """One measurement. Times in milliseconds, memory in MB: resident size of all processes of the server."""

    way: str
    parallel: int
    requests: int
    tokens_per_s: float
    first_token: float
    per_token: float
    memory: float


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path)
    p.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    p.add_argument("--parallel", type=int, nargs="+", default=[1, 2])
    p.add_argument("--ways", nargs="+")
    p.add_argument("--folder", type=Path, help="keep the models here, and use those that exist")
    p.add_argument("--rounds", type=int, default=1, help="each way is started so many times, in turn; the best counts")
    args = p.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        folders = models(folder)
        for _ in range(args.rounds):
            for way, path in folders.items():
                if args.ways and way not in args.ways:
                    continue
                for parallel in args.parallel:
                    for row in serve(way, path, parallel, args.requests, Path(scratch)):
                        print(row, flush=True)
                        rows.append(row)
                        if args.json:
                            write(args.json, rows)
    print(table(rows))


def write(path: Path, rows: list[Row]) -> None:
    """The rows and the machine, as JSON."""
    path.write_text(
        json.dumps(
            {"machine": machine.describe(len(os.sched_getaffinity(0))), "rows": [asdict(row) for row in rows]}, indent=1
        )
    )


def models(folder: Path) -> dict[str, Path]:
    """The folder of each way; made if it does not exist."""
    import pennyweight as pw

    base = folder / "bfloat16"
    if not (base / "config.json").exists():
        llama.write("llama", base)
        tokenizer(base)
    mixed = pw.FqnToConfig(
        {"re:.*(v_proj|down_proj)": pw.Int4WeightOnlyConfig(64), "lm_head": pw.Int8WeightOnlyConfig(),
         "_default": pw.Int4WeightOnlyConfig(128)}
    )  # fmt: skip
    made: dict[str, tuple[Any, str | None]] = {
        "vLLM int8 (W8A8)": ("int8-dynamic", "compressed-tensors"),
        "pennyweight int8-dynamic": ("int8-dynamic", None),
        "vLLM int4": (pw.Int4WeightOnlyConfig(128), "compressed-tensors"),
        "pennyweight int4": (pw.Int4WeightOnlyConfig(128), None),
        "pennyweight mixture": (mixed, None),
    }
    out = {"vLLM bfloat16": base}
    for way, (config, to) in made.items():
        path = out[way] = folder / way.replace(" ", "-").replace("(", "").replace(")", "")
        if (path / "config.json").exists():
            continue
        # vLLM's own layers keep the head in bfloat16; ours does as well, where the same config is compared
        native = path if to is None else path.with_name(f"{path.name}-native")
        skip = [] if config is mixed else ["lm_head"]
        pw.quantize_checkpoint(base, native, config, skip=skip)
        if to is not None:
            pw.convert(native, path, to=to)
    return out


def tokenizer(folder: Path) -> None:
    """A tokenizer of the vocabulary, one word a token: the client makes its prompts by it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(llama.VOCAB)}
    made = Tokenizer(models.WordLevel(words, unk_token="t0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    named = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t2"}
    PreTrainedTokenizerFast(tokenizer_object=made, **named).save_pretrained(folder)


def serve(way: str, folder: Path, parallel: int, requests: list[int], scratch: Path) -> list[Row]:
    """Start a server, measure each number of requests at once, stop it."""
    env = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env |= {"VLLM_LOGGING_LEVEL": "WARNING"}
    cores = sorted(os.sched_getaffinity(0))
    if parallel > 1:
        each = len(cores) // parallel
        parts = [cores[i * each : (i + 1) * each] for i in range(parallel)]
        env["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, part)) for part in parts)
    vllm = str(Path(sys.executable).with_name("vllm"))
    command = [vllm, "serve", str(folder), "--port", str(PORT), "--dtype", "bfloat16", "--max-model-len", "1024",
               "--max-num-seqs", "32", "--tensor-parallel-size", str(parallel),
               "--no-enable-prefix-caching"]  # fmt: skip
    with (scratch / "log").open("w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        try:
            wait(server, scratch / "log")
            return [measure(way, folder, parallel, n, server.pid, env, vllm, scratch) for n in requests]
        finally:
            os.killpg(server.pid, 15)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, 9)
                server.wait()


def wait(server: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers. Raises RuntimeError with the end of its log if it stops or takes ten minutes."""
    for _ in range(600):
        if server.poll() is not None:
            break
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5).close()
            return
        except OSError:
            time.sleep(1)
    raise RuntimeError(log.read_text()[-4000:])


def measure(
    way: str, folder: Path, parallel: int, n: int, pid: int, env: dict[str, str], vllm: str, scratch: Path
) -> Row:
    """Send n requests at once; three if n is 1."""
    result = scratch / "result.json"
    result.unlink(missing_ok=True)
    command = [vllm, "bench", "serve", "--model", str(folder), "--port", str(PORT), "--dataset-name", "random",
               "--random-input-len", str(PROMPT), "--random-output-len", str(NEW.get(n, 32)), "--ignore-eos",
               "--max-concurrency", str(n), "--num-prompts", str(max(3, n)), "--num-warmups", "1", "--disable-tqdm",
               "--save-result", "--result-dir", str(scratch), "--result-filename", result.name]  # fmt: skip
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    if done.returncode or not result.exists():
        raise RuntimeError(f"{way}: vllm bench serve failed: {done.stderr[-3000:]}")
    got = json.loads(result.read_text())
    if got["completed"] != max(3, n):
        raise RuntimeError(f"{way}: {got['completed']} of {max(3, n)} requests were answered")
    return Row(way, parallel, n, got["output_throughput"], got["mean_ttft_ms"], got["mean_tpot_ms"], resident(pid))


def resident(session: int) -> float:
    """MB that the processes of a session hold, shared pages divided among them."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            if os.getsid(int(status.parent.name)) == session:
                rollup = (status.parent / "smaps_rollup").read_text()
                total += next(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
        except (OSError, StopIteration):  # ended meanwhile
            continue
    return total / 1000


def best(rows: list[Row]) -> list[Row]:
    """The fastest of each measurement that was repeated."""
    out: dict[tuple[str, int, int], Row] = {}
    for row in rows:
        key = (row.way, row.parallel, row.requests)
        if key not in out or row.tokens_per_s > out[key].tokens_per_s:
            out[key] = row
    return list(out.values())


def table(rows: list[Row]) -> str:
    """Markdown, with the ratio to bfloat16 of the same number of processes and requests."""
    rows = best(rows)
    base = {(r.parallel, r.requests): r.tokens_per_s for r in rows if r.way == "vLLM bfloat16"}
    heads = ("way", "processes", "requests", "tokens/s", "x bfloat16", "first token, ms", "per token, ms", "memory, MB")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for r in sorted(rows, key=lambda r: (r.parallel, r.requests)):
        ratio = f"{r.tokens_per_s / base[r.parallel, r.requests]:.2f}" if (r.parallel, r.requests) in base else ""
        lines.append(
            f"| {r.way} | {r.parallel} | {r.requests} | {r.tokens_per_s:.1f} | {ratio} | {r.first_token:.0f} | "
            f"{r.per_token:.1f} | {r.memory:.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
