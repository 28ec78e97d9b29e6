"""Low-bit optimizers beside torch.optim's, torchao's and bitsandbytes': time of a step, and what training loses.

    python -m benchmarks.optimizers [--threads 1]              time of a step
    python -m benchmarks.optimizers --losses [--seeds 5]       losses and updates, beside float32 states
    ... --also PYTHON                                          the peers that another interpreter has, too
    ... --data FILE [FILE ..] --report                         write docs/optimizers.md's tables from saved runs

What is installed is measured, in one process, in turn. Losses: a small Llama over bytes of the standard library's
sources, one initialization and one order of the data a seed, the rate decayed to nothing; then the validation split.
Updates: the gradients of one such run, given to each optimizer; its update beside that of float32 states.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.machine import describe

Make = Callable[..., torch.optim.Optimizer]
PAGE = Path(__file__).resolve().parents[1] / "docs" / "optimizers.md"
BASE = "torch.optim.AdamW"
SHAPES = [(512, 512)] * 16 + [(2048, 512)] * 8 + [(512,)] * 40 + [(4096, 512)]  # 14.7 million: a small transformer
BYTES = {"8bit": 16.13, "4bit": 14.25, "Fp8": 16.13}  # of memory a step must move for an element: p, g, p, and states


def contenders() -> dict[str, Make]:
    """What this interpreter has, by name."""
    from pennyweight import optim

    made: dict[str, Make] = {BASE: lambda p, **k: torch.optim.AdamW(p, foreach=True, **k)}
    made |= {f"pennyweight {c.__name__}": c for c in (optim.AdamW8bit, optim.AdamW4bit, optim.AdamWFp8)}
    if _version("bitsandbytes"):
        import bitsandbytes

        made["bitsandbytes AdamW8bit"] = bitsandbytes.optim.AdamW8bit
    if _version("torchao"):
        from torchao import optim as torchao

        made |= {f"torchao {c.__name__}": c for c in (torchao.AdamW8bit, torchao.AdamW4bit, torchao.AdamWFp8)}
    return made


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# -- time --------------------------------------------------------------------------------------------------------------


def bandwidth() -> float:
    """Bytes a second that a copy moves, read and written; the best of some."""
    a, b = torch.ones(1 << 24), torch.empty(1 << 24)
    best = 0.0
    for _ in range(9):
        begin = time.perf_counter()
        b.copy_(a)
        best = max(best, 2 * a.nbytes / (time.perf_counter() - begin))
    return best


def times(rounds: int) -> list[dict[str, Any]]:
    """Seconds of a step, the median of alternated rounds, over parameters of SHAPES in float32."""
    held = {}
    for name, make in contenders().items():
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in SHAPES]
        for p in params:
            p.grad = torch.randn_like(p) * 1e-3
        held[name] = make(params, lr=1e-3)
        for _ in range(2):  # the first makes the states, and torchao's compiles
            held[name].step()
    seconds: dict[str, list[float]] = {name: [] for name in held}
    for _ in range(rounds):
        for name, optimizer in held.items():
            begin = time.perf_counter()
            optimizer.step()
            seconds[name].append(time.perf_counter() - begin)
    elements, speed = sum(math.prod(s) for s in SHAPES), bandwidth()
    rows = []
    for name, samples in seconds.items():
        moved = next((b for kind, b in BYTES.items() if kind in name), 28.0) * elements
        took = statistics.median(samples)
        rows.append({
            "name": name, "seconds": took, "ratio": took / statistics.median(seconds[BASE]),
            "bandwidth": moved / took / speed, "memory": state_bytes(held[name]) / (8 * elements),
        })  # fmt: skip
    return rows


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors of an optimizer's state, of the parts of those that have parts."""

    def size(t: Tensor) -> int:
        if hasattr(t, "__tensor_flatten__"):
            return sum(size(getattr(t, name)) for name in t.__tensor_flatten__()[0] if "qmap" not in name)
        return t.numel() * t.element_size()

    return sum(size(t) for s in optimizer.state.values() for n, t in s.items() if "qmap" not in n and _many(t))


def _many(t: Any) -> bool:
    return isinstance(t, Tensor) and t.numel() > 1


# -- losses ------------------------------------------------------------------------------------------------------------

STEPS, BATCH, LENGTH = 250, 4, 128


