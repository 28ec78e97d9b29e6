"""Rows measured one after the other, each in a process of its own."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from benchmarks.accuracy.results import Results
from benchmarks.accuracy.rivals import FAMILIES, OURS, Family
from benchmarks.accuracy.rivals.base import Row
from benchmarks.accuracy.subjects import Subject

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Choice:
    """What to run.

    families  names in `FAMILIES`
    methods   parts of the names of our rows; empty: all
    pythons   family -> interpreter
    again     parts of "family: name" of rows that are measured though they were before
    quick     leave out what is slow
    seconds   a row may take
    """

    families: tuple[str, ...] = tuple(FAMILIES)
    methods: tuple[str, ...] = ()
    pythons: dict[str, str] = field(default_factory=dict)
    again: tuple[str, ...] = ()
    quick: bool = False
    seconds: float = 1800

    def rows(self, family: Family, subject: Subject) -> Iterator[Row]:
        for name, row in family.rows().items():
            if not row.takes(subject) or (family.name == OURS and self.methods and not _any(self.methods, name)):
                continue
            yield row

    def wants(self, family: str, name: str) -> bool:
        return _any(self.again, f"{family}: {name}")


def _any(parts: tuple[str, ...], text: str) -> bool:
    return any(part in text for part in parts)


def run(subjects: list[Subject], choice: Choice, results: Results, say: Callable[[str], None]) -> None:
    """Measure what is not there yet; what cannot be measured gets a row with the reason."""
    for name in choice.families:
        family = FAMILIES[name]
        python = family.python(choice.pythons)
        versions = family.versions(python)
        if isinstance(versions, str):
            say(f"{name} is left out: {versions}")
        for subject in subjects:
            for row in choice.rows(family, subject):
                head = {"subject": subject.name, "digest": subject.digest, "family": name, "name": row.name,
                        "note": row.note, "date": datetime.date.today().isoformat()}  # fmt: skip
                if results.has(head) and not choice.wants(name, row.name):
                    continue
                if isinstance(versions, str):
                    answer: dict[str, Any] = {"failed": versions}
                elif choice.quick and row.slow:
                    answer = {"failed": "left out by --quick, it takes minutes"}
                else:
                    answer = measure(python, family, row.name, subject, choice.seconds)
                    answer["versions"] = versions
                    say(f"{subject.name}, {name}: {row.name}: {summary(answer, subject)}")
                if "failed" in answer and results.has(head):
                    say(f"{subject.name}, {name}: {row.name}: the row measured before stays")
                    continue
                results.add(head | answer)


def measure(python: str, family: Family, name: str, subject: Subject, seconds: float) -> dict[str, Any]:
    """One row in a process of its own: its answer with figures, or {"failed": reason}."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", **family.env,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "benchmarks.accuracy.worker", family.name, name, str(subject.folder), folder]
        log = Path(folder) / "log.txt"
        try:
            with log.open("wb") as f:
                done = subprocess.run(
                    command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=f, stderr=f,
                    timeout=seconds, check=False,
                )  # fmt: skip
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {seconds:.0f} s"}
        if os.environ.get("PENNYWEIGHT_BENCH_VERBOSE"):
            sys.stderr.write(log.read_text(errors="replace"))
        answer_file, weights = Path(folder) / "answer.json", Path(folder) / "weights.safetensors"
        if not answer_file.exists():
            return {"failed": f"the process ended with code {done.returncode}: {_last_line(log)}"}
        answer: dict[str, Any] = json.loads(answer_file.read_text())
        if weights.exists():
            model = subject.model()
            model.load_state_dict(load_file(weights), strict=False)
            try:
                answer["figures"] = subject.evaluate(model).to_dict()
            except ValueError as e:
                return {"failed": str(e)}
    return answer


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def summary(answer: dict[str, Any], subject: Subject) -> str:
    if "failed" in answer:
        return f"failed, {answer['failed']}"
    value = answer["figures"]["values"][subject.measure]
    return f"{answer['bits']:.3f} bits, {subject.measure} {value:.3g}, {answer['seconds']:.0f} s"
