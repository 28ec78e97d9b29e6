"""Calibrations and searches in files that are killed several times go on to the same bytes."""

import os
import re
from pathlib import Path

import pytest

from tests import forked

pytest.importorskip("transformers")
pytest.importorskip("scipy")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on Windows")
def test_killed_and_continued(tmp_path: Path) -> None:
    command = ["-m", "benchmarks.reliability.kill_calibration", "--kills", 4, "--blocks", 2, "--folder", tmp_path]
    done = forked.run(command, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["gptq", "search"]
    for line in lines:
        assert re.search(r"  4 kills in \d+ runs", line)  # of a run that ends before its moment none is counted
        assert "all with the bytes of a whole run" in line
        assert int(re.search(r"at most (\d+), all of one block", line)[1]) <= 7  # type: ignore[index]