def training(seed: int) -> tuple[torch.nn.Module, Iterator[Tensor]]:
    """A model of 0.55 million parameters and its batches, the same for every optimizer."""
    from benchmarks.accuracy import corpus
    from benchmarks.accuracy.language_model import Recipe, build

    model = build(Recipe(hidden=128, inner=512, layers=2, length=LENGTH, seed=seed))
    text = torch.frombuffer(bytearray(corpus.split("train")), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(seed)

    def batches() -> Iterator[Tensor]:
        for _ in range(STEPS):
            start = torch.randint(text.numel() - LENGTH - 1, (BATCH,), generator=generator)
            yield torch.stack([text[s : s + LENGTH + 1] for s in start.tolist()]).long()

    return model, batches()


def run(model: torch.nn.Module, batches: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """Train; yields after each backward pass, before the step."""
    from benchmarks.accuracy.language_model import next_byte_loss

    warm = 20
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm, max(0.0, (STEPS - s) / (STEPS - warm)))
    )
    for i, window in enumerate(batches):
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(window[:, :-1], use_cache=False).logits
        next_byte_loss(logits, window[:, 1:]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        yield i
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()


OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.1}


@torch.no_grad()
def validation_loss(model: torch.nn.Module) -> float:
    from benchmarks.accuracy import corpus
    from benchmarks.accuracy.language_model import next_byte_loss

    windows = corpus.sequences("validation", 64, LENGTH + 1)
    losses = [float(next_byte_loss(model(w[:, :-1], use_cache=False).logits, w[:, 1:])) for w in windows.split(8)]
    return sum(losses) / len(losses)


def losses(seeds: int, wanted: str) -> list[dict[str, Any]]:
    rows = [{"name": name, "loss": []} for name in contenders() if re.search(wanted, name)]
    makes = contenders()
    for seed in range(seeds):
        for row in rows:
            model, batches = training(seed)
            optimizer = makes[row["name"]](model.parameters(), **OPTIONS)
            begin = time.perf_counter()
            for _ in run(model, batches, optimizer):
                pass
            row["loss"].append(validation_loss(model))
            say = f"seed {seed} {row['name']}: {row['loss'][-1]:.4f}, {time.perf_counter() - begin:.0f} s"
            print(say, file=sys.stderr, flush=True)
    return rows


def updates(wanted: str) -> list[dict[str, Any]]:
    """Of each optimizer, over the matrices and steps 20 on of one run: |update - update with float32 states| over the
    latter, and the greatest element of an update over the greatest of the other.

    Without decay an update does not depend on the parameter, so that one of zeros shows it.
    """
    model, batches = training(0)
    real = [p for p in model.parameters() if p.ndim == 2]
    shadows, makes = {}, contenders()
    for name in [BASE, *(n for n in makes if n != BASE and re.search(wanted, n))]:
        params = [torch.nn.Parameter(torch.zeros_like(p)) for p in real]
        shadows[name] = (params, makes[name](params, lr=1e-3, betas=OPTIONS["betas"], weight_decay=0.0))
    errors: dict[str, list[float]] = {name: [] for name in shadows}
    worst = dict.fromkeys(shadows, 0.0)
    for i in run(model, batches, torch.optim.AdamW(model.parameters(), **OPTIONS)):
        for name, (params, optimizer) in shadows.items():
            for p, source in zip(params, real, strict=True):
                p.data.zero_()
                p.grad = source.grad.clone()
            optimizer.step()
            if i < 20 or i % 5:
                continue
            for p, exact in zip(params, shadows[BASE][0], strict=True):
                errors[name].append(float((p - exact).detach().norm() / exact.detach().norm()))
                worst[name] = max(worst[name], float(p.detach().abs().max() / exact.detach().abs().max()))
    return [
        {"name": n, "error": statistics.mean(e), "median": statistics.median(e), "worst": worst[n]}
        for n, e in errors.items()
    ]  # fmt: skip


# -- tables ------------------------------------------------------------------------------------------------------------


def time_table(rows: list[dict[str, Any]]) -> str:
    heads = ("ms per step", "relative to AdamW(foreach=True)", "of memory bandwidth", "state relative to float32")
    lines = ["| optimizer | " + " | ".join(heads) + " |"]
    lines.append("|---|---:|---:|---:|---:|")
    for r in rows:
        figures = f"{1e3 * r['seconds']:.1f} | {r['ratio']:.2f} | {100 * r['bandwidth']:.0f} % | {r['memory']:.3f}"
        lines.append(f"| {r['name']} | {figures} |")
    return "\n".join(lines)


