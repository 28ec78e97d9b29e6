"""report.txt: what ran, which goals were met, in a table that is printed last."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .schemes import UNMEASURED

_FAILURES = 15  # lines of failed cases in the report; results.json has all


def report(data: dict[str, Any]) -> str:
    stages = data["stages"]
    machine = stages.get("facts", {}).get("cases", {}).get("machine", {})
    lines = [
        "DRY RUN: every time below is invented" if data["dry"] else "",
        f"{machine.get('card', 'no card')}, driver {machine.get('driver')}, torch {machine.get('torch')},"
        f" triton {machine.get('triton')}, commit {data['commit'][:12] or 'unknown'}, {data['started']}",
        "",
    ]
    rows = [(n, s["status"], str(len(s["cases"])), f"{s['seconds']:.0f} s", s["note"]) for n, s in stages.items()]
    lines += [table(("stage", "status", "cases", "time", ""), rows), ""]
    lines += failures(stages)
    lines += questions(stages.get("facts", {}).get("cases", {}))
    bench = stages.get("bench", {}).get("cases", {})
    lines += [table(BENCH_COLUMNS, bench_rows(bench)), ""] if bench else []
    quantizing, hosts = input_rows(bench), host_rows(bench)
    lines += [table(INPUT_COLUMNS, quantizing), ""] if quantizing else []
    lines += [table(HOST_COLUMNS, hosts), ""] if hosts else []
    model = stages.get("model", {}).get("cases", {})
    lines += [table(MODEL_COLUMNS, model_rows(model)), ""] if model else []
    return "\n".join([*lines, goals(bench, model)]) + "\n"


def failures(stages: dict[str, Any]) -> list[str]:
    failed = [
        f"FAILED {name}: {case}: {' '.join(values['error'].split())[:200]}"
        for name, stage in stages.items()
        for case, values in stage["cases"].items()
        if "error" in values
    ]
    more = [f"... and {len(failed) - _FAILURES} more in results.json"] if len(failed) > _FAILURES else []
    return [*failed[:_FAILURES], *more, ""] if failed else []


def questions(facts: dict[str, Any]) -> list[str]:
    lines = []
    if "bytes_per_s" in facts.get("copy rate", {}):
        lines.append(f"copy rate {facts['copy rate']['bytes_per_s'] / 1e12:.2f} TB/s, read and written")
    if "tflops" in facts.get("bf16 product", {}):
        lines.append(f"bf16 8192 x 8192 x 8192: {facts['bf16 product']['tflops']:.0f} TFLOP/s")
    lines += [f"{name}: {'yes' if found['ok'] else 'NO'}" for name, found in facts.items() if "ok" in found]
    return [*lines, ""] if lines else []


# -- tables ------------------------------------------------------------------------------------------------------------

BENCH_COLUMNS = ("case", "kernel", "us", "bf16 us", "x bf16", "spread", "of copy", "tuned", "goal", "", "others")
INPUT_COLUMNS = ("input", "us", "x torch's ops", "spread", "of copy", "goal", "")
HOST_COLUMNS = ("eager call", "kernel", "us of the host", "bf16 us")
MODEL_COLUMNS = ("eight layers", "us", "tokens/s", "x bf16", "spread", "goal", "")


def bench_rows(bench: dict[str, Any]) -> list[tuple[str, ...]]:
    """A row per goal, with the tuned tile and the other libraries in the same row."""
    beside: dict[str, dict[str, Any]] = {}
    for values in bench.values():
        if "of" in values:
            beside.setdefault(values["of"], {})[values["peer"]] = values
    rows = []
    for name, values in bench.items():
        if "bf16_us" not in values:
            continue
        others = beside.get(name, {})
        best = others.pop("tuned tile", {}).get("ratio")
        told = [f"{peer} {v['ratio']:.2f}" for peer, v in others.items() if v.get("ratio")]
        share = f"{values['share']:.0%}" if "share" in values else ""
        rows.append(
            (
                name, values["kernel"], f"{values['us']:.1f}", f"{values['bf16_us']:.1f}", f"{values['ratio']:.2f}",
                f"{max(values['spread'], values['bf16_spread']):.1%}", share, f"{best:.2f}" if best else "",
                f"{values['goal']}" if values["goal"] else "", verdict(reached(values, best), values["goal"]),
                ", ".join(told),
            )
        )  # fmt: skip
    return rows


def input_rows(bench: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for name, values in bench.items():
        if "quantizes" in values and "us" in values:
            share, goal = values["share"], values["goal_share"]
            rows.append(
                (
                    name, f"{values['us']:.1f}", f"{values['torch_us'] / values['us']:.1f}", f"{values['spread']:.1%}",
                    f"{share:.0%}" if share else "", f"{goal:.0%}" if goal else "", verdict(share, goal),
                )
            )  # fmt: skip
    return rows


def host_rows(bench: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (name.removeprefix("launch: "), found["kernel"], f"{found['host_us']:.1f}", f"{found['bf16_host_us']:.1f}")
        for name, found in bench.items()
        if "host_us" in found
    ]


def model_rows(found: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    for name, values in found.items():
        if "us" not in values:
            continue
        goal = (values.get("goal") or [None])[0]
        ratio = values.get("ratio")
        rows.append(
            (
                name, f"{values['us']:.0f}", f"{values['tokens_per_s']:.0f}", f"{ratio:.2f}" if ratio else "",
                f"{values['spread']:.1%}", f"{goal}" if goal else "", verdict(ratio, goal),
            )
        )  # fmt: skip
    return rows


def reached(values: dict[str, Any], tuned: float | None = None) -> float:
    """The better of the shipped and the tuned tile."""
    return max(values["ratio"], tuned or 0.0)


def verdict(ratio: float | None, goal: float | None) -> str:
    return "" if goal is None or ratio is None else "met" if ratio >= goal else "missed"


def goals(bench: dict[str, Any], model: dict[str, Any]) -> str:
    verdicts = [row[9] for row in bench_rows(bench)] + [row[6] for row in (*input_rows(bench), *model_rows(model))]
    met, missed = verdicts.count("met"), verdicts.count("missed")
    return f"goals: {met} met, {missed} missed; no kernel of ours yet: {', '.join(UNMEASURED)}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Plain text, columns aligned."""
    lines = [tuple(columns), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)
