"""Ctrl-C, SIGTERM, kill -9, a full disk and a closed pipe at many moments of a command; the same command then resumes."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import snapshot

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and POSIX signals")
INT4 = ("--config", "int4", "--group-size", "32", "--max-shard-size", "40kB")
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
SAID = {signal.SIGINT: "pennyweight: interrupted", signal.SIGTERM: "pennyweight: terminated"}
HINT = "; run the same command again to resume\n"


class Result:
    def __init__(self, job: dict[str, Any], status: int, moments: int) -> None:
        self.status, self.moments = status, moments
        self.stdout, self.stderr = Path(job["stdout"]).read_text(), Path(job["stderr"]).read_text()


Stopped = Callable[[Sequence[dict[str, Any]]], list[Result]]


@pytest.fixture
def stopped(tmp_path: Path) -> Stopped:
    """stopped(jobs) -> results, see tests/cli/stopped.py; arguments may be paths."""

    def call(jobs: Sequence[dict[str, Any]]) -> list[Result]:
        folder = tmp_path / "streams"
        folder.mkdir(exist_ok=True)
        start = len(list(folder.iterdir()))
        full = [
            {
                **job, "arguments": list(map(str, job["arguments"])), "within": str(job["within"]),
                "stdout": str(folder / f"{start + i}.out"), "stderr": str(folder / f"{start + i}.err"),
            }
            for i, job in enumerate(jobs)
        ]  # fmt: skip
        (tmp_path / "jobs.json").write_text(json.dumps(full))
        command = [sys.executable, "-m", "tests.cli.stopped", str(tmp_path / "jobs.json")]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        assert run.returncode == 0, run.stderr
        lines = [json.loads(line) for line in run.stdout.splitlines()]
        return [Result(job, *line) for job, line in zip(full, lines, strict=True)]

    return call


def spread(count: int, number: int) -> list[int]:
    """Some of the moments 1 to count: the first, the last, and others between."""
    return sorted({1 + round(i * (count - 1) / (number - 1)) for i in range(number)})


def check(
    stopped: Stopped, base: Path, command: Callable[[Path], list[Any]], signals: Sequence[int], hint: bool = True,
    number: int = 6,
) -> None:  # fmt: skip
    """Stop the command at several moments by each signal, run it again, and compare the files."""
    base.mkdir()
    folder = base / "whole"
    folder.mkdir()
    (whole,) = stopped([{"arguments": command(folder), "within": folder}])
    assert whole.status == 0, whole.stderr
    assert whole.moments > 3
    jobs: list[dict[str, Any]] = []
    for each in signals:
        for moment in spread(whole.moments, number):
            folder = base / f"{each}-{moment}"
            folder.mkdir()
            job = {"arguments": command(folder), "within": folder}
            jobs += [{**job, "signals": [(moment, each)]}, job]
    results = iter(zip(jobs, stopped(jobs), strict=True))
    for job, first in results:
        number_of_signal = job["signals"][0][1]
        where = f"{signal.Signals(number_of_signal).name} at moment {job['signals'][0][0]} of {whole.moments}"
        assert first.status == CODES[number_of_signal], (where, first.stderr)
        assert first.stdout == "", where
        expected = SAID.get(number_of_signal)
        if expected is None:
            assert first.stderr == "", where
        else:
            assert first.stderr in {f"{expected}\n", expected + HINT}, where
            assert first.stderr.endswith(HINT) or not hint or job["signals"][0][0] in (1, whole.moments), where
        again, second = next(results)
        assert second.status == 0, (where, second.stderr)
        assert snapshot(Path(again["within"])) == snapshot(base / "whole"), where


def test_quantize(stopped: Stopped, writer: Path, tmp_path: Path) -> None:
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    check(stopped, tmp_path / "q", lambda folder: ["quantize", writer, folder / "out", *INT4], signals, hint=False)
