"""Ctrl-C, SIGTERM, kill -9, a full disk and a closed pipe while a command runs; the same command then resumes."""

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.cli.conftest import snapshot
from tests.io.hub_server import Hub

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and POSIX signals")
SHARDS = ("--max-shard-size", "20kB")
INT4 = ("--config", "int4", "--group-size", "32", *SHARDS)
INT, TERM, KILL = signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)
CODES = {INT: 130, TERM: 143, KILL: -9}
SAID = {INT: "pennyweight: interrupted", TERM: "pennyweight: terminated"}
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
        command = ["-m", "tests.cli.stopped", str(tmp_path / "jobs.json")]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        run = forked.run(command, env=env)
        assert run.returncode == 0, run.stderr
        lines = [json.loads(line) for line in run.stdout.splitlines()]
        return [Result(job, *line) for job, line in zip(full, lines, strict=True)]

    return call


def check(
    stopped: Stopped, base: Path, command: Callable[[Path], list[Any]], total: int, signals: dict[int, list[int]]
) -> None:
    """Run the command, and stop it by each signal at these of about ``total`` moments. Run it again where it was
    stopped, and compare the files."""
    base.mkdir()
    (base / "whole").mkdir()
    jobs: list[dict[str, Any]] = [{"arguments": command(base / "whole"), "within": base / "whole"}]
    for number, moments in signals.items():
        for moment in moments:
            folder = base / f"{number}-{moment}"
            folder.mkdir()
            job = {"arguments": command(folder), "within": folder}
            jobs += [{**job, "signals": [(moment, number)]}, {**job, "stopped_by": number}]
    whole, *results = stopped(jobs)
    assert whole.status == 0, whole.stderr
    assert max(map(max, signals.values())) < whole.moments < 2 * total
    for job, first, again in zip(jobs[1::2], results[::2], results[1::2], strict=True):
        ((moment, number),) = job["signals"]
        where = f"{signal.Signals(number).name} at moment {moment} of {whole.moments}"
        assert first.status == CODES[signal.Signals(number)], (where, first.stderr)
        said = SAID.get(signal.Signals(number))
        assert (first.stdout, first.stderr) == ("", "" if said is None else said + HINT), where
        assert again.status == 0, (where, again.stderr)
        assert snapshot(job["within"]) == snapshot(base / "whole"), where


SOME = {INT: [2, 24], TERM: [12], KILL: [5, 16, 27]}
OTHERS = {INT: [12, 29], TERM: [4, 8, 20], KILL: [9, 22]}


@pytest.mark.parametrize("moments", [SOME, pytest.param(OTHERS, marks=pytest.mark.exhaustive)], ids=["some", "others"])
def test_quantize(stopped: Stopped, plain: Path, tmp_path: Path, moments: dict[int, list[int]]) -> None:
    check(stopped, tmp_path / "q", lambda folder: ["quantize", plain, folder / "out", *INT4], 31, moments)


@pytest.mark.exhaustive
def test_convert(stopped: Stopped, plain: Path, tmp_path: Path, run: Any) -> None:
    assert run("quantize", plain, tmp_path / "small", "--config", "w4a16", "--group-size", "32").exit_code == 0
    options = ("--to", "compressed-tensors", *SHARDS)
    moments = {INT: [2, 18], TERM: [10], KILL: [14, 22]}
    check(
        stopped, tmp_path / "c", lambda folder: ["convert", tmp_path / "small", folder / "out", *options], 28, moments
    )


@pytest.mark.exhaustive
def test_quantize_with_calibration(stopped: Stopped, writer: Path, text: Path, tmp_path: Path) -> None:
    options = ("--config", "int4", "--group-size", "32", "--calibration", text, "--algorithm", "gptq")
    check(
        stopped, tmp_path / "q", lambda folder: ["quantize", writer, folder / "out", *options], 40,
        {INT: [6, 14], KILL: [10]},
    )  # fmt: skip


def test_push(
    stopped: Stopped, hub: Hub, plain: Path, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("quantize", plain, tmp_path / "small", *INT4).exit_code == 0
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_DISABLE_XET", "1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    def job(name: str, *signals: tuple[int, int]) -> dict[str, Any]:
        return {
            "arguments": ["push", tmp_path / "small", f"org/{name}"],
            "within": tmp_path / "none",
            "signals": signals,
        }

    whole, *results = stopped(
        [job("whole"), job("first", (1, INT)), job("later", (1, TERM)), job("first"), job("later")]
    )
    assert (whole.status, whole.stderr) == (0, "")
    assert whole.moments >= 1
    assert [r.status for r in results] == [130, 143, 0, 0]
    assert [r.stderr for r in results[:2]] == [SAID[INT] + HINT, SAID[TERM] + HINT]
    for name in ("first", "later"):
        assert len(hub.repos[f"org/{name}"].messages) == len(hub.repos["org/whole"].messages)
        files = {k: v for k, v in hub.repos[f"org/{name}"].main.items() if k != "README.md"}
        assert files == {k: v for k, v in hub.repos["org/whole"].main.items() if k != "README.md"}


def test_a_second_signal_a_full_disk_and_a_closed_pipe(stopped: Stopped, plain: Path, tmp_path: Path) -> None:
    """A second signal ends the command at once, while the first is cleaning up: no traceback. The error of a full disk
    is one line. Both resume; nobody needs to read the report."""
    folders = whole, twice, folder = tmp_path / "whole", tmp_path / "twice", tmp_path / "out"
    jobs = [{"arguments": ["quantize", plain, each / "out", *INT4], "within": each} for each in folders]
    for each in folders:
        each.mkdir()
    expected, first, after, full, again = stopped(
        [
            {**jobs[0], "closed": True},
            {**jobs[1], "signals": [(12, INT), (13, INT)]},
            jobs[1],
            {**jobs[2], "max_file_bytes": 9_000, "signals": []},
            jobs[2],
        ]
    )
    assert (first.status, first.stdout, first.stderr) in {(-INT, "", ""), (130, "", SAID[INT] + HINT)}
    assert after.status == 0, after.stderr
    assert snapshot(twice) == snapshot(whole)
    assert (expected.status, expected.stderr) == (1, "")
    assert (full.status, full.stdout) == (2, "")
    assert full.stderr.startswith("pennyweight: ")
    assert full.stderr.endswith("File too large\n")
    assert full.stderr.count("\n") == 1
    assert again.status == 0, again.stderr
    assert snapshot(folder) == snapshot(whole)
