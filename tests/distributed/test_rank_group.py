"""Which rank is named when a connection is lost."""

import subprocess
from pathlib import Path

import pytest

from pennyweight.distributed import rank_group
from pennyweight.distributed.rank_group import RankGroup

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def test_a_process_that_has_ended_is_named() -> None:
    here = rank_group._process("self")
    assert here is not None
    child = subprocess.Popen(["sleep", "60"])
    team = RankGroup()
    team.processes = [here, rank_group._process(str(child.pid)), here._replace(machine=("another", ""), number="0")]
    child.kill()
    try:
        assert team._lost() == "rank 1"  # nobody has asked for its status yet
    finally:
        child.wait()
    assert team._lost() == "rank 1"


def test_another_rank_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "SECONDS", 0.05)
    here = rank_group._process("self")
    assert here is not None
    team = RankGroup()
    for of in (None, here, here._replace(machine=("another", ""), number="0")):
        team.processes = [here, of]
        assert team._lost() == "another rank"
    team.processes = [here, here._replace(started="0")]  # its number is used again
    assert team._lost() == "rank 1"
