"""Quantization-aware training of the accuracy benchmark's language model: how much of what rounding costs it wins back.

    python -m benchmarks.qat [--formats int4 int2] [--methods ...] [--steps 40] [--seeds 5] [--peer PYTHON] [--timing]

All methods see the same windows of the train split in the same order, 2048 bytes a step; a seed is another choice of
windows. KL is that of the test split to the float model, in nats a byte, the mean over seeds. The gap is that between
round-to-nearest and a control: the float model, trained on the same bytes with the same loss (with a divergence from
itself that is the model itself, at zero). Intervals: 95 %, from draws of the test split's sequences. ``--peer`` is a
Python that has torchao. Results are kept in the cache folder. Rates were chosen on the validation split
(``--split validation --lr RATE``).
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.accuracy import corpus, language_model
from benchmarks.accuracy.statistics import ratio

FORMATS = {"int4": "4-bit groups of 128, offsets (4.25 bits)", "int2": "2-bit groups of 64, zero points (2.28 bits)"}


RATES = {"int4": 1e-4, "int2": 3e-4}  # of weights; scales have a tenth of it
BETTER = {("int2", "torchao-kl"): 1e-3}  # where a method does better with another one


@dataclass(frozen=True)
class Method:
    """loss: None trains nothing."""

    about: str
    loss: str | None
    start: str = "nearest"  # or the name of an algorithm; "float": nothing is quantized; "torchao": theirs
    learn: str = "none"


METHODS = {
    "nearest": Method("round-to-nearest", None),
    "gptq": Method("GPTQ, nothing trained", None, "gptq"),
    "float-ce": Method("control: the float model, trained on the bytes", "ce", "float"),
    "minmax-ce": Method("scales from each step's weights, trained on the bytes", "ce"),
    "minmax-kl": Method("the same, distilled", "kl"),
    "torchao-ce": Method("torchao's, trained on the bytes", "ce", "torchao"),
    "torchao-kl": Method("torchao's, distilled", "kl", "torchao"),
    "auto": Method('"auto", nothing trained', None, "auto"),
    "gptq-kl": Method("from GPTQ's codes, distilled", "kl", "gptq"),
    "gptq-kl-scale": Method("from GPTQ's codes, distilled, scales and offsets learned", "kl", "gptq", "all"),
    "auto-kl-scale": Method('from the codes of "auto", distilled, scales and offsets learned', "kl", "auto", "all"),
}


def config(name: str) -> Any:
    import pennyweight as pw
    from pennyweight.core.spec import TINYGEMM

    if name == "int4":  # Int4WeightOnlyConfig's numbers in a model of bfloat16
        return pw.SpecConfig(TINYGEMM, rule="minmax")
    return pw.IntxWeightOnlyConfig(torch.int2, pw.PerGroup(64), pw.MappingType.ASYMMETRIC, scale_dtype=torch.bfloat16)


def _layers(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "lm_head" not in name


def prepared(model: nn.Module, name: str, method: Method) -> None:
    """What is trained, or evaluated where nothing is."""
    import pennyweight as pw

    data = [{"input_ids": w} for w in corpus.sequences("calibration", 64).split(8)]
    chosen = {} if method.start == "nearest" else {"calibration": data, "algorithm": method.start}
    pw.quantize_(model, pw.QATConfig(config(name), learn=method.learn), _layers, **chosen)


def prepared_by_torchao(model: nn.Module, name: str) -> None:
    from torchao.quantization import quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig
    from torchao.quantization.quant_primitives import ZeroPointDomain

    if name == "int4":  # tinygemm's numbers: a real zero point
        weight = IntxFakeQuantizeConfig(
            torch.uint4, group_size=128, is_symmetric=False, zero_point_domain=ZeroPointDomain.FLOAT,
            scale_precision=torch.bfloat16, zero_point_precision=torch.bfloat16,
        )  # fmt: skip
    else:
        weight = IntxFakeQuantizeConfig(torch.int2, PerGroup(64), is_symmetric=False, scale_precision=torch.bfloat16)
    quantize_(model, QATConfig(weight_config=weight, step="prepare"), _layers)


def windows(steps: int, seed: int, rows: int = 8) -> Iterator[Tensor]:
    text = torch.frombuffer(bytearray(corpus.split("train")), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1 + seed)
    for _ in range(steps):
        start = torch.randint(text.numel() - 257, (rows,), generator=generator)
        yield torch.stack([text[s : s + 257] for s in start.tolist()]).long()


def kl(output: Tensor, reference: Tensor) -> Tensor:
    q, p = output.float().log_softmax(-1), reference.float().log_softmax(-1)
    return F.kl_div(q.flatten(0, -2), p.flatten(0, -2), reduction="batchmean", log_target=True)


def train(
    model: nn.Module, teacher: nn.Module, method: Method, lr: float, steps: int, seed: int, say: Callable[[str], None]
) -> None:
    """AdamW without decay, the rate falls to zero as a cosine; the same for everyone."""
    if method.start in ("torchao", "float"):
        groups: Any = [{"params": list(model.parameters()), "lr": lr}]
    else:
        from pennyweight.training import parameter_groups

        groups = parameter_groups(model, lr)
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 5) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    model.train()
    for step, window in enumerate(windows(steps, seed)):
        output = model(input_ids=window[:, :-1], use_cache=False).logits
        if method.loss == "ce":
            loss = language_model.next_byte_loss(output, window[:, 1:])
        else:
            with torch.no_grad():
                reference = teacher(input_ids=window[:, :-1], use_cache=False).logits
            loss = kl(output, reference)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 20 == 19:
            say(f"  step {step + 1}/{steps}: {method.loss} {float(loss.detach()):.4f}")
    model.eval()


@torch.no_grad()
def divergence(model: nn.Module, teacher: nn.Module, split: str, count: int) -> list[float]:
    """Of each sequence."""
    found = []
    for w in corpus.sequences(split, count).split(8):
        outputs = (m(input_ids=w, use_cache=False).logits for m in (model, teacher))
        found += [float(kl(a, b)) for a, b in zip(*outputs, strict=True)]
    return found


def run(name: str, key: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One method on one format; from the cache where it was run before."""
    method, lr = METHODS[key], options.lr or BETTER.get((name, key), RATES[name])
    lr, seed = (lr, seed) if method.loss else (0.0, 0)
    fields = {name: value for name, value in asdict(method).items() if name != "about"}
    told = json.dumps([7, seed, name, fields, lr, options.steps, options.split, options.windows, corpus.digest()])
    digest = hashlib.sha256(told.encode()).hexdigest()[:12]
    file = language_model.cache_folder() / "qat" / f"{name}-{key}-{digest}.json"
    if file.exists():
        return json.loads(file.read_text())
    print(f"{name} {key}, seed {seed}: {method.about}", flush=True)
    torch.manual_seed(0)
    teacher = language_model.load().requires_grad_(False)
    model = copy.deepcopy(teacher).requires_grad_(True)
    begin = time.perf_counter()
    if method.start == "torchao":
        prepared_by_torchao(model, name)
    elif method.start != "float":
        prepared(model, name, method)
    if method.loss:
        train(model, teacher, method, lr, options.steps, seed, lambda line: print(line, flush=True))
    found = divergence(model, teacher, options.split, options.windows)
    out = {
        "format": name, "method": key, "about": method.about, "lr": lr, "seed": seed, "sequences": found,
        "kl": statistics.fmean(found), "seconds": time.perf_counter() - begin,
    }  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(out))
    print(f"  KL {out['kl']:.5f}, {out['seconds']:.0f} s", flush=True)
    return out


