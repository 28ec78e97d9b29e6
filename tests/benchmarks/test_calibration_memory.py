"""The benchmark of calibration's memory: what a run tells, and its table. No bytes are asserted."""

import sys

import pytest

from benchmarks import calibration_memory as benchmark


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc")
@pytest.mark.parametrize("way", benchmark.WAYS)
def test_a_run(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    for name, value in (("HIDDEN", 64), ("INNER", 96), ("BATCHES", 2), ("LENGTH", 16), ("MAX_RAM", 2e5)):
        monkeypatch.setattr(benchmark, name, value)
    run = benchmark.child(2, way)
    assert (run["depth"], run["way"]) == (2, way)
    assert run["model"] == 2 * benchmark.block_bytes()
    assert run["beside"] == run["peak"] - run["before"]
    assert run["allowed"] >= 6 * benchmark.block_bytes()
    lines = benchmark.table([run]).splitlines()
    assert len(lines) == 3
    assert lines[2].startswith("| 2 | " + ("in memory" if way == "memory" else "on disk"))
