"""Rows measured one after the other, each family in a process of its own."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

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
    keep      a folder for the weights that rows with float inputs made, see `kept`
    """

    families: tuple[str, ...] = tuple(FAMILIES)
    methods: tuple[str, ...] = ()
    pythons: dict[str, str] = field(default_factory=dict)
    again: tuple[str, ...] = ()
    quick: bool = False
    seconds: float = 1800
    keep: Path | None = None

    def rows(self, family: Family, subject: Subject) -> Iterator[Row]:
        for name, row in family.rows().items():
            if not row.takes(subject.kind, subject.name) or (
                family.name == OURS and self.methods and not _any(self.methods, name)
            ):
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
            heads = {}
            for row in choice.rows(family, subject):
                head = {"subject": subject.name, "digest": subject.digest, "family": name, "name": row.name,
                        "note": row.note, "date": datetime.date.today().isoformat()}  # fmt: skip
                if results.has(head) and not choice.wants(name, row.name):
                    continue
                if isinstance(versions, str):
                    results.add(head | {"failed": versions})
                elif choice.quick and row.slow:
                    results.add(head | {"failed": "left out by --quick, it takes minutes"})
                else:
                    heads[row.name] = head
            for row_name, answer in measure(python, family, list(heads), subject, choice.seconds, choice.keep):
                say(f"{subject.name}, {name}: {row_name}: {summary(answer, subject)}")
                if "failed" in answer and results.has(heads[row_name]):
                    say("the row measured before stays")
                else:
                    results.add(heads[row_name] | answer | {"versions": versions})


def measure(
    python: str, family: Family, names: list[str], subject: Subject, seconds: float, keep: Path | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, answer with figures, or {"failed": reason}) of each row, as they come.

    One process for all; after one that died, or took longer than so many seconds, another for what is left.
    """
    while names:
        with tempfile.TemporaryDirectory() as folder:
            process = _start(python, family, names, subject, Path(folder), keep is not None)
            try:
                done = 0
                for i, name in enumerate(names):
                    answer = _wait(process, Path(folder), i, seconds)
                    if "figures" not in answer and "failed" not in answer:
                        weights = Path(folder) / str(i) / "weights.safetensors"
                        answer = _evaluated(answer, weights, subject)
                        if keep is None or "failed" in answer:
                            weights.unlink()
                        else:
                            keep.mkdir(parents=True, exist_ok=True)
                            shutil.move(weights, kept(keep, family.name, name))
                    done += 1
                    yield name, answer
                    if answer.pop("over", False):
                        break
            finally:
                process.kill()
                process.wait()
                if os.environ.get("PENNYWEIGHT_BENCH_VERBOSE"):
                    sys.stderr.write((Path(folder) / "log.txt").read_text(errors="replace"))
            names = names[done:]


def kept(folder: Path, family: str, name: str) -> Path:
    """Where the weights of a row are kept: the float32 tensors that are not the float model's."""
    return folder / f"{quote(f'{family} {name}', safe=' ')}.safetensors"


def _start(
    python: str, family: Family, names: list[str], subject: Subject, folder: Path, hand_back: bool
) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "",
        "PENNYWEIGHT_BENCH_HAND_BACK": "1" if hand_back else "", **family.env,
    }  # fmt: skip
    command = [python, "-m", "benchmarks.accuracy.worker", family.name, str(subject.folder), str(folder), *names]
    with (folder / "log.txt").open("wb") as log:
        return subprocess.Popen(command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _wait(process: subprocess.Popen[bytes], folder: Path, i: int, seconds: float) -> dict[str, Any]:
    """The answer of row i; with "over" where no more will come from this process."""
    end, file = time.monotonic() + seconds, folder / str(i) / "answer.json"
    while time.monotonic() < end:
        ended = process.poll() is not None  # before the look, so that an answer cannot come in between
        if file.exists():
            return dict(json.loads(file.read_text()))
        if ended:
            why = f"the process ended with code {process.returncode}: {_last_line(folder / 'log.txt')}"
            return {"failed": why, "over": True}
        time.sleep(0.1)
    return {"failed": f"not done after {seconds:.0f} s", "over": True}


def _evaluated(answer: dict[str, Any], weights: Path, subject: Subject) -> dict[str, Any]:
    model = subject.model()
    model.load_state_dict(load_file(weights), strict=False)
    try:
        return answer | {"figures": subject.evaluate(model).to_dict()}
    except ValueError as e:
        return {"failed": str(e)}


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"


def summary(answer: dict[str, Any], subject: Subject) -> str:
    if "failed" in answer:
        return f"failed, {answer['failed']}"
    value = answer["figures"]["values"][subject.measure]
    return f"{answer['bits']:.3f} bits, {subject.measure} {value:.3g}, {answer['seconds']:.0f} s"
