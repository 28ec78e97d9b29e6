"""Low-precision training beside bfloat16: losses of paired seeds, and gradients beside float64's.

    python -m benchmarks.training [--recipes NAME ..] [--seeds 5] [--steps 200] [--out FILE]
    python -m benchmarks.training --data FILE [--report]       the table, and with a plot into docs/training.md

A small Llama over bytes of the standard library's sources. For each seed every recipe starts from the same weights and
sees the same data; the rate warms up and decays to nothing; then the loss of the validation split, in the recipe's own
forward pass. Baseline: bfloat16 under autocast. "float32" is the control: how far a run moves when nothing but
rounding changes. Each run is appended to the file when it is done, and one that is there is not run again, so that a
measurement can be stopped and go on, with more seeds or more recipes.

Gradients: of every linear layer of a model at its start and as bfloat16 trained it (seed 0), one batch, the cosine
with float64's. "whole": through the model, every layer under the recipe. "one layer": each layer for itself, given
float64's input and gradient.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.accuracy import corpus
from benchmarks.accuracy.language_model import Recipe as Model
from benchmarks.accuracy.language_model import build, next_byte_loss
from benchmarks.machine import describe

PAGE = Path(__file__).resolve().parents[1] / "docs" / "training.md"
BASE, CONTROL, INT8_WEIGHTS = "bfloat16", "float32", "int8 weights"
LOW = (
    "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "int8", "int8_hadamard", "mxfp8", "mxfp8_mxfp4",
    "mxfp4", "nvfp4", "bitnet",
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """What is trained, and how long."""

    hidden: int = 128
    inner: int = 384
    layers: int = 2
    batch: int = 8
    length: int = 128
    steps: int = 200
    rate: float = 1e-3

    def model(self, seed: int) -> nn.Module:
        return build(Model(hidden=self.hidden, inner=self.inner, layers=self.layers, length=self.length, seed=seed))

    def batches(self, seed: int) -> Iterator[Tensor]:
        text = torch.frombuffer(bytearray(corpus.split("train")), dtype=torch.uint8)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(self.steps):
            start = torch.randint(text.numel() - self.length - 1, (self.batch,), generator=generator)
            yield torch.stack([text[s : s + self.length + 1] for s in start.tolist()]).long()


def convert_(model: nn.Module, name: str) -> None:
    """The model under a recipe; the baselines stay as they are."""
    from pennyweight.quantize.pipeline import quantize_
    from pennyweight.training import Int8WeightOnlyTrainingConfig, LowPrecisionTrainingConfig

    if name not in (BASE, CONTROL):
        quantize_(model, Int8WeightOnlyTrainingConfig() if name == INT8_WEIGHTS else LowPrecisionTrainingConfig(name))


def context(name: str) -> AbstractContextManager[Any]:
    return nullcontext() if name == CONTROL else torch.autocast("cpu", torch.bfloat16)


def train(size: Size, name: str, seed: int) -> tuple[nn.Module, list[float]]:
    """A trained model and its training losses."""
    from pennyweight.training import stochastic_rounding

    model = size.model(seed)
    convert_(model, name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(1, size.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / warm, max(0.0, (size.steps - s) / max(1, size.steps - warm)))
    )
    losses = []
    for step, window in enumerate(size.batches(seed)):
        with context(name):
            logits = model(window[:, :-1], use_cache=False).logits
        loss = next_byte_loss(logits, window[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with stochastic_rounding(step, seed) if name == INT8_WEIGHTS else nullcontext():
            optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    return model, losses


@torch.no_grad()
def validation_loss(size: Size, model: nn.Module, name: str) -> float:
    windows = corpus.sequences("validation", 128, size.length + 1)
    total = 0.0
    for w in windows.split(16):
        with context(name):
            logits = model(w[:, :-1], use_cache=False).logits
        total += float(next_byte_loss(logits, w[:, 1:])) * w.shape[0]
    return total / windows.shape[0]


# -- gradients ---------------------------------------------------------------------------------------------------------


def gradients(model: nn.Module, window: Tensor, name: str) -> dict[str, Tensor]:
    """Gradients of the weights of all linear layers, by name."""
    model.zero_grad()
    wide = next(model.parameters()).dtype is torch.float64
    with nullcontext() if wide else context(name):
        logits = model(window[:, :-1], use_cache=False).logits
    F.cross_entropy(logits.double().flatten(0, 1), window[:, 1:].flatten()).backward()
    found = {n: m.weight.grad.clone() for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    model.zero_grad()
    return found


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def one_layer_at_a_time(exact: nn.Module, window: Tensor, name: str) -> list[float]:
    """Cosines of each layer's two gradients, given float64's input and output gradient."""
    from pennyweight.training import linear

    seen: dict[str, list[Tensor]] = {}
    handles = []
    for n, m in exact.named_modules():
        if isinstance(m, nn.Linear):
            handles.append(m.register_forward_hook(lambda m, x, y, n=n: seen.setdefault(n, [x[0].detach()]) and None))
            handles.append(m.register_full_backward_hook(lambda m, gi, go, n=n: seen[n].append(go[0].detach())))
    gradients(exact, window, CONTROL)
    for handle in handles:
        handle.remove()
    cosines = []
    for n, (x, g) in seen.items():
        weight = exact.get_submodule(n).weight.detach()
        dtype = torch.bfloat16 if name == BASE else torch.float32
        a, w = x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        y = F.linear(a, w) if name in (BASE, CONTROL) else linear(a, w, None, name)
        y.backward(g.to(y.dtype))
        rows, grads = x.flatten(0, -2), g.flatten(0, -2)
        cosines += [cosine(a.grad, g @ weight), cosine(w.grad, grads.t() @ rows)]
    return cosines


def measure_gradients(size: Size, name: str, trained: nn.Module) -> dict[str, Any]:
    """Least and mean cosine over layers, at the start and after training, through the model and layer by layer."""
    window = corpus.sequences("validation", size.batch, size.length + 1, seed=1)
    found: dict[str, Any] = {}
    for when, model in (("start", size.model(0)), ("trained", trained)):
        exact = copy.deepcopy(model).double()
        low = copy.deepcopy(model)
        convert_(low, name)
        wanted, got = gradients(exact, window, CONTROL), gradients(low, window, name)
        whole = [cosine(got[n], wanted[n]) for n in wanted]
        alone = one_layer_at_a_time(exact, window, name)
        found[when] = {
            "whole": [min(whole), statistics.fmean(whole)], "one layer": [min(alone), statistics.fmean(alone)]
        }  # fmt: skip
    return found


# -- runs, kept in a file ----------------------------------------------------------------------------------------------


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep(path: Path, row: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def run(path: Path, size: Size, names: list[str], seeds: int, say: Any = print) -> None:
    """What is not in the file yet: seed by seed, so that a stopped run has whole seeds."""
    done = {(r["kind"], r["name"], r.get("seed"), json.dumps(r["size"])) for r in read(path)}
    shape = asdict(size)
    for seed in range(seeds):
        for name in names:
            if ("loss", name, seed, json.dumps(shape)) in done:
                continue
            begin = time.perf_counter()
            model, losses = train(size, name, seed)
            loss, took = validation_loss(size, model, name), time.perf_counter() - begin
            keep(path, {
                "kind": "loss", "name": name, "seed": seed, "size": shape, "loss": loss, "training": losses,
                "seconds": took, "machine": describe(torch.get_num_threads()),
            })  # fmt: skip
            say(f"seed {seed} {name}: {loss:.4f}, {took:.0f} s")
    trained = None
    for name in names:
        if name == INT8_WEIGHTS or ("gradients", name, None, json.dumps(shape)) in done:
            continue
        trained = trained if trained is not None else train(size, BASE, 0)[0]
        keep(path, {"kind": "gradients", "name": name, "size": shape, **measure_gradients(size, name, trained)})
        say(f"gradients {name}")


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: loss less the baseline's, paired by seed, with its 95 % interval, beside the spread of seeds."""
    size = max((json.dumps(r["size"]) for r in rows), key=lambda s: sum(json.dumps(r["size"]) == s for r in rows))
    rows = [r for r in rows if json.dumps(r["size"]) == size]
    losses: dict[str, dict[int, float]] = {}
    for r in rows:
        if r["kind"] == "loss":
            losses.setdefault(r["name"], {})[r["seed"]] = r["loss"]
    base = losses[BASE]
    spread = statistics.stdev(base.values()) if len(base) > 1 else math.nan
    lines = [
        f"Sizes: {size}; {len(base)} seeds; {BASE}'s loss {statistics.fmean(base.values()):.4f}, spread of seeds "
        f"(standard deviation) {spread:.4f}.",
        "",
        "| recipe | seeds | loss minus bfloat16's, paired, 95 % interval | of the loss | of the spread | target |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name, mine in losses.items():
        shared = sorted(mine.keys() & base.keys())
        if name == BASE or len(shared) < 2:
            continue
        d = [mine[s] - base[s] for s in shared]
        mean, half = statistics.fmean(d), _t(len(d) - 1) * statistics.stdev(d) / len(d) ** 0.5
        level = statistics.fmean(base[s] for s in shared)
        bound = min(0.25 * spread, 0.001 * level)
        met = mean + half <= bound
        verdict = "met" if met else "not met" if mean - half > bound else "not resolved"
        lines.append(
            f"| {name} | {len(d)} | {mean:+.4f} ({mean - half:+.4f} to {mean + half:+.4f}) "
            f"| {100 * mean / level:+.2f} % | {mean / spread:+.2f} | {verdict} |"
        )
    lines += ["", *_cosines(rows)]
    return "\n".join(lines)


def _cosines(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| recipe | one layer, start: min, mean | one layer, trained | whole model, start | whole model, trained |",
        "|---|---:|---:|---:|---:|",
    ]
    for r in rows:
        if r["kind"] == "gradients":
            cells = [
                " · ".join(f"{v:.5f}" for v in r[when][what])
                for what in ("one layer", "whole") for when in ("start", "trained")
            ]  # fmt: skip
            lines.append(f"| {r['name']} | {' | '.join(cells)} |")
    return lines


def _t(degrees: int) -> float:
    """Two-sided 95 % point of Student's t."""
    from scipy.stats import t

    return float(t.ppf(0.975, degrees))


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Training losses, and below them each recipe's less the baseline's of the same seed: means over seeds, smoothed
    over a tenth of the steps, with the standard error of the mean. Of runs that kept all their losses."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "pennyweight"  # the same data give the same file
    import matplotlib.pyplot as plt

    runs: dict[str, dict[int, Tensor]] = {}
    for r in rows:
        if r["kind"] == "loss" and len(r["training"]) == r["size"]["steps"]:
            runs.setdefault(r["name"], {})[r["seed"]] = torch.tensor(r["training"], dtype=torch.float64)
    if BASE not in runs:
        raise ValueError(
            f"{path}: no run of {BASE} has kept all its losses; run the benchmark anew, with another --out"
        )
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True, layout="constrained")
    for i, (name, mine) in enumerate(sorted(runs.items(), key=lambda pair: pair[0] != BASE)):
        colour = "black" if name == BASE else plt.colormaps["tab20"]((i - 1) % 20)
        curve, at = _smooth(torch.stack([*mine.values()]))
        above.plot(at, curve.mean(0), color=colour, linewidth=1, label=f"{name} ({len(mine)} seeds)")
        shared = sorted(mine.keys() & runs[BASE].keys())
        if name == BASE or len(shared) < 2:
            continue
        apart, at = _smooth(torch.stack([mine[s] - runs[BASE][s] for s in shared]))
        mean, error = apart.mean(0), apart.std(0) / len(shared) ** 0.5
        below.plot(at, mean, color=colour, linewidth=1)
        below.fill_between(at, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)
    above.set_ylabel("training loss, nats a byte")
    above.legend(fontsize=8)
    below.axhline(0, color="black", linewidth=0.6)
    below.set_yscale("symlog", linthresh=0.02)  # what differs by a little, beside what differs by much
    below.set_ylabel(f"less {BASE}'s, same seed")
    below.set_xlabel("step")
    for axis in (above, below):
        axis.grid(alpha=0.3)
    figure.savefig(path, metadata={"Date": None})


