"""Who is compared: one family a file, each run in processes of its own, with a python of its own where it needs one.

A family's file has ``ROWS``; the package it is about is imported inside its functions, so that the table can be listed
without it. `FAMILIES` is the registry. Ours is a family like the others, see `benchmarks/accuracy/methods.py`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from benchmarks.accuracy.rivals.base import Row

OURS = "pennyweight"


@dataclass(frozen=True)
class Family:
    """Rows that need the same packages.

    packages  distributions whose versions matter; the first must be there
    install   what to give pip
    env       of its processes
    """

    name: str
    module: str
    packages: tuple[str, ...]
    install: str
    env: dict[str, str] = field(default_factory=dict)

    def rows(self) -> dict[str, Row]:
        rows = importlib.import_module(self.module).ROWS
        table = {row.name: row for row in rows}
        if len(table) != len(rows):
            raise ValueError(f"{self.module}.ROWS has two rows of one name")
        return table

    def python(self, given: dict[str, str] | None = None) -> str:
        """The interpreter: given, or from the environment, or this one."""
        variable = f"PENNYWEIGHT_BENCH_PYTHON_{self.name.upper().replace('-', '_')}"
        return (given or {}).get(self.name) or os.environ.get(variable) or sys.executable

    def versions(self, python: str) -> dict[str, str] | str:
        """Versions of its packages in that interpreter, or the sentence why it cannot run."""
        code = (
            "import json, sys, importlib.metadata as m\n"
            "v = {'python': sys.version.split()[0]}\n"
            "for p in sys.argv[1:]:\n"
            "    try: v[p] = m.version(p)\n"
            "    except m.PackageNotFoundError: pass\n"
            "print(json.dumps(v))"
        )
        packages = (*self.packages, "torch", "transformers")
        try:
            found = subprocess.run(
                [python, "-c", code, *packages], capture_output=True, text=True, check=True, timeout=120
            )
        except (OSError, subprocess.SubprocessError) as e:
            return f"its python does not run: {e}"
        versions: dict[str, Any] = json.loads(found.stdout)
        if self.name != OURS and self.packages[0] not in versions:
            return f"{self.packages[0]} is not installed; pip install {self.install}, or --python {self.name}=PYTHON"
        return versions


_HERE = "benchmarks.accuracy.rivals"
FAMILIES = {
    f.name: f
    for f in (
        Family(OURS, "benchmarks.accuracy.methods", ("pennyweight",), "pennyweight"),
        Family("torchao", f"{_HERE}.torchao_rival", ("torchao",), "torchao"),
        Family("gptqmodel", f"{_HERE}.gptqmodel_rival", ("gptqmodel",), "gptqmodel", {"GPTQMODEL_CPU_WORKERS": "2"}),
        Family("llm-compressor", f"{_HERE}.llmcompressor_rival", ("llmcompressor", "compressed-tensors"),
               "llmcompressor"),
        Family("auto-round", f"{_HERE}.autoround_rival", ("auto-round",), "auto-round"),
        Family("hqq", f"{_HERE}.hqq_rival", ("hqq",), "hqq"),
        Family("quanto", f"{_HERE}.quanto_rival", ("optimum-quanto",), "optimum-quanto"),
        Family("bitsandbytes", f"{_HERE}.bitsandbytes_rival", ("bitsandbytes",), "bitsandbytes"),
        Family("gguf", f"{_HERE}.gguf_rival", ("gguf",), "gguf"),
        Family("ggml", f"{_HERE}.ggml_rival", ("pywhispercpp",), "pywhispercpp (its wheel brings ggml's library)"),
    )
}  # fmt: skip
REFERENCE = ("torchao", "int4 g128 tinygemm (prototype)")  # T: what ratios are to, 4.25 bits a weight
REFERENCES = {"smollm2": ("torchao", "int4 g64 tinygemm (prototype)")}  # 4.5 bits


def reference_of(subject: str) -> tuple[str, str]:
    """(family, row) of T."""
    return REFERENCES.get(subject, REFERENCE)
