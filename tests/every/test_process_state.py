"""Nothing that is computed, or kept for later, depends on the state of the process: see process_state.py."""

import json
import re
from functools import lru_cache
from pathlib import Path

import pytest

from tests import forked
from tests.every.process_state import STATES

REPOSITORY = Path(__file__).resolve().parents[2]
# What may differ while the state lasts, and why. After it nothing may.
MATMUL = "torch's own float product depends on the number of threads"
MODE = "a mode has to see each operation, so steps are those of the reference"
DIFFERS = {
    "inference": {r"gradient": "there are none"},
    "one thread": {r"gradient|float8-(dynamic|int4): torch.float32": MATMUL},
    "three threads": {r"gradient|float8-(dynamic|int4): torch.float32": MATMUL},
    "dispatch mode": {r"optimizer": MODE},
    "bfloat16, dispatch mode": {r"optimizer": MODE},
}


@lru_cache(maxsize=1)
def usual() -> dict[str, str]:
    under, after = run("none")
    assert under == after
    assert not [name for name in under if name.endswith("raises")]
    return under


def run(state: str) -> tuple[dict[str, str], dict[str, str]]:
    command = ["-m", "tests.every.process_state", state]
    done = forked.run(command, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-2000:]
    under, after = json.loads(done.stdout)
    return under, after


QUICK = ("inference", "bfloat16, dispatch mode")


@pytest.mark.parametrize(
    "state",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.exhaustive) for name in STATES if name != "none"],
)
def test_results_do_not_depend_on(state: str) -> None:
    under, after = run(state)
    allowed = DIFFERS.get(state, {})
    changed = {
        name: under.get(name, "missing")
        for name in usual().keys() | under.keys()
        if under.get(name) != usual().get(name) and not any(re.search(pattern, name) for pattern in allowed)
    }
    assert changed == {}
    assert after == usual()
    assert len(under) > 250