def loss_table(rows: list[dict[str, Any]]) -> str:
    """A peer that has fewer seeds is compared over those."""
    from scipy.stats import t

    base = next(r["loss"] for r in rows if r["name"] == BASE)
    lines = ["| optimizer | seeds | mean loss | minus float32's, paired | relative, 95 % interval |"]
    lines.append("|---|---:|---:|---:|---:|")
    for r in rows:
        count, mean = len(r["loss"]), statistics.mean(r["loss"])
        relative = [100 * (a - b) / b for a, b in zip(r["loss"], base[:count], strict=True)]
        half = t.ppf(0.975, count - 1) * statistics.stdev(relative) / math.sqrt(count) if count > 1 else math.nan
        figures = f"{mean - statistics.mean(base[:count]):+.4f} | {statistics.mean(relative):+.2f} ± {half:.2f} %"
        lines.append(f"| {r['name']} | {count} | {mean:.4f} | {figures} |")
    return "\n".join(lines)


def update_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| optimizer | update error, mean | median | largest element relative to float32's |",
        "|---|---:|---:|---:|",
    ]
    lines += [f"| {r['name']} | {r['error']:.3f} | {r['median']:.3f} | {r['worst']:.3g} |" for r in rows]
    return "\n".join(lines)


TABLES = {"times": time_table, "losses": loss_table, "updates": update_table}


def joined(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows of several interpreters, each name once: the base is the first's."""
    out: dict[str, list[dict[str, Any]]] = {}
    for one in runs:
        for kind, rows in one["rows"].items():
            seen = {r["name"] for r in out.setdefault(kind, [])}
            out[kind] += [r for r in rows if r["name"] not in seen]
    return out


def section(runs: list[dict[str, Any]], kind: str) -> str:
    about = runs[0]
    machine = about["machine"]
    versions = {k: v for one in runs for k, v in one["versions"].items()}
    return "\n".join([
        f"`{about['command']}`, {machine['date']}: {machine['cpu']} ({', '.join(machine['isa'])}), "
        f"{machine['threads']} thread(s), " + ", ".join(f"{k} {v}" for k, v in versions.items()) + ".",
        "",
        TABLES[kind](joined(runs)[kind]),
    ])  # fmt: skip


def report(runs: list[dict[str, Any]]) -> None:
    """Put the tables between their marks in docs/optimizers.md."""
    text = PAGE.read_text(encoding="utf-8")
    for kind in TABLES:
        some = [r for r in runs if kind in r["rows"]]
        if some:
            begin, end = f"<!-- {kind} -->", f"<!-- /{kind} -->"
            head, _, rest = text.partition(begin)
            text = f"{head}{begin}\n{section(some, kind)}\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text, encoding="utf-8")


def measure(o: argparse.Namespace) -> list[dict[str, Any]]:
    """This interpreter's run, and those of the others."""
    names = ("torch", "torchao", "bitsandbytes")
    words = ["python", "-m", "benchmarks.optimizers", *(["--losses"] if o.losses else []), "--threads", str(o.threads)]
    mine: dict[str, Any] = {
        "command": " ".join(words), "machine": describe(o.threads), "rows": {},
        "versions": {name: _version(name) for name in names if _version(name)},
    }  # fmt: skip
    if o.losses:
        mine["rows"]["updates"] = updates(o.only)
        print(update_table(mine["rows"]["updates"]), flush=True)
        mine["rows"]["losses"] = losses(o.seeds, o.only)
        if any(r["name"] == BASE for r in mine["rows"]["losses"]):
            print(loss_table(mine["rows"]["losses"]), flush=True)
    else:
        mine["rows"]["times"] = times(o.rounds)
        print(time_table(mine["rows"]["times"]), flush=True)
    runs = [mine]
    Path(o.save).write_text(json.dumps(runs, indent=1))
    for python in o.also:
        more = [python, "-m", "benchmarks.optimizers", *words[3:], "--seeds", str(o.seeds), "--rounds", str(o.rounds)]
        more += ["--only", "torchao.*bit|bitsandbytes", "--save", f"{o.save}.also"]
        subprocess.run(more, check=True, env={**os.environ, "PYTHONPATH": str(PAGE.parents[1])})
        runs += json.loads(Path(f"{o.save}.also").read_text())
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="names to train with: a pattern")
    parser.add_argument("--also", nargs="*", default=[], metavar="PYTHON")
    parser.add_argument("--save", default="optimizers.json", help="where the data goes")
    parser.add_argument("--data", nargs="*", default=[], metavar="FILE", help="measure nothing, take these")
    parser.add_argument("--report", action="store_true")
    o = parser.parse_args()
    torch.set_num_threads(o.threads)
    runs = [r for file in o.data for r in json.loads(Path(file).read_text())] or measure(o)
    if o.also:
        Path(o.save).write_text(json.dumps(runs, indent=1))
    if o.report:
        report(runs)


if __name__ == "__main__":
    main()
