"""Tables and sentences that the sections of docs/benchmarks.md share."""

from __future__ import annotations

from typing import Any

from benchmarks.arithmetic import steady


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table; the first column is text, the others are figures."""
    lines = ["| " + " | ".join(header) + " |", "|---" + "|---:" * (len(header) - 1) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def machine_of(d: dict[str, Any]) -> str:
    m = d["machine"]
    caches = ", ".join(f"{level} {size}" for level, size in m["caches"].items())
    versions = ", ".join(f"{name} {v}" for name, v in d["versions"].items())
    return (
        f"{m['date']}; {m['cpu']} (family/model {m['cpu_family_model']}; {', '.join(m['isa'])}), {m['cores']} cores, "
        f"{m['threads']} threads, {caches}, {m['memory_gib']} GiB; Python {m['python']}, {versions}. "
        f"Command: `{d['command']}`."
    )


def limits_of(d: dict[str, Any]) -> str:
    """The range of each limit over all cells or cases."""
    words, cells = [], d.get("cells") or d["cases"]
    for name, unit in (
        ("read", "GB/s read"),
        ("int8", "GOP/s int8"),
        ("bf16", "GFLOP/s bf16"),
        ("fp32", "GFLOP/s fp32"),
    ):
        rates = [steady(c["limits"][name], largest=True) / 1e9 for c in cells if name in c["limits"]]
        if rates:
            low, high = min(rates), max(rates)
            words.append(f"{low:.0f} to {high:.0f} {unit}" if high - low >= 0.5 else f"{high:.0f} {unit}")
    return ", ".join(words) or "not measured"