def by_peer(name: str, key: str, seed: int, options: argparse.Namespace) -> dict[str, Any] | None:
    """A method that needs torchao, in a process that has it."""
    if options.peer is None:
        return None
    command = [
        options.peer, "-W", "ignore", "-m", "benchmarks.qat", "--worker", name, key, str(seed),
        "--lr", str(options.lr or 0), "--steps", str(options.steps),
        "--split", options.split, "--windows", str(options.windows),
    ]  # fmt: skip
    subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
    return run(name, key, seed, options)


def table(results: list[dict[str, Any]]) -> str:
    """Markdown. Seeds of a method are averaged sequence by sequence; after the interval, least and greatest seed."""
    lines = [
        "| format | method | seeds | KL, nats a byte | gap closed, 95 % interval | seeds | against the control |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for name, format_about in FORMATS.items():
        runs: dict[str, list[dict[str, Any]]] = {}
        for r in results:
            if r["format"] == name:
                runs.setdefault(r["method"], []).append(r)
        means = {key: [statistics.fmean(v) for v in zip(*(r["sequences"] for r in some), strict=True)]
                 for key, some in runs.items()}  # fmt: skip
        nearest = means.get("nearest")
        for key, some in runs.items():
            value, cells = statistics.fmean(means[key]), ["", "", ""]
            if nearest is not None and key != "nearest":
                rest = ratio(means[key], nearest)
                closed = [1 - r["kl"] / statistics.fmean(nearest) for r in some]
                cells[0] = f"{1 - rest.value:.0%} ({1 - rest.high:.0%} to {1 - rest.low:.0%})"
                cells[1] = f"{min(closed):.0%} to {max(closed):.0%}" if len(some) > 1 else ""
                low = statistics.fmean(means["float-ce"]) if METHODS[key].loss == "ce" and "float-ce" in means else 0.0
                gap = statistics.fmean(nearest) - low
                # Where the control went further from the float model than rounding does, there is no gap to speak of.
                cells[2] = f"{(statistics.fmean(nearest) - value) / gap:.0%}" if gap > 0 else "-"
            count = len({r["seed"] for r in some})
            lines.append(f"| {format_about} | {METHODS[key].about} | {count} | {value:.5f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def timing(options: argparse.Namespace) -> None:
    """Forward and backward of one layer, 2048 tokens, beside float's: the median of interleaved runs."""
    x = torch.randn(2048, 768)
    grad = torch.randn(2048, 768)
    layers: dict[str, Any] = {"float": nn.Sequential(nn.Linear(768, 768, bias=False))}
    for name in [*FORMATS]:
        layers[name] = copy.deepcopy(layers["float"])
        if options.worker:
            prepared_by_torchao(layers[name], name)
        else:
            import pennyweight as pw

            pw.quantize_(layers[name], pw.QATConfig(config(name)))
            layers[f"{name}, learned"] = copy.deepcopy(layers["float"])
            pw.quantize_(layers[f"{name}, learned"], pw.QATConfig(config(name), learn="all"))
    times: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(15):
        for name, layer in layers.items():
            begin = time.perf_counter()
            layer(x.requires_grad_()).backward(grad)
            times[name].append(time.perf_counter() - begin)
    base = statistics.median(times["float"])
    who = "torchao" if options.worker else "pennyweight"
    for name, found in times.items():
        print(f"{who} {name}: {1e3 * statistics.median(found):.1f} ms, {statistics.median(found) / base:.2f} x float")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=32, help="of 256 bytes, that are evaluated")
    parser.add_argument("--split", default="test")
    parser.add_argument("--lr", type=float, default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peer", default=None, help="a Python that has torchao")
    parser.add_argument("--timing", action="store_true")
    parser.add_argument("--worker", nargs="*", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.timing:
        timing(options)
        if options.peer and options.worker is None:
            command = [options.peer, "-W", "ignore", "-m", "benchmarks.qat", "--timing", "--worker", "timing"]
            subprocess.run(command, check=True, cwd=Path(__file__).parents[1])
        return
    if options.worker:
        name, key, seed = options.worker
        run(name, key, int(seed), options)
        return
    results = []
    for seed in range(options.seeds):
        for name in options.formats:
            for key in options.methods if seed == 0 else [k for k in options.methods if METHODS[k].loss]:
                one = by_peer if METHODS[key].start == "torchao" else run
                found = one(name, key, seed, options)
                results += [found] if found is not None else []
    print(table(results))


if __name__ == "__main__":
    sys.exit(main())
