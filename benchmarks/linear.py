"""One linear layer on a CPU: pennyweight beside every other way there is, and beside what the machine can do.

    python benchmarks/linear.py                          # 4096x4096; 1, 16 and 128 rows
    python benchmarks/linear.py --full --json out.json   # all shapes and rows
    python benchmarks/linear.py --report out.json        # the sections of docs/benchmarks.md; measures nothing

Every competitor is visited in turn, round after round (A B C A B C ...), families with thread pools of their own in
processes of their own, one of them active at a time. A visit is the median of the calls that fit into it; what counts
is the second best visit. Weights rotate over copies of 200 MB together. Before any time, the result must agree with a
float64 product within the competitor's bound: a red gate prints no time. Limits of the machine (reading memory, int8,
bf16 and fp32 products) are visited in the same rounds. With PENNYWEIGHT_CPU_ISA (and ATEN_CPU_CAPABILITY,
ONEDNN_MAX_CPU_ISA) the run is held to an older instruction set, and says so.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.arithmetic import rows_of, steady
from benchmarks.measure import Measurement, Plan
from benchmarks.peers import FAMILIES
from benchmarks.peers.base import ROTATED_BYTES
from benchmarks.peers.pool import Pool

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (1536, 1536), (32000, 4096)]
ROWS = [1, 4, 16, 64, 512]


def table_of(cell: dict[str, Any], competitors: dict[str, dict[str, Any]]) -> Table:
    """A cell as printed."""
    limits = ", ".join(f"{name} {steady(v, largest=True) / 1e9:.0f} G/s" for name, v in cell["limits"].items())
    disturbed = "" if cell["quiet"] else f"; DISTURBED: others took {max(cell['others']):.0%}"
    table = Table(
        title=f"{cell['n']}x{cell['k']}, {cell['m']} rows; limits: {limits or 'not measured'}{disturbed}",
        title_justify="left",
    )
    for column, justify in (("", "left"), ("bits", "right"), ("us", "right"), ("x bf16", "right"), ("x peer", "right"),
                            ("of limit", "right"), ("error", "right"), ("", "left")):  # fmt: skip
        table.add_column(column, justify=justify)
    for r in rows_of(cell, competitors):
        if "refused" in cell["results"][r.name]:
            continue
        table.add_row(
            r.name, str(r.bits), "" if r.seconds is None else f"{r.seconds * 1e6:.0f}",
            *("" if v is None else f"{v:.2f}" for v in (r.x_bf16, r.x_peer)),
            "" if r.fraction is None else f"{r.fraction:.2f} {r.limit}",
            "" if r.error is None else f"{r.error:.2g}", r.note[:60],
            style="bold" if r.family == "pennyweight" else None,
        )  # fmt: skip
    return table


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--full", action="store_true", help="all shapes and rows")
    p.add_argument("--shapes", help="NxK,NxK,...")
    p.add_argument("--rows", help="M,M,...")
    p.add_argument("--peers", help=f"families, of {', '.join(FAMILIES)}; all by default")
    p.add_argument("--only", default="", help="parts of competitors' names, with commas between; bf16 F.linear stays")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--realtime", action="store_true", help="visits take precedence over other processes; needs root")
    p.add_argument("--visit-ms", type=float, default=30)
    p.add_argument("--cell-seconds", type=float, default=1.2, help="a slower competitor gets fewer rounds")
    p.add_argument("--extra-rounds", type=int, default=3, help="at most, where neighbours took part of the processor")
    p.add_argument("--threads", type=int, default=machine.cores())
    p.add_argument("--json", type=Path, metavar="OUT")
    p.add_argument("--report", type=Path, nargs="+", metavar="JSON")
    o = p.parse_args(arguments)
    o.shapes = (
        [tuple(map(int, s.split("x"))) for s in o.shapes.split(",")] if o.shapes else SHAPES[: 5 if o.full else 1]
    )
    o.rows = [int(m) for m in o.rows.split(",")] if o.rows else ROWS if o.full else [1, 16, 128]
    o.peers = o.peers.split(",") if o.peers else list(FAMILIES)
    unknown = set(o.peers) - set(FAMILIES)
    if unknown:
        p.error(f"unknown families {', '.join(sorted(unknown))}; known: {', '.join(FAMILIES)}")
    o.only = [*o.only.split(","), "bf16 F.linear"] if o.only else []
    return o


def plan_of(o: argparse.Namespace, say: Callable[[dict[str, Any] | None, str], None]) -> Plan:
    return Plan(o.shapes, o.rows, o.rounds, o.visit_ms, o.extra_rounds, o.cell_seconds, o.only, say)


def main() -> None:
    o = parse()
    if o.report:
        from benchmarks.report import write

        return write(*(json.loads(path.read_text()) for path in o.report))
    console, begin = Console(width=140), time.perf_counter()
    if o.realtime:
        os.environ[machine.REALTIME] = "1"  # inherited by the workers
    pool = Pool(list(dict.fromkeys(["limits", "torch", *o.peers])), o.threads)
    for family, why in pool.missing.items():
        console.print(f"{family} is left out: {why}")
    competitors = pool.competitors

    def say(cell: dict[str, Any] | None, text: str) -> None:
        if cell is not None:
            console.print(table_of(cell, competitors))
        console.print(f"[dim]{time.perf_counter() - begin:5.0f} s  {text}[/dim]")

    plan = plan_of(o, say)
    data: dict[str, Any] = {
        "kind": "linear",
        "isa": os.environ.get("PENNYWEIGHT_CPU_ISA", ""),
        "command": machine.command("benchmarks/linear.py"),
        "machine": machine.describe(o.threads),
        "versions": {k: v for d in pool.described.values() for k, v in d["versions"].items()},
        "method": {
            "rounds": o.rounds,
            "visit_ms": o.visit_ms,
            "cell_seconds": o.cell_seconds,
            "extra_rounds": o.extra_rounds,
            "rotated_mb": ROTATED_BYTES / 1e6,
        },
        "missing": pool.missing,
        "competitors": competitors,
        "cells": [],
    }
    measurement = Measurement(pool, plan)
    try:
        for cell in measurement.cells():
            data["cells"].append(cell)
            if o.json:  # after each cell: an interrupted run keeps what it has
                o.json.write_text(json.dumps(data, indent=1))
    finally:
        pool.close()
    console.print(f"{len(data['cells'])} cells in {time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
