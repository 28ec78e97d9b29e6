"""A small Llama (0.85 B parameters, random weights, bf16) through transformers and llama.cpp: prompt and decoding.

    python benchmarks/llm.py [--json llm.json] [--rounds 5] [--families torch,pennyweight,torchao,llamacpp]

A prompt of 128 tokens, then 16 tokens one at a time, eager. Every way is visited in turn, round after round, families
in processes of their own, one active at a time; the second best visit counts. Logits must agree with bf16's within the
way's bound before any time is printed. The head is computed for the last token only. What quantizing cost stands
beside the time it takes to read the model's file and to write as many bytes as come out.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.arithmetic import llm_rows
from benchmarks.limits import LIMITS
from benchmarks.models import worker
from benchmarks.peers.base import relative_error
from benchmarks.peers.pool import Died, Failed, Pool


def measure(pool: Pool, folder: Path, rounds: int, say: Any) -> dict[str, Any]:
    """Results by way: {"nbytes", "costs", "error", "prompt": [...], "token": [...]} or {"failed": sentence}."""
    results: dict[str, dict[str, Any]] = {}
    reference: list[Any] = []
    for name, fields in pool.competitors.items():
        begin = time.perf_counter()
        try:
            nbytes, costs = pool.ask(fields["family"], "build", name, str(folder))
            logits = pool.ask(fields["family"], "check", name)
        except (Failed, Died) as e:
            results[name] = {"failed": str(e)}
            say(f"{name}: {e}")
            continue
        reference = reference or [t.double() for t in logits]  # the first is bf16
        error = max(relative_error(y, r) for y, r in zip(logits, reference, strict=True))
        results[name] = {"nbytes": nbytes, "costs": costs, "error": error, "red": error > fields["bound"]}
        say(f"{name}: loaded in {time.perf_counter() - begin:.0f} s, error {error:.3f}")
    limits: dict[str, list[float]] = {}
    green = [name for name, r in results.items() if not r.get("red") and "failed" not in r]
    for _ in range(rounds):
        for limit in LIMITS if "limits" in pool.families else ():
            rate = pool.ask("limits", "limit", limit, 0.2)
            if rate is not None:
                limits.setdefault(limit, []).append(rate)
        for name in [n for n in green if "failed" not in results[n]]:
            family = pool.competitors[name]["family"]
            try:
                prompt, token = pool.ask(family, "visit", name)
            except (Failed, Died) as e:
                for other in green if isinstance(e, Died) else [name]:  # what the process held is gone with it
                    if pool.competitors[other]["family"] == family:
                        results[other]["failed"] = str(e)
                continue
            results[name].setdefault("prompt", []).append(prompt)
            results[name].setdefault("token", []).append(token)
        say("round done")
    return {"limits": limits, "results": results}


def table_of(data: dict[str, Any]) -> Table:
    table = Table(title="tokens per second (fraction of the limit)")
    columns = ("", "bits", "decode", "x bf16", "prompt", "x bf16", "error", "file MB", "quantize s", "disk to disk s",
               "read + write s", "")  # fmt: skip
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for row in llm_rows(data):
        table.add_row(*row.cells())
    return table


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--json", type=Path, metavar="OUT")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--threads", type=int, default=machine.cores())
    p.add_argument("--families", default=",".join(worker.FAMILIES))
    p.add_argument("--folder", type=Path, help="for the model's files, some 6 GB; a temporary one by default")
    o = p.parse_args()
    console, begin = Console(width=170), time.perf_counter()

    def say(text: str) -> None:
        console.print(f"[dim]{time.perf_counter() - begin:5.0f} s  {text}[/dim]")

    families = list(dict.fromkeys(["torch", *o.families.split(",")]))
    with tempfile.TemporaryDirectory(dir=o.folder) as folder:
        pool = Pool(["limits", *families], o.threads, dict.fromkeys(families, worker.main))
        for family, why in pool.missing.items():
            console.print(f"{family} is left out: {why}")
        data = {
            "kind": "llm",
            "command": machine.command("benchmarks/llm.py"),
            "machine": machine.describe(o.threads),
            "versions": machine.versions(),
            "method": {"rounds": o.rounds},
            "missing": pool.missing,
            "competitors": pool.competitors,
        }
        try:
            pool.ask("torch", "write", folder)
            say("model written")
            data |= measure(pool, Path(folder), o.rounds, say)
        finally:
            pool.close()
    if o.json:
        o.json.write_text(json.dumps(data, indent=1))
    console.print(table_of(data))


if __name__ == "__main__":
    main()