def _smooth(losses: Tensor) -> tuple[Tensor, Tensor]:
    """(running means over a tenth of the steps [seeds, n], the steps in their middle [n])."""
    width = max(1, losses.shape[1] // 10)
    runs = losses.unfold(1, width, 1).mean(-1)
    return runs, torch.arange(runs.shape[1]) + (width - 1) / 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", default=[CONTROL, *LOW, INT8_WEIGHTS])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("training-runs.jsonl"))
    parser.add_argument("--data", type=Path, help="only the table of these runs")
    parser.add_argument("--report", action="store_true", help="into docs/training.md, between its marks, with a plot")
    for name, default in asdict(Size()).items():
        parser.add_argument(f"--{name}", type=type(default), default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    path = options.data or options.out
    if options.data is None:
        size = Size(**{name: getattr(options, name) for name in asdict(Size())})
        say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
        run(path, size, list(dict.fromkeys([BASE, *options.recipes])), options.seeds, say)
    text = table(read(path))
    print(text)
    if options.report:
        plot(read(path), PAGE.with_name("training-losses.svg"))
        page = PAGE.read_text(encoding="utf-8")
        begin, end = "<!-- measured: products -->", "<!-- /measured: products -->"
        head, _, rest = page.partition(begin)
        PAGE.write_text(f"{head}{begin}\n{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
